"""Seconds of one transformer block and of embedding and head, on one rank, for one micro-batch.

GEMMs run at the device's sustained rate, less for short inner dimensions and for grids that do not
fill the processors. Element-wise operations take their bytes over the memory bandwidth. The host
that starts all this takes its own time, for each operation and collective.
"""

from dataclasses import replace
from functools import singledispatch
from math import ceil

from mtcli.core.config.fp8 import is_narrow
from mtcli.core.mesh.visibility import mean_keys
from mtcli.core.plan.costs import Pass
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.workload import Workload

BLOCK_KERNELS = 24  # of a dense block's forward pass
# Operations of the host that cost as much as the Python of a forward pass.
BLOCK_CALLS, END_CALLS = 450, 100
ROUTED_CALLS = 750  # more where tokens are routed to experts that are multiplied together
EXPERT_CALLS = 75  # or of each expert on a CPU, where they are not

GemmShape = tuple[int, int, int]


def block_seconds(work: Workload, device: Device) -> Pass:
    """Seconds of a block's arithmetic and memory traffic."""
    moving = elementwise_bytes(work, device) / device.reached_bandwidth
    filling = BLOCK_KERNELS * work.unfused * device.physics.kernel
    return (
        Pass(filling, 2 * filling)
        + _dense(work, device)
        + _routed(work, device)
        + attention_seconds(work, device)
        + Pass(moving, 1.5 * moving)
        + functions_seconds(work, device)
    )


def host_seconds(work: Workload, device: Device) -> Pass:
    """Seconds of the host to start a block's operations, without collectives."""
    m, calls = work.model, float(BLOCK_CALLS)
    if m.num_experts:
        apart = EXPERT_CALLS * m.num_experts // work.layout.ep
        calls += apart if device.physics.host_adds else ROUTED_CALLS
    return _host_seconds(calls, work, device)


def functions_seconds(work: Workload, device: Device) -> Pass:
    """Seconds of computing a block's activation function and its derivative, where memory does not
    hide them."""
    m = work.model
    routed = work.expert_rows * m.moe_ffn_hidden_size / work.layout.etp if m.num_experts else 0.0
    inner = work.tokens * m.dense_ffn_hidden_size / work.layout.tp + routed
    # relu2 has no exponential to compute
    seconds = inner * device.physics.element * (m.activation != "relu2")
    return Pass(seconds, 2 * seconds)


def _host_seconds(calls: float, work: Workload, device: Device) -> Pass:
    """Seconds of the host for `calls` operations in a forward pass, and for those of its
    backward."""
    seconds = calls * device.physics.call * work.host_share
    return Pass(seconds, 1.5 * seconds)


def beside_host(busy: Pass, host: Pass, device: Device) -> Pass:
    """Seconds of the device and its host together: the slower one's, or both where one is the
    other."""
    return busy + host if device.physics.host_adds else busy.beside(host)


def head_seconds(work: Workload, device: Device) -> Pass:
    """Seconds of the logits and their loss, read and written in float32, on the last stage."""
    m = work.model
    rows, panels = work.layout.tp_rows, work.panels
    columns = -(-m.vocab_size // work.columns)
    wide = replace(work, precision="bf16") if work.sizes.gemm in ("fp8", "nvfp4") else work
    shape = (work.tokens // rows, columns, m.hidden_size // panels)
    logits_gemm = gemms_seconds(wide, device, [shape]) * panels
    logits = 4.0 * work.tokens // rows * columns * device.physics.traffic
    moved = logits / device.reached_bandwidth
    busy = logits_gemm + Pass(2 * moved, 2 * moved)
    return beside_host(busy, _host_seconds(END_CALLS, work, device), device)


def embedding_seconds(work: Workload, device: Device) -> Pass:
    """Seconds of the lookup, and of the backward's scatter: rows read and written."""
    rows = 2.0 * work.tokens * work.model.hidden_size * work.sizes.weight
    moved = rows * device.physics.traffic / device.reached_bandwidth
    return beside_host(Pass(moved, 2 * moved), _host_seconds(END_CALLS, work, device), device)


@singledispatch  # `benchmarks/published/software.py` has that of former years
def attention_seconds(work: Workload, device: Device) -> Pass:
    """Seconds of flash attention over the scores that the mask leaves, half the square if causal;
    the backward has 5 GEMMs for the forward's 2."""
    flops = attention_flops(work, mean_keys(work.model, work.seq_len))
    seconds = flops / (attention_rate(work, device) * device.physics.attention)
    # a soft cap computes a tanh for each score, again in the backward
    scores = flops / (4.0 * work.model.head_dim) * (work.model.attention_softcap > 0)
    capped = scores * device.physics.element
    return Pass(seconds + capped, 2.5 * seconds + capped)


def attention_flops(work: Workload, keys: float) -> float:
    """FLOPs of both GEMMs of a rank's heads, with `keys` keys per query."""
    heads = work.model.num_heads / work.layout.tp
    return 4.0 * work.tokens * keys * heads * work.model.padded_head_dim


def attention_rate(work: Workload, device: Device) -> float:
    """FLOP/s of large GEMMs in the precision of the activations."""
    precision = {8: "fp64", 4: "fp32"}.get(work.sizes.weight, "bf16")
    return device.peak("fp16" if "fp16" in device.flops else precision) * device.sustained


def dense_gemms(work: Workload) -> list[GemmShape]:
    """Shapes (M, N, K) of a block's unsharded GEMMs [M, K] @ [K, N] outside of routed experts;
    tensor parallelism shards N of those with even index and K of those with odd index."""
    m = work.model
    values = m.num_heads * m.value_dim
    if m.mla:  # a down-projection, of which a rank computes its tokens, counts as sharded
        down, kv = m.mla.q_rank + m.mla.kv_rank + m.mla.rope_dim, m.num_heads * m.mla.nope_dim
        shapes = [
            (work.tokens, down, m.hidden_size),
            (work.tokens, m.num_heads * m.head_dim, m.mla.q_rank or m.hidden_size),
            (work.tokens, kv + values, m.mla.kv_rank),
        ]
    else:
        fused = values + 2 * m.num_kv_heads * m.head_dim
        shapes = [(work.tokens, fused, m.hidden_size)]
    shapes.append((work.tokens, m.hidden_size, values))
    inner = m.dense_ffn_hidden_size
    up = (work.tokens, m.up_factor * inner, m.hidden_size)
    return [*shapes, up, (work.tokens, m.hidden_size, inner)] if inner else shapes


def _dense(work: Workload, device: Device) -> Pass:
    """Seconds of a block's GEMMs on a rank. SUMMA makes a GEMM in as many steps as there are
    panels (arXiv:2104.05343, algorithm 1), which divide K of column-parallel and N of
    row-parallel layers."""
    rows, columns, panels = work.layout.tp_rows, work.columns, work.panels
    sharded = []
    for index, (m, n, k) in enumerate(dense_gemms(work)):
        n, k = (n // columns, k // panels) if index % 2 == 0 else (n // panels, k // columns)
        sharded.append((m // rows, n, k))
    return gemms_seconds(work, device, sharded) * panels


def _routed(work: Workload, device: Device) -> Pass:
    m, layout = work.model, work.layout
    if not m.num_experts:
        return Pass()
    if work.precision == "fp8" and not work.narrow_experts:
        work = replace(work, precision="bf16")
    experts = m.num_experts // layout.ep
    rows = max(1, round(work.expert_rows / experts))
    inner = m.moe_ffn_hidden_size // layout.etp
    shapes = [(rows, m.up_factor * inner, m.hidden_size), (rows, m.hidden_size, inner)]
    return gemms_seconds(work, device, shapes, experts)


def gemms_seconds(work: Workload, device: Device, shapes: list[GemmShape], copies: int = 1) -> Pass:
    """Seconds of the GEMMs (M, N, K), and of the backward's two GEMMs each, one where weights are
    frozen; bfloat16 where float8 does not take a weight of [N, K]."""
    forward = backward = 0.0
    given = work
    for m, n, k in shapes:
        wide = given.precision == "fp8" and not is_narrow(given.fp8_scaling, n, k)
        work = replace(given, precision="bf16") if wide else given
        forward += copies * gemm_seconds((m, n, k), work, device, copies)
        backward += copies * gemm_seconds((m, k, n), work, device, copies)
        if of_weight := work.gemms_back - 1:
            backward += of_weight * copies * gemm_seconds((n, k, m), work, device, copies)
    return Pass(forward, backward)


def gemm_seconds(shape: GemmShape, work: Workload, device: Device, copies: int = 1) -> float:
    """Seconds of one of `copies` equal GEMMs that are launched together."""
    (m, n, k), physics = shape, device.physics
    narrow = work.sizes.gemm in ("fp8", "nvfp4")
    tile = physics.tile
    tiles = copies * ceil(m / tile) * ceil(n / tile)
    waves = tiles / device.processors
    fullness = waves / ceil(waves) if waves > 1 else max(waves, 0.25)
    padding = (m / (tile * ceil(m / tile))) * (n / (tile * ceil(n / tile)))
    share = (physics.narrow_gemm if narrow else physics.gemm) * k / (k + physics.fill)
    rate = device.peak(work.sizes.gemm) * device.sustained * share * fullness * padding
    size = work.sizes.weight
    moved = size * (m * k + k * n + m * n) / device.reached_bandwidth
    if narrow:  # inputs are read wide and written narrow, twice: as they are and transposed
        cast = (m * k + k * n) * (size + 2) / device.reached_bandwidth
        return max(2.0 * m * n * k / rate, moved) + cast / 2
    return max(2.0 * m * n * k / rate, moved)


def elementwise_bytes(work: Workload, device: Device) -> float:
    """Bytes that norms, residuals, dropout, activation and rotation read and write in a layer's
    forward."""
    m, tp = work.model, work.layout.tp
    shared = (6.0 + 2.0 * m.norms_per_block) * m.hidden_size / (tp if work.sequence_parallel else 1)
    per_width = 1 + m.up_factor
    heads = 2.0 * (m.num_heads + work.kv_heads) * m.head_dim / tp * m.copies_of_heads
    if m.num_experts:
        widths = m.top_k * m.moe_ffn_hidden_size + m.shared_expert_ffn_hidden_size
        routed = 8.0 * m.top_k * m.hidden_size / tp  # permute, unpermute, weigh and sum
        biased = m.top_k * (m.up_factor * m.moe_ffn_hidden_size + m.hidden_size) * m.expert_bias
        inner = (per_width * widths + 2.0 * biased) / tp + routed
    else:
        inner = per_width * m.ffn_hidden_size / tp
    moved = work.tokens * (shared + heads + inner) * work.sizes.weight
    return moved * device.physics.traffic * work.unfused
