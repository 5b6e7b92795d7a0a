"""Folders with weights in float8, in blocks of 128 x 128: what is read is each number times its
block's factor, in any box."""

import json
import shutil

import pytest
import torch
from quantised import quantised_folders
from safetensors.torch import load_file, save_file

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.mesh.sharding import Box

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
KEPT = ("embed_tokens", "norm", "mlp.gate.", "lm_head")  # as DeepSeek-V3 leaves them


def decoded(numbers, factors):
    """Block by block, the last ones ragged."""
    out = torch.zeros(numbers.shape)
    for i in range(factors.shape[0]):
        for j in range(factors.shape[1]):
            part = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            out[part] = numbers[part].float() * factors[i, j]
    return out.to(torch.bfloat16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder in float8, and the same model decoded."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=51, hidden_size=144, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=40, kv_lora_rank=136,
        qk_nope_head_dim=30, qk_rope_head_dim=6, v_head_dim=34, moe_intermediate_size=132,
        first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, max_position_embeddings=40,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def quantise(name, tensor):
        if any(word in name for word in KEPT):
            return None
        numbers = (tensor.float() * 4000).to(torch.float8_e4m3fn)
        factors = torch.rand([-(-size // 128) for size in numbers.shape]) + 0.5
        return {name: numbers, f"{name}_scale_inv": factors}, decoded(numbers, factors)

    return quantised_folders(model, tmp_path_factory.mktemp("v3"), quantise, FP8)


def test_what_is_read_is_each_number_times_its_block_s_factor_in_any_box(folders):
    ours, plain = map(open_checkpoint, folders)
    assert ours.model == plain.model
    for name in plain.names():
        assert torch.equal(ours.read(name), plain.read(name)), name
    boxes = {
        "attention.q_up": [Box((1, 7, 3), (2, 20, 30)), Box((3, 35, 39), (1, 1, 1))],
        "attention.kv_down": [Box((127, 100), (2, 40)), Box((0, 0), (142, 144))],
        "mlp.experts.gate_up": [Box((1, 0, 126, 120), (3, 2, 4, 20))],
    }
    for kind, some in boxes.items():
        for box in some:
            name = f"blocks.1.{kind}.weight"
            found = ours.read(name, box)
            assert found.abs().sum() > 0 and torch.equal(found, plain.read(name, box)), box


def test_it_is_written_decoded_and_without_a_quantization_config(folders, tmp_path):
    packed, plain = folders
    layout = parse_layout("tp=2,ep=4,dp=2,pp=2")
    to_mtcli(open_checkpoint(packed), tmp_path / "ours", *layout, WriteOptions())
    to_hf(open_checkpoint(tmp_path / "ours"), tmp_path / "back", 1 << 30, WriteOptions())
    expected, found = (load_file(f / "model.safetensors") for f in (plain, tmp_path / "back"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_other_blocks_and_missing_or_wrong_factors_are_refused(folders, tmp_path):
    packed, _ = folders
    table = json.loads((packed / "config.json").read_text())
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"

    def refusal(config, weights):
        folder = tmp_path / "wrong"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(packed, folder)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(MtcliError) as error:
            open_checkpoint(folder)
        return str(error.value)

    other = FP8 | {"weight_block_size": [64, 64]}
    assert "[64, 64]" in refusal(table | {"quantization_config": other}, tensors)
    missing = {key: tensor for key, tensor in tensors.items() if key != name}
    assert "F8_E4M3" in refusal(table, missing)
    wide = tensors | {name: torch.ones(3, 3)}
    assert "F32 [3, 3]" in refusal(table, wide) and "F32 [2, 2]" in refusal(table, wide)
