"""A blend of what is left, by source: a `data.train` list for `mtcli train`.

Training draws from it by greedy error diffusion (`mtcli.core.data.blend`).
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtcli.core.curate.shards import file_stem


def blend_of(
    weights: Mapping[str, float], sources: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Normalised weights of the sources that have documents, and the epochs of each.

    Epochs are of as many bytes as are left in all: a source whose share of the blend is twice its
    share of the corpus is read twice. Sources without documents are named `missing`, those without
    a weight `unweighted`. Empty where there are no weights.
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
    """`data.train`, and the commands that make its token files beside the shards."""
    train: list[str] = []
    commands = []
    for facts in blend["sources"].values():
        prefix = folder / facts["prefix"]
        train += [f"{facts['weight']:.8g}", str(prefix)]
        shards = f"{shlex.quote(str(prefix))}-?????.jsonl.zst"
        output = shlex.quote(str(prefix))
        commands.append(f"mtcli preprocess {shards} --output {output} --tokenizer TOKENIZER")
    return {"data.train": train, "preprocess": commands}
