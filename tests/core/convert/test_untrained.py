"""Biases of experts in checkpoints: on any layout, as wide as they were, never lost silently."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from saving import save_halves, values
from tiny import BIASED, MOE, run_config

from mtcli.core.checkpoint.compatibility import require_model
from mtcli.core.checkpoint.huggingface.config_json import family_of
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import dump_toml
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.verify import differences
from mtcli.core.mesh.parameters import count_parameters, parameters

CONFIG = run_config(BIASED)
BIASES = [f"blocks.{layer}.mlp.router.bias" for layer in range(2)]


@pytest.fixture
def source(tmp_path):
    """A checkpoint of a model with biases of experts, and its tensors."""
    tensors = {name: x for name, x in values(CONFIG.model).items() if "/" not in name}
    saved = save_halves(tmp_path / "src", tensors=tensors, config_toml=dump_toml(CONFIG))[0]
    return open_checkpoint(saved), tensors


@pytest.mark.parametrize("layout", ["tp=2,dp=2,ep=2,etp=2", "pp=2,cp=2"])
def test_biases_go_to_any_layout_and_keep_their_width(source, tmp_path, layout):
    before, tensors = source
    to_mtcli(before, tmp_path / "dst", *parse_layout(layout), WriteOptions(dtype=torch.bfloat16))
    after = open_checkpoint(tmp_path / "dst")
    assert after.dtype("blocks.0.mlp.router.weight") == torch.bfloat16
    for name in BIASES:
        assert after.dtype(name) == torch.float32
        assert torch.equal(after.read(name), tensors[name])
    assert list(differences(before, after, torch.bfloat16)) == []


def test_a_checkpoint_that_lost_its_biases_is_refused(source):
    checkpoint, tensors = source
    rest = {n: t for n, t in checkpoint.tensors.items() if n not in BIASES}
    with pytest.raises(MtcliError, match=r"has no tensor blocks\.0\.mlp\.router\.bias"):
        require_model(replace(checkpoint, tensors=rest), CONFIG.model)


def test_a_hugging_face_family_takes_biases_of_the_choice_or_refuses_them(source, tmp_path):
    checkpoint, tensors = source
    assert family_of(checkpoint.model).model_type == "glm4_moe"
    to_hf(checkpoint, tmp_path / "dst", 10**9, WriteOptions())
    written = load_file(tmp_path / "dst" / "model.safetensors")
    for layer, name in enumerate(BIASES):
        bias = written[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert torch.equal(bias, tensors[name])
    with pytest.raises(MtcliError, match=r"mixtral cannot have router_biases=True") as e:
        family_of(run_config(MOE | {"router_bias_update_rate": 0.01}).model)
    assert "a checkpoint of ours holds any model" in str(e.value)
    assert family_of(run_config(MOE).model).model_type == "mixtral"


def test_a_count_of_parameters_is_of_those_that_are_trained():
    without = run_config(BIASED | {"router_bias_update_rate": 0.0}).model
    assert count_parameters(CONFIG.model) == count_parameters(without)
    assert [n for n in parameters(CONFIG.model) if n not in parameters(without)] == BIASES
