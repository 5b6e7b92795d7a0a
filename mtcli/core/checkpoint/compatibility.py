"""Checks whether a checkpoint has the parameters of a model, in their shapes."""

from mtcli.core.checkpoint.manifest import is_optimizer
from mtcli.core.checkpoint.reader import HEAD, Checkpoint
from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Parameter


def missing_head(checkpoint: Checkpoint, model: ModelConfig) -> set[str]:
    """The parameters of a model's head that are not here in their shapes, as of another head."""
    if model.head == "lm":
        return set()
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    return {
        name
        for name, parameter in parameters(model).items()
        if name.startswith(HEAD) and shapes.get(name) != parameter.shape
    }


def require_model(checkpoint: Checkpoint, model: ModelConfig, but_head: bool = False) -> None:
    """Raises MtcliError with every parameter of `model` that is not here in its shape, and
    every one that is here and not in `model`; `but_head` of those of a `missing_head`.

    Untrained parameters that its own model does not have may be missing (`begins_at_zero`).
    """
    problems, free = [], missing_head(checkpoint, model) if but_head else set()
    for name, parameter in parameters(model).items():
        if begins_at_zero(checkpoint, parameter) or name in free:
            continue
        if name not in checkpoint.tensors:
            problems.append(Problem(f"{checkpoint.folder} has no tensor {name}"))
        elif checkpoint.tensors[name].shape != parameter.shape:
            shape = checkpoint.tensors[name].shape
            message = f"{name} is {shape} in {checkpoint.folder} and {parameter.shape} in the model"
            problems.append(Problem(message))
    for name in sorted(parameters(checkpoint.model).keys() - parameters(model).keys()):
        if but_head and name.startswith(HEAD) and model.head != "lm":
            continue
        problems.append(
            Problem(f"{checkpoint.folder} has the tensor {name}, and the model has not")
        )
    if not problems:
        return
    hint = "the checkpoint is of another model; compare its config.toml with yours"
    if model.num_experts and checkpoint.model.has_router_biases and not model.has_router_biases:
        hint = "model.router_biases = true keeps the biases of its routers as they are"
    if model.num_experts and not checkpoint.model.num_experts:
        sizes = f"num_experts={model.num_experts},top_k={model.top_k}"
        slices = checkpoint.model.ffn_hidden_size // max(1, model.moe_ffn_hidden_size)
        sizes += f",granularity={slices}" * (slices > 1)
        command = f"`mtcli shard {checkpoint.folder} DST --to mtcli --upcycle {sizes}`"
        hint = f"the checkpoint is dense: {command} makes a mixture of experts of it"
    raise MtcliError(*problems[:-1][:8], problems[-1]._replace(hint=hint))


def begins_at_zero(checkpoint: Checkpoint, parameter: Parameter) -> bool:
    """Whether a parameter is missing because this model was made without it: the bias of a
    router, whose zeros change nothing."""
    return not parameter.trained and parameter.name not in parameters(checkpoint.model)


def keeps_dtype(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor keeps its dtype where weights are converted: optimizer state, and what
    is moved by steps without being trained."""
    table = parameters(checkpoint.model)
    return is_optimizer(name) or (name in table and not table[name].trained)
