"""Maps the modules that peft trains whole beside adapters, its `modules_to_save`.

peft has a copy of its own of each such module. A tied head is then tied no longer, so a tied
embedding is written as both modules, and both are equal where they are read. transformers 5 calls
the head of every family lm_head, whatever its folders call it.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.huggingface.family import Family, same
from mtcli.core.checkpoint.huggingface.peft_modules import PREFIX
from mtcli.core.checkpoint.reader import HEAD, Checkpoint
from mtcli.core.checkpoint.safetensors_file import StoredBox
from mtcli.core.config.errors import wrong
from mtcli.core.config.lora import saved_modules
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import BOX_BYTES, boxes_of_at_most


class SavedTensor(NamedTuple):
    """A tensor of a whole module in peft's file, and the parameter whose elements it has."""

    parameter: str
    box: StoredBox

    @property
    def module(self) -> str:
        """The last part of the module's name, which `modules_to_save` has."""
        return self.box.key.split(".")[-2]


def saved_tensors(model: ModelConfig, family: Family, names: Collection[str]) -> list[SavedTensor]:
    """Lists the tensors of parameters by name, those of a head that is tied to one too."""
    table, found = parameters(model), []
    untied = model.model_copy(update={"tie_embeddings": False})
    for name in (name for name in table if name in names):
        if name.startswith(HEAD):
            boxes = same(f"lm_head.{name.removeprefix(HEAD)}")(table[name], model)
        else:
            boxes = family.boxes(table[name], model)
        if table[name].tied:
            boxes = [*boxes, *same("lm_head.weight")(parameters(untied)["head.weight"], untied)]
        found += [SavedTensor(name, box._replace(key=PREFIX + box.key)) for box in boxes]
    return found


def named_modules(
    path: Path, table: dict[str, Any], model: ModelConfig, family: Family
) -> tuple[str, ...]:
    """Reads `modules_to_save` of an adapter_config.json, by our names. Raises MtcliError for
    modules that cannot be trained whole here."""
    given = table.get("modules_to_save") or []
    is_list = isinstance(given, list) and all(isinstance(name, str) for name in given)
    left, found = set(given) if is_list else set(), []
    for module, names in saved_modules(model).items():
        theirs = {tensor.module for tensor in saved_tensors(model, family, names)}
        if theirs <= left:
            left -= theirs
            found.append(module)
    if left or not is_list:
        message = f"{path}: modules_to_save={shown(given)} cannot be represented"
        tied = ", both of them where they are tied" * model.tie_embeddings
        raise wrong(message, f"plain LoRA can, and a whole embedding and head{tied}")
    return tuple(found)


def require_tied(raw: Checkpoint, tensors: Collection[SavedTensor]) -> None:
    """Raises MtcliError where two modules of one parameter, by their keys in `raw`, differ."""
    first = {tensor.parameter: tensor.box.key for tensor in reversed([*tensors])}
    for tensor in tensors:
        key, other = tensor.box.key, first[tensor.parameter]
        size = BOX_BYTES // raw.dtype(key).itemsize
        pairs = (
            (raw.read(key, box), raw.read(other, box))
            for box in boxes_of_at_most(raw.shape(key), size)
        )
        if key != other and not all(torch.equal(a, b) for a, b in pairs):
            message = f"{raw.folder} has a {other} and a {key} that differ, and the head is tied"
            raise wrong(message, "train it with tied weights, or untie the base first")


def read_saved(adapters: Checkpoint, tensors: Collection[SavedTensor]) -> Iterator[Tensor]:
    """Yields the elements of whole modules, in the order of peft's file."""
    for tensor in tensors:
        yield adapters.read(tensor.parameter)[tensor.box.box.slices].permute(tensor.box.order)
