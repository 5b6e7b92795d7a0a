"""Writes data as JSON, which has no NaN and no infinity: such numbers become null."""

import json
import math
from typing import Any


def json_text(data: object) -> str:
    """Data as indented JSON with a final newline."""
    return json.dumps(finite(data), indent=2, allow_nan=False) + "\n"


def finite(data: Any) -> Any:
    """Data of dicts and lists, with None for each number that is not finite."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
