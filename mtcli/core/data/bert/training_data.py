"""Opens the training data of heads other than the language model's."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mtcli.core.config.blend import Which, read_blend
from mtcli.core.config.errors import collect_errors, wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.bert.example_rows import ExampleRows, share_of
from mtcli.core.data.bert.examples import (
    Examples,
    Room,
    race_limit,
    read_classes,
    read_race_examples,
)
from mtcli.core.data.bert.masked_rows import MaskedRows
from mtcli.core.data.bert.row_format import EncoderBatches
from mtcli.core.data.bert.special_tokens import SpecialTokens, special_tokens
from mtcli.core.data.blend import chosen
from mtcli.core.data.indexed import tokenizer_folder
from mtcli.core.data.subset import require_subset
from mtcli.core.data.tokenize import Tokenizer, load_tokenizer
from mtcli.core.runtime.remote import local_copy

PARTS = {"train": "train", "valid": "dev", "test": "test"}  # of RACE, by our names


def encoder_batches(
    config: RunConfig, which: Which, num_samples: int, tokenizer: str | Path | None = None
) -> EncoderBatches:
    """Opens a split of a run's data by the model's head; `tokenizer` is that of the initial
    weights.

    Raises MtcliError for missing or wrong files, and where no tokenizer is found.
    """
    if config.model.head != "mlm":
        examples = open_examples(config, tokenizer, which)
        examples.num_samples = num_samples
        return examples
    paths, split = chosen(config.data, which)
    special = _special_tokens(config, encoder_tokenizer(config, tokenizer, paths))
    where = (paths, split, which, num_samples, config.batch.seq_len, config.data_seed)
    rows = MaskedRows(*where, special, config.model.sentence_order)
    rows.require_order()
    return rows


def open_examples(
    config: RunConfig, tokenizer: str | Path | None, which: Which = "train"
) -> ExampleRows:
    """Opens the labelled examples of a config by its tokenizer, or that of the initial weights; for
    training, those of its subset.

    Raises MtcliError where no tokenizer is found, and with all faults of the files.
    """
    paths, split = chosen(config.data, which)
    words, weights = read_blend(paths, "data.train")
    if weights:
        raise wrong("examples have no weights", "name their files alone", "data.train")
    loaded = encoder_tokenizer(config, tokenizer, paths)
    read = partial(_read, config, loaded, which)
    *sources, special = collect_errors(
        *(partial(read, word) for word in words), partial(_special_tokens, config, loaded)
    )
    shares = [(word, share_of(one, split, which)) for word, one in zip(words, sources, strict=True)]
    batch = config.batch
    rows = ExampleRows(shares, batch.seq_len, special, config.data_seed, batch.global_batch_size)
    if which == "train" and (subset := require_subset(config)):
        rows.keep(subset)
    return rows


def encoder_tokenizer(
    config: RunConfig, tokenizer: str | Path | None, paths: Sequence[str]
) -> Tokenizer:
    """Loads a run's tokenizer: data.tokenizer, or that of the first dataset that has one, or of the
    initial weights.

    Raises MtcliError where there is none.
    """
    folders = (folder for word in paths if (folder := tokenizer_folder(word)))
    spec = config.data.tokenizer or next(folders, None) or tokenizer
    if spec is None:
        message = f"no tokenizer is known for {' '.join(paths)}"
        hint = "name one in data.tokenizer, or start from weights that have one, with --init"
        raise wrong(message, hint, "data.tokenizer")
    return load_tokenizer(spec)


def _special_tokens(config: RunConfig, tokenizer: Tokenizer) -> SpecialTokens:
    """Finds the tokenizer's special tokens. Raises MtcliError where one is missing, or positions
    begin behind another padding id."""
    special, offset = special_tokens(tokenizer), config.model.position_offset
    if offset not in (0, special.pad + 1):
        message = f"position_offset={offset} with a tokenizer whose padding is id {special.pad}"
        hint = f"model.position_offset = {special.pad + 1}, where RoBERTa's positions then begin"
        raise wrong(message, hint, "model.position_offset")
    return special


def _read(config: RunConfig, tokenizer: Tokenizer, which: Which, word: str) -> Examples:
    model, data, size = config.model, config.data, config.batch.seq_len
    path, field = Path(word).expanduser(), "data.train"
    if data.format == "race":
        room = Room(race_limit(model.max_seq_len), size, data.skip_bad)
        return read_race_examples(path, PARTS[which], tokenizer, room, field)
    room = Room(min(model.max_seq_len, size), size, data.skip_bad)
    path = local_copy(word).expanduser()
    return read_classes(path, tokenizer, room, model.num_labels, field)
