"""Selects the linear layers that `train.precision = "fp8"` computes in float8, on a layout.

Those are the GEMMs of attention, MLP and shared expert. Embedding, head, router, norms and routed
experts, whose grouped GEMMs are bfloat16, are not. Scaled GEMMs need rows and columns in multiples
of 16, or of 128 with blockwise scaling: a layer whose weight on a rank has another size runs in
bfloat16, with the same result as under precision = "bf16".
"""

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import Fp8Scaling

MULTIPLE: dict[Fp8Scaling, int] = {"rowwise": 16, "blockwise": 128, "tensorwise": 16}
LayerSizes = dict[str, tuple[int, int]]  # rows and columns by layer, such as "attention.qkv"


def is_narrow(scaling: Fp8Scaling, rows: int, columns: int) -> bool:
    """Says whether a weight of [rows, columns] on a rank is multiplied in float8."""
    return rows % MULTIPLE[scaling] == 0 == columns % MULTIPLE[scaling]


def weight_sizes(model: ModelConfig, tp: int) -> LayerSizes:
    """Returns rows and columns on a rank of each linear layer of a block but routed experts.

    They equal the parameter table's, which needs a layout and is unavailable to rules.
    """
    hidden, heads, mla = model.hidden_size, model.num_heads, model.mla
    up, rows = ("gate_up", 2) if model.is_gated else ("up", 1)
    sizes = {"attention.out": (hidden, -(-heads * model.value_dim // tp))}
    if mla:
        query, columns = ("q_up", mla.q_rank) if mla.q_rank else ("q", hidden)
        sizes |= {"attention.q_down": (mla.q_rank, hidden)} if mla.q_rank else {}
        sizes |= {
            f"attention.{query}": (heads // tp * model.head_dim, columns),
            "attention.kv_down": (mla.kv_rank + mla.rope_dim, hidden),
            "attention.kv_up": (heads // tp * (mla.nope_dim + mla.value_dim), mla.kv_rank),
        }
    else:
        qkv = (heads + 2 * model.num_kv_heads) * model.head_dim
        sizes = {"attention.qkv": (-(-qkv // tp), hidden)} | sizes
    widths = {"mlp.shared_expert" if model.num_experts else "mlp": model.dense_ffn_hidden_size}
    if model.first_dense_layers:
        widths["mlp"] = model.ffn_hidden_size
    for name, ffn in widths.items():
        columns = -(-ffn // tp)
        if not ffn:
            continue
        sizes |= {f"{name}.{up}": (rows * columns, hidden), f"{name}.down": (hidden, columns)}
    return sizes


def narrow_layers(scaling: Fp8Scaling, sizes: LayerSizes) -> LayerSizes:
    """Selects the layers of `weight_sizes` that are multiplied in float8."""
    return {name: size for name, size in sizes.items() if is_narrow(scaling, *size)}


def listed(sizes: LayerSizes) -> str:
    """Words the sizes: "attention.qkv 192 x 64, ..."."""
    return ", ".join(f"{name} {rows} x {columns}" for name, (rows, columns) in sizes.items())
