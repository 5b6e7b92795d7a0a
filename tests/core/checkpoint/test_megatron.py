"""Megatron-LM's torch_dist checkpoints. The oracle is megatron-core: its files and its logits."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import megatron_saves
import pytest
import torch
from ranks import warm
from safetensors.torch import load_file

from mtcli.core.checkpoint.huggingface.config_json import family_of
from mtcli.core.checkpoint.megatron.gpt import factored_boxes, model_of
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.convert.inspect import describe
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.verify import differences, logits_of
from mtcli.core.mesh.sharding import Box

MODELS = sorted(megatron_saves.MODELS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint of each model, by megatron-core, and its logits beside it."""
    root = tmp_path_factory.mktemp("megatron")
    process = warm().Process(target=megatron_saves.save_models, args=(root,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return root


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the gpt model's folder, to be changed."""
    return shutil.copytree(saved / "gpt", tmp_path / "copy")


@pytest.mark.parametrize("name", MODELS)
def test_our_logits_are_megatron_s_and_a_conversion_to_any_layout_is_bit_exact(
    saved, tmp_path, name
):
    source = open_checkpoint(saved / name)
    expected = load_file(saved / f"{name}.safetensors")["logits"]
    count = megatron_saves.LENGTH
    expected = expected[:, [0, count // 2, count - 1]]
    torch.testing.assert_close(logits_of(source), expected, rtol=1e-5, atol=1e-5)
    layout = "tp=2,pp=2,ep=2" if name == "moe" else "tp=2,pp=2"
    layout = layout.replace("pp=2", "pp=3") if source.model.num_layers == 3 else layout
    to_mtcli(source, tmp_path / "ours", *parse_layout(layout), WriteOptions())
    ours = open_checkpoint(tmp_path / "ours")
    assert not list(differences(source, ours))
    assert ours.step == 7


def test_what_is_there_is_described(saved):
    facts = describe(open_checkpoint(saved / "llama"))
    assert (facts["format"], facts["step"], facts["dtype"]) == ("megatron", 7, "float32")
    assert set(facts["files"]) <= {path.name for path in (saved / "llama").glob("*.distcp")}
    assert open_checkpoint(saved / "llama").unread == ("the optimizer's state",)


def test_a_run_s_folder_is_its_latest_iteration(saved, tmp_path):
    shutil.copytree(saved / "gpt", tmp_path / "iter_0000012")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert open_checkpoint(tmp_path).folder == tmp_path / "iter_0000012"


@pytest.mark.parametrize("text", ["13\n", "release\n", "", "x"])
def test_a_latest_iteration_that_is_not_there_is_named(tmp_path, text):
    (tmp_path / "iter_0000012").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    name = "iter_0000013" if text.startswith("13") else "release"
    with pytest.raises(MtcliError, match=f"txt says .*, and there is no .*{name}") as error:
        open_checkpoint(tmp_path)
    assert "the folder of a checkpoint: iter_0000012" in str(error.value)


def test_rows_that_pad_the_vocabulary_are_left_out(saved):
    whole = open_checkpoint(saved / "gpt")
    fewer = open_checkpoint(saved / "gpt", whole.model.model_copy(update={"vocab_size": 61}))
    assert torch.equal(fewer.read("embedding.weight"), whole.read("embedding.weight")[:61])


def test_an_architecture_that_is_not_said_is_asked_for_and_may_be_given(saved, copy):
    model = open_checkpoint(saved / "gpt").model
    torch.save({"iteration": 3}, copy / "common.pt")
    with pytest.raises(MtcliError) as error:
        open_checkpoint(copy)
    assert "num_layers, hidden_size, num_heads, ffn_hidden_size, vocab_size, max_seq" in str(
        error.value
    )
    assert "hint: say what it is: --config FILE" in str(error.value)
    found = open_checkpoint(copy, model)
    assert found.step == 3
    assert not list(differences(open_checkpoint(saved / "gpt"), found))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": False}, r"has tensors that a GPT model of this architecture has not: .*bias"),
        ({"hidden_size": 64}, r"word_embeddings.weight is \[64, 32\] in .* and \[64, 64\] in the"),
        ({"num_layers": 3}, r"layer_norm_weight is \[2, 32\] in .* and \[3, 32\] in the model"),
        ({"vocab_size": 65}, r"is \[64, 32\] in .* and \[65, 32\] in the model"),
        ({"norm": "rmsnorm"}, r"architecture has not: .*layernorm.bias"),
        ({"tie_embeddings": False}, r"has no tensor output_layer.weight, which is head.weight"),
    ],
    ids=str,
)
def test_a_model_that_is_not_this_one_is_refused(saved, change, message):
    model = open_checkpoint(saved / "gpt").model.model_copy(update=change)
    with pytest.raises(MtcliError, match=message):
        open_checkpoint(saved / "gpt", model)


def test_all_arguments_that_we_have_no_way_of_are_named():
    arguments = megatron_saves.LLAMA | {"no_rope_freq": 4, "qk_l2_norm": True}
    with pytest.raises(MtcliError) as error:
        model_of(arguments, Path("x/common.pt"))
    found = [problem.message for problem in error.value.problems]
    assert found == [
        "x/common.pt: no_rope_freq=4 cannot be represented",
        "x/common.pt: qk_l2_norm=true cannot be represented",
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"no_rope_freq": [0, 1]},
        {"glu_linear_offset": 1.0},
        {"activation_func_clamp_value": 7.0},
        {"attention_output_gate": True},
        {"moe_apply_probs_on_input": True},
        {"moe_router_topk_limited_devices": 2},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_layer_freq": 2},
        {"moe_layer_freq": [1, 0]},
        {"moe_layer_freq": [0, 0]},
        {"moe_layer_freq": [0, 1, 1]},
        {"mla_down_proj_fusion": True},
        {"squared_relu": 1.5},
    ],
    ids=str,
)
def test_an_argument_that_changes_what_is_computed_is_refused(changed):
    (name,) = changed
    with pytest.raises(MtcliError, match=f"common.pt: {name}=.* cannot be represented"):
        model_of(megatron_saves.MOE | changed, Path("x/common.pt"))


@pytest.mark.parametrize(
    "changed",
    [
        {"qk_layernorm": False},
        {"normalization": "LayerNorm"},
        {"position_embedding_type": "learned_absolute"},
        {"rotary_interleaved": True},
        {"rotary_percent": 0.5},
        {"group_query_attention": True},
        {"rope_type": "mrope"},
        {"moe_router_group_topk": 4},
        {"moe_router_group_topk": 1},
    ],
    ids=str,
)
def test_an_argument_that_latent_attention_has_no_way_of_is_refused(changed):
    (name,) = changed
    with pytest.raises(MtcliError, match=f"common.pt: {name}=.* cannot be represented"):
        model_of(megatron_saves.DEEPSEEK_V3 | changed, Path("x/common.pt"))


def test_widths_and_scalings_that_are_not_said_are_named():
    silent = megatron_saves.DEEPSEEK_V3 | {"kv_lora_rank": None, "v_head_dim": None}
    with pytest.raises(MtcliError, match="widths of its latent .*: kv_lora_rank, v_head_dim"):
        model_of(silent, Path("common.pt"))
    silent = megatron_saves.YARN | {"yarn_original_max_position_embeddings": None}
    with pytest.raises(MtcliError, match="how YaRN scales: yarn_original_max_position"):
        model_of(silent, Path("common.pt"))


@pytest.mark.parametrize("value", ["x", [1], {}, 0, -1, True, 1e400], ids=str)
@pytest.mark.parametrize(
    "name", ["rotary_scaling_factor", "mscale", "mscale_all_dim", "qk_head_dim", "beta_fast"]
)
@pytest.mark.parametrize("kind", ["rope", "yarn"])
def test_an_argument_of_latent_attention_that_is_no_number_ends_in_no_crash(name, value, kind):
    given = megatron_saves.DEEPSEEK_V3 | {"rope_type": kind, name: value}
    try:
        model_of(given, Path("common.pt"))
    except MtcliError as error:
        assert "common.pt" in str(error)


def with_names(folder, rename, keep=False):
    """Has saved tensors have other names; with `keep`, the old ones too."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for old in list(metadata.state_dict_metadata):
        if (name := rename(old)) == old:
            continue
        tensor = metadata.state_dict_metadata[old]
        metadata.state_dict_metadata[name] = tensor
        for index in [index for index in metadata.storage_data if index.fqn == old]:
            place = metadata.storage_data[index]
            metadata.storage_data[type(index)(name, index.offset, index.index)] = place
        if not keep:
            del metadata.state_dict_metadata[old]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_layers_that_predict_further_ahead_are_left_out_by_name(saved, tmp_path):
    folder = shutil.copytree(saved / "deepseek_v3", tmp_path / "copy")
    with_names(folder, lambda name: name.replace("decoder.final", "mtp.layers.0.final"), keep=True)
    unread = ("the optimizer's state", "layers that predict further ahead")
    assert open_checkpoint(folder).unread == unread


def test_norms_of_latents_may_be_part_of_the_projections_after_them(saved, tmp_path):
    folder = shutil.copytree(saved / "deepseek_v3", tmp_path / "copy")

    def fused(name):
        for norm, linear in (("q_layernorm", "q_up_proj"), ("kv_layernorm", "kv_up_proj")):
            name = name.replace(f"attention.{norm}.", f"attention.linear_{linear}.layer_norm_")
        return name

    with_names(folder, fused)
    found = open_checkpoint(folder)
    assert not list(differences(open_checkpoint(saved / "deepseek_v3"), found))


def test_an_argument_that_refers_to_itself_many_times_is_shown_in_short():
    bomb = []
    for _ in range(100):  # 2**100 characters written out
        bomb = [bomb, bomb]
    with pytest.raises(MtcliError, match="qk_layernorm=.* cannot be represented") as error:
        model_of(megatron_saves.LLAMA | {"qk_layernorm": bomb}, Path("common.pt"))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("base", ["x", [500]])
def test_a_rotary_base_that_is_no_number_is_refused(base):
    with pytest.raises(MtcliError, match="common.pt: rope_theta: .* should be a number"):
        model_of(megatron_saves.LLAMA | {"rotary_base": base}, Path("common.pt"))


@pytest.mark.parametrize(
    ("changed", "ours"),
    [
        ({"bias_gelu_fusion": True}, {"activation": "gelu_tanh"}),
        ({"openai_gelu": True}, {"activation": "gelu_tanh"}),
        ({"bias_gelu_fusion": True, "add_bias_linear": False}, {"activation": "gelu"}),
        ({"add_bias_linear": False, "add_qkv_bias": True}, {"bias": False, "qkv_bias": True}),
        ({"num_query_groups": 2}, {"num_kv_heads": 4}),
        ({"num_experts": 4, "moe_router_pre_softmax": True}, {"normalize_top_k": False}),
    ],
    ids=str,
)
def test_arguments_mean_what_megatron_makes_of_them(changed, ours):
    model = model_of(megatron_saves.GPT | changed, Path("common.pt"))
    assert {name: getattr(model, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("arguments", "family"),
    [
        (megatron_saves.LLAMA | {"qk_layernorm": True}, "qwen3"),
        (megatron_saves.QWEN3_MOE | {"apply_layernorm_1p": False}, "qwen3_moe"),
        (megatron_saves.DEEPSEEK_V3 | {"norm_epsilon": 1e-6}, "deepseek_v3"),
        (megatron_saves.DEEPSEEK_V2 | {"norm_epsilon": 1e-6, "mscale": 1.0}, "deepseek_v2"),
        (megatron_saves.NEMOTRON | {"untie_embeddings_and_output_weights": True}, "nemotron"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_of_megatron_s_arguments_are_of_their_hugging_face_families(arguments, family):
    assert family_of(model_of(arguments, Path("common.pt"))).model_type == family


def test_other_formats_are_named(tmp_path):
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(MtcliError, match="of torch.save, a pickle that is never loaded") as error:
        open_checkpoint(tmp_path / "old")
    assert "--ckpt-format torch_dist" in str(error.value)
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(MtcliError, match="in the format 'zarr'"):
        open_checkpoint(tmp_path / "zarr")


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def poison_metadata(folder, mark):
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Touch(mark)}))


def poison_common(folder, mark):
    torch.save({"args": Touch(mark)}, folder / "common.pt")


def poison_tensor(folder, mark):
    """A chunk of the embedding becomes an archive whose pickle runs something."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(p for i, p in metadata.storage_data.items() if "word_emb" in i.fqn)
    torch.save(Touch(mark), folder / "evil.distcp")
    place.relative_path, place.offset = "evil.distcp", 0
    place.length = (folder / "evil.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("poison", [poison_metadata, poison_common, poison_tensor])
def test_a_pickle_in_any_place_runs_nothing(copy, tmp_path, poison):
    poison(copy, tmp_path / "ran")
    with pytest.raises(MtcliError, match="names 'posix.system', which no data needs"):
        open_checkpoint(copy)
    assert not (tmp_path / "ran").exists()


def with_place(folder, **changes):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(p for i, p in metadata.storage_data.items() if "word_emb" in i.fqn)
    for name, value in changes.items():
        setattr(place, name, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_path": "../x"}, "it names a file outside of its folder"),
        ({"relative_path": "gone"}, "gone is damaged: it cannot be read"),
        ({"offset": 10**15}, r"its \d+ bytes do not hold an archive at 10{15}"),
        ({"offset": 3}, "at byte 3 there is no archive of torch.save|is not"),
        ({"length": -1}, "is not the metadata of torch.distributed.checkpoint"),
        ({"length": 100}, "there is no archive of torch.save"),
        ({"transform_descriptors": ["zstd"]}, "is compressed, which is not read"),
    ],
    ids=str,
)
def test_places_are_checked_against_the_files(copy, changes, message):
    with_place(copy, **changes)
    with pytest.raises(MtcliError, match=message) as error:
        open_checkpoint(copy)
    assert error.value.code == Exit.WRONG_INPUT


def with_metadata(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata.state_dict_metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", [5, None, b"bytes", (1, 2)], ids=str)
def test_a_tensor_whose_name_is_no_text_is_refused(copy, name):
    with_metadata(copy, lambda table: table.update({name: next(iter(table.values()))}))
    with pytest.raises(MtcliError, match="is not the metadata of torch.distributed.checkpoint"):
        open_checkpoint(copy)


class Index:
    """Stands for DCP's index of a chunk, whose hash it does not have."""


def test_a_chunk_of_a_tensor_whose_name_is_no_text_is_refused_before_it_is_hashed(copy):
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    index, name = Index(), "x"
    for _ in range(100):  # a hash of 2**100 steps
        name = (name, name)
    index.__dict__.update(fqn=name, offset=None, index=0)
    metadata.storage_data[index] = next(iter(metadata.storage_data.values()))
    ours, theirs = f"c{__name__}\n".encode(), b"ctorch.distributed.checkpoint.metadata\n"
    (copy / ".metadata").write_bytes(pickle.dumps(metadata, 2).replace(ours, theirs))
    with pytest.raises(MtcliError, match="is not the metadata of torch.distributed.checkpoint"):
        open_checkpoint(copy)


def test_chunks_that_leave_elements_out_are_refused(copy):
    def twice(table):
        """Has the first of two chunks stand for the second as well: the number of elements fits."""
        chunks = next(t.chunks for t in table.values() if len(getattr(t, "chunks", ())) > 1)
        chunks[1] = chunks[0]

    with_metadata(copy, twice)
    with pytest.raises(MtcliError, match=r"the chunks of .* overlap at \[0, 0"):
        open_checkpoint(copy)


def test_a_compressed_pickle_is_refused_before_it_grows(copy):
    with zipfile.ZipFile(copy / "common.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("common/data.pkl", bytes(100 << 20))
    with pytest.raises(MtcliError, match="data.pkl is compressed, which torch never does"):
        open_checkpoint(copy)


def test_a_missing_or_damaged_common_file_is_an_error(copy):
    (copy / "common.pt").write_bytes(b"PK nothing")
    with pytest.raises(MtcliError, match="there is no archive of torch.save"):
        open_checkpoint(copy)
    (copy / "common.pt").unlink()
    with pytest.raises(MtcliError, match="has no common.pt"):
        open_checkpoint(copy)


def test_a_chunk_is_rectangles_of_the_split_tensor():
    whole = torch.arange(2 * 12 * 5).view(2, 12, 5)
    for start, size in ((0, 12), (2, 7), (3, 1), (8, 4)):
        chunk = whole[1:, start : start + size].reshape(-1)
        found = torch.full((3, 4, 5), -1)
        for first, (at, extent) in factored_boxes(
            Box((1, start, 0), (1, size, 5)), (1,), ((3, 4), (5,))
        ):
            count = torch.Size(extent).numel()
            box = Box(at, extent)
            found[box.slices] = chunk[first : first + count].view(extent)
        expected = torch.full((12, 5), -1)
        expected[start : start + size] = whole[1, start : start + size]
        assert torch.equal(found.view(12, 5), expected)
    assert not list(factored_boxes(Box((1, 0, 0), (1, 12, 5)), (0,), ((3, 4), (5,))))
    with pytest.raises(MtcliError, match="cuts heads apart"):
        list(factored_boxes(Box((0, 1), (5, 6)), (), ((5,), (3, 4))))
