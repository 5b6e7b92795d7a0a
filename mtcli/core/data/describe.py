"""`PREFIX.json`: what preprocess says of the tokens it wrote."""

from pathlib import Path

from mtcli.core.data.indexed import with_suffix
from mtcli.core.spec.errors import wrong
from mtcli.core.spec.foreign import parse_json
from mtcli.core.spec.untrusted import read_untrusted

MAX_FACTS_BYTES = 16 << 20
AGAIN = "write it again with mtcli preprocess"


def describe(prefix: str | Path) -> dict[str, object] | None:
    """What `PREFIX.json` says, or None where there is none (data from another tool).

    Raises MtcliError where it is not what preprocess writes.
    """
    path = with_suffix(prefix, ".json")
    if not path.exists():
        return None
    try:
        facts = parse_json(read_untrusted(path, MAX_FACTS_BYTES))
    except OSError as error:
        raise wrong(
            f"{path} cannot be read: {error.strerror}", "write it again with mtcli preprocess"
        ) from None
    except ValueError as error:
        raise wrong(f"{path} is not JSON: {error}", AGAIN) from None
    if not isinstance(facts, dict):
        raise wrong(f"{path} holds no object", AGAIN)
    return facts


def max_token_id(prefix: str | Path) -> int | None:
    """The largest token id in the data at `prefix`, where `PREFIX.json` has it."""
    value = (describe(prefix) or {}).get("max_token_id")
    return value if type(value) is int else None


def tokenizer_folder(prefix: str | Path) -> Path | None:
    """The folder of the tokenizer that made the data at `prefix`, where preprocess left one."""
    folder = with_suffix(prefix, ".tokenizer")
    return folder if (folder / "tokenizer.json").is_file() else None
