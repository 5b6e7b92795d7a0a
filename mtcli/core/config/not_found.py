"""Hints for a name that is not there: the nearest name beside it, or how to download it."""

import os
import re

from mtcli.core.config.synonyms import closest

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def near_path(name: str, is_folder: bool = False) -> str:
    """Words the nearest name beside a path that is not there, as a clause of a hint; of folders
    alone where the path should be one."""
    folder, _, last = name.rpartition(os.sep)
    try:
        names = os.listdir(folder or ("/" if name.startswith(os.sep) else "."))
    except (OSError, ValueError):
        return ""
    paths = [os.path.join(folder, one) for one in names]
    return closest(name, filter(os.path.isdir, paths) if is_folder else paths) if last else ""


def download(name: str) -> str:
    """Words the command that downloads a Hugging Face name, as a clause of a hint; empty where a
    folder has its first word or it is no such name."""
    owner, _, model = name.partition("/")
    if not HUB_NAME.fullmatch(name) or os.path.exists(owner):
        return ""
    return f"; for a Hugging Face name `hf download {name} --local-dir {model}`, then give {model}"
