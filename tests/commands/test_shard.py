"""`mtcli shard` as a user types it: exit codes, stdout, stderr, and what lies there afterwards."""

import json
import shutil

import pytest
import torch
import typer
from marks import slow
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from typer.main import get_command

from mtcli.commands.shard import shard
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import Shard, commit, dump_written, write_shards
from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.schema import RunConfig

app = typer.Typer(add_completion=False)
app.command("shard")(shard)


def run(*words):
    """What the command raises or returns."""
    return get_command(app).main([str(word) for word in words], standalone_mode=False)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A tiny GPT-2 folder as transformers saves it, with a file that a tokenizer would have."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=51, n_positions=17, n_embd=24, n_layer=2, n_head=4)
    folder = tmp_path_factory.mktemp("shard") / "gpt2"
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def warm():
    """The fork server has what other tests need of it, whichever come first."""
    run_ranks(1, rank_of)


def rank_of(runtime):
    return runtime.rank


def test_a_folder_goes_to_a_layout_and_back_with_proofs(gpt2, tmp_path, capsys):
    run(gpt2, tmp_path / "ours", "--layout", "tp=2,pp=2", "--verify", "--json", "-")
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["format"], facts["tensors_equal"], facts["logits_apart"]) == ("mtcli", 28, 0.0)
    assert (facts["layout"]["tp"], facts["layout"]["pp"], facts["layout"]["world"]) == (2, 2, 4)
    assert "parameters" in err.splitlines()[0]
    assert err.splitlines()[-1] == f"wrote {tmp_path / 'ours'}"
    run(tmp_path / "ours", tmp_path / "back", "--verify", "--max-shard-size", "20KB")
    before = load_file(gpt2 / "model.safetensors")
    after = {
        k: v for f in (tmp_path / "back").glob("*.safetensors") for k, v in load_file(f).items()
    }
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in before.values())
    assert set(index["weight_map"]) == set(before)
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "back" / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000


def test_inspect_says_what_is_there(gpt2, tmp_path, capsys):
    run(gpt2, tmp_path / "ours", "--layout", "tp=2")
    capsys.readouterr()
    run("inspect", tmp_path / "ours", "--json", tmp_path / "facts.json")
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["parameters"] == 51 * 24 + 17 * 24 + 2 * (12 * 24**2 + 13 * 24) + 2 * 24
    assert facts["bytes"] == 4 * facts["parameters"]
    assert facts["tensors"]["embedding.weight"] == {
        "shape": [51, 24],
        "dtype": "float32",
        "pieces": 1,  # padded to 256 rows, so that the first rank holds all of the 51
    }
    assert facts["tensors"]["blocks.0.mlp.up.weight"]["pieces"] == 2
    assert (facts["format"], facts["optimizer"], facts["tokenizer"]) == ("mtcli", [], False)
    assert "parameters" in capsys.readouterr().out
    run("inspect", gpt2, "--json", "-")
    assert json.loads(capsys.readouterr().out)["format"] == "hf"


def test_verify_names_the_first_tensor_that_differs_and_fails(gpt2, tmp_path, capsys):
    run(gpt2, tmp_path / "a", "--to", "hf")
    run("verify", gpt2, tmp_path / "a", "--verify")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["transformer.h.1.mlp.c_proj.weight"][95, 23] += 1e-3
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(MtcliError, match=r"blocks\.1\.mlp\.down\.weight differs in 1 of") as error:
        run("verify", gpt2, tmp_path / "a")
    assert error.value.code == Exit.FAILED


def test_zeros_of_another_sign_and_equal_nans_are_counted_by_their_bits(tmp_path, gpt2):
    from mtcli.core.convert.verify import differences

    folders = []
    for number, row in enumerate(([0.0, float("nan"), 1.0], [-0.0, float("nan"), 1.0])):
        folders.append(tmp_path / str(number))
        run(gpt2, folders[-1], "--to", "hf")
        path = folders[-1] / "model.safetensors"
        tensors = load_file(path)
        tensors["transformer.ln_f.bias"][:3] = torch.tensor(row)
        save_file(tensors, path, metadata={"format": "pt"})
    (found,) = differences(*(open_checkpoint(folder) for folder in folders))
    assert found.name == "final_norm.bias" and found.what.startswith("differs in 1 of 24 elements")


def test_force_replaces_no_folder_that_holds_the_source(gpt2, tmp_path):
    run(gpt2, tmp_path / "outer", "--to", "hf")
    run(gpt2, tmp_path / "outer" / "inner", "--to", "hf")
    (tmp_path / "outer" / "tokenizer").symlink_to("inner")
    for target, said in (
        ("outer/inner", "the input .*outer/inner would be replaced"),
        ("outer", "outer holds 2 files of no checkpoint: inner, tokenizer"),
    ):
        with pytest.raises(MtcliError, match=said):
            run(tmp_path / "outer" / "inner", tmp_path / target, "--to", "hf", "--force")
    assert open_checkpoint(tmp_path / "outer" / "inner").model == open_checkpoint(gpt2).model


def test_a_damaged_source_is_refused_and_not_copied_with_new_hashes(gpt2, tmp_path):
    run(gpt2, tmp_path / "ours", "--layout", "tp=2")
    path = tmp_path / "ours" / "rank-00001.safetensors"
    flipped = bytearray(path.read_bytes())
    flipped[-9] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(MtcliError, match="rank-00001.safetensors is damaged: the bytes from 0 do"):
        run(tmp_path / "ours", tmp_path / "again", "--layout", "pp=2")
    assert not (tmp_path / "again").exists()


@slow("workers of their own, six times")
def test_verify_says_what_was_compared_of_the_optimizer(gpt2, tmp_path, capsys, warm):
    source = open_checkpoint(gpt2)
    weights = {name: source.read(name) for name in source.names()}
    toml = dump_toml(RunConfig.model_validate({"model": source.model, "batch": {"seq_len": 8}}))
    for name, moment in (("none", None), ("some", 1.0), ("other", 2.0)):
        state = {"optimizer.exp_avg/final_norm.bias": torch.full((24,), moment)} if moment else {}
        tensors = (weights | state).items()
        pieces = [Shard(n, t, (0,) * t.dim(), tuple(t.shape)) for n, t in tensors]
        (tmp_path / name).mkdir()
        written = dump_written(write_shards(tmp_path / name, 0, pieces))
        commit(tmp_path / name, written, {"step": 3, "world": 1, "extra": {}}, toml, {})

    def said(a, b):
        run("verify", tmp_path / a, tmp_path / b, "--json", "-", "--nproc", "2")
        return json.loads(capsys.readouterr().out)

    assert said("none", "none")["optimizer"] == "none"
    assert said("some", "some")["optimizer"] == "the same"
    assert said("some", "some")["tensors_equal"] == len(weights) + 1
    only = f"not compared: only {tmp_path / 'some'} has optimizer.exp_avg"
    assert said("none", "some")["optimizer"] == said("some", "none")["optimizer"] == only
    with pytest.raises(MtcliError, match=r"exp_avg/final_norm.bias differs in 24 of 24") as error:
        said("some", "other")
    assert error.value.code == Exit.FAILED


def test_verify_tells_models_apart_whose_tensors_are_the_same(gpt2, tmp_path):
    run(gpt2, tmp_path / "a", "--to", "hf")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config["layer_norm_epsilon"] = 1e-3
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(MtcliError, match="tensors are, and norm_eps is 1e-05 and 0.001") as error:
        run("verify", gpt2, tmp_path / "a")
    assert error.value.code == Exit.FAILED


@slow("workers of their own")
def test_the_first_tensor_that_differs_is_named_however_many_look_for_it(gpt2, tmp_path, warm):
    run(gpt2, tmp_path / "a", "--to", "hf")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    for name in tensors.keys() - {"transformer.wte.weight"}:
        tensors[name][-1] += 1
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    for nproc in (1, 3):
        with pytest.raises(MtcliError, match=r"position_embedding.weight differs in 24 of 408"):
            run("verify", gpt2, tmp_path / "a", "--nproc", nproc)


@slow("workers of their own")
def test_the_result_says_what_memory_it_took(gpt2, tmp_path, capsys, warm):
    for nproc in (1, 2):
        target = tmp_path / f"{nproc}"
        run(gpt2, target, "--layout", "tp=2", "--nproc", nproc, "--verify", "--json", "-")
        facts = json.loads(capsys.readouterr().out)
        assert facts["largest_tensor_bytes"] == 4 * 24 * 96
        assert 0 <= facts["working_memory_bytes"] < 80e6 < facts["peak_memory_bytes"]


def damaged(folder, target, value):
    """A copy of a Hugging Face folder with one weight of another value."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"].view(-1)[5] = value
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_prove_nothing_and_are_named(gpt2, tmp_path, value):
    broken = damaged(gpt2, tmp_path / "broken", value)
    with pytest.raises(MtcliError) as error:
        run(broken, tmp_path / "ours", "--verify")
    assert error.value.code is Exit.FAILED
    assert str(error.value) == (
        f"error: the logits of {broken} are not finite and prove nothing: "
        "blocks.1.mlp.up.weight holds NaN or infinity\n\n"
        "hint: `mtcli shard verify A B` compares the tensors alone, bit for bit"
    )
    run(broken, tmp_path / "alone")
    run("verify", broken, tmp_path / "alone")
    with pytest.raises(MtcliError, match="differs in 1 of 2304 elements, NaN or infinity among"):
        run("verify", gpt2, broken)


def test_the_step_is_the_run_s_and_a_hugging_face_folder_has_none(gpt2, tmp_path, capsys):
    source, kept = open_checkpoint(gpt2), tmp_path / "kept"
    tensors = ((name, source.read(name)) for name in source.names())
    pieces = [Shard(n, t, (0,) * t.dim(), tuple(t.shape)) for n, t in tensors]
    toml = dump_toml(RunConfig(model=source.model, batch={"seq_len": 17}))
    kept.mkdir()
    about = {"step": 3, "world": 1, "extra": {}}
    commit(kept, dump_written(write_shards(kept, 0, pieces)), about, toml, {})
    run(kept, tmp_path / "hf", "--json", "-")
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == 3 and "step 3; writing hf" in err
    run("inspect", tmp_path / "hf", "--json", "-")
    assert json.loads(capsys.readouterr().out)["step"] is None
    run("inspect", tmp_path / "hf")
    assert "step             none\n" in capsys.readouterr().out
    run(tmp_path / "hf", tmp_path / "ours")
    assert "bytes; writing mtcli" in capsys.readouterr().err


def test_a_change_of_dtype_is_verified_within_its_rounding(gpt2, tmp_path, capsys):
    run(gpt2, tmp_path / "half", "--dtype", "bf16", "--verify", "--json", "-")
    facts = json.loads(capsys.readouterr().out)
    assert facts["dtype"] == "bfloat16"
    assert 0 < facts["logits_apart"] < 0.1
    with pytest.raises(MtcliError, match="embedding.weight is float32 and bfloat16"):
        run("verify", gpt2, tmp_path / "half")
    run("verify", gpt2, tmp_path / "half", "--dtype", "bf16")


def test_logits_that_differ_fail_the_command(gpt2, tmp_path, monkeypatch):
    import mtcli.core.convert.verify as proof

    monkeypatch.setattr(proof, "logit_difference", lambda a, b: (1e-3, 1.0))
    with pytest.raises(MtcliError, match=r"are 0.001 apart, and 0 at most is rounding") as error:
        run(gpt2, tmp_path / "x", "--verify")
    assert error.value.code == Exit.FAILED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one"], "'one' is not SRC DST"),
        (["verify", "SRC"], "is not SRC DST"),
        (["SRC", "DST", "--layout", "tp=3"], "tp=3 does not divide num_kv_heads=4"),
        (["inspect", "SRC", "--layout", "tp=3"], "--layout with inspect"),
        (["verify", "SRC", "SRC", "--to", "hf"], "--to with verify"),
        (["inspect", "SRC", "--dtype", "bf16"], "--dtype with inspect"),
        (["inspect", "SRC", "--verify"], "--verify with inspect"),
        (["SRC", "DST", "--layout", "zz=3"], "'zz=3' is not a part of a layout"),
        (["SRC", "DST", "--dtype", "int8"], "there is no dtype 'int8'"),
        (["SRC", "DST", "--to", "hf", "--layout", "tp=2"], "--layout tp=2 with --to hf"),
        (["SRC", "DST", "--max-shard-size", "5GB"], "--max-shard-size 5GB with --to mtcli"),
        (["SRC", "DST", "--to", "hf", "--max-shard-size", "big"], "'big' is not a size"),
        (["SRC", "DST", "--to", "hf", "--max-shard-size", "0GB"], "'0GB' is not a size"),
        (["SRC", "DST", "--to", "hf", "--max-shard-size", "²GB"], "'²GB' is not a size"),
        (["SRC", "DST", "--to", "hf", "--max-shard-size", "9" * 400], "9' is not a size"),
        (["SRC", "DST", "--layout", "tp=" + "9" * 20], "is not a part of a layout"),
        (["SRC", "DST", "--layout", "tp=2,tp=4"], "tp is given twice: 2 and 4"),
        (["gone", "DST"], "there is no folder gone"),
        (["SRC", "SRC"], "gpt2 exists"),
        (["SRC", "d" * 300], "d cannot be written: File name too long"),
    ],
)
def test_wrong_input_is_refused_before_a_word_and_nothing_is_written(
    gpt2, tmp_path, words, message, capsys
):
    places = {"SRC": gpt2, "DST": tmp_path / "dst"}
    with pytest.raises(MtcliError) as error:
        run(*(places.get(word, word) for word in words))
    assert message in str(error.value)
    assert error.value.code == Exit.WRONG_INPUT
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_all_parts_of_a_layout_that_are_none_are_told_at_once(gpt2, tmp_path):
    with pytest.raises(MtcliError) as error:
        run(gpt2, tmp_path / "dst", "--layout", "tp=2,foo=2,pp=x,tp=4,zero=2")
    assert [(problem.field, problem.message) for problem in error.value.problems] == [
        ("--layout", "'foo=2' is not a part of a layout"),
        ("--layout", "'pp=x' is not a part of a layout"),
        ("--layout", "tp is given twice: 2 and 4"),
        ("--layout", "zero=2 is no way to share"),
    ]


def test_all_that_is_wrong_is_told_at_once_and_as_json(tmp_path):
    flags = ["--dtype", "int8", "--layout", "zz=3", "--max-shard-size", "big"]
    with pytest.raises(MtcliError) as error:
        run("gone", tmp_path / "x", *flags, "--json", tmp_path / "answer.json")
    assert len(error.value.problems) == 4
    told = json.loads((tmp_path / "answer.json").read_text())
    assert told["ok"] is False
    assert [told["message"] for told in told["problems"]] == [
        p.message for p in error.value.problems
    ]


@pytest.mark.parametrize(
    ("text", "count"), [("5GB", 5 * 10**9), ("1.5MiB", 3 << 19), ("700", 700), ("2kb", 2000)]
)
def test_a_size_is_a_number_and_a_unit(text, count):
    from mtcli.commands.shard import _size

    assert _size(text) == count
