"""Presents adapters and their base weights as one model: W + scale * B A, computed when read.

A checkpoint of a LoRA run holds only A, B, modules that are trained whole, and the optimizer state
of these. Its config names the base in train.init, and its manifest has the base's hash.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mtcli.core.checkpoint.blocks import sampled_hash
from mtcli.core.checkpoint.folder import MANIFEST
from mtcli.core.checkpoint.new_rows import with_trained_tables
from mtcli.core.checkpoint.reader import Adapters, Checkpoint, StoredTensor
from mtcli.core.checkpoint.run_progress import progress_of
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import LoraConfig, RunConfig
from mtcli.core.mesh.adapters import LoraTarget, adapter_name, chosen_targets
from mtcli.core.mesh.parameters import parameters, run_parameters, saved_parameters
from mtcli.core.mesh.sharding import Box

Open = Callable[[Path], Checkpoint]


def base_of(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint of the base weights, or `checkpoint` itself where it has no
    adapters."""
    return checkpoint if checkpoint.adapters is None else checkpoint.adapters.base


def own_of(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint of a merged model's adapters and their optimizer state, or
    `checkpoint` itself where it has no adapters."""
    return checkpoint if checkpoint.adapters is None else checkpoint.adapters.own


def with_adapters(checkpoint: Checkpoint) -> Checkpoint:
    """Adds the adapters and their optimizer state to the tensors of a merged model; returns
    `checkpoint` itself where it has no adapters."""
    if checkpoint.adapters is None:
        return checkpoint
    return replace(checkpoint, tensors=checkpoint.tensors | checkpoint.adapters.own.tensors)


def weights_hash(base: Checkpoint) -> str:
    """Hashes weights: the manifest's hash, or one of sampled blocks of the tensors' files."""
    if base.format == "mtcli":
        return sampled_hash([base.folder / MANIFEST])
    return sampled_hash(sorted(base.folder / name for name in base.headers))


def with_base(
    checkpoint: Checkpoint, open_base: Open, moved_to: Path | None = None, flag: str = "--base"
) -> Checkpoint:
    """Merges a run's adapters with their base, looked for at `moved_to` first.

    Raises MtcliError where the base is missing or changed (`flag` names another one), or of another
    model.
    """
    assert checkpoint.config is not None, "a run has a config"
    record, train = progress_of(checkpoint).base, checkpoint.config.train
    candidates = [moved_to, train.base or train.init, record.path if record else None]
    names = list(dict.fromkeys(str(name) for name in candidates if name))
    path = next((Path(name) for name in names if Path(name).exists()), None)
    if path is None:
        missing = " or ".join(names) or "weights"
        message = f"{checkpoint.folder} holds adapters of {missing}, which is gone"
        raise wrong(message, f"name the folder that it has moved to: {flag} FOLDER")
    base = base_of(open_base(path))
    if record is not None and weights_hash(base) != record.hash:
        message = f"{checkpoint.folder} holds adapters of {path} with the hash {record.hash}, "
        message += f"and it has now {weights_hash(base)}"
        hint = "they are for the weights that they were trained on"
        raise wrong(message, f"{hint}: {flag} FOLDER names these")
    if train.new_tokens:
        base = with_trained_tables(base, checkpoint)
    bare = checkpoint.config.model_copy(update={"lora": LoraConfig()})
    return merged(checkpoint, base, checkpoint.config.lora, bare)


def merged(
    checkpoint: Checkpoint, base: Checkpoint, lora: LoraConfig, config: RunConfig | None = None
) -> Checkpoint:
    """Merges adapters and their base into a checkpoint with the run's `config`; tensors keep the
    base's dtype.

    Raises MtcliError with every adapter that is missing, unknown or of another shape.
    """
    model = base.model
    require_adapters(checkpoint, model, lora)
    adapters, saved = Adapters(checkpoint, base, lora), saved_parameters(model, lora)
    tensors = {}
    for name, weight in parameters(model).items():
        if name not in base.tensors:
            continue
        targets, source = chosen_targets(weight, model, lora), checkpoint if name in saved else base
        read = partial(_merged, adapters, name, targets) if targets else partial(source.read, name)
        tensors[name] = StoredTensor(source.dtype(name), source.shape(name), (), read)
    found = replace(checkpoint, model=model, tensors=tensors, adapters=adapters, config=config)
    return replace(found, tokenizer_folder=checkpoint.tokenizer_folder or base.tokenizer_folder)


def require_adapters(checkpoint: Checkpoint, model: ModelConfig, lora: LoraConfig) -> None:
    """Raises MtcliError where a checkpoint's adapters are not those of a model and a config."""
    table = run_parameters(model, lora)
    expected = {name: parameter for name, parameter in table.items() if parameter.trained}
    problems = [
        Problem(f"{checkpoint.folder} has no adapter {name}")
        for name in expected
        if name not in checkpoint.tensors
    ]
    problems += [
        Problem(
            f"{name} is {checkpoint.shape(name)} in {checkpoint.folder} "
            f"and {parameter.shape} by its rank"
        )
        for name, parameter in expected.items()
        if name in checkpoint.tensors and checkpoint.shape(name) != parameter.shape
    ]
    given = {name for name in checkpoint.names() if "/" not in name}
    problems += [
        Problem(f"{checkpoint.folder} has the adapter {name}, and the config has not")
        for name in sorted(given - expected.keys())
    ]
    if problems:
        fields = "lora.rank, lora.targets and lora.modules_to_save"
        hint = f"adapters keep their rank and targets: set {fields} to theirs"
        raise MtcliError(*problems[:8], hint=hint)


def require_scale(adapters: Adapters, lora: LoraConfig) -> None:
    """Raises MtcliError where a run would scale its initial adapters differently from the run that
    trained them."""
    theirs = adapters.lora
    if theirs.alpha / theirs.rank != lora.alpha / lora.rank:
        message = f"lora.alpha={lora.alpha:g}, and the adapters of {adapters.own.folder} are scaled"
        message += f" by {theirs.alpha:g}/{theirs.rank}"
        raise wrong(message, f"--set lora.alpha={theirs.alpha:g}", "lora.alpha")


@torch.no_grad()
def _merged(adapters: Adapters, name: str, targets: tuple[LoraTarget, ...], box: Box) -> Tensor:
    """Reads a box of W + scale * B A, summed in float32 at least and rounded once."""
    weight = adapters.base.read(name, box)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    source, rank = adapters.own, adapters.lora.rank
    for target in targets:
        start, size, rows = list(box.start[:-1]), list(box.size[:-1]), slice(None)
        if target.dim is not None:
            first = max(start[target.dim], target.first)
            end = min(start[target.dim] + size[target.dim], target.first + target.num_slots)
            if first >= end:
                continue
            rows = slice(first - start[target.dim], end - start[target.dim])
            start[target.dim], size[target.dim] = first - target.first, end - first
        of_a, of_b = (adapter_name(name, side, target) for side in "ab")
        b = source.read(of_b, Box((*start, 0), (*size, rank))).to(wide.dtype)
        experts = len(source.shape(of_a)) - 2  # 1 where each expert has its own A
        inputs = (*start[:experts], 0, box.start[-1]), (*size[:experts], rank, box.size[-1])
        a = source.read(of_a, Box(*inputs)).to(wide.dtype)
        change = b.reshape(*size[:experts], prod(size[experts:]), rank) @ a
        part = wide if target.dim is None else wide[(slice(None),) * target.dim + (rows,)]
        part.add_(change.view(*size, -1), alpha=adapters.lora.alpha / rank)
    return wide.to(weight.dtype)
