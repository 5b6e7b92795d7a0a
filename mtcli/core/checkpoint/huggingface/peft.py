"""Reads and describes adapters in peft's format: adapter_config.json, adapter_model.safetensors.

A target's tensors are `base_model.model.<module>.lora_A.weight` [rank, in] and `lora_B.weight`
[out, rank], where the module has the family's own name.
"""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from mtcli.core.checkpoint.adapters import base_of, merged
from mtcli.core.checkpoint.folder import ADAPTER_CONFIG, CheckpointFolder, peft_base
from mtcli.core.checkpoint.huggingface.config_json import family_of, read_json
from mtcli.core.checkpoint.huggingface.family import Family
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.checkpoint.resharding import DTYPE_OF_CODE
from mtcli.core.checkpoint.safetensors_file import StoredBox, read_header
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import LARGEST
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig
from mtcli.core.config.untrusted import is_number, listed, shown
from mtcli.core.mesh.adapters import adapter_name, chosen_targets, targets_of
from mtcli.core.mesh.parameters import parameters, run_parameters
from mtcli.core.mesh.sharding import Parameter

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings that change what adapters compute, and the values that we represent.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layers_to_transform": (None,),
    "target_parameters": (None, []),
    "lora_bias": (None, False),
    "trainable_token_indices": (None,),
}


def open_peft(source: CheckpointFolder, open_base: Callable[[Path], Checkpoint]) -> Checkpoint:
    """Opens adapters of peft, merged with the base that their config names or with another one.

    Raises MtcliError for unsupported settings, a missing base, and tensors that are missing,
    unknown or of another shape.
    """
    folder, base = source.folder, base_of(open_base(peft_base(source)))
    header = read_header(folder / WEIGHTS)
    table = read_json(folder / ADAPTER_CONFIG)
    lora = _lora(folder / ADAPTER_CONFIG, table)
    family = family_of(base.model)
    boxes = dict(_boxes(base.model, family, lora))
    names = {_target_of(base.model, name) for name, box in boxes.items() if box.key in header}
    if not names:
        raise wrong(f"{folder / WEIGHTS} has no adapter of {base.folder}", "is it their base?")
    lora = lora.model_copy(update={"targets": tuple(sorted(names))})
    expected = dict(_boxes(base.model, family, lora))
    if unknown := sorted(header.keys() - {box.key for box in expected.values()}):
        message = f"{folder / WEIGHTS} has tensors that no target has: {listed(unknown)}"
        raise wrong(message, "nothing is left out silently")
    tensors = {}
    shapes = run_parameters(base.model, lora)
    for name, box in expected.items():
        if box.key not in header:
            message = (
                f"{folder / WEIGHTS} has {len(header)} of {len(expected)} tensors: no {box.key}"
            )
            where = f"target_modules={shown(table.get('target_modules'))} leaves modules out"
            hint = f"where {where}, convert what peft's merge_and_unload saves: a target has "
            raise wrong(message, f"{hint}adapters in every layer here; else copy the file again")
        entry = header[box.key]
        if entry.shape != box.shape or entry.code not in DTYPE_OF_CODE:
            message = f"{box.key} is {entry.code} {list(entry.shape)} in {folder / WEIGHTS}"
            raise wrong(f"{message} and {list(box.shape)} by its config", "is it of this model?")
        stored = box._replace(file=WEIGHTS, code=entry.code)
        tensors[name] = StoredTensor(DTYPE_OF_CODE[entry.code], shapes[name].shape, (stored,))
    checkpoint = Checkpoint(
        folder=folder,
        model=base.model,
        tensors=tensors,
        tokenizer_folder=source.tokenizer_folder,
        headers={WEIGHTS: header},
        format="peft",
    )
    return merged(checkpoint, base, lora)


def peft_config(source: Checkpoint) -> dict[str, Any]:
    """Builds the adapter_config.json of a checkpoint's adapters."""
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    _, base, lora = source.adapters
    family = family_of(base.model)
    modules = {
        _module(base.model, family, weight, target.name)
        for weight in parameters(base.model).values()
        for target in chosen_targets(weight, base.model, lora)
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.folder),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({_suffix(module) for module in modules}),
        "fan_in_fan_out": base.model.position == "learned",  # GPT-2's Conv1D
        "bias": "none",
        "inference_mode": True,
    }


def peft_boxes(source: Checkpoint) -> Iterator[tuple[str, StoredBox]]:
    """Yields each adapter by canonical name, with peft's tensor of it.

    Raises MtcliError where no Hugging Face family has the model, or the base holds more than it.
    """
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    _, base, lora = source.adapters
    if base.unread and base.format == "hf":
        message = f"{base.folder} has a {base.unread[0]}, and peft calls its modules otherwise"
        hint = f"`mtcli shard {base.folder} TEXT --to hf` writes its text model: --base TEXT"
        raise wrong(message, hint)
    family = family_of(base.model)
    for weight in parameters(base.model).values():
        targets = [target.name for target in chosen_targets(weight, base.model, lora)]
        if targets and _is_fused(base.model, family, weight):
            key = family.boxes(weight, base.model)[0].key
            message = f"{family.model_type} has one module {key.removesuffix('.weight')}"
            hint = "--merge-lora adds them to its weights"
            raise wrong(f"{message} for {', '.join(targets)}, whose adapters are apart", hint)
    yield from _boxes(base.model, family, lora)


def _boxes(model: ModelConfig, family: Family, lora: LoraConfig) -> Iterator[tuple[str, StoredBox]]:
    table = run_parameters(model, lora)
    for name, weight in parameters(model).items():
        if _is_fused(model, family, weight):
            continue
        for target in chosen_targets(weight, model, lora):
            module = _module(model, family, weight, target.name)
            a, b = (adapter_name(name, side, target) for side in "ab")
            shape = table[a].shape
            yield a, StoredBox(f"{module}.lora_A.weight", shape, shape, (0, 1), (0, 0))
            yield b, _of_b(f"{module}.lora_B.weight", table[b].shape, target.name)


def _of_b(key: str, shape: tuple[int, ...], target: str) -> StoredBox:
    """Maps B of a target. A fused projection's rows are in our order, but for GPT-2's c_attn: all
    queries, then all keys, then all values."""
    *outer, rank = shape
    rows, zeros = prod(outer), (0,) * len(shape)
    if target == "c_attn":
        heads, slots, dim = outer
        return StoredBox(key, (rows, rank), (slots, heads, dim, rank), (1, 0, 2, 3), zeros)
    return StoredBox(key, (rows, rank), shape, tuple(range(len(shape))), zeros)


def _is_fused(model: ModelConfig, family: Family, weight: Parameter) -> bool:
    """Says whether a family's module stands for several targets, which have adapters of their own
    here and one of common A in peft."""
    targets = targets_of(weight, model)
    return len(targets) > 1 and len({box.key for box in family.boxes(weight, model)}) == 1


def _module(model: ModelConfig, family: Family, weight: Parameter, target: str) -> str:
    """Returns peft's name of the module for a target of a weight."""
    boxes = family.boxes(weight, model)
    numbers = [lora_target.name for lora_target in targets_of(weight, model)]
    return PREFIX + boxes[numbers.index(target)].key.removesuffix(".weight")


def _suffix(module: str) -> str:
    """Returns what peft calls a target: a module's name, with that of a shared expert's."""
    prefix, _, name = module.rpartition(".")
    parent = prefix.rpartition(".")[2]
    return f"{parent}.{name}" if parent.startswith("shared_expert") else name


def _target_of(model: ModelConfig, adapter: str) -> str:
    """Returns the target of an adapter's canonical name, with the prefix of a shared expert."""
    layer, _, name = adapter.partition(".adapter.")
    weight, short = parameters(model)[f"{layer}.weight"], name.partition(".")[2]
    return next(target.name for target in targets_of(weight, model) if target.short == short)


def _lora(path: Path, table: dict[str, Any]) -> LoraConfig:
    """Converts adapter_config.json to the adapters of all targets."""
    problems = [
        Problem(f"{path}: {name}={shown(table.get(name))} cannot be represented", "plain LoRA can")
        for name, values in PLAIN.items()
        if table.get(name) not in values
    ]
    rank, alpha, drop = table.get("r"), table.get("lora_alpha"), table.get("lora_dropout") or 0.0
    if type(rank) is not int or not 0 < rank < LARGEST:
        problems.append(Problem(f"{path}: r={shown(rank)} is no rank", "1 or more"))
    if not is_number(alpha) or not is_number(drop) or not 0.0 <= drop < 1.0:
        said = f"lora_alpha={shown(alpha)} and lora_dropout={shown(drop)}"
        problems.append(Problem(f"{path}: {said} are no numbers for adapters"))
    if problems:
        raise MtcliError(*problems)
    if table.get("use_rslora"):  # alpha / sqrt(rank) is another alpha / rank
        alpha = table["lora_alpha"] * table["r"] ** 0.5
    return LoraConfig(rank=rank, alpha=alpha, dropout=drop)
