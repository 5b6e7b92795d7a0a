"""Which layers float8 takes, by the sizes of their weights on a rank."""

from mtcli.core.config.fp8 import is_narrow, listed, narrow_layers, weight_sizes
from mtcli.core.config.loading import load_config
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters

MOE = ["num_experts=8", "top_k=2", "moe_ffn_hidden_size=192", "shared_expert_ffn_hidden_size=256"]


def sizes(layout, *overrides):
    config = load_config("tiny", [f"model.{word}" for word in overrides])
    found = weight_sizes(config.model, layout.tp)
    assert found == of_the_table(config.model, layout)
    return found


def of_the_table(model, layout):
    """The matrices of the parameter table's first block, but router, experts and gate."""
    found = {}
    for name, parameter in parameters(model).items():
        layer = name.removeprefix("blocks.0.").removesuffix(".weight")
        is_linear = name.endswith(".weight") and name.startswith("blocks.0.")
        if (
            is_linear
            and not parameter.is_expert
            and layer.rpartition(".")[2] in ("qkv", "out", "up", "gate_up", "down")
        ):
            found[layer] = tuple(parameter.stored_shape(layout))
    return found


def test_the_layers_of_a_dense_block_are_cut_as_their_weights_are():
    assert sizes(ParallelLayout(2, tp=2)) == {
        "attention.qkv": (384, 256),
        "attention.out": (256, 128),
        "mlp.up": (512, 256),
        "mlp.down": (256, 512),
    }


def test_a_shared_expert_counts_and_routed_ones_router_and_gate_do_not():
    found = sizes(
        ParallelLayout(4, ep=2, etp=2),
        *MOE,
        "activation=swiglu",
        "ffn_hidden_size=512",
        "shared_expert_gate=true",
    )
    assert found == {
        "attention.qkv": (768, 256),
        "attention.out": (256, 256),
        "mlp.shared_expert.gate_up": (512, 256),
        "mlp.shared_expert.down": (256, 256),
    }
    assert narrow_layers("blockwise", found) == found


def test_both_sizes_have_to_be_multiples():
    assert is_narrow("rowwise", 16, 48) and is_narrow("tensorwise", 48, 16)
    assert not is_narrow("rowwise", 16, 40) and not is_narrow("tensorwise", 40, 16)
    assert is_narrow("blockwise", 128, 256) and not is_narrow("blockwise", 128, 192)
    assert listed({"a": (1, 2), "b": (3, 4)}) == "a 1 x 2, b 3 x 4"
