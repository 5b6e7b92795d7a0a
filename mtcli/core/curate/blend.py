"""Blends the sources of a curated corpus into a `data.train` list for `mtcli train`.

Training draws from the list by greedy error diffusion (`mtcli.core.data.blend`).
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtcli.core.curate.shards import file_stem


def blend_of(
    weights: Mapping[str, float], sources: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Normalises the weights of the sources that have documents, and counts the epochs of each.

    Epochs assume a run over as many bytes as the whole corpus has: a source whose share of the
    blend is twice its share of the corpus is read twice. `missing` names sources without documents,
    `unweighted` those without a weight. Returns {} where there are no weights.
    """
    if not weights:
        return {}
    used = {name: float(weight) for name, weight in weights.items() if name in sources and weight}
    total, size = sum(used.values()), sum(sources[name]["bytes"] for name in used)
    blended = {}
    for name in sorted(used):
        share = used[name] / total
        epochs = share * size / max(1, sources[name]["bytes"])
        blended[name] = {"weight": share, "prefix": file_stem(name), "epochs": epochs}
    return {
        "sources": blended,
        "missing": sorted(set(weights) - set(sources)),
        "unweighted": sorted(set(sources) - set(weights)),
    }


def commands_of(blend: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns `data.train`, and the commands that write its token files into the shards' folder."""
    train: list[str] = []
    commands = []
    for facts in blend["sources"].values():
        prefix = folder / facts["prefix"]
        train += [f"{facts['weight']:.8g}", str(prefix)]
        shards = f"{shlex.quote(str(prefix))}-?????.jsonl.zst"
        output = shlex.quote(str(prefix))
        commands.append(f"mtcli preprocess {shards} --output {output} --tokenizer TOKENIZER")
    return {"data.train": train, "preprocess": commands}
