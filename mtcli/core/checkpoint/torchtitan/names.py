"""Maps a model's parameters to the tensors of torchtitan's Llama 3 and Qwen3, by name and order.

Theirs are Meta's names: wq, wk and wv for the rows of our fused projection [K, Q + 2, D, H], w1 and
w3 for gate and up. Llama 3 rotates neighbours there, rows 2i and 2i + 1 of a head, where ours are i
and i + D / 2; Qwen3 rotates halves as we do.
"""

from typing import NamedTuple

from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Parameter

OUTER = {
    "embedding.weight": "tok_embeddings.weight",
    "final_norm.weight": "norm.weight",
    "head.weight": "output.weight",
}
INNER = {
    "attention_norm.weight": "attention_norm.weight",
    "attention.q_norm.weight": "attention.q_norm.weight",
    "attention.k_norm.weight": "attention.k_norm.weight",
    "attention.out.weight": "attention.wo.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "mlp.down.weight": "feed_forward.w2.weight",
}
QKV, GATE_UP = "attention.qkv.weight", "mlp.gate_up.weight"
HINT = "Llama 3 and Qwen3 have: RMSNorm, SwiGLU, rotary positions, no biases, no experts"


class TitanTensor(NamedTuple):
    """A tensor of torchtitan's: its name and shape, and the slots first .. first + slots - 1 of a
    fused parameter that it is; no slots where it is a whole one. `turned` where rows of each head
    are neighbours."""

    name: str
    shape: tuple[int, ...]
    first: int = 0
    slots: int = 0
    turned: bool = False


def titan_tensors(model: ModelConfig) -> dict[str, list[TitanTensor]]:
    """Returns the tensors of each parameter. Raises MtcliError with the parameters that
    torchtitan's models have not."""
    table, unknown = {}, []
    for parameter in parameters(model).values():
        tensors = _of(parameter, model)
        table[parameter.name] = tensors
        unknown += [] if tensors else [parameter.name]
    if unknown or model.position != "rope" or model.rotary_fraction != 1.0:
        what = f"{unknown[0]}" if unknown else f"position={model.position!r}"
        message = f"torchtitan's models have no {what}"
        raise MtcliError(Problem(message, HINT))
    return table


def _of(parameter: Parameter, model: ModelConfig) -> list[TitanTensor]:
    if parameter.name in OUTER:
        return [TitanTensor(OUTER[parameter.name], parameter.shape)]
    if not parameter.name.startswith("blocks."):
        return []
    _, layer, inner = parameter.name.split(".", 2)
    prefix = f"layers.{layer}."
    if inner in INNER:
        return [TitanTensor(prefix + INNER[inner], parameter.shape)]
    if inner == QKV:
        groups, slots, dim, hidden = parameter.shape
        turned = model.qk_norm == "none" and not model.rope_interleaved
        letters = (("q", 0, slots - 2), ("k", slots - 2, 1), ("v", slots - 1, 1))
        return [
            TitanTensor(
                f"{prefix}attention.w{letter}.weight",
                (groups * count * dim, hidden),
                first,
                count,
                turned and letter != "v",
            )
            for letter, first, count in letters
        ]
    if inner == GATE_UP:
        names = ("w1", "w3")
        return [
            TitanTensor(f"{prefix}feed_forward.{name}.weight", parameter.shape[1:], slot, 1)
            for slot, name in enumerate(names)
        ]
    return []
