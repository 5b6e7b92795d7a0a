"""The text models of folders that also read images; transformers' whole model is the oracle."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtcli.core.checkpoint.adapters import Adapters
from mtcli.core.checkpoint.huggingface.config_json import differing_fields, model_of
from mtcli.core.checkpoint.huggingface.peft import peft_modules
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config
from mtcli.core.config.schema import LoraConfig
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.verify import differences, logits_of
from mtcli.core.inference.model import end_ids

TEXT = {
    "vocab_size": 51, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "max_position_embeddings": 40,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "patch_size": 4}
VISION |= {"num_attention_heads": 2, "image_size": 8}
LINEAR = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 99.0}}
OF_GEMMA = {"sliding_window": 7, "query_pre_attn_scalar": 12, "rope_parameters": LINEAR}
OF_GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES = {"gemma3": "gemma3_text", "mistral3": "mistral"}
FORMS = ("as saved", "as in memory", "head inside")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(model, folder) of each, all of whose parameters do something."""
    import transformers as t

    root, models = tmp_path_factory.mktemp("vision"), {}
    tower = {"model_type": "siglip_vision_model"} | VISION
    gemma = t.Gemma3Config(
        text_config=TEXT | OF_GEMMA, vision_config=tower, mm_tokens_per_image=4, eos_token_id=[1, 6]
    )
    mistral = t.Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config={"model_type": "pixtral"} | VISION,
        tie_word_embeddings=False,
    )
    kinds = (t.Gemma3ForConditionalGeneration, t.Mistral3ForConditionalGeneration)
    for name, kind, config in zip(FAMILIES, kinds, (gemma, mistral), strict=True):
        torch.manual_seed(len(models))
        models[name] = model = kind(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        model.save_pretrained(root / name)
    return models, root


def named(name, form):
    """What a tensor is called in folders of another version of transformers."""
    if form == "head inside":
        return f"language_model.{name}" if name.startswith("lm_head") else name
    if form == "as saved" or name.startswith("lm_head"):
        return name
    return "model." + name.replace("language_model.model.", "language_model.")


def copied(saved, name, target, form="as saved", **changes):
    source = saved[1] / name
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    renamed = {named(key, form): tensor for key, tensor in tensors.items()}
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    table = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(table))
    return target


def expected(saved, name):
    tokens = torch.randint(51, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return saved[0][name](input_ids=tokens).logits[:, [0, 16, 31]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_model_has_the_logits_of_the_whole_by_either_name(saved, tmp_path, name, form):
    ours = open_checkpoint(copied(saved, name, tmp_path / "x", form))
    assert ours.unread == ("multi_modal_projector", "vision_tower")
    theirs = expected(saved, name)
    assert float((logits_of(ours) - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_is_a_folder_of_the_text_model_alone(saved, tmp_path, name):
    from transformers import AutoModelForCausalLM

    source = open_checkpoint(saved[1] / name)
    to_mtcli(source, tmp_path / "ours", *parse_layout("tp=2"), WriteOptions())
    ours = open_checkpoint(tmp_path / "ours")
    assert end_ids(ours) == end_ids(source)
    to_hf(ours, tmp_path / "back", 10**9, WriteOptions())
    to_hf(source, tmp_path / "direct", 10**9, WriteOptions())
    written = [(tmp_path / x / "config.json").read_bytes() for x in ("back", "direct")]
    assert written[0] == written[1]
    assert json.loads(written[0])["model_type"] == FAMILIES[name]
    back = open_checkpoint(tmp_path / "back")
    assert not list(differences(source, back)) and not back.unread
    assert back.model == source.model
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == json.loads(written[0])["architectures"][0]
    tokens = torch.randint(51, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model.eval()(tokens).logits[:, [0, 16, 31]]
    assert torch.equal(found, expected(saved, name))


def test_a_folder_s_ends_are_those_of_all_of_it(saved, tmp_path):
    folder = copied(saved, "gemma3", tmp_path / "x")
    (folder / "generation_config.json").unlink()
    assert end_ids(open_checkpoint(folder)) == {1, 6}
    table = json.loads((folder / "config.json").read_text())
    del table["eos_token_id"]  # then those of the text model
    (folder / "config.json").write_text(json.dumps(table))
    assert end_ids(open_checkpoint(folder)) == {1}


@pytest.mark.parametrize("size", ["4b", "12b", "27b"])
def test_gemma_3_as_published_says_little_and_is_the_preset(size, tmp_path):
    sizes = {
        "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        "12b": {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
        | {"num_attention_heads": 16, "num_key_value_heads": 8},
        "27b": {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62}
        | {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
        | {"query_pre_attn_scalar": 168},
    }[size]
    rope = {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    text = sizes | rope | {"model_type": "gemma3_text"}
    table = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    preset = load_config(f"gemma-3-{size}").model
    assert not differing_fields(model_of(table, tmp_path), preset)


def test_a_head_is_tied_as_the_whole_config_says_and_else_as_the_text_model_s(saved, tmp_path):
    table = json.loads((saved[1] / "mistral3" / "config.json").read_text())
    assert not model_of(table, tmp_path).tie_embeddings
    assert model_of(table | {"tie_word_embeddings": True}, tmp_path).tie_embeddings
    table.pop("tie_word_embeddings")
    assert not model_of(table, tmp_path).tie_embeddings
    folder = copied(saved, "mistral3", tmp_path / "x", tie_word_embeddings=True)
    with pytest.raises(MtcliError, match="lm_head.weight that differs from the embedding"):
        open_checkpoint(folder)


REFUSED = [
    ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
     "model_type='llama4' is not supported, and neither is its text model, model_type='llama4_te"),
    ({"model_type": "llava", "text_config": {"model_type": "llama"}},
     "save its text model alone, model_type='llama', as a folder"),
    ({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
     "model_type='ministral3' in text_config is not supported"),
    ({"model_type": "gemma3", "text_config": 3}, "text_config=3 is not a table"),
    ({"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}},
     "use_bidirectional_attention=true cannot be represented"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_another_text_model_is_refused_by_name(table, message, tmp_path):
    with pytest.raises(MtcliError, match=message):
        model_of(table, tmp_path)


def test_a_tensor_of_no_part_is_refused(saved, tmp_path):
    folder = copied(saved, "gemma3", tmp_path / "x")
    tensors = load_file(folder / "model.safetensors") | {"audio_tower.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MtcliError, match="tensors that gemma3_text does not: audio_tower.weight"):
        open_checkpoint(folder)


def test_adapters_are_not_written_for_the_whole_whose_modules_have_other_names(saved):
    base = open_checkpoint(saved[1] / "gemma3")
    trained = replace(base, adapters=Adapters(base, base, LoraConfig(rank=2)))
    with pytest.raises(MtcliError, match="has a multi_modal_projector, and peft") as error:
        list(peft_modules(trained))
    assert "gemma3 TEXT --to hf` writes its text model: --base TEXT" in str(error.value)
    bare = replace(base, unread=())
    assert list(peft_modules(replace(trained, adapters=Adapters(bare, bare, LoraConfig(rank=2)))))
