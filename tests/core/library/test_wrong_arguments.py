"""Wrong arguments of Python calls: each is named, with what was given and a cure, all at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from indexed_dataset import write_dataset
from tiny import LLAMA, run_config
from trained import checkpoint_of, train_and_save

import mtcli
from mtcli.core.config.arguments import overrides_of
from mtcli.core.config.errors import wrong
from mtcli.core.config.loading import with_overrides
from mtcli.core.data.indexed import token_dtype
from mtcli.core.library.argument_names import naming_arguments
from mtcli.core.runtime.launch import bring_up


def refused(function, *arguments, **named):
    """The problems of a call, by the argument that each is about."""
    with pytest.raises(mtcli.MtcliError) as caught:
        function(*arguments, **named)
    assert caught.value.code == 2
    assert all(problem.hint for problem in caught.value.problems), caught.value
    return {problem.field: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("argument", "value", "words", "hint"),
    [
        ("gpus", "8", "'8' is no whole number of 1 to 1048576", "gpus=8"),
        ("gpus", 0, "0 is no whole", "gpus=8"),
        ("gpus", True, "True is no whole", "gpus=8"),
        ("gpus", 2.0, "2.0 is no whole", "gpus=8"),
        ("gpus", 2**20 + 1, "1048577 is no whole", "gpus=8"),
        ("top", "3", "'3' is no whole number of 1 to 1000", "top=3"),
        ("device", 3, "3 is neither a text", 'device="h100"'),
        ("device", "nope", "no device named 'nope'", "one of v100-32gb"),
        ("tokens", -1, "-1 is no number of 1 to 1e+18", "tokens=3e+11"),
        ("tokens", True, "True is no number", "tokens=3e+11"),
        ("tokens", float("nan"), "nan is no number", "tokens=3e+11"),
        ("tokens", "x", "'x' is no number of tokens", "300B"),
        ("overrides", "parallel.tp=2", "'parallel.tp=2' is no list", "overrides=['parallel.tp=2']"),
        ("overrides", 5, "5 is no list", 'overrides=["section.field=value"]'),
        ("overrides", None, "None is no list", 'overrides=["section.field=value"]'),
        ("overrides", ["parallel.tp"], "'parallel.tp' is no section.field=value", "overrides=["),
        ("overrides", [b"parallel.tp=2"], "is no section.field=value", "overrides=["),
        ("overrides", {2: 3}, "2 is no name of a field", "overrides=["),
        ("overrides", {"parallel.tp": None}, "None of parallel.tp is no value", "a number"),
        ("overrides", {"data.train": [b"a"]}, "b'a' of data.train is no value", "a text"),
    ],
)
def test_a_wrong_argument_of_plan_is_named_with_its_value_and_a_cure(argument, value, words, hint):
    (problem,) = refused(mtcli.plan, "tiny", **{argument: value}).values()
    assert problem.field == argument and words in problem.message and hint in problem.hint


@pytest.mark.parametrize("config", [3, None, "", b"tiny", {"model": {}}, "no-such-preset"])
def test_what_is_no_config_is_refused_as_the_argument_config(config):
    assert list(refused(mtcli.plan, config)) == ["config"]


def test_all_wrong_arguments_are_reported_at_once():
    problems = refused(mtcli.plan, 3, gpus="8", device=4, top=0, tokens=-1, overrides="a")
    assert list(problems) == ["config", "gpus", "device", "top", "tokens", "overrides"]
    problems = refused(mtcli.open, 3, overrides="a=b", device="gpu", base=5)
    assert list(problems) == ["checkpoint", "overrides", "device", "base"]
    sampled = {"temperature": -1, "top_k": -1, "top_p": 2, "seed": -1, "min_p": 2}
    assert refused(mtcli.Sampling, **sampled).keys() == sampled.keys()


def test_numbers_of_tokens_and_overrides_by_name_are_those_of_texts():
    layout = {"parallel": {"tp": np.int64(2)}, "batch.global_batch_size": 32}
    words = ["parallel.tp=2", "batch.global_batch_size=32"]
    named = mtcli.plan("tiny", gpus=2, device="h100", tokens=3 * 10**11, overrides=layout)
    listed = mtcli.plan("tiny", gpus=2, device="h100", tokens="300B", overrides=words)
    assert named.config == listed.config and named.as_json() == listed.as_json()


def test_a_mapping_of_overrides_has_the_values_that_it_was_given():
    values = {
        "text": 'a "q" \n\x00\x7f',
        "digits": "12",
        "path": Path("a b") / "c",
        "list": [{"b": 1}, {"b": [2.5, True]}],
        "most": float("inf"),
        "data": {"valid": {"one": "two"}},
        "narrow": np.float32(0.5),
    }
    assert with_overrides({}, overrides_of(values)) == values | {"path": "a b/c"}


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("temperature", -1, "-1 is no number of 0 to 1000"),
        ("temperature", "1", "'1' is no number"),
        ("temperature", float("nan"), "nan is no number"),
        ("top_k", -1, "-1 is no whole number"),
        ("top_k", 2.5, "2.5 is no whole number"),
        ("top_k", 5, "temperature=0 takes the likeliest token"),
        ("top_p", 0, "top_p=0 keeps no token"),
        ("top_p", 1.5, "1.5 is no number of 0 to 1"),
        ("min_p", 0.5, "temperature=0 takes the likeliest token"),
        ("seed", -1, "-1 is no whole number"),
        ("repetition_penalty", 0, "0 is no number of 0.01 to 100"),
        ("logit_bias", [1], "[1] is no mapping"),
        ("logit_bias", {"a": 1}, "id 'a' is no whole number"),
        ("logit_bias", {-1: 1}, "id -1 is no whole number"),
        ("logit_bias", {1: float("nan")}, "bias nan is no number"),
    ],
)
def test_a_wrong_setting_of_sampling_is_refused(argument, value, words):
    (problem,) = refused(mtcli.Sampling, **{argument: value}).values()
    assert problem.field == argument and words in problem.message


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint without a tokenizer."""
    home = tmp_path_factory.mktemp("saved")
    with bring_up("cpu", 60.0) as runtime:
        train_and_save(runtime, run_config(LLAMA), home)
    return str(checkpoint_of(home, 4).folder)


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("prompts", 3, "3 is neither a text nor a list of texts"),
        ("prompts", {"a": 1}, "is neither a text nor a list of texts"),
        ("prompts", ["a", 3], "3 is no text"),
        ("prompts", "\ud800", "is no text that UTF-8 can encode"),
        ("max_tokens", "5", "'5' is no whole number"),
        ("max_tokens", 0, "0 is no whole number"),
        ("sampling", 0.8, "0.8 is no mtcli.Sampling"),
        ("stop", None, "None is neither a text nor a list of texts"),
        ("stop", ["a", ""], "'' is an empty text"),
        ("chat", "yes", "'yes' is neither True nor False"),
        ("logit_bias", mtcli.Sampling(logit_bias={150: 1.0}), "the id 150 is not among"),
    ],
)
def test_a_wrong_argument_of_generate_is_refused(saved, argument, value, words):
    name = "sampling" if isinstance(value, mtcli.Sampling) else argument
    with mtcli.open(saved, device="cpu") as model:
        (problem,) = refused(model.generate, **({"prompts": "a"} | {name: value})).values()
    assert problem.field == argument and words in problem.message


@pytest.mark.parametrize("tokens", [[1.5, 2.5], [True], ["a"], {"a": 1}, [1, 2**70], [None], 3])
def test_what_is_no_ids_is_refused_and_none_is_rounded(saved, tokens):
    with mtcli.open(saved, device="cpu") as model:
        assert list(refused(model.logits, tokens)) == ["tokens"]
        assert model.logits(np.array([1, 2], "int32")).equal(model.logits([1, 2]))


def test_what_has_no_effect_on_an_opened_model_is_refused(saved):
    problems = refused(mtcli.open, saved, ["optimizer.lr=1", "data.train=a"], device="cpu")
    assert problems["optimizer.lr"].hint == "leave the override optimizer.lr out"
    assert list(problems) == ["optimizer.lr", "data.train"]
    assert "holds no adapters" in refused(mtcli.open, saved, base="a")["base"].message
    assert list(refused(mtcli.open, saved, {"train.precision": "bf"}, "cpu")) == ["train.precision"]


def test_a_closed_model_refuses_calls_and_says_how_to_open_it_again(saved):
    model = mtcli.open(saved, device="cpu")
    assert repr(model) == f"<Model {saved}: llama, on cpu>"
    with model:
        model.losses([1, 2])
    for call in (
        lambda: model.logits([1]),
        lambda: model.losses([1, 2]),
        lambda: model.generate("a"),
    ):
        (problem,) = refused(call).values()
        assert problem.message == "the model is closed" and f"mtcli.open({saved!r})" in problem.hint
    refused(model.__enter__)
    model.close()
    assert repr(model).endswith("closed>") and model.config.num_layers == LLAMA["num_layers"]


def test_a_plan_and_a_dataset_say_what_they_are(tmp_path):
    plan = mtcli.plan("tiny", gpus=2, device="h100", overrides={"parallel.tp": 2})
    assert repr(plan).startswith("<Plan of 2 x h100, bf16: tp=2 micro-batch 8")
    assert f"{plan.step_seconds:.4g} s a step" in repr(plan) and len(repr(plan)) < 200
    assert list(refused(plan.save, 3)) == ["path"]
    write_dataset(tmp_path / "data", [np.arange(n) for n in (3, 5)], token_dtype(101))
    data = mtcli.tokens(tmp_path / "data")
    assert repr(data) == f"<TokenData {tmp_path / 'data'}: 2 documents, 8 tokens>"
    for document in ("0", 2, -3, 0.5):
        assert list(refused(data.text, document)) == ["document"]
    for prefix in (3, None, b"data", tmp_path / "none"):
        assert list(refused(mtcli.tokens, prefix)) == ["prefix"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--set a.b='c d'; --tokens", "overrides=[\"a.b='c d'\"]; tokens"),
        ("leave --set a.b out", "leave the override a.b out"),
        ("--global-batch 64, or", 'overrides=["batch.global_batch_size=64"], or'),
        ("--top 5 and --top-p", "top 5 and --top-p"),
    ],
)
def test_flags_in_errors_become_arguments(text, named):
    with pytest.raises(mtcli.MtcliError) as caught, naming_arguments("otherwise"):
        raise wrong("message", text)
    assert caught.value.problems[0] == ("message", named, "otherwise")


def test_tokens_of_a_tensor_are_ids_whatever_their_integer(saved):
    with mtcli.open(saved, device="cpu") as model:
        narrow = torch.tensor([3, 4], dtype=torch.int16)
        assert model.losses(narrow).equal(model.losses([3, 4]))
