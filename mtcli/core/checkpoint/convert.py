"""Conversion: any checkpoint to ours on any layout, or to a Hugging Face folder.

One tensor's rectangle is held at a time, so peak memory is bounded by the largest tensor and not by
the model.
"""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint import hfconfig
from mtcli.core.checkpoint.aside import written_aside
from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.cuts import Cut, cuts_of
from mtcli.core.checkpoint.hf import GENERATION, TOKENIZER_FILES
from mtcli.core.checkpoint.names import HUGGINGFACE, TOKENIZER
from mtcli.core.checkpoint.store import About, Outline, commit, write_outlined
from mtcli.core.spec import check
from mtcli.core.spec.config import BatchConfig, ParallelConfig, RunConfig
from mtcli.core.spec.errors import MtcliError, wrong
from mtcli.core.spec.load import dump_toml

LAYOUT_AXES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
Progress = Callable[[int], None]  # told the bytes of the source that were converted


class Options(NamedTuple):
    """How to write: weights in a dtype (None keeps each tensor's), over what is there or not."""

    dtype: torch.dtype | None = None
    force: bool = False
    progress: Progress = lambda _: None


def parse_layout(text: str) -> tuple[ParallelConfig, int]:
    """The parallel config and world size of a layout such as "tp=2,pp=2".

    Raises MtcliError that names the axes.
    """
    sizes: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        axis, _, number = item.strip().partition("=")
        if axis not in LAYOUT_AXES or not number.isdigit() or int(number) < 1:
            hint = f"sizes of {', '.join(LAYOUT_AXES)}, such as tp=2,pp=2"
            raise wrong(f"{item.strip()!r} is not a part of a layout", hint, "--layout")
        sizes[axis] = int(number)
    dp = sizes.pop("dp", 1)
    schedule = "interleaved" if sizes.get("vpp", 1) > 1 else "1f1b"
    parallel = ParallelConfig.model_validate(sizes | {"schedule": schedule})
    return parallel, parallel.tp * parallel.cp * parallel.pp * dp


def output_config(source: Checkpoint, parallel: ParallelConfig, world: int) -> RunConfig:
    """The config of a checkpoint converted to a layout; raises MtcliError where it cannot be."""
    base = source.config or RunConfig.model_validate(
        {"model": source.model, "batch": {"seq_len": min(1024, source.model.max_seq_len)}}
    )
    changes = parallel.model_dump(include={*LAYOUT_AXES, "schedule"})
    changes |= {"stage_layers": ()}
    config = base.model_copy(update={"parallel": base.parallel.model_copy(update=changes)})
    # Sequences and batches are the run's affair: a batch that fits leaves the cuts of the model.
    fits = BatchConfig(seq_len=2 * parallel.cp * parallel.tp)
    problems = check.problems(config.model_copy(update={"batch": fits}), world)
    if broken := [p for p in problems if p.field.startswith(("parallel.", "model."))]:
        raise MtcliError(*broken)
    return config


def to_mtcli(
    source: Checkpoint, final: Path, parallel: ParallelConfig, world: int, options: Options
) -> None:
    """Writes `source` as a checkpoint of ours, one file per rank of a layout that owns anything.

    Optimizer state is cut like its parameters and keeps its dtype.
    """
    config = output_config(source, parallel, world)
    ranks = [
        [_outline(source, cut, options) for cut in cuts]
        for cuts in cuts_of(source, source.names(), config, world)
    ]
    attached = tokenizer_files(source, f"{TOKENIZER}/") | _originals(source)
    about = About(source.step, source.extra, dump_toml(config), attached)
    needed = sum(_bytes(outline) for outlines in ranks for outline in outlines)
    with written_aside(final, needed, options.force) as partial:
        written = []
        for rank, outlines in enumerate(ranks):
            full = [outline for outline in outlines if prod(outline.box.size)]
            full.sort(key=lambda outline: -outline.dtype.itemsize)
            tensors = _read_all(source, full, options.progress)
            written.append(write_outlined(partial, rank, full, tensors))
        commit(partial, written, about)


def tokenizer_files(source: Checkpoint, prefix: str) -> dict[str, Path]:
    """The tokenizer's files of a checkpoint, by prefixed name."""
    folder = source.tokenizer_folder
    if folder is None:
        return {}
    is_ours = source.config is not None  # whose folder holds nothing else
    return {
        prefix + path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file() and (is_ours or path.name in TOKENIZER_FILES) and path.name[0] != "."
    }


def original_config(source: Checkpoint) -> Path | None:
    """The config.json that the weights came with, where there is one that is still true."""
    folder = source.folder if source.config is None else source.folder / HUGGINGFACE
    path = folder / hfconfig.NAME
    if not path.is_file():
        return None
    model = hfconfig.model_of(hfconfig.read_json(path), path)
    return path if hfconfig.says_the_same(model, source.model) else None


def _originals(source: Checkpoint) -> dict[str, Path]:
    path = original_config(source)
    if path is None:
        return {}
    files = (path, path.with_name(GENERATION))
    return {f"{HUGGINGFACE}/{file.name}": file for file in files if file.is_file()}


def _outline(source: Checkpoint, cut: Cut, options: Options) -> Outline:
    keep = options.dtype is None or source.keeps_dtype(cut.name)
    dtype = source.dtype(cut.name) if keep else options.dtype
    return Outline(cut.name, dtype, cut.box, source.shape(cut.name))


def _bytes(outline: Outline) -> int:
    return prod(outline.box.size) * outline.dtype.itemsize


def _read_all(source: Checkpoint, outlines: list[Outline], progress: Progress) -> Iterator[Tensor]:
    for outline in outlines:
        block = source.read(outline.name, outline.box)
        yield block.to(outline.dtype)
        progress(block.nbytes)
