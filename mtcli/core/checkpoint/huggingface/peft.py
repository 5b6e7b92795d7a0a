"""Reads and describes adapters in peft's format: adapter_config.json, adapter_model.safetensors.

A module's tensors are `base_model.model.<module>.lora_A.weight` [rank, in] and `lora_B.weight`
[out, rank], where the module has the family's own name; `peft_modules.py` maps them to targets.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isclose, sqrt
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mtcli.core.checkpoint.adapters import base_of, merged
from mtcli.core.checkpoint.folder import ADAPTER_CONFIG, CheckpointFolder, peft_base
from mtcli.core.checkpoint.huggingface.config_json import family_in, family_of
from mtcli.core.checkpoint.huggingface.family import Family
from mtcli.core.checkpoint.huggingface.json_files import CONFIG_JSON, read_json
from mtcli.core.checkpoint.huggingface.peft_modules import (
    OF_EXPERTS,
    PREFIX,
    PeftModule,
    RankOf,
    as_parameter,
    box_of_target,
    modules_of,
    modules_of_experts,
)
from mtcli.core.checkpoint.huggingface.peft_saved import (
    SavedTensor,
    named_modules,
    require_tied,
    saved_tensors,
)
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.checkpoint.resharding import DTYPE_OF_CODE
from mtcli.core.checkpoint.safetensors_file import (
    StoredBox,
    TensorEntry,
    read_header,
    read_metadata,
)
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import LARGEST
from mtcli.core.config.lora import is_chosen, lora_targets
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.config.untrusted import is_number, listed, shown
from mtcli.core.mesh.adapters import LoraTarget, adapter_name
from mtcli.core.mesh.parameters import parameters, run_parameters, saved_parameters
from mtcli.core.mesh.sharding import Box, Parameter

WEIGHTS = "adapter_model.safetensors"
TARGETS = "mtcli.targets"  # in the file's metadata: targets whose adapters in a module are apart
TASKS = {"lm": "CAUSAL_LM", "classification": "SEQ_CLS"}  # of heads; peft has none for others
Header = Mapping[str, TensorEntry]
Number = TypeVar("Number", int, float)
# Settings that change what adapters compute, and the values that we represent.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "layers_to_transform": (None,),
    "lora_bias": (None, False),
    "trainable_token_indices": (None,),
}


class PeftSettings(NamedTuple):
    """The ranks and scales in adapter_config.json, which may be a module's own."""

    path: Path
    rank: int
    alpha: float
    dropout: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    by_root: bool
    """scaled by alpha / sqrt(rank)"""
    parameters: tuple[str, ...]
    """arrays of experts that have adapters"""

    def rank_of(self, name: str, _: tuple[LoraTarget, ...] = ()) -> int:
        """Returns the rank of a module by name."""
        return _of_pattern(self.ranks, name, self.rank)

    def scale_of(self, name: str) -> float:
        """Returns what a module's adapters are multiplied by."""
        rank = self.rank_of(name)
        return _of_pattern(self.alphas, name, self.alpha) / (sqrt(rank) if self.by_root else rank)


class TargetPart(NamedTuple):
    """A target's adapter in a module: its rows of A, and columns of B, from `first` on."""

    module: PeftModule
    target: LoraTarget
    first: int
    rank: int


def open_peft(source: CheckpointFolder, open_base: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Opens adapters of peft, merged with the base that their config names or with another one.

    Raises MtcliError for unsupported settings, a missing base, and tensors that are missing,
    unknown or of another shape.
    """
    folder, base = source.folder, base_of(open_base(peft_base(source)))
    header = read_header(folder / WEIGHTS)
    table = read_json(folder / ADAPTER_CONFIG)
    settings = _settings(folder / ADAPTER_CONFIG, table)
    targets, family = _separate_targets(folder, base.model), family_of_base(base)
    saved_names = named_modules(folder / ADAPTER_CONFIG, table, base.model, family)
    saved = saved_tensors(base.model, family, _of_modules(base.model, saved_names))
    possible = list(_modules_in(base.model, family, header, settings, targets))
    present = [m for m in possible if m.a[0].key in header or m.b[0].key in header]
    if not present:
        raise wrong(f"{folder / WEIGHTS} has no adapter of {base.folder}", "is it their base?")
    names = targets or tuple(sorted({t.name for m in present for t in m.targets}))
    modules = [m for m in possible if any(is_chosen(t.name, names) for t in m.targets)]
    of_saved = [tensor.box for tensor in saved]
    _require_tensors(folder, header, modules, of_saved, table)
    parts = [part for module in modules for part in _parts(folder, module, names, bool(targets))]
    lora = _lora(settings, parts, names).model_copy(update={"modules_to_save": saved_names})
    headers = {WEIGHTS: dict(header)}
    stored = _stored(header, modules) | {box.key: _in_file(header, [box]) for box in of_saved}
    raw = Checkpoint(folder, base.model, stored, None, headers=headers)
    require_tied(raw, saved)
    read = {tensor.parameter: tensor.box.key for tensor in saved}
    checkpoint = Checkpoint(
        folder=folder,
        model=base.model,
        tensors=_tensors(raw, parts, run_parameters(base.model, lora))
        | {
            name: stored[key]._replace(boxes=(), computed=partial(raw.read, key))
            for name, key in read.items()
        },
        tokenizer_folder=source.tokenizer_folder,
        headers=headers,
        open_files=raw.open_files,
        format="peft",
    )
    return merged(checkpoint, base, lora)


def family_of_base(base: Checkpoint) -> Family:
    """Returns the family whose modules adapters are of: that of a Hugging Face folder, else the
    first that has the model."""
    if base.format != "hf":
        return family_of(base.model)
    path = base.folder / CONFIG_JSON
    return family_in(read_json(path), path, [key for keys in base.headers.values() for key in keys])


def _modules_in(
    model: ModelConfig,
    family: Family,
    header: Header,
    settings: PeftSettings,
    targets: tuple[str, ...],
) -> Iterator[PeftModule]:
    """Yields the modules that a file's adapters may be of; of experts' matrices those of arrays, or
    of transformers 4, whichever it has."""
    table, rank_of = parameters(model), settings.rank_of
    for weight in table.values():
        if not weight.is_expert:
            yield from modules_of(model, family, weight, rank_of)
            continue
        if not weight.matrices:
            continue
        single = modules_of_experts(model, family, weight, rank_of)
        if any(box.key in header for module in single for box in module.a):
            yield from single
            continue
        both = modules_of(model, family, weight, rank_of, both=True)
        outer = f"{PREFIX}{both[0].name.rpartition('.')[0]}"
        if f"{outer}.base_layer.lora_A.weight" in header:
            yield from both
            continue
        matrix = weight.name.split(".")[-2]
        named = any(is_chosen(target.name, targets) for target in both[0].targets)
        listed_there = any(name.endswith(OF_EXPERTS[matrix]) for name in settings.parameters)
        if named if targets else listed_there:
            yield from modules_of(model, family, weight, rank_of, both=False)


def _of_modules(model: ModelConfig, names: Sequence[str]) -> set[str]:
    """The parameters of modules that are trained whole, by the modules' names."""
    return saved_parameters(model, LoraConfig(rank=1, modules_to_save=tuple(names)))


def _require_tensors(
    folder: Path,
    header: Header,
    modules: Sequence[PeftModule],
    saved: Sequence[StoredBox],
    table: dict[str, Any],
) -> None:
    """Raises MtcliError for tensors that are unknown, missing or of another shape or dtype."""
    expected = [*(box for module in modules for box in (*module.a, *module.b)), *saved]
    keys = {box.key: box for box in expected}
    if unknown := sorted(header.keys() - keys.keys()):
        message = f"{folder / WEIGHTS} has tensors that no target has: {listed(unknown)}"
        raise wrong(message, "nothing is left out silently")
    for key, box in keys.items():
        if key not in header:
            message = f"{folder / WEIGHTS} has {len(header)} of {len(keys)} tensors: no {key}"
            where = f"target_modules={shown(table.get('target_modules'))} leaves modules out"
            hint = f"where {where}, convert what peft's merge_and_unload saves: a target has "
            raise wrong(message, f"{hint}adapters in every layer here; else copy the file again")
        entry = header[key]
        if entry.shape != box.shape or entry.code not in DTYPE_OF_CODE:
            message = f"{key} is {entry.code} {list(entry.shape)} in {folder / WEIGHTS}"
            raise wrong(f"{message} and {list(box.shape)} by its config", "is it of this model?")


def _parts(
    folder: Path, module: PeftModule, names: tuple[str, ...], apart: bool
) -> Iterator[TargetPart]:
    """Yields the part of each target in a module: all of A, unless the targets' are `apart`."""
    chosen = [target for target in module.targets if is_chosen(target.name, names)]
    count = len(chosen) if apart else 1
    if module.rank % count:
        message = f"{folder / WEIGHTS} has {count} targets in {module.name} of rank {module.rank}"
        raise wrong(message, "copy adapter_config.json again")
    rank = module.rank // count
    for number, target in enumerate(chosen):
        yield TargetPart(module, target, number * rank if apart else 0, rank)


def _stored(header: Header, modules: Sequence[PeftModule]) -> dict[str, StoredTensor]:
    """Maps modules' tensors A and B to the boxes of their file."""
    tensors = {}
    for module in modules:
        sides = ("A", module.shape_of_a, module.a), ("B", module.shape_of_b, module.b)
        for side, shape, boxes in sides:
            tensors[_raw_name(module, side)] = _in_file(header, boxes)._replace(shape=shape)
    return tensors


def _in_file(header: Header, boxes: Sequence[StoredBox]) -> StoredTensor:
    """A tensor that boxes of the file tile, of the first one's dtype and shape."""
    found = [box._replace(file=WEIGHTS, code=header[box.key].code) for box in boxes]
    return StoredTensor(DTYPE_OF_CODE[found[0].code], found[0].shape, found)


def _raw_name(module: PeftModule, side: str) -> str:
    return f"{module.name}.lora_{side}"


def _tensors(
    raw: Checkpoint, parts: Sequence[TargetPart], table: Mapping[str, Parameter]
) -> dict[str, StoredTensor]:
    """Maps the adapters of targets, by canonical name, to those of their modules."""
    tensors = {}
    for part in parts:
        weight = part.module.weight.name
        for side, read in (("a", _read_a), ("b", _read_b)):
            name = adapter_name(weight, side, part.target)
            dtype = raw.dtype(_raw_name(part.module, side.upper()))
            tensors[name] = StoredTensor(dtype, table[name].shape, (), partial(read, raw, part))
    return tensors


def _read_a(raw: Checkpoint, part: TargetPart, box: Box) -> Tensor:
    rows = len(box.start) - 2
    by = [part.first if dim == rows else 0 for dim in range(len(box.start))]
    return _padded(raw, _raw_name(part.module, "A"), rows, part.rank, box, tuple(by))


def _read_b(raw: Checkpoint, part: TargetPart, box: Box) -> Tensor:
    moved = box_of_target(part.target, box, part.first)
    by = tuple(a - b for a, b in zip(moved.start, box.start, strict=True))
    return _padded(raw, _raw_name(part.module, "B"), len(by) - 1, part.rank, box, by)


def _padded(
    raw: Checkpoint, name: str, dim: int, rank: int, box: Box, by: tuple[int, ...]
) -> Tensor:
    """Reads a box, moved by `by` into a module's tensor, of which `rank` slots of `dim` exist: the
    others, of a run whose adapters have a larger rank, are 0."""
    count = max(0, min(box.size[dim], rank - box.start[dim]))
    size = (*box.size[:dim], count, *box.size[dim + 1 :])
    values = raw.read(name, Box(box.start, size).moved(by)) if count else None
    if values is not None and size == box.size:
        return values
    out = torch.zeros(box.size, dtype=raw.dtype(name))
    if values is not None:
        out.narrow(dim, 0, count).copy_(values)
    return out


def peft_modules(source: Checkpoint) -> list[PeftModule]:
    """Lists the modules of a checkpoint's adapters, each of as many times their rank as it has
    targets. Raises MtcliError where no Hugging Face family has the model, or the base holds more
    than it."""
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    _, base, lora = source.adapters
    if base.unread and base.format == "hf":
        message = f"{base.folder} has a {base.unread[0]}, and peft calls its modules otherwise"
        hint = f"`mtcli shard {base.folder} TEXT --to hf` writes its text model: --base TEXT"
        raise wrong(message, hint)
    family, rank_of = family_of_base(base), _rank_in_file(lora)
    table = parameters(base.model).values()
    adapted = {w.name for w in table if any(_chosen(m, lora) for m in _all(base.model, family, w))}
    modules = []
    for weight in table:
        layer = weight.name.rpartition(".experts.")[0]
        both = sum(name.startswith(f"{layer}.experts.") for name in adapted) > 1
        modules += modules_of(base.model, family, weight, rank_of, both)
    return [module for module in modules if _chosen(module, lora)]


def _all(model: ModelConfig, family: Family, weight: Parameter) -> list[PeftModule]:
    return modules_of(model, family, weight, lambda name, targets: 1)


def _chosen(module: PeftModule, lora: LoraConfig) -> list[LoraTarget]:
    """Lists the targets of a module that have adapters."""
    return [target for target in module.targets if is_chosen(target.name, lora.targets)]


def _rank_in_file(lora: LoraConfig) -> RankOf:
    def rank_of(_: str, targets: tuple[LoraTarget, ...]) -> int:
        return lora.rank * sum(is_chosen(target.name, lora.targets) for target in targets)

    return rank_of


def peft_tensors(source: Checkpoint, module: PeftModule) -> Iterator[tuple[StoredBox, Tensor]]:
    """Yields the boxes of a module's A and B with their elements, in the order of the file: As of
    its targets one below the other, and a B of their blocks."""
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    adapters, _, lora = source.adapters
    weight, chosen = module.weight.name, _chosen(module, lora)
    a = torch.cat([adapters.read(adapter_name(weight, "a", target)) for target in chosen], -2)
    yield module.a[0], a
    b = a.new_zeros(module.shape_of_b)
    for number, target in enumerate(chosen):
        block = adapters.read(adapter_name(weight, "b", target))
        b[box_of_target(target, Box.of(tuple(block.shape)), number * lora.rank).slices] = block
    for box in module.b:
        yield box, b[box.box.slices].permute(box.order)


def saved_of(source: Checkpoint) -> list[SavedTensor]:
    """Lists the tensors of a checkpoint's modules that are trained whole beside adapters."""
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    _, base, lora = source.adapters
    names = saved_parameters(base.model, lora)
    return saved_tensors(base.model, family_of_base(base), names)


def peft_config(source: Checkpoint, modules: Sequence[PeftModule]) -> dict[str, Any]:
    """Builds the adapter_config.json of a checkpoint's adapters."""
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    _, base, lora = source.adapters
    family = family_of_base(base)
    arrays = {module: as_parameter(family, module) for module in modules}
    wide = {re.escape(m.suffix): m.rank // lora.rank for m in modules if m.rank > lora.rank}
    table: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": TASKS.get(base.model.head),
        "base_model_name_or_path": str(base.folder),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0 if any(arrays.values()) else lora.dropout,  # peft refuses it there
        "target_modules": sorted({module.suffix for module in modules if not arrays[module]}),
        "fan_in_fan_out": family.model_type == "gpt2",  # its Conv1D
        "bias": "none",
        "inference_mode": True,
    }
    if any(arrays.values()):
        table["target_parameters"] = sorted({name for name in arrays.values() if name})
    if saved := saved_of(source):
        table["modules_to_save"] = sorted({tensor.module for tensor in saved})
    if wide:
        table["rank_pattern"] = {name: lora.rank * times for name, times in wide.items()}
        table["alpha_pattern"] = {name: lora.alpha * times for name, times in wide.items()}
    return table


def peft_metadata(source: Checkpoint, modules: Sequence[PeftModule]) -> dict[str, str]:
    """Returns the metadata of the tensors' file, which names the targets of modules that have
    several."""
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    lora = source.adapters.lora
    names = sorted({target.name for module in modules for target in _chosen(module, lora)})
    several = any(len(module.targets) > 1 for module in modules)
    return {"format": "pt"} | ({TARGETS: ",".join(names)} if several else {})


def _separate_targets(folder: Path, model: ModelConfig) -> tuple[str, ...]:
    """Reads the targets whose adapters in one module are apart; none in a file of peft's own."""
    text = read_metadata(folder / WEIGHTS).get(TARGETS, "")
    names = tuple(name for name in text.split(",") if name)
    if unknown := [name for name in names if name not in lora_targets(model)]:
        message = f"{folder / WEIGHTS} has adapters of {listed(unknown)}, which the model has not"
        raise wrong(message, "is it of this model?")
    return names


def _settings(path: Path, table: dict[str, Any]) -> PeftSettings:
    """Reads what adapter_config.json says of ranks, scales and dropout."""
    problems = [
        Problem(f"{path}: {name}={shown(table.get(name))} cannot be represented", "plain LoRA can")
        for name, values in PLAIN.items()
        if table.get(name) not in values
    ]
    rank, alpha, drop = table.get("r"), table.get("lora_alpha"), table.get("lora_dropout") or 0.0
    if not _is_rank(rank):
        problems.append(Problem(f"{path}: r={shown(rank)} is no rank", "1 or more"))
    if not is_number(alpha) or not is_number(drop) or not 0.0 <= drop < 1.0:
        said = f"lora_alpha={shown(alpha)} and lora_dropout={shown(drop)}"
        problems.append(Problem(f"{path}: {said} are no numbers for adapters"))
    ranks, alphas = (table.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
    for name, patterns, fits in (("rank", ranks, _is_rank), ("alpha", alphas, is_number)):
        values = patterns.items() if isinstance(patterns, dict) else [(patterns, None)]
        if not all(_is_name(key) and fits(value) for key, value in values):
            said = f"{name}_pattern={shown(patterns)} cannot be represented"
            problems.append(Problem(f"{path}: {said}", "names of modules, each with a number, can"))
    arrays = table.get("target_parameters") or []
    if not isinstance(arrays, list) or not all(isinstance(name, str) for name in arrays):
        problems.append(Problem(f"{path}: target_parameters={shown(arrays)} is no list of names"))
    if problems:
        raise MtcliError(*problems)
    by_root = bool(table.get("use_rslora"))
    numbers = table["r"], table["lora_alpha"], drop, ranks, alphas
    return PeftSettings(path, *numbers, by_root, tuple(arrays))


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < LARGEST


def _is_name(pattern: Any) -> bool:
    """Says whether a pattern names modules, and is no other regular expression."""
    return isinstance(pattern, str) and re.fullmatch(r"[\w.]+", _plain(pattern)) is not None


def _plain(pattern: str) -> str:
    r"""Returns the name of a pattern such as `.*\.gate_up_proj`."""
    return pattern.removeprefix("^").removeprefix(r".*\.").replace(r"\.", ".")


def _of_pattern(patterns: Mapping[str, Number], name: str, default: Number) -> Number:
    """Returns the value of the first pattern that a module's name ends with."""
    plain = ((_plain(pattern), value) for pattern, value in patterns.items())
    return next((v for key, v in plain if f".{name}".endswith(f".{key}")), default)


def _lora(
    settings: PeftSettings, parts: Sequence[TargetPart], names: tuple[str, ...]
) -> LoraConfig:
    """Builds the config of adapters, whose rank is that of the widest. Raises MtcliError where they
    have several scales."""
    rank = max(part.rank for part in parts)
    scales = sorted({settings.scale_of(part.module.name) for part in parts})
    if not isclose(scales[0], scales[-1], rel_tol=1e-9):
        message = f"{settings.path}: adapters are scaled by {scales[0]:g} and by {scales[-1]:g}"
        raise wrong(message, "one alpha / rank can be represented: convert merge_and_unload's")
    alpha = settings.alpha
    if rank != settings.rank or settings.by_root or settings.alphas:
        alpha = scales[0] * rank
    return LoraConfig(rank=rank, alpha=alpha, dropout=settings.dropout, targets=names)
