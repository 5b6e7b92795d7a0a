"""Names the JSON files of a Hugging Face folder and reads them, without knowledge of families."""

from pathlib import Path
from typing import Any

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import load_json

CONFIG_JSON = "config.json"
GENERATION_JSON = "generation_config.json"
MAX_BYTES = 16 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises MtcliError where it holds none."""
    table = load_json(path, "use another copy", "is the folder complete?", MAX_BYTES)
    if not isinstance(table, dict):
        raise wrong(f"{path} is not a JSON object", "use another copy")
    return table
