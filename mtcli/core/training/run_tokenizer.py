"""Finds the tokenizer of a run: of its texts, its checkpoints and its exports; without torch.

`train.new_tokens` are added to the tokenizer of the initial weights. The result is a folder in the
user's cache, named by a hash of the tokenizer's files and the new tokens.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mtcli.core.checkpoint.fine_tuning import starting_folder, starting_tokenizer
from mtcli.core.checkpoint.folder import TOKENIZER, TOKENIZER_FILES, tokenizer_files
from mtcli.core.config.errors import failed, wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.data.indexed import tokenizer_folder
from mtcli.core.data.new_tokens import FIELD, extended_size, with_new_tokens
from mtcli.core.data.tokenize import MAX_DEFINITION_BYTES, Tokenizer, load_tokenizer
from mtcli.core.runtime.private_folder import adds_to_caches, private_folder, user_cache

CACHE = "tokenizers"  # in the user's cache
REWRITTEN = ("tokenizer.json", "tokenizer_config.json")


def run_tokenizer(config: RunConfig) -> Path | None:
    """Returns the folder of a checkpoint's tokenizer, if any: the one that made the training data,
    where preprocess left it, or that texts are read with."""
    data = config.data
    if data.tokenizer or data.format == "conversations" or config.train.new_tokens:
        return _named_tokenizer(config)
    prefixes = [word for word in data.train if tokenizer_folder(word)]
    return tokenizer_folder(prefixes[0]) if prefixes else None


def _named_tokenizer(config: RunConfig) -> Path | None:
    """Returns the folder of data.tokenizer; a named one is written next to the checkpoints."""
    spec = config.data.tokenizer
    if spec is None:
        return extended_tokenizer(config)
    path = Path(spec).expanduser()
    if path.exists():
        return path if path.is_dir() else path.parent
    return load_tokenizer(spec).save(Path(config.train.output) / TOKENIZER)


def extended_tokenizer(config: RunConfig) -> Path | None:
    """Returns the tokenizer folder of a run's initial weights, with train.new_tokens; None without
    a tokenizer. Raises MtcliError where one of them is a token already."""
    folder, texts = starting_tokenizer(config), config.train.new_tokens
    if folder is None or not texts:
        return folder
    files = {
        name: read_untrusted(path, MAX_DEFINITION_BYTES)
        for name, path in tokenizer_files(folder, names=TOKENIZER_FILES).items()
    }
    facts = [texts, {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    cached = user_cache() / CACHE / key
    if cached.is_dir():
        return cached
    extended = with_new_tokens(load_tokenizer(folder), texts)
    if adds_to_caches():
        with suppress(OSError):
            return _written(extended, files, cached)
    try:
        return _written(extended, files, private_folder() / CACHE / key)
    except OSError as error:
        message = f"the tokenizer with new tokens cannot be written: {error}"
        raise failed(message, "free some space, or name a folder in XDG_CACHE_HOME") from None


def _written(tokenizer: Tokenizer, files: dict[str, bytes], final: Path) -> Path:
    """Writes an extended tokenizer beside the other files of its folder, unless it is there.
    Raises OSError where the disk refuses."""
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=final.parent) as scratch:
        folder = tokenizer.save(Path(scratch) / final.name)
        for name, data in files.items():
            if name not in REWRITTEN:
                (folder / name).write_bytes(data)
        if REWRITTEN[1] in files:  # without the fields that `save` adds
            text = json.dumps(tokenizer.config, indent=2, ensure_ascii=False) + "\n"
            (folder / REWRITTEN[1]).write_text(text, encoding="utf-8")
        with suppress(OSError):
            folder.rename(final)
    if not final.is_dir():  # another process's rename is as good
        raise OSError(f"{final} was not written")
    return final


def new_ids(config: RunConfig) -> range:
    """Returns the ids of train.new_tokens, which follow those of the initial weights' tokenizer.

    Raises MtcliError where that has one of them or is missing, and where the model has no rows for
    them, or adapters that a run goes on from have none.
    """
    texts, start = config.train.new_tokens, starting_folder(config)
    if not texts or start is None:
        return range(0)
    if config.lora.rank and start.has_adapters:
        message = f"{config.train.init} holds adapters, whose base has no rows for new tokens"
        hint = f"merge them first: `mtcli shard {config.train.init} DST --to hf --merge-lora`"
        raise wrong(message, hint, FIELD)
    if start.tokenizer_folder is None:
        message = f"{config.train.init} has no tokenizer to add new tokens to"
        raise wrong(message, "copy the tokenizer's files into its folder", FIELD)
    size, stated = extended_size(start.tokenizer_folder, texts), config.model.vocab_size
    if stated < size:
        message = f"vocab_size={stated}, and the tokenizer has {size} ids with train.new_tokens"
        raise wrong(message, f"leave model.vocab_size out, or {size} or more", "model.vocab_size")
    return range(size - len(texts), size)


def new_token_notes(config: RunConfig) -> list[str]:
    """Says which ids new tokens have, and how their rows begin."""
    if not (ids := new_ids(config)):
        return []
    note = f"note: {len(ids)} new tokens have the ids {ids.start} to {ids.stop - 1}; their rows, "
    return [f"{note}of {config.model.vocab_size:,}, begin as the mean of the {ids.start:,} before"]
