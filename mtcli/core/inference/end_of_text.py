"""Which tokens end a generated text, by the files of a Hugging Face folder."""

from pathlib import Path

from mtcli.core.checkpoint.folder import HUGGINGFACE
from mtcli.core.checkpoint.huggingface.config_json import GENERATION, NAME, read_json
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import shown


def end_ids(checkpoint: Checkpoint) -> frozenset[int] | None:
    """The ids of generation_config.json, or of config.json where there is no such file, as
    transformers reads them: one, several or none. None of weights that came without either.

    Raises MtcliError where the file is damaged, or says what is no id.
    """
    is_theirs = checkpoint.format == "hf"
    folder = checkpoint.folder if is_theirs else checkpoint.folder / HUGGINGFACE
    path = next((folder / n for n in (GENERATION, NAME) if (folder / n).is_file()), None)
    return None if path is None else _ids(read_json(path).get("eos_token_id"), path)


def _ids(value: object, path: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        message = f"{path}: eos_token_id={shown(value)} is no token id"
        raise wrong(message, "an id, a list of ids, or null")
    return frozenset(ids)
