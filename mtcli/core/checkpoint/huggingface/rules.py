"""Rules from our parameters to Hugging Face's tensors; each is a reshape, a reordering and a place.

Shapes: K key-value heads, Q query heads per key-value head, D head_dim, H hidden, F inner width,
E experts.
"""

from mtcli.core.checkpoint.huggingface.family import Part, TensorRule
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.sharding import Parameter


def same(name: str) -> TensorRule:
    """The same tensor under another name."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[Part]:
        return [_whole(name, parameter.shape)]

    return rule


def transposed(name: str) -> TensorRule:
    """GPT-2's Conv1D: ours [out, in] is stored as [in, out]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[Part]:
        out, into = parameter.shape
        return [Part(name, (into, out), (into, out), (1, 0), (0, 0))]

    return rule


def joined_qkv(name: str) -> TensorRule:
    """GPT-2's c_attn: ours [K, 3, D, H] is stored as [H, 3 * K * D], and its bias as [3 * K * D].

    Without grouped queries Q is 1, so each head's query, key and value are ours in turn.
    """

    def rule(parameter: Parameter, model: ModelConfig) -> list[Part]:
        heads, _, dim, *hidden = parameter.shape
        view = (*hidden, 3, heads, dim)
        axes = (2, 1, 3, 0) if hidden else (1, 0, 2)
        shape = (*hidden, 3 * heads * dim)
        return [Part(name, shape, view, axes, (0,) * len(view))]

    return rule


def separate_qkv(template: str) -> TensorRule:
    """Llama's q_proj, k_proj and v_proj: ours [K, Q + 2, D, H] in three tensors [heads * D, H]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[Part]:
        groups, slots, dim, *hidden = parameter.shape
        parts = []
        for letter, first, count in (("q", 0, slots - 2), ("k", slots - 2, 1), ("v", slots - 1, 1)):
            view = (groups, count, dim, *hidden)
            shape = (groups * count * dim, *hidden)
            start = (0, first, *(0 for _ in view[2:]))
            parts.append(Part(template.format(letter), shape, view, _in_order(view), start))
        return parts

    return rule


def gate_and_up(gate: str, up: str) -> TensorRule:
    """Llama's gate_proj and up_proj [F, H]: ours [2, F, H]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[Part]:
        shape = parameter.shape[1:]
        view = (1, *shape)
        return [
            Part(name, shape, view, _in_order(view), (i, *(0 for _ in shape)))
            for i, name in enumerate((gate, up))
        ]

    return rule


def expert_gate_and_up(gate: str, up: str) -> TensorRule:
    """A gate and an up tensor [F, H] of each {expert}: ours [E, 2, F, H]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[Part]:
        shape = parameter.shape[2:]
        view = (1, 1, *shape)
        return [
            Part(name.format(expert=e), shape, view, _in_order(view), (e, i, 0, 0))
            for e in range(parameter.shape[0])
            for i, name in enumerate((gate, up))
        ]

    return rule


def expert(name: str) -> TensorRule:
    """One tensor [H, F] of each {expert}: ours [E, H, F]."""

    def rule(parameter: Parameter, _: ModelConfig) -> list[Part]:
        shape = parameter.shape[1:]
        view = (1, *shape)
        return [
            Part(name.format(expert=e), shape, view, _in_order(view), (e, 0, 0))
            for e in range(parameter.shape[0])
        ]

    return rule


def _whole(name: str, shape: tuple[int, ...]) -> Part:
    return Part(name, shape, shape, _in_order(shape), (0,) * len(shape))


def _in_order(view: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(len(view)))
