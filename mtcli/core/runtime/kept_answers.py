"""Keeps answers that take seconds in the user's cache, by all that they depend on."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from mtcli.core.config.untrusted import parse_json, read_untrusted
from mtcli.core.runtime.atomic_writes import atomic_file
from mtcli.core.runtime.private_folder import adds_to_caches, user_cache


def answer_key(facts: Sequence[Any]) -> str:
    """Hashes JSON values that an answer depends on, and the code."""
    return xxhash.xxh3_128_hexdigest(json.dumps([*facts, _code()]).encode())


def kept_answer(folder: str, key: str) -> Any:
    """The JSON of an answer; None where there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        return parse_json(read_untrusted(_file(folder, key)))
    return None


def keep_answer(folder: str, key: str, answer: Any) -> None:
    """Writes the JSON of an answer, where the cache can be written."""
    if not adds_to_caches():
        return
    with suppress(OSError):
        _file(folder, key).parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(_file(folder, key)) as path:
            path.write_text(json.dumps(answer))


def _file(folder: str, key: str) -> Path:
    return user_cache() / folder / f"{key}.json"


@cache
def _code() -> str:
    """The version of torch, and when our files were changed."""
    files = sorted(Path(__file__).parents[2].rglob("*.py"))
    changed = [(file.name, file.stat().st_mtime_ns) for file in files]
    return f"{version('torch')} {xxhash.xxh3_128_hexdigest(repr(changed).encode())}"
