"""Fits the vocabulary of a model to its data's: an embedding's unused rows harm training.

Rows that are never a target are only pushed away, and with a high learning rate the loss has
spikes. So the tokenizer of the data overrides a preset's vocabulary, but not one that the config
sets. New tokens grow the vocabulary of initial weights that have too few spare rows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from mtcli.core.config.blend import read_blend
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import Table, preset_names, read_config, read_table, with_overrides
from mtcli.core.config.schema import RunConfig

TokenizerOf = Callable[[RunConfig], Path | None]  # the folder of a run's initial weights


def with_vocabulary(
    source: str | Table,
    overrides: list[str],
    tokenizer_of: TokenizerOf,
    size: int | None = None,
) -> list[str]:
    """Returns the overrides, preceded by the vocabulary of the data's tokenizer where the model's
    is a preset's and the run starts from no weights, or by one that has room for new tokens. `size`
    is that of data yet to be made."""
    try:
        config, _ = read_config(source, overrides)
        if config and config.train.new_tokens and (folder := tokenizer_of(config)):
            from mtcli.core.data.new_tokens import extended_size  # tokenizers, for no plan

            size = extended_size(folder, config.train.new_tokens)
            grows = size > config.model.vocab_size
            return [f"model.vocab_size={size}", *overrides] if grows else overrides
        size = size or (_largest(config) if config else None)
        if (
            config is None
            or size is None
            or config.train.init
            or not _is_default(source, overrides)
        ):
            return overrides
    except MtcliError:  # what reads them says it, with all else that is wrong
        return overrides
    return [f"model.vocab_size={size}", *overrides]


def describe_vocabulary(config: RunConfig) -> dict[str, str]:
    """Returns the lines of a run's header: the vocabulary of the model and that of the data."""
    size, ids = _largest(config), config.model.vocab_size
    if size is None:
        return {}
    same = "as many as the data's tokenizer" if size == ids else f"the data's tokenizer {size:,}"
    return {"vocab": f"{ids:,} ids, {same}"}


def vocabulary_notes(config: RunConfig) -> list[str]:
    """Warns where the data does not use most, or half, of the model's vocabulary."""
    used, ids = _largest(config, used=True), config.model.vocab_size
    if used is None or 2 * used > ids:
        return []
    size = _largest(config) or used
    note = f"warning: model.vocab_size={ids}, and the data has ids up to {used - 1}: {ids - used:,}"
    cure = f"--set model.vocab_size={size}" if size < ids else "preprocess --tokenizer train:N"
    return [f"{note} rows of the embedding are never used; {cure}"]


def _is_default(source: str | Table, overrides: Sequence[str]) -> bool:
    """Says whether a config's vocabulary is that of the preset it names."""
    is_preset = isinstance(source, str) and source in preset_names()
    if isinstance(source, str):
        source = {} if is_preset else read_table(source)
    model = with_overrides(source, overrides).get("model", {})
    return (
        isinstance(model, dict) and "vocab_size" not in model and (is_preset or "preset" in model)
    )


def _largest(config: RunConfig, used: bool = False) -> int | None:
    """Returns the largest vocabulary of the data's tokenizers, or of the ids that are `used`; None
    for other formats than tokens, or where a dataset does not state it."""
    if config.data.format != "tokens" or not config.data.train:
        return None
    from mtcli.core.data.indexed import max_token_id, tokenizer_size  # numpy, for no plan

    sizes = []
    for prefix in (
        prefix for blend in config.words_by_field.values() for prefix in read_blend(blend)[0]
    ):
        largest = max_token_id(prefix) if used else None
        sizes.append(tokenizer_size(prefix) if largest is None else largest + 1)
    known_sizes = [size for size in sizes if size is not None]
    return max(known_sizes) if len(known_sizes) == len(sizes) else None
