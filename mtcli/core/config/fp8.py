"""Selects the linear layers that `train.precision = "fp8"` multiplies in float8, on a layout.

The GEMMs of attention, MLP and shared expert are; embedding, head, router, norms and routed
experts, whose grouped GEMMs are bfloat16's, are not. GPUs take rows of whole 16 bytes, and blocks
of 128: a layer whose weight on a rank has another size is multiplied in bfloat16, with the same
result as under precision = "bf16".
"""

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import Fp8Scaling

MULTIPLE: dict[Fp8Scaling, int] = {"rowwise": 16, "blockwise": 128, "tensorwise": 16}
LayerSizes = dict[str, tuple[int, int]]  # rows and columns by layer, such as "attention.qkv"


def is_narrow(scaling: Fp8Scaling, rows: int, columns: int) -> bool:
    """Whether a weight of [rows, columns] on a rank is multiplied in float8."""
    return rows % MULTIPLE[scaling] == 0 == columns % MULTIPLE[scaling]


def weight_sizes(model: ModelConfig, tp: int) -> LayerSizes:
    """Rows and columns on a rank of each linear layer of a block but those of routed experts.

    The same as those of the parameter table, which needs a layout and cannot be read by rules.
    """
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    qkv = heads + 2 * model.num_kv_heads * model.head_dim
    up, rows = ("gate_up", 2) if model.is_gated else ("up", 1)
    sizes = {"attention.qkv": (-(-qkv // tp), hidden), "attention.out": (hidden, -(-heads // tp))}
    name = "mlp.shared_expert" if model.num_experts else "mlp"
    if ffn := model.dense_ffn_hidden_size:
        columns = -(-ffn // tp)
        sizes |= {f"{name}.{up}": (rows * columns, hidden), f"{name}.down": (hidden, columns)}
    return sizes


def narrow_layers(scaling: Fp8Scaling, sizes: LayerSizes) -> LayerSizes:
    """Selects those of `weight_sizes` that are multiplied in float8."""
    return {name: size for name, size in sizes.items() if is_narrow(scaling, *size)}


def listed(sizes: LayerSizes) -> str:
    """The sizes in words: "attention.qkv 192 x 64, ..."."""
    return ", ".join(f"{name} {rows} x {columns}" for name, (rows, columns) in sizes.items())
