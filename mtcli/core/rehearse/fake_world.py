"""Fakes a world of ranks in one process: fake tensors, fake process groups and chosen numbers.

Inside, the process is any rank of any world. Tensors have shapes and no memory, and collectives
return at once. Numbers that a step reads from its tensors are chosen: losses and norms are 1, and
routed tokens spread evenly over the experts.

A GPU's tensors are on `meta`, whose operators take a third of the time of torch's FakeTensor; and a
CPU's are of FakeTensor, as `meta` takes a GPU's paths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.model import build
from mtcli.core.parallel.collectives import Pending
from mtcli.core.rehearse.cpu_kernels import CpuKernels, copying
from mtcli.core.rehearse.live_memory import LiveMemory, Mode
from mtcli.core.runtime.launch import Runtime, cores
from mtcli.core.training.step import Trainer
from mtcli.kernels import (
    limits,
    permute,  # noqa: F401
)
from mtcli.kernels.gemm import set_bfloat16_in_float32
from mtcli.kernels.limits import IS_INTEL
from mtcli.kernels.triton_launch import fake_gpu

META = torch.device("meta")
LARGEST_KNOWN = 2**24  # elements of index tensors whose values are followed
RMS_NORM, ATTENTION = F.rms_norm, F.scaled_dot_product_attention
ROW_SLICES = limits.row_slices
aten = torch.ops.aten
FACTORIES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.zeros.default,
    aten.full.default,
}
DYNAMIC = {
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten.nonzero.default,
}


@contextmanager
def fake_trainer(
    config: RunConfig, world: int, rank: int, on_cpu: bool, widens: bool
) -> Iterator[tuple[Trainer, LiveMemory]]:
    """Builds the trainer of a rank, and counts live bytes while it is used."""
    where = torch.device("cpu") if on_cpu else META  # which takes a GPU's paths
    sharding = fake_shards(where) if config.parallel.zero == 3 else nullcontext()
    live, gemms = LiveMemory(where.type), in_float32(widens)
    kernels = _cpu_kernels(config, world) if on_cpu else nullcontext()
    with sharding, gemms, fake_world(rank, world, config.model, live, not on_cpu), kernels:
        yield Trainer(_as_written(config), Runtime(rank, world, rank, world, where)), live


def _cpu_kernels(config: RunConfig, world: int) -> CpuKernels:
    """The kernels of a CPU whose cores are shared by all ranks (`runtime.launch.set_matmul`)."""
    dtypes = {torch.bfloat16} | ({torch.float32} if config.train.matmul == "fast" else set())
    return CpuKernels(max(1, cores() // world), set() if IS_INTEL else dtypes)


def _as_written(config: RunConfig) -> RunConfig:
    """The config without compilation and CUDA graphs, which need tensors with memory."""
    plain = config.train.model_copy(
        update={"compile": False, "cuda_graphs": False, "eval_batches": 1}
    )
    return config.model_copy(update={"train": plain})


@contextmanager
def in_float32(widens: bool) -> Iterator[None]:
    """Computes GEMMs of bfloat16 in float32 inside, if `widens`, as some devices do."""
    usual = set_bfloat16_in_float32(widens)
    try:
        yield
    finally:
        set_bfloat16_in_float32(usual)


@contextmanager
def fake_world(
    rank: int, world: int, model: ModelConfig, watching: TorchDispatchMode, on_gpu: bool
) -> Iterator[None]:
    """Makes this process a rank of a world of fake ranks, and every new tensor a fake one.

    `watching` sees every operation. With `on_gpu`, Triton kernels are assumed to run.
    """
    if world > 1:
        backend = "cpu:fake,meta:fake"
        dist.init_process_group(backend, rank=rank, world_size=world, store=FakeStore())
    try:
        with ExitStack() as stack:
            if not on_gpu:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(patch.object(F, "rms_norm", _rms_norm))
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attention))
            stack.enter_context(patch.object(limits, "row_slices", _some_slices))
            stack.enter_context(patch.object(Pending, "is_completed", lambda pending: True))
            stack.enter_context(fake_gpu() if on_gpu else nullcontext())
            for mode in (Answers(model, on_gpu), watching):
                stack.enter_context(mode)
            yield
    finally:
        if world > 1:
            dist.destroy_process_group()


@contextmanager
def fake_shards(where: torch.device) -> Iterator[None]:
    """Lets FSDP2 shard fake parameters, which are on a CPU or on `meta` from the start.

    FSDP2 asks the device for streams, which `meta` lacks and a CPU fakes. It refuses to train
    parameters on meta, and reads the address of what `to_empty` moves, which fake tensors lack.
    """
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_param,
        _fsdp_param_group,
        _fully_shard,
    )

    replaced = [
        (torch, "meta", torch.cpu),
        (build, "META", where),
        (_fully_shard, "_get_device_from_mesh", lambda mesh: where),
        (_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        (_fsdp_param.FSDPParam, "reset_sharded_param", lambda parameter: None),
        (_fsdp_param, "_chunk_with_empty", FakeChunks),
        (nn.Module, "to_empty", lambda module, device: module),
    ]
    if where.type == "cpu":
        gather, scatter = _fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter
        replaced += [
            (gather, "__call__", copying(gather.__call__, 0)),
            (scatter, "__call__", copying(scatter.__call__, 1)),
        ]
    with ExitStack() as stack:
        for owner, name, instead in replaced:
            stack.enter_context(patch.object(owner, name, instead, create=name == "meta"))
        yield


class FakeChunks:
    """The chunks of a tensor by rank, as FSDP2 cuts it. The view of a rank is made when it is read,
    as those of a thousand fake ranks take a second for every five parameters."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, rank: int) -> Tensor:
        left = self.tensor.size(self.dim) - rank * self.length
        if left <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, rank * self.length, min(self.length, left))


class Answers(Mode):
    """Answers with a number when a step reads one from a fake tensor.

    Integers that follow from constants, from balanced counts of routed tokens and from the batch
    (such as the indices of its weights that are not 0) are computed on real tensors next to the
    fake ones. Any other number is 1.
    """

    def __init__(self, model: ModelConfig, on_gpu: bool) -> None:
        super().__init__()
        self.model, self.on_gpu = model, on_gpu
        self.known = WeakIdKeyDictionary()  # of a fake tensor: its values

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation; its result has values where those of its inputs are known."""
        given = dict(kwargs or {})
        taken = _tensors(args, given)
        if self.on_gpu and _stays_on_host(taken, given):
            return func(*args, **given)
        if func is aten._local_scalar_dense.default or _reaches_host(func, args, given):
            return self._read(args[0], given)
        if func is aten.bincount.default:
            bins = given["minlength"] if "minlength" in given else args[-1]
            counts = self._balanced(args[0].numel(), bins - 1, bins)
            return self._learn(args[0].new_empty(bins), counts)
        if func is torch.ops.mtcli.sort_copies.default:
            counts, edges = func(*args, **given)
            return self._learn(counts, self._balanced(args[0].numel(), args[2])), edges
        if func is torch.ops.c10d._allgather_base_.default:
            self._gather(args[0], args[1])
        if func is aten.baddbmm.dtype_out:  # torch's fake kernel takes the dtype for beta
            return given["out"]
        value = self._compute(func, args, given, taken)
        if func in DYNAMIC and value is not None:
            like = next(x for x in args if isinstance(x, Tensor))
            return tree_map(lambda x: self._learn(like.new_empty(x.shape, dtype=x.dtype), x), value)
        fake = func(*args, **given)
        return fake if value is None else self._learn_all(fake, value)

    def _read(self, x: Tensor, given: Mapping[str, Any]) -> Any:
        """A fake tensor's values, or ones: a copy on the host where a device is given, or a
        number."""
        values = self._values(x)
        with _disable_current_modes():
            values = torch.ones(x.shape, dtype=x.dtype) if values is None else values
            return values.to(given["dtype"], copy=True) if "device" in given else values.item()

    def _balanced(self, copies: int, experts: int, bins: int = 0) -> Tensor:
        """Copies of tokens by expert under balanced routing; a last bin has the dropped ones."""
        m = self.model
        expert_copies = int(copies * min(1.0, m.capacity_factor or 1.0)) // m.num_experts
        dropped = [copies - expert_copies * experts] if bins > experts else []
        with _disable_current_modes():
            return torch.tensor([expert_copies] * experts + dropped)

    def _compute(
        self, func: Any, args: Sequence[Any], given: dict[str, Any], taken: Sequence[Tensor]
    ) -> Any:
        """The operation's result on the values of the tensors that it takes; None where one of them
        is not known."""
        if not taken and (func not in FACTORIES or _makes_reals(func, given)):
            return None
        if any(self._values(x) is None for x in taken):
            for x in taken[:1] if func._schema.is_mutable else ():
                self.known.pop(x, None)
            return None
        args, given = tree_map(
            lambda x: self._values(x) if isinstance(x, Tensor) else x, (args, given)
        )
        if "device" in given:
            given["device"] = torch.device("cpu")
        with _disable_current_modes():
            value = func(*args, **given)
        if any(x.is_floating_point() for x in taken):
            return value
        # What is made of whole numbers, such as a rotary table, decides nothing.
        return tree_map(lambda x: None if _is_real(x) else x, value)

    def _values(self, x: Tensor) -> Tensor | None:
        if x.numel() > LARGEST_KNOWN:
            return None
        return self.known.get(x) if x.is_meta or isinstance(x, FakeTensor) else x

    def _learn(self, fake: Tensor, values: Tensor) -> Tensor:
        self.known[fake] = values
        return fake

    def _learn_all(self, fakes: Any, value: Any) -> Any:
        for fake, values in zip(tree_leaves(fakes), tree_leaves(value), strict=True):
            if isinstance(fake, Tensor) and isinstance(values, Tensor):
                self.known[fake] = values
        return fakes

    def _gather(self, out: Tensor, x: Tensor) -> None:
        """Gathers this rank's values as every rank's."""
        values, into = self._values(x), self._values(out)
        if values is not None and into is not None:
            with _disable_current_modes():
                into.copy_(values.repeat(len(into) // len(values)))


def _some_slices(count: int, step: int) -> list[slice]:
    """Replaces limits.row_slices by the first two slices and the last: the others take no more."""
    slices = ROW_SLICES(count, step)
    return slices if len(slices) < 4 else [*slices[:2], slices[-1]]


def _makes_reals(func: Any, given: Mapping[str, Any]) -> bool:
    """Whether a factory says that it makes real numbers: memory for them would be real too."""
    dtype = given.get("dtype")
    return func is aten.zeros.default if dtype is None else dtype.is_floating_point


def _tensors(*arguments: Any) -> list[Tensor]:
    return [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]


def _stays_on_host(taken: Sequence[Tensor], given: Mapping[str, Any]) -> bool:
    """Whether an operation takes tensors of the host alone, and leaves its result there."""
    return not any(x.is_meta for x in taken) and given.get("device") != META


def _reaches_host(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether an operation copies a tensor from `meta` to the host."""
    to_host = func is aten._to_copy.default and given.get("device") == torch.device("cpu")
    return to_host and args[0].is_meta


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _rms_norm(
    x: Tensor, size: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Replaces F.rms_norm, in one kernel where a GPU has one."""
    if x.device.type != "meta":
        return RMS_NORM(x, size, weight, eps)
    return _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]  # torch


class _FusedRmsNorm(torch.autograd.Function):
    """Takes memory as a GPU's kernel does: it saves its input and one float32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        """x [..., D] normalised."""
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients of both."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _attention(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Replaces F.scaled_dot_product_attention, by the kernel that torch chooses on a GPU.

    See aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash for 16 bits without a mask, then
    the one that saves memory, and plain products where neither takes it.
    """
    masked, causal = given.get("attn_mask") is not None, given.get("is_causal", False)
    if q.device.type != "meta" or q.element_size() > 4:
        return ATTENTION(q, k, v, **given)
    if q.element_size() == 2 and not masked:
        return cast(Tensor, aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0])
    if q.shape[1] != k.shape[1]:
        return ATTENTION(q, k, v, **given)
    bias = None if not masked else torch.zeros_like(given["attn_mask"], dtype=q.dtype)
    outs = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)
    return cast(Tensor, outs[0])
