"""Bytes that the ranks of a grid exchange in two-dimensional tensor parallelism, per block.

They are those of parallel/summa.py and parallel/tensor_2d.py on a grid of r x c ranks. A
column-parallel GEMM [T, K] @ [K, N] broadcasts its input along rows and its weight down columns; a
row-parallel one sums its output along rows and broadcasts its weight. Each gradient moves one more
matrix of its kind; those of a row-parallel layer's input and weight share the panels of dY.
"""

from typing import NamedTuple

from mtcli.core.plan.gpu_time import dense_gemms
from mtcli.core.plan.workload import Workload


class GridBytes(NamedTuple):
    """Mean bytes that a rank of a grid sends along its row and down its column."""

    along: float
    down: float


class GridTraffic(NamedTuple):
    """Bytes of a block and a micro-batch: of its forward, and of its backward."""

    forward: GridBytes
    backward: GridBytes


def grid_traffic(work: Workload) -> GridTraffic:
    """Bytes of a block's GEMMs and norms, and of its tokens' all-to-all to the router in a mixture.

    With h = K, 4 h wide MLPs and s tokens of b sequences: (4 bsh)/r along rows and 12 h^2/c down
    columns forward, 6 bsh/r and 24 h^2/c backward. The paper's choice of GEMMs has 7 bsh and 14 bsh
    (arXiv:2104.05343, table 1). A ring sends (n - 1)/n of what n ranks gather.
    """
    layout, size = work.layout, work.sizes.weight
    rows, columns = layout.tp_rows, layout.tp_columns
    along, down = [0.0, 0.0], [0.0, 0.0]  # forward, backward
    for index, (tokens, n, k) in enumerate(dense_gemms(work)):
        is_column = index % 2 == 0
        moved, weight = tokens / rows * (k if is_column else n) * size, n * k / columns * size
        along = [along[0] + moved, along[1] + moved * (2 if is_column else 1)]
        down = [down[0] + weight, down[1] + 2 * weight]
    for way, numbers in enumerate(_numbers_of_norms(work)):
        along[way] += work.model.norms_per_block * numbers * work.tokens / rows * max(4, size)
    if work.model.num_experts:
        there_and_back = 2 * work.stream_bytes / layout.tp
        along = [bytes + there_and_back for bytes in along]
    shares = (columns - 1) / columns, (rows - 1) / rows
    forward, backward = (GridBytes(along[way] * shares[0], down[way] * shares[1]) for way in (0, 1))
    return GridTraffic(forward, backward)


def grid_bytes_per_step(work: Workload) -> GridBytes:
    """Mean bytes that a rank's blocks send in a step, on the pipeline rank that sends most."""
    forward, backward = grid_traffic(work)
    passes = 2 if work.recompute == "full" else 1
    blocks = work.num_micro_batches * work.most_layers
    along, down = (blocks * (passes * forward[way] + backward[way]) for way in (0, 1))
    return GridBytes(along, down)


def _numbers_of_norms(work: Workload) -> tuple[float, float]:
    """(forward, backward) numbers per token of a norm, of which a ring of c ranks carries (c -
    1)/c.

    LayerNorm all-gathers a mean and a variance, and sums two numbers in the backward; RMSNorm sums
    one in each. A sum counts twice.
    """
    if work.model.norm == "layernorm":
        return 2.0 * work.layout.tp_columns, 2.0 * 2
    return 2.0, 2.0
