"""The run config's sections: defaults that follow the architecture, help on every field."""

import pytest
from pydantic import BaseModel, ValidationError

from mtcli.core.config.loading import validate
from mtcli.core.config.model import ModelConfig, with_model_defaults
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import parameters

SIZES = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_heads": 4,
    "vocab_size": 100,
    "max_seq_len": 64,
}


def test_a_gpt_fills_in_gpt_2_s_conventions():
    model = ModelConfig(**SIZES)
    assert (model.num_kv_heads, model.head_dim, model.ffn_hidden_size) == (4, 12, 192)
    assert (model.activation, model.norm, model.position) == ("gelu", "layernorm", "learned")
    assert model.tie_embeddings and model.bias and model.qkv_bias


def test_a_llama_fills_in_llama_s_conventions():
    model = ModelConfig(architecture="llama", ffn_hidden_size=128, **SIZES)
    assert (model.activation, model.norm, model.position) == ("swiglu", "rmsnorm", "rope")
    assert not (model.tie_embeddings or model.bias or model.qkv_bias)


def test_an_architecture_s_default_gives_way_to_a_field():
    assert ModelConfig(norm="rmsnorm", tie_embeddings=False, **SIZES).norm == "rmsnorm"


def test_a_mixture_needs_no_width_of_the_mlp_that_it_has_not():
    """With the width of an expert, `ffn_hidden_size` sizes no tensor and may be left out."""
    widths = {"moe_ffn_hidden_size": 24, "shared_expert_ffn_hidden_size": 40}
    for architecture in ("qwen2-moe", "mixtral"):
        model = ModelConfig(architecture=architecture, **widths, **SIZES)
        other = ModelConfig(architecture=architecture, ffn_hidden_size=999, **widths, **SIZES)
        assert parameters(model) == parameters(other)
    problems = refused({"architecture": "qwen2-moe", "moe_ffn_hidden_size": -1, **SIZES})
    assert problems == ["model.moe_ffn_hidden_size"]
    assert refused({"architecture": "mixtral", **SIZES}) == ["model.ffn_hidden_size"]


def refused(model):
    """The fields that a [model] is refused for."""
    return [problem.field for problem in validate({"model": model})[1]]


def test_a_qwen2_moe_has_a_gated_shared_expert_and_query_biases():
    model = ModelConfig(architecture="qwen2-moe", ffn_hidden_size=64, **SIZES)
    assert (model.num_experts, model.top_k, model.moe_ffn_hidden_size) == (60, 4, 64)
    assert model.shared_expert_gate and model.qkv_bias and not model.bias
    assert not model.normalize_top_k


def test_a_gated_mlp_has_no_default_width():
    with pytest.raises(ValidationError, match="ffn_hidden_size"):
        ModelConfig(architecture="llama", **SIZES)


def test_heads_that_do_not_divide_the_width_leave_head_dim_to_the_user():
    assert "head_dim" not in with_model_defaults(SIZES | {"num_heads": 5})
    assert ModelConfig(head_dim=7, **(SIZES | {"num_heads": 5})).head_dim == 7


def test_a_config_cannot_be_changed_after_loading():
    config = RunConfig(model=ModelConfig(**SIZES))
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.model.num_layers = 3


def test_every_field_has_a_help_text_of_one_line():
    for path, description in _descriptions(RunConfig):
        assert description, f"{path} has no docstring"
        assert "\n" not in description, path
        assert not description.endswith("."), path


def _descriptions(section: type[BaseModel], path: str = ""):
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _descriptions(field.annotation, f"{path}{name}.")
        else:
            yield f"{path}{name}", field.description
