"""Folders with experts in MXFP4: what is read is what transformers decodes, in any box."""

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

EXPERTS, HIDDEN, INNER = 3, 64, 96  # the widths differ, or a transposed matrix would pass
ROWS = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
PACKED = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def decoded(blocks, scales):
    """transformers' numbers, as its bf16 folders have them: [E, inputs, outputs]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales).contiguous()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder in MXFP4, and the same model decoded by transformers."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=51, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, num_local_experts=EXPERTS,
        num_experts_per_tok=2, sliding_window=5, max_position_embeddings=40,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def quantise(name, tensor):
        if not name.endswith(tuple(ROWS)):
            return None
        rows, inputs = ROWS[name.rpartition(".")[2]]
        assert tensor.shape == (EXPERTS, inputs, rows)
        blocks = torch.randint(256, (EXPERTS, rows, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(112, 128, blocks.shape[:-1], dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, decoded(blocks, scales)

    return quantised_folders(model, tmp_path_factory.mktemp("oss"), quantise, PACKED)


def test_what_is_read_is_what_transformers_decodes_in_any_box(folders):
    ours, theirs = map(open_checkpoint, folders)
    assert ours.model == theirs.model
    for name in theirs.names():
        assert torch.equal(ours.read(name), theirs.read(name)), name
    boxes = {
        "gate_up": [Box((1, 0, 7, 3), (2, 2, 40, 50)), Box((0, 1, 90, 31), (1, 1, 6, 1))],
        "down": [Box((2, 5, 33), (1, 20, 63)), Box((0, 0, 64), (3, 64, 32))],
    }
    for kind, some in boxes.items():
        for box in some:
            name = f"blocks.1.mlp.experts.{kind}.weight"
            found = ours.read(name, box)
            assert found.abs().sum() > 0 and torch.equal(found, theirs.read(name, box)), box


def test_it_is_written_decoded_and_without_a_quantization_config(folders, tmp_path):
    packed, plain = folders
    layout = parse_layout("tp=2,ep=3,dp=3,pp=2")
    to_mtcli(open_checkpoint(packed), tmp_path / "ours", *layout, WriteOptions())
    for source in (packed, tmp_path / "ours"):
        out = tmp_path / f"{source.name} back"
        to_hf(open_checkpoint(source), out, 10_000_000, WriteOptions())
        found, expected = (load_file(f / "model.safetensors") for f in (out, plain))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert "quantization_config" not in json.loads((out / "config.json").read_text())


def changed(packed, folder, change):
    shutil.copytree(packed, folder)
    tensors = load_file(folder / "model.safetensors")
    table = json.loads((folder / "config.json").read_text())
    change(tensors, table)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(table))
    return folder


DOWN = "model.layers.1.mlp.experts.down_proj"


def shorten(tensors, table):
    tensors[DOWN + "_scales"] = tensors[DOWN + "_scales"][:, :, :2].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, table: tensors.pop(DOWN + "_scales"), f"has no tensor {DOWN}_scales"),
        (shorten, f"{DOWN}_scales is U8 [3, 64, 2] in"),
        (
            lambda tensors, table: table.update(quantization_config={"quant_method": "fp8"}),
            "quantization_config with quant_method='fp8' cannot be represented",
        ),
    ],
)
def test_what_is_not_mxfp4_of_the_model_is_refused(folders, tmp_path, change, message):
    with pytest.raises(MtcliError) as caught:
        open_checkpoint(changed(folders[0], tmp_path / "other", change))
    assert message in str(caught.value)
