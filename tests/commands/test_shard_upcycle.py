"""`mtcli shard --upcycle` as a user types it: what it says, proves, writes and refuses."""

import json

import pytest
import torch
import typer
from tiny import LLAMA
from typer.main import get_command

from mtcli.commands.shard import shard
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import Shard, save
from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.config.loading import dump_toml, load_config
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import count_active, count_parameters, parameters
from mtcli.core.parallel.tree import ALONE

app = typer.Typer(add_completion=False)
app.command("shard")(shard)
MODEL = ModelConfig(**LLAMA | {"num_layers": 2})


def run(*words):
    """What the command raises or returns."""
    return get_command(app).main([str(word) for word in words], standalone_mode=False)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense checkpoint of ours with an optimizer, at step 3."""
    torch.manual_seed(0)
    pieces = []
    for name, parameter in parameters(MODEL).items():
        shape = parameter.shape
        for kind in ("", "optimizer.exp_avg/"):
            pieces.append(Shard(kind + name, 0.2 * torch.randn(shape), (0,) * len(shape), shape))
    about = {"extra": {}, "config_toml": dump_toml(RunConfig(model=MODEL)), "tokenizer": None}
    root = tmp_path_factory.mktemp("dense")
    return save(root, 3, pieces, ranks=ALONE, keep=0, **about)


def test_it_writes_a_checkpoint_of_ours_with_a_proof_and_says_what_it_left_out(
    dense, tmp_path, capsys
):
    moe = tmp_path / "moe"
    text = "num_experts=8,top_k=4,granularity=2"
    run(dense, moe, "--upcycle", text, "--layout", "dp=2,ep=2", "--verify", "--json", "-")
    out, err = capsys.readouterr()
    facts, model = json.loads(out), load_config(str(moe)).model
    assert facts["format"] == "mtcli"
    assert (facts["step"], facts["layout"]["ep"]) == (0, 2)
    assert facts["upcycled"] == {"num_experts": 8, "top_k": 4, "granularity": 2}
    assert facts["parameters"] == count_parameters(model) > count_parameters(MODEL)
    assert facts["tensors_equal"] == len(open_checkpoint(moe).names())
    assert 0.0 < facts["logits_apart"] < 1e-4
    said = f"8 experts of 12, 4 for each token: {count_parameters(model):,} parameters, "
    assert f"; {said}{count_active(model):,} used; leaving out optimizer.exp_avg" in err
    assert err.splitlines()[0].endswith(", since the model is new")
    run("verify", moe, moe)


@pytest.mark.parametrize("to", ["mtcli", "hf"])
def test_a_rounded_mixture_is_proven_within_its_rounding(dense, tmp_path, capsys, to):
    text = "num_experts=6,top_k=3,granularity=3,seed=5"
    run(dense, tmp_path / "moe", "--upcycle", text, "--to", to, "--dtype", "bf16", "--verify")
    capsys.readouterr()
    assert open_checkpoint(tmp_path / "moe").dtype("embedding.weight") == torch.bfloat16
    run("inspect", tmp_path / "moe")
    assert "mixtral" in capsys.readouterr().out


def test_a_mixture_that_is_not_the_dense_function_fails_the_proof(dense, tmp_path, monkeypatch):
    import mtcli.core.convert.upcycle as upcycle

    exact = upcycle._experts

    def scaled(*arguments):
        return exact(*arguments) * 1.01

    monkeypatch.setattr(upcycle, "_experts", scaled)
    with pytest.raises(MtcliError, match=r"the logits .* apart, and .* is rounding") as error:
        run(dense, tmp_path / "moe", "--upcycle", "num_experts=4,top_k=2", "--verify")
    assert error.value.code == Exit.FAILED
    assert open_checkpoint(tmp_path / "moe").config is not None  # ours, where nothing is said


def test_a_tensor_that_was_not_written_as_said_is_named(dense, tmp_path, monkeypatch):
    import mtcli.core.convert.shard as conversion
    from mtcli.core.convert.upcycle import upcycled
    from mtcli.core.convert.upcycle_recipe import recipe_of

    write = conversion._write

    def with_another_router(source, target, plan):
        recipe = recipe_of("num_experts=4,top_k=2,seed=8", MODEL)
        return write(upcycled(open_checkpoint(dense), recipe), target, plan)

    monkeypatch.setattr(conversion, "_write", with_another_router)
    with pytest.raises(MtcliError, match=r"same: blocks.0.mlp.router.weight differs in") as error:
        run(dense, tmp_path / "moe", "--upcycle", "num_experts=4,top_k=2", "--verify")
    assert error.value.code == Exit.FAILED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SRC", "DST", "--upcycle", "num_experts=8"], "--upcycle: top_k is missing"),
        (["SRC", "DST", "--upcycle", ""], "--upcycle: num_experts is missing"),
        (["inspect", "SRC", "--upcycle", "num_experts=8,top_k=2"], "--upcycle with inspect"),
        (["verify", "SRC", "SRC", "--upcycle", "top_k=2"], "--upcycle with verify"),
        (
            ["SRC", "DST", "--upcycle", "num_experts=8,top_k=2", "--layout", "dp=3,ep=3"],
            "ep=3 does not divide num_experts=8",
        ),
        (
            ["SRC", "DST", "--upcycle", "num_experts=8,top_k=2,router_score=sigmoid", "--to", "hf"],
            "no Hugging Face family has this model: mixtral cannot have router_score='sigmoid'",
        ),
    ],
)
def test_wrong_input_is_refused_and_nothing_is_written(dense, tmp_path, words, message):
    places = {"SRC": dense, "DST": tmp_path / "dst"}
    with pytest.raises(MtcliError) as error:
        run(*(places.get(word, word) for word in words))
    assert message in str(error.value)
    assert error.value.code == Exit.WRONG_INPUT
    assert not list(tmp_path.iterdir())
