"""Says what a CONFIG, a CHECKPOINT and data may name, and what a name that is nothing here may
mean: one of the Hugging Face hub, or the nearest one."""

import os
import re

CONFIGS = "a TOML file, a run folder, a preset's name, a Hugging Face folder, or hub:owner/name"
CHECKPOINTS = "a checkpoint, a run, a Hugging Face, Megatron or DCP folder, or hub:owner/name"
HUB = "hub:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZED = ".tokenized"  # of the folder beside a text with the data sets that are made of it
# Files of conversations by their names.
CHAT_FILE = re.compile(r".\.(?:parquet|(?:jsonl|ndjson|json)(?:\.gz|\.zst|\.xz|\.bz2)?)$")
# Endings of files that are missing, and of no model's name.
FILE = re.compile(r"\.(?:toml|ya?ml|jsonl?|txt|gguf|safetensors|bin|pth?|ckpt)$")


def as_hub(word: str) -> str | None:
    """Returns hub:owner/name[@revision] for a word owner/name[@revision] that cannot be a path: no
    folder here is named owner. None for other words."""
    name, at, revision = word.partition("@")
    if FILE.search(name) or not HUB_NAME.fullmatch(name) or os.path.exists(name.partition("/")[0]):
        return None
    return f"{HUB}{name}{at}{revision}"


def near_path(name: str, is_folder: bool = False) -> str:
    """Words the path nearest to a missing one, as a clause of a hint; with `is_folder`, of folders
    alone."""
    from mtcli.core.config.synonyms import closest  # here, not above: help needs none

    folder, _, last = name.rpartition(os.sep)
    try:
        names = os.listdir(folder or ("/" if name.startswith(os.sep) else "."))
    except (OSError, ValueError):
        return ""
    paths = [os.path.join(folder, one) for one in names]
    return closest(name, filter(os.path.isdir, paths) if is_folder else paths) if last else ""


def download(name: str) -> str:
    """Words how to name a model of the Hugging Face hub, as a clause of a hint; empty where the
    name can be of none."""
    hub = as_hub(name)
    return f"; a model of the Hugging Face hub is {hub}" if hub else ""
