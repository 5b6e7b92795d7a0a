"""Opens the data that a head other than a language model's is trained on."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mtcli.core.config.blend import Which, read_blend
from mtcli.core.config.errors import collect_errors, wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.encoder_rows import EncoderBatches
from mtcli.core.data.example_rows import ExampleRows, share_of
from mtcli.core.data.examples import Examples, race_limit, read_classes, read_race_examples
from mtcli.core.data.indexed import tokenizer_folder
from mtcli.core.data.masked_rows import MaskedRows
from mtcli.core.data.special_tokens import special_tokens
from mtcli.core.data.tokenize import Tokenizer, load_tokenizer

PARTS = {"train": "train", "valid": "dev", "test": "test"}  # of RACE, by our names


def encoder_batches(
    config: RunConfig, paths: Sequence[str], split: str, which: Which, num_samples: int
) -> EncoderBatches:
    """Opens a split of the data at `paths` by the model's head.

    Raises MtcliError for files that are missing or wrong, and where no tokenizer is known.
    """
    model, batch = config.model, config.batch
    if model.head != "mlm":
        return example_rows(config, paths, split, which, num_samples)
    special = special_tokens(encoder_tokenizer(config, paths))
    where = (paths, split, which, num_samples, batch.seq_len, config.data_seed)
    return MaskedRows(*where, special, model.sentence_order)


def example_rows(
    config: RunConfig, paths: Sequence[str], split: str, which: Which, num_samples: int | None
) -> ExampleRows:
    """Opens a split of labelled examples; `num_samples` of None are those that hold each once.

    Raises MtcliError for files that are missing or wrong, and where no tokenizer is known.
    """
    special = partial(special_tokens, tokenizer := encoder_tokenizer(config, paths))
    words, weights = read_blend(paths, "data.train")
    if weights:
        raise wrong("examples have no weights", "name their files alone", "data.train")
    read = partial(_read, config, tokenizer, which)
    *sources, known = collect_errors(*(partial(read, word) for word in words), special)
    shares = [(word, share_of(one, split, which)) for word, one in zip(words, sources, strict=True)]
    return ExampleRows(shares, num_samples, config.batch.seq_len, config.data_seed, known)


def encoder_tokenizer(config: RunConfig, paths: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of a run: data.tokenizer, or that of the first dataset that has one.

    Raises MtcliError where there is none.
    """
    if config.data.tokenizer:
        return load_tokenizer(config.data.tokenizer)
    folders = [folder for word in paths if (folder := tokenizer_folder(word))]
    if not folders:
        message = f"no tokenizer is known for {' '.join(paths)}"
        hint = "name one in data.tokenizer, or start from weights that have one, with --init"
        raise wrong(message, hint, "data.tokenizer")
    return load_tokenizer(folders[0])


def _read(config: RunConfig, tokenizer: Tokenizer, which: Which, word: str) -> Examples:
    model, data, size = config.model, config.data, config.batch.seq_len
    path, field = Path(word).expanduser(), "data.train"
    if data.format == "race":
        limit = race_limit(model.max_seq_len, size)
        return read_race_examples(path, PARTS[which], tokenizer, limit, field)
    limit = min(model.max_seq_len, size)
    found = read_classes(path, tokenizer, limit, model.num_labels, data.skip_bad, field)
    for kind, count in found.skipped.items():
        sys.stderr.write(f"{word}: skipped {count:,} lines: {kind}\n")
    return found
