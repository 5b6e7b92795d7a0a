"""Writes tokens as an indexed dataset, without the preprocessing that users would run."""

from pathlib import Path

import numpy as np

from mtcli.core.data.indexed import write_index


def write_dataset(prefix, sequences, dtype):
    """Writes sequences, a document each, as `PREFIX.bin` and `.idx`."""
    sequences = [np.asarray(sequence, np.int64) for sequence in sequences]
    np.concatenate(sequences).astype(dtype).tofile(f"{prefix}.bin")
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    write_index(Path(f"{prefix}.idx"), dtype, lengths)
