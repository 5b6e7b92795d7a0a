"""Checks whether a checkpoint has the parameters of a model, in their shapes."""

from mtcli.core.checkpoint.manifest import is_optimizer
from mtcli.core.checkpoint.reader import HEAD, Checkpoint
from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Parameter


def missing_head(checkpoint: Checkpoint, model: ModelConfig) -> set[str]:
    """Returns the parameters of a model's head that a checkpoint lacks, or has in other shapes, as
    of another head."""
    if model.head == "lm":
        return set()
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    return {
        name
        for name, parameter in parameters(model).items()
        if name.startswith(HEAD) and shapes.get(name) != parameter.shape
    }


def require_model(checkpoint: Checkpoint, model: ModelConfig, but_head: bool = False) -> None:
    """Raises MtcliError with every parameter of `model` that the checkpoint lacks or has in another
    shape, and every one that only the checkpoint has. With `but_head`, a `missing_head` is allowed.

    An untrained parameter that the checkpoint's own model lacks may be missing (`begins_at_zero`).
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
    """Says whether a parameter is missing because the checkpoint's model lacks it: a router's bias,
    whose zeros change nothing."""
    return not parameter.trained and parameter.name not in parameters(checkpoint.model)


def keeps_dtype(checkpoint: Checkpoint, name: str) -> bool:
    """Says whether a conversion of weights keeps a tensor's dtype: optimizer state, and parameters
    that steps move without training them."""
    table = parameters(checkpoint.model)
    return is_optimizer(name) or (name in table and not table[name].trained)
