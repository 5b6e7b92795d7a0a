"""Compiles blocks by torch.compile, which fuses the operations between two GEMMs.

The collectives of tensor parallel layers are part of a block's graph. Other code that talks to
ranks, reads a tensor's values on the host, or depends on the layer's number (such as dropout's key)
stays uncompiled and breaks the graph. So the compiler sees all blocks of a stage as equal: the
first block's graphs serve them all, and compiling takes as long as for one block.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from mtcli.core.config.errors import failed
from mtcli.core.model.attention import Attention
from mtcli.core.model.block import Block
from mtcli.core.model.dropout import Dropout
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.latent_attention import LatentAttention
from mtcli.core.model.moe import MixtureOfExperts
from mtcli.core.model.transformer import Stage
from mtcli.core.parallel.compiled_collectives import in_graph
from mtcli.core.parallel.tensor import ColumnLinear, HeadExchange, RowLinear

MOST_LAYERS = 8  # of a graph of all layers
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Losses = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]  # as `Stage.loss`


def compile_blocks(stages: Iterable[Stage], documents: bool, backend: str = "inductor") -> None:
    """Compiles every block, in its first forward and backward and again for each new shape.

    `documents`: attention stays within documents, whose lengths are read on the host on CPU.
    Modules, parameters and their hooks stay as they are.
    """
    for stage in stages:
        asks_lengths = _asks_lengths(stage, documents)
        for block in stage.blocks.values():
            for module in block.modules():
                _keep_collectives(module)
                for name in _left_out(module, asks_lengths):
                    setattr(module, name, torch.compiler.disable(getattr(module, name)))
            assert isinstance(block, Block), block
            block._run = torch.compile(block._run, dynamic=False, backend=backend)  # type: ignore[method-assign]  # of the instance


def compile_stage(
    stage: Stage, losses: Losses, documents: bool, backend: str = "inductor"
) -> Losses:
    """Compiles `losses`, the whole forward of a stage and its loss, as one graph.

    Where something breaks graphs, or there are more than MOST_LAYERS, compiles the blocks instead
    and returns `losses` as it is.

    A graph costs 0.3 ms to call, forward and backward: a fifth of a step of two layers of 32. Its
    compile time grows with its layers.
    """
    asks_lengths = _asks_lengths(stage, documents)
    left_out = any(True for module in stage.modules() for _ in _left_out(module, asks_lengths))
    recomputed = any(block.recompute != "none" for block in stage.blocks.values())
    if left_out or recomputed or len(stage.blocks) > MOST_LAYERS or stage.model.head != "lm":
        compile_blocks([stage], documents, backend)
        return losses
    # Of each size of an array there is a graph, and dynamo gives up after 8 of the same function.
    torch._dynamo.reset()
    return as_graph(losses, backend)


def as_graph(
    function: Callable[Arguments, Result], backend: str = "inductor"
) -> Callable[Arguments, Result]:
    """Returns a function of tensors, compiled for each of their shapes in its first call.

    Without the asserts of generated code on its inputs' strides, which dynamo has guarded: 250 in
    a step of an array of two layers.
    """
    options: dict[str, str | int | bool | Callable[..., object]] | None = None
    if backend == "inductor":
        options = {"size_asserts": False, "alignment_asserts": False}
    return torch.compile(function, dynamic=False, backend=backend, options=options)


def uncompiled(compiled: bool) -> AbstractContextManager[None]:
    """Runs `compiled` blocks eagerly inside, as compiled ones skip the hooks of their modules."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


@contextmanager
def compiler_errors(compiled: bool) -> Iterator[None]:
    """Turns a failure of the C++ compiler inside, of `compiled` blocks, into an MtcliError.

    The compiler runs in a block's first forward or backward, and mostly fails for lack of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not compiled:
            raise
        from torch._dynamo.exc import BackendCompilerFailed
        from torch._inductor.exc import CppCompileError

        cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if not isinstance(cause, CppCompileError):
            raise
        raise failed(
            f"train.compile: {cause.cmd[0]} failed: {_first_complaint(cause.output)}",
            "free some memory, name another compiler in CXX, or set train.compile = false",
        ) from error


def _first_complaint(output: str) -> str:
    """The first line of a compiler's output with an error, or else its last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])[:300]


def _keep_collectives(module: nn.Module) -> None:
    """Makes the collectives of tensor parallel layers nodes of their block's graph."""
    match module:
        case LatentAttention():
            module.enter = in_graph(module.enter, module.tp)
        case HeadExchange():
            module.exchange = in_graph(module.exchange, module.tp)
        case ColumnLinear():
            module.enter = in_graph(module.enter, module.tp)
        case RowLinear():
            module.leave = in_graph(module.leave, module.tp)


def _asks_lengths(stage: Stage, documents: bool) -> bool:
    """Whether attention reads the lengths of documents on the host."""
    return documents and stage.build.groups.device.type == "cpu"


def _left_out(module: nn.Module, asks_lengths: bool) -> Iterator[str]:
    """The functions of a module that are not compiled."""
    match module:
        case Dropout() if module.active:
            yield "forward"
        case MixtureOfExperts():
            yield "forward"
        case Attention():
            if module.stream.active:
                yield "_attend_with_dropout"
            if module.cp.size > 1 or asks_lengths:
                yield "attend"
