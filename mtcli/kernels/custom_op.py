"""Registers custom torch operators, which torch.compile, FakeTensor and autograd treat as one
call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MTCLI_OPS = torch.library.Library("mtcli", "FRAGMENT")


def custom_op(
    schema: str,
    fake: Callable[..., Any] | None = None,
    saved: Callable[..., tuple[Any, ...]] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as the operator `torch.ops.mtcli.<name>` of schema "name(Tensor x) ->
    Tensor".

    `fake(*inputs)` allocates outputs of the right shape, dtype and strides, for FakeTensor and meta
    tensors. By default there is one output, contiguous and otherwise like the first input.
    `saved(output, *inputs)` returns what the backward reads: tensors are saved for backward, other
    values stored on the context. `backward(*grads, *saved)` returns the gradients of the inputs in
    order; inputs after its last gradient have none.

    torch.library.custom_op does the same, and imports torch._dynamo in its first call, 0.9 s.
    """
    name = schema.split("(")[0]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values = saved(output, *inputs)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in values))
        ctx.values = [None if isinstance(x, Tensor) else x for x in values]
        ctx.num_inputs = len(inputs)

    def gradient(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.values, strict=True)
        gradients = backward(*grads, *(x if tensor is None else tensor for tensor, x in pairs))
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return (*gradients, *[None] * (ctx.num_inputs - len(gradients)))

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MTCLI_OPS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        # On CPU for the interpreter.
        for device in ("CPU", "CUDA"):
            MTCLI_OPS.impl(name, function, device)
        default = _nothing if schema.endswith("-> ()") else _like_first
        torch.library.register_fake(f"mtcli::{name}", fake or default, lib=MTCLI_OPS)
        if backward is not None:
            torch.library.register_autograd(
                f"mtcli::{name}", gradient, setup_context=setup_context, lib=MTCLI_OPS
            )
        return getattr(torch.ops.mtcli, name).default

    return register


def _like_first(x: Tensor, *inputs: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _nothing(*inputs: Any) -> None:
    return None
