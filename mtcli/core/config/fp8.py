"""Which linear layers `train.precision = "fp8"` multiplies in float8, on a layout.

The products of attention, MLP and experts are; embedding, head, router and norms are not. GPUs take
rows of whole 16 bytes, and blocks of 128: a layer whose weight on a rank has another size is
multiplied in bfloat16, with the same result as under precision = "bf16".
"""

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import Fp8Scaling
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters

MULTIPLE: dict[Fp8Scaling, int] = {"rowwise": 16, "blockwise": 128, "tensorwise": 16}
LayerSizes = dict[str, tuple[int, int]]  # rows and columns by layer, such as "attention.qkv"
LAYERS = ("qkv", "out", "up", "gate_up", "down")  # the last word of a linear layer's name


def is_narrow(scaling: Fp8Scaling, rows: int, columns: int) -> bool:
    """Whether a weight of [rows, columns] on a rank is multiplied in float8."""
    return rows % MULTIPLE[scaling] == 0 == columns % MULTIPLE[scaling]


def weight_sizes(model: ModelConfig, layout: ParallelLayout) -> LayerSizes:
    """What a rank holds of each linear layer of a block; of experts, one's."""
    block = model.model_copy(update={"num_layers": 1})
    found = {}
    for name, parameter in parameters(block).items():
        layer = name.removeprefix("blocks.0.").removesuffix(".weight")
        if name.endswith(".weight") and layer.rpartition(".")[2] in LAYERS:
            rows, columns = parameter.stored_shape(layout)
            if parameter.is_expert:
                rows //= parameter.local_shape(layout)[0]
            found[layer] = (rows, columns)
    return found


def narrow_layers(scaling: Fp8Scaling, sizes: LayerSizes) -> LayerSizes:
    """Those of `weight_sizes` that are multiplied in float8."""
    return {name: size for name, size in sizes.items() if is_narrow(scaling, *size)}


def listed(sizes: LayerSizes) -> str:
    """The sizes in words: "attention.qkv 192 x 64, ..."."""
    return ", ".join(f"{name} {rows} x {columns}" for name, (rows, columns) in sizes.items())
