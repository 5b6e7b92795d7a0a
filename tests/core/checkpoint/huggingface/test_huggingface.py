"""Hugging Face folders, both ways. The oracle is transformers: its tensors, and its logits."""

import filecmp
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from hostile import write_manifest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_hf import FAMILIES, auto_model

from mtcli.core.checkpoint import reader as our_reader
from mtcli.core.checkpoint import resharding
from mtcli.core.checkpoint.compatibility import require_model
from mtcli.core.checkpoint.huggingface import reader
from mtcli.core.checkpoint.huggingface.config_json import BY_TYPE, family_named, family_of, model_of
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config, preset_names
from mtcli.core.config.model import ModelConfig, RopeScaling
from mtcli.core.convert import to_mtcli as conversion
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.verify import logits_of
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box

LAYOUTS = {
    "gpt2": "tp=3,pp=2",
    "llama": "tp=2,pp=2",
    "llama-tied": "tp=2,dp=2",
    "mistral": "pp=2,vpp=1",
    "qwen2": "tp=2",
    "mixtral": "ep=3,dp=3,pp=2",
    "qwen2_moe": "tp=2,etp=2",
    "gpt_oss": "tp=2,etp=2",
    "granite": "tp=2",
    "smollm3": "tp=2,pp=3",
    "phi": "tp=2,pp=2",
    "phi3": "tp=4",
    "stablelm": "tp=2",
    "stablelm-parallel": "pp=2",
    "stablelm-heads": "tp=4,pp=2",
    "glm4": "tp=4",
    "gpt_neox": "tp=2,pp=2",
    "gpt_neox-sequential": "tp=4",
    "falcon-7b": "tp=2",
    "falcon-40b": "tp=2,pp=2",
    "falcon-heads": "tp=2,dp=2",
    "olmo2": "tp=4,pp=2",
    "olmo3": "tp=2,pp=4",
    "glm4_moe": "tp=2,pp=3",
    "deepseek_v2": "tp=2,ep=4,etp=1,dp=2",
    "deepseek_v3": "tp=4,pp=3",
    "qwen3": "tp=2,pp=2",
    "qwen3_moe": "ep=3,dp=3",
    "qwen3_moe-dense": "tp=2,pp=3",
    "qwen2_moe-dense": "ep=3,dp=3",
    "gemma2": "tp=2,pp=2",
    "gemma3_text": "tp=4",
    "starcoder2": "tp=2,pp=2",
    "nemotron": "tp=2",
    "roberta": "tp=4,pp=2",
    "modernbert": "tp=2,pp=4",
}


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: t for file in files for name, t in load_file(file).items()}


def edited(source, target, change=lambda tensors: None, config=lambda table: None):
    """A copy of a Hugging Face folder with other tensors or another config."""
    shutil.copytree(source, target)
    tensors, table = tensors_of(target), json.loads((target / "config.json").read_text())
    change(tensors)
    config(table)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(table))
    return target


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_comes_back_byte_identical_through_a_layout_in_slabs(
    hf_folders, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(conversion, "BOX_BYTES", 100)
    source = hf_folders[name]
    layout = parse_layout(LAYOUTS[name])
    to_mtcli(open_checkpoint(source), tmp_path / "ours", *layout, WriteOptions())
    to_hf(open_checkpoint(tmp_path / "ours"), tmp_path / "back", 10_000, WriteOptions())
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key]), key
    for file in ("config.json", "generation_config.json"):
        if (source / file).exists():
            assert filecmp.cmp(source / file, tmp_path / "back" / file, shallow=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_we_write_without_an_original_and_gives_its_logits(
    hf_folders, hf_models, tmp_path, name
):
    ours = open_checkpoint(hf_folders[name])
    plain = Checkpoint(**(vars(ours) | {"folder": tmp_path, "files": {}}))  # no config.json there
    link_weights(hf_folders[name], tmp_path)
    to_hf(plain, tmp_path / "out", 10_000, WriteOptions())
    auto = auto_model(hf_models[name].config)
    model, told = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(2 * 17).view(2, 17) % 51
    with torch.no_grad():
        expected, found = hf_models[name](ids).logits, model.eval()(ids).logits
    assert expected.std() > 0.01
    assert torch.equal(expected, found)


def link_weights(source, target):
    for file in source.glob("*.safetensors"):
        (target / file.name).symlink_to(file)


def test_the_tokenizer_is_copied_verbatim_and_its_end_is_the_models(hf_folders, tmp_path):
    tokens = load_tokenizer("bytes")
    source = tmp_path / "hf"
    shutil.copytree(hf_folders["gpt2"], source)
    tokens.save(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("not a tokenizer's")
    to_mtcli(open_checkpoint(source), tmp_path / "ours", *parse_layout(""), WriteOptions())
    ours = open_checkpoint(tmp_path / "ours")
    files = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in ours.tokenizer_folder.iterdir()} == files
    to_hf(ours, tmp_path / "back", 10**9, WriteOptions())
    for file in files:
        assert filecmp.cmp(source / file, tmp_path / "back" / file, shallow=False)
    assert not (tmp_path / "back" / "README.md").exists()
    shutil.rmtree(tmp_path / "ours" / "huggingface")  # as where a run of ours wrote it
    to_hf(ours, tmp_path / "new", 10**9, WriteOptions())
    for file in ("config.json", "generation_config.json"):
        table = json.loads((tmp_path / "new" / file).read_text())
        assert (table["bos_token_id"], table["eos_token_id"]) == (256, 256)


def test_an_original_config_that_is_no_longer_true_is_not_written_back(hf_folders, tmp_path):
    to_mtcli(
        open_checkpoint(hf_folders["llama"]), tmp_path / "ours", *parse_layout(""), WriteOptions()
    )
    path = tmp_path / "ours" / "huggingface" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    manifest = tmp_path / "ours" / "manifest.json"
    table = json.loads(manifest.read_text())
    table["files"]["huggingface/config.json"]["bytes"] = path.stat().st_size
    write_manifest(manifest, table)
    to_hf(open_checkpoint(tmp_path / "ours"), tmp_path / "back", 10**9, WriteOptions())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["rms_norm_eps"] == 1e-5


def test_a_change_of_dtype_is_told_in_the_config(hf_folders, tmp_path):
    to_hf(open_checkpoint(hf_folders["gpt2"]), tmp_path / "x", 10**9, WriteOptions(torch.bfloat16))
    assert json.loads((tmp_path / "x" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in tensors_of(tmp_path / "x").items():
        assert torch.equal(tensor, tensors_of(hf_folders["gpt2"])[name].to(torch.bfloat16))


def test_what_the_config_says_is_what_transformers_has(hf_folders, hf_models):
    llama, gpt2 = (open_checkpoint(hf_folders[name]).model for name in ("llama", "gpt2"))
    assert (llama.num_heads, llama.num_kv_heads, llama.head_dim) == (4, 2, 10)
    assert (llama.rope_theta, llama.norm_eps, llama.max_seq_len) == (5000.0, 1e-5, 40)
    sizes = {"low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_seq_len": 16}
    assert llama.rope_scaling == RopeScaling(kind="llama3", factor=4.0, **sizes)
    assert (gpt2.activation, gpt2.ffn_hidden_size, gpt2.max_seq_len) == ("gelu_tanh", 27, 17)
    assert gpt2.norm_eps == 1e-3
    assert (gpt2.dropout, gpt2.attention_dropout, gpt2.tie_embeddings) == (0.1, 0.1, True)
    moe = open_checkpoint(hf_folders["qwen2_moe"]).model
    assert (moe.num_experts, moe.top_k, moe.moe_ffn_hidden_size) == (3, 2, 12)
    assert (moe.shared_expert_ffn_hidden_size, moe.normalize_top_k) == (16, False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FAMILIES), data=st.data())
def test_a_box_of_a_translated_tensor_is_the_slice_of_the_whole(hf_folders, name, data):
    checkpoint = open_checkpoint(hf_folders[name])
    key = data.draw(st.sampled_from(checkpoint.names()))
    shape = checkpoint.shape(key)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    box = Box(start, size)
    assert torch.equal(checkpoint.read(key, box), checkpoint.read(key)[box.slices])


def test_every_parameter_is_read_in_its_shape(hf_folders):
    for folder in hf_folders.values():
        checkpoint = open_checkpoint(folder)
        require_model(checkpoint, checkpoint.model)
        for name, parameter in parameters(checkpoint.model).items():
            assert checkpoint.read(name).shape == parameter.shape


def test_gpt2_as_published_has_no_prefix_and_holds_masks(hf_folders, tmp_path):
    def publish(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 17, 17, dtype=torch.uint8)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    published = open_checkpoint(edited(hf_folders["gpt2"], tmp_path / "p", publish))
    usual = open_checkpoint(hf_folders["gpt2"])
    for name in usual.names():
        assert torch.equal(published.read(name), usual.read(name))


def test_a_stored_copy_of_a_tied_head_must_be_the_embedding(hf_folders, tmp_path):
    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors):
        copy(tensors)
        tensors["lm_head.weight"][50, 23] += 1

    open_checkpoint(edited(hf_folders["llama-tied"], tmp_path / "same", copy))
    with pytest.raises(MtcliError, match="holds a lm_head.weight that differs from the embedding"):
        open_checkpoint(edited(hf_folders["llama-tied"], tmp_path / "other", other))


def test_a_tied_head_is_compared_a_slab_at_a_time(hf_folders, tmp_path, monkeypatch):
    def copy(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    read, sizes = resharding.read_box, []

    def watched(file, offset, shape, box, into):
        sizes.append(into.nbytes)
        read(file, offset, shape, box, into)

    for module in (reader, our_reader):
        monkeypatch.setattr(module, "read_box", watched)
    monkeypatch.setattr(reader, "BOX_BYTES", 1000)
    open_checkpoint(edited(hf_folders["llama-tied"], tmp_path / "same", copy))
    assert 0 < max(sizes) <= 1000


def test_unknown_tensors_are_refused_by_name(hf_folders, tmp_path):
    def add(tensors):
        tensors |= {f"model.layers.0.extra.{i}": torch.ones(2) for i in range(7)}

    folder = edited(hf_folders["llama"], tmp_path / "x", add)
    with pytest.raises(MtcliError, match=r"llama does not: .*extra\.0, .*extra\.4 and 2 more"):
        open_checkpoint(folder)


def test_a_missing_tensor_is_named(hf_folders, tmp_path):
    folder = edited(hf_folders["llama"], tmp_path / "x", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(MtcliError, match=r"no tensor model\.norm\.weight, which final_norm.weight"):
        open_checkpoint(folder)


def test_a_tensor_of_another_shape_is_named_with_both(hf_folders, tmp_path):
    def cut(tensors):
        tensors["model.norm.weight"] = torch.ones(23)

    with pytest.raises(MtcliError, match=r"model.norm.weight is \[23\] in .* and \[24\] by its"):
        open_checkpoint(edited(hf_folders["llama"], tmp_path / "x", cut))


def test_quantised_weights_are_refused(hf_folders, tmp_path):
    def quantise(tensors):
        tensors["model.norm.weight"] = torch.ones(24, dtype=torch.int8)

    with pytest.raises(MtcliError, match="model.norm.weight is I8 in .*, which cannot be loaded"):
        open_checkpoint(edited(hf_folders["llama"], tmp_path / "x", quantise))


def test_parts_of_several_dtypes_are_read_in_the_widest(hf_folders, tmp_path):
    def narrow(tensors):
        name = "model.layers.0.self_attn.k_proj.weight"
        tensors[name] = tensors[name].to(torch.bfloat16)

    mixed = open_checkpoint(edited(hf_folders["llama"], tmp_path / "x", narrow))
    whole = open_checkpoint(hf_folders["llama"]).read("blocks.0.attention.qkv.weight")
    found = mixed.read("blocks.0.attention.qkv.weight")
    assert found.dtype == torch.float32
    assert torch.equal(found[:, 2], whole[:, 2].to(torch.bfloat16).float())
    assert torch.equal(found[:, 3], whole[:, 3])


CONFIGS = [
    ("gpt2", {"model_type": "bloom"}, "model_type='bloom' is not supported"),
    ("gpt2", {"model_type": "qwen33"}, "did you mean 'qwen3'"),
    ("gpt2", {"model_type": None}, "model_type=null is not supported"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping=5.0 cannot be"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 is not above 0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    ("modernbert", {"local_attention": 1}, "local_attention=1 is not a whole number of 2 or more"),
    ("modernbert", {"local_attention": None}, "local_attention=null is not a whole number of 2"),
    ("modernbert", {"decoder_bias": False}, "decoder_bias=false cannot be represented"),
    ("modernbert", {"classifier_activation": "silu"}, "classifier_activation='silu' cannot be"),
    ("modernbert", {"mlp_dropout": 0.1}, "mlp_dropout=0.1 cannot be represented"),
    ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling={"),
    (
        "modernbert",
        {"layer_types": None, "global_attn_every_n_layers": 0},
        "global_attn_every_n_layers=0 is not a number of layers",
    ),
    ("gpt2", {"activation_function": "relu"}, "activation_function='relu' is not supported"),
    ("gpt2", {"activation_function": 3}, "activation_function=3 is not supported"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=false cannot be represented"),
    ("gpt2", {"embd_pdrop": 0.2}, "resid_pdrop=0.1 and embd_pdrop=0.2 differ"),
    ("gpt2", {"n_embd": "wide"}, "n_embd: 'wide' should be a whole number"),
    ("gpt2", {"n_layer": None}, "has no n_layer"),
    ("llama", {"max_position_embeddings": None}, "has no max_position_embeddings"),
    ("gpt2", {"n_head": 7}, "n_head=7 does not divide n_embd="),
    ("gpt2", {"n_embd": -16}, "n_embd: -16 should be at least 1"),
    ("llama", {"attention_bias": 2}, "attention_bias: 2 should be true or false"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "ntk"}}, "rope_type='ntk'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn' has no factor"),
    ("llama", {"rope_parameters": [1]}, "rope_scaling is [1], which is not a table"),
    ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "'llama3' has no factor"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ("mistral", {"sliding_window": -1}, "sliding_window=-1 is not a whole number"),
    ("mistral", {"sliding_window": 9, "layer_types": ["full_attention"] * 2}, "layer_types=['fu"),
    ("qwen2_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] cannot be represented"),
    ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "mlp_only_layers=[0, 1] cannot be represented"),
    ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers='0' cannot be represented"),
    ("qwen3_moe", {"decoder_sparse_step": 3}, "decoder_sparse_step=3 cannot be represented"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 cannot be represented"),
    ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers=[true] cannot be represented"),
    ("gpt2", {"num_attention_heads": 4}, "num_attention_heads=4 and n_head=3 differ"),
    ("llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type='su'"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters of 'full_attention'"),
    ("llama", {"original_max_position_embeddings": 9}, "is 16 in rope_scaling and 9 beside it"),
    ("llama", {"sliding_window": 39}, "sliding_window=39 is shorter than max_position_embed"),
    ("mistral", {"sliding_window": "9"}, "sliding_window='9' is not a whole number"),
    ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob=false cannot be represented"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=['full_"),
    ("qwen2", {"is_causal": False}, "is_causal=false cannot be represented"),
    ("qwen2_moe", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} cannot"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] is not a 0 or 1 for each of 3"),
    ("smollm3", {"no_rope_layers": [1, 0, 1.0]}, "is not a 0 or 1 for each of 3 layers"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "interval=0 is no number"),
    ("smollm3", {"num_hidden_layers": 0}, "num_hidden_layers: 0 should be at least 1"),
    ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
    ("phi3", {"rope_parameters": {"type": "su", "short_factor": [1.0]}}, "has no long_factor"),
    ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings=true cannot be represented"),
    ("stablelm", {"qk_layernorm": "yes"}, "qk_layernorm='yes' cannot be represented"),
    ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 1.0}, "rotary_pct=0.5 and partial"),
    ("falcon-7b", {"alibi": True}, "alibi=true cannot be represented"),
    ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 with parallel_attn=t"),
    ("falcon-40b", {"parallel_attn": False}, "num_ln_in_parallel_attn=2 with parallel_attn=false"),
]
CONFIGS += [
    ("llama", {field: value}, f"{field}={json.dumps(value)} cannot be represented")
    for field, value in {
        "partial_rotary_factor": 0.5,
        "attention_multiplier": 0.1,
        "final_logit_softcapping": 30.0,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
    }.items()
]


def test_what_cannot_be_represented_is_refused(hf_folders, tmp_path, subtests):
    for number, (name, change, message) in enumerate(CONFIGS):
        with subtests.test(message):
            changed = lambda table, change=change: table.update(change)  # noqa: E731
            folder = edited(hf_folders[name], tmp_path / str(number), config=changed)
            with pytest.raises(MtcliError, match=re.escape(message)):
                open_checkpoint(folder)


def test_all_that_a_config_gets_wrong_is_reported_at_once(hf_folders, tmp_path):
    wrong = {"is_causal": False, "hidden_act": "relu", "rope_parameters": {"rope_type": "ntk"}}
    folder = edited(hf_folders["llama"], tmp_path / "x", config=lambda table: table.update(wrong))
    with pytest.raises(MtcliError) as error:
        open_checkpoint(folder)
    assert len(error.value.problems) == 3


def test_mistral_without_a_word_on_its_window_has_transformers_default(hf_folders, tmp_path):
    def silent(table):
        table.pop("sliding_window")
        table["max_position_embeddings"] = 5000

    folder = edited(hf_folders["mistral"], tmp_path / "x", config=silent)
    assert open_checkpoint(folder).model.window == 4096


def test_the_older_form_of_rotary_fields_means_the_same(hf_folders, tmp_path):
    def older(table):
        scaling = table.pop("rope_parameters")
        table |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}

    folder = edited(hf_folders["llama"], tmp_path / "x", config=older)
    assert open_checkpoint(folder).model == open_checkpoint(hf_folders["llama"]).model


def test_where_both_forms_of_rotary_fields_are_given_the_older_counts(hf_folders, tmp_path):
    def both(table):
        table["rope_scaling"] = table.pop("rope_parameters")
        table["rope_parameters"] = {"rope_type": "default", "rope_theta": 3.0}

    folder = edited(hf_folders["llama"], tmp_path / "x", config=both)
    assert open_checkpoint(folder).model == open_checkpoint(hf_folders["llama"]).model


def test_what_a_config_leaves_out_is_as_in_transformers(hf_folders, tmp_path):
    import transformers

    def silent(table):
        for field in ("rms_norm_eps", "rope_parameters"):
            table.pop(field, None)

    kinds = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "mixtral": "Mixtral"}
    for name, kind in (kinds | {"qwen2_moe": "Qwen2Moe"}).items():
        found = open_checkpoint(edited(hf_folders[name], tmp_path / name, config=silent)).model
        expected = getattr(transformers, f"{kind}Config")()
        assert found.norm_eps == expected.rms_norm_eps, name
        assert found.rope_theta == expected.rope_parameters["rope_theta"], name


@pytest.mark.parametrize("kind", BY_TYPE)
def test_a_config_that_says_its_type_alone_is_the_model_of_transformers_defaults(kind):
    from transformers import AutoConfig

    def read(table):
        # their default window is shorter than their default context; some name layers that have it
        named = kind.startswith(("gemma", "gpt_oss", "olmo3"))
        return model_of(table | ({} if named else {"sliding_window": None}), Path("config.json"))

    theirs = AutoConfig.for_model(kind).to_dict() | {"architectures": None}
    assert read({"model_type": kind}) == read(theirs)
    for field in BY_TYPE[kind].defaults:
        silent = {name: value for name, value in theirs.items() if name != field}
        assert read(silent) == read(theirs), field


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "qwen2", "qwen2_moe"])
def test_a_folder_that_leaves_sizes_out_has_transformers_logits(tmp_path, name):
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 300, "sliding_window": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **given, initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    kept = given | {"model_type": name, "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    (tmp_path / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()  # by what the folder still says
    ours = open_checkpoint(tmp_path)
    assert ours.model.max_seq_len == model.config.max_position_embeddings
    tokens = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(tokens).logits[:, [0, 16, 31]]
    assert float((logits_of(ours) - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def test_a_window_is_compared_with_the_context_that_a_config_leaves_out(hf_folders, tmp_path):
    def silent(table):
        table.pop("max_position_embeddings")
        table["sliding_window"] = 2047

    with pytest.raises(MtcliError, match="sliding_window=2047 is shorter than .*=2048"):
        open_checkpoint(edited(hf_folders["llama"], tmp_path / "x", config=silent))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "is not a JSON object"), ("[" * 10**5, "")]
)
def test_a_config_that_is_not_a_table_is_refused(hf_folders, tmp_path, text, message):
    folder = edited(hf_folders["gpt2"], tmp_path / "x")
    (folder / "config.json").write_text(text)
    with pytest.raises(MtcliError, match=message):
        open_checkpoint(folder)


def test_a_folder_with_pickles_only_is_refused_and_nothing_is_loaded(hf_folders, tmp_path):
    folder = edited(hf_folders["gpt2"], tmp_path / "x")
    (folder / "model.safetensors").unlink()
    with pytest.raises(MtcliError, match="has neither"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    with pytest.raises(MtcliError, match=r"only pytorch_model.bin, a pickle that is never loaded"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "it has no weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "is not a file of its folder"),
        ({"weight_map": {"a": 3}}, "is not a file of its folder"),
        ({"weight_map": {"a": "model.safetensors"}}, "which has no such"),
        (
            {"weight_map": dict(a="model.safetensors", b="gone.safetensors")},
            "gone.safetensors cannot",
        ),
        ({"weight_map": {"a": "gone.safetensors"}}, "has model.safetensors, and .* of other files"),
    ],
)
def test_an_index_that_cannot_be_true_is_refused(hf_folders, tmp_path, index, message):
    folder = edited(hf_folders["gpt2"], tmp_path / "x")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MtcliError, match=message):
        open_checkpoint(folder)


def test_a_model_that_no_family_has_is_refused_with_what_is_in_the_way():
    shapes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 9, "max_seq_len": 4}
    learned = ModelConfig(**shapes, norm="rmsnorm", bias=False, qkv_bias=False)
    with pytest.raises(MtcliError, match="no Hugging Face family has this model") as error:
        family_of(learned)
    assert "llama cannot have activation='gelu', position='learned'" in str(error.value)
    grouped = ModelConfig(**shapes, num_kv_heads=1)
    with pytest.raises(MtcliError, match="gpt2 cannot have num_kv_heads=1"):
        family_of(grouped)
    with pytest.raises(MtcliError, match="gpt2 cannot have causal=False"):
        family_of(ModelConfig(**shapes, causal=False))
    wide = ModelConfig(**shapes, head_dim=6)
    with pytest.raises(MtcliError, match="gpt2 cannot have head_dim=6"):
        family_of(wide)


def test_kimi_k2_is_a_deepseek_v3_and_keeps_its_name(hf_folders, tmp_path):
    def named(table):
        table["model_type"] = "kimi_k2"

    folder = edited(hf_folders["deepseek_v3"], tmp_path / "kimi", config=named)
    assert open_checkpoint(folder).model == open_checkpoint(hf_folders["deepseek_v3"]).model
    to_mtcli(open_checkpoint(folder), tmp_path / "x", *parse_layout(""), WriteOptions())
    to_hf(open_checkpoint(tmp_path / "x"), tmp_path / "back", 1 << 30, WriteOptions())
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "kimi_k2"


def test_a_named_family_is_written_or_refused_with_the_fields_that_it_cannot_have():
    shapes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 9, "max_seq_len": 4}
    model = ModelConfig(**shapes, architecture="llama", ffn_hidden_size=12, qkv_bias=True)
    assert family_named("qwen2", model).model_type == "qwen2"
    with pytest.raises(MtcliError, match=r"^error: --family: mistral cannot have qkv_bias=True\n"):
        family_named("mistral", model)
    with pytest.raises(MtcliError, match="'qwen' is no family"):
        family_named("qwen", model)


def test_the_family_of_a_model_is_the_one_that_says_all_of_it():
    shapes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": 9, "max_seq_len": 4}
    llama = shapes | {"architecture": "llama", "ffn_hidden_size": 12}
    experts = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 6}
    assert family_of(ModelConfig(**shapes, dropout=0.3)).model_type == "gpt2"
    assert family_of(ModelConfig(**llama)).model_type == "llama"
    assert family_of(ModelConfig(**llama, qkv_bias=True)).model_type == "qwen2"
    mixtral = ModelConfig(**llama | experts | {"architecture": "mixtral"}, aux_loss_coeff=0.1)
    assert family_of(mixtral).model_type == "mixtral"
    qwen = llama | experts | {"architecture": "qwen2-moe", "shared_expert_ffn_hidden_size": 4}
    assert family_of(ModelConfig(**qwen)).model_type == "qwen2_moe"


@pytest.mark.parametrize("name", sorted(set(preset_names()) - {"tiny"}))
def test_every_preset_has_a_family(name):
    assert family_of(load_config(name).model)  # raises where none can say it
