"""Small datasets on disk, and the real files where the machine has them."""

import os
from pathlib import Path

import numpy as np
import pytest
from indexed_dataset import write_dataset

from mtcli.core.data.indexed import token_dtype


@pytest.fixture
def real_data():
    folder = os.environ.get("MTCLI_TEST_DATA")
    if not folder:
        pytest.skip("MTCLI_TEST_DATA names no folder of real data")
    return Path(folder)


@pytest.fixture
def make_dataset(tmp_path):
    """Writes documents of random tokens; returns the prefix and the documents."""

    def make(name="data", count=40, longest=50, seed=0, vocab=50257):
        random = np.random.default_rng(seed)
        documents = [random.integers(0, vocab, n) for n in random.integers(1, longest, count)]
        prefix = str(tmp_path / name)
        write_dataset(prefix, documents, token_dtype(vocab))
        return prefix, documents

    return make
