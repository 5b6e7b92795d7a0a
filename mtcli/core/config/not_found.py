"""Words hints for a missing name: the nearest one, or its name on the hub."""

import os
import re

from mtcli.core.config.synonyms import closest

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def near_path(name: str, is_folder: bool = False) -> str:
    """Words the path nearest to a missing one, as a clause of a hint; with `is_folder`, of folders
    alone."""
    folder, _, last = name.rpartition(os.sep)
    try:
        names = os.listdir(folder or ("/" if name.startswith(os.sep) else "."))
    except (OSError, ValueError):
        return ""
    paths = [os.path.join(folder, one) for one in names]
    return closest(name, filter(os.path.isdir, paths) if is_folder else paths) if last else ""


def download(name: str) -> str:
    """Words how to name a model of the Hugging Face hub, as a clause of a hint; empty where a local
    folder has its first word, or it is no such name."""
    owner = name.partition("/")[0]
    if not HUB_NAME.fullmatch(name) or os.path.exists(owner):
        return ""
    return f"; a model of the Hugging Face hub is hub:{name}"
