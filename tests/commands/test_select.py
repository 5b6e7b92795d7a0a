"""`mtcli select`, and training on what it chose, as typed."""

import json

import pytest
from command_line import mtcli
from indexed_dataset import write_dataset
from marks import slow
from tiny import documents, metrics, write_run

from mtcli.core.data.indexed import token_dtype

STILL = {"optimizer.schedule": "constant"}  # a rate that does not depend on the steps
OUT = ("--output", "s.json", "--json", "a.json")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data sets and a run of two steps at run/."""
    folder = tmp_path_factory.mktemp("select")
    config = write_run(folder, train={"steps": 2})
    assert mtcli("train", config).returncode == 0
    write_dataset(folder / "other", documents(32, seed=5), token_dtype(101))
    return folder


def select(home, *words, model="run", data=("data",), out=OUT):
    named = [word for prefix in data for word in ("--data", prefix)]
    model = ("--model", model) if model else ()
    return mtcli("select", *named, *model, *out, *words, folder=home)


def chosen(home, *words, **options):
    done = select(home, *words, **options)
    assert done.returncode == 0, done.stderr
    return json.loads((home / "a.json").read_text())


def train(home, output, *words, subset="s.json", **settings):
    sets = {"train.output": output, "data.subset": subset, "train.steps": 6} | STILL | settings
    sets = [word for item in sets.items() for word in ("--set", "{}={}".format(*item))]
    return mtcli("train", "run.toml", *sets, *words, folder=home)


def losses(home, output):
    return [row["loss"] for row in metrics(home / output)]


@pytest.fixture(scope="module")
def subset(home):
    return chosen(home, "--fraction", "0.1")


def test_a_tenth_has_the_keys_that_are_promised_and_beats_a_random_one(home, subset):
    count = subset["num_candidates"]
    assert count == (62 * 60 - 1) // 8  # of the training part of 64 documents
    assert len(subset["indices"]) == len(set(subset["indices"])) == round(0.1 * count)
    assert len(subset["weights"]) == len(subset["indices"])
    assert sum(subset["weights"]) == pytest.approx(count)
    assert subset["method"] == "craig"
    assert subset["objective"] > subset["random_objective"]
    random = chosen(
        home, "--fraction", "0.1", "--method", "random", out=("--output", "r.json", *OUT[2:])
    )
    assert random["objective"] == pytest.approx(subset["random_objective"])
    assert random["error"] == pytest.approx(subset["random_error"])
    assert 0 < subset["error"] < subset["bound"]
    assert set(random["weights"]) == {count / len(random["indices"])}


@pytest.mark.parametrize(
    "layout",
    [["parallel.tp=2"], pytest.param([], marks=slow("a further layout, 1 s"))],
    ids=["tp=2", "dp=2"],
)
def test_two_ranks_choose_what_one_does(home, subset, layout):
    sets = [word for one in layout for word in ("--set", one)]
    out = ("--output", "two.json", *OUT[2:])
    found = chosen(home, "--fraction", "0.1", "--nproc", 2, *sets, out=out)
    assert found["indices"] == subset["indices"]
    assert found["weights"] == subset["weights"]
    assert found["objective"] == pytest.approx(subset["objective"], rel=1e-4)


def test_training_on_it_is_the_same_on_tp_2_with_a_resume_as_on_one_process(home, subset):
    done = train(home, "one")
    assert done.returncode == 0, done.stderr
    assert f"subset {len(subset['indices'])} of {subset['num_candidates']}" in done.stdout
    tp = {"parallel.tp": 2}
    assert train(home, "two", "--nproc", 2, **tp, **{"train.steps": 3}).returncode == 0
    done = train(home, "two", "--nproc", 2, "--resume", **tp)
    assert done.returncode == 0, done.stderr
    assert losses(home, "two")[3:] == pytest.approx(losses(home, "one")[3:], rel=1e-5)


@slow("a blend, 1 s")
def test_sources_of_a_blend_are_chosen_from_by_their_weights(home):
    words = ("0.75", "data", "0.25", "other")
    found = chosen(home, "--size", 40, data=words, out=("--output", "b.json", *OUT[2:]))
    file = json.loads((home / "b.json").read_text())
    first = file["sources"][0]["candidates"]
    own = [index < first for index in found["indices"]]
    assert sum(own) == 30
    weights = [w for w, is_first in zip(found["weights"], own, strict=True) if is_first]
    assert sum(weights) == pytest.approx(0.75 * found["num_candidates"])


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (("--fraction", "0.1", "--size", "3"), ["--fraction and --size given"]),
        ((), ["none of --fraction, --size and --cover given"]),
        (("--fraction", "0"), ["--fraction: 0 of the sequences"]),
        (("--fraction", "1.5"), ["--fraction"]),
        (("--size", "100000"), ["--size: 100000 sequences of the 464 that there are"]),
        (("--fraction", "0.1", "--method", "dsir"), ["--target: it is missing"]),
        (("--cover", "0.5", "--method", "random"), ["--cover: --method random covers nothing"]),
        (("--size", "3", "--target", "other"), ["--target: --method craig reads no target"]),
        (
            ("--size", "3", "--set", "data.train=x", "--set", "optimizer.lr=1"),
            ["data.train: --data names", "optimizer.lr: it is of a training run"],
        ),
        (("--size", "3", "--method", "random", "--greedy", "naive"), ["--greedy: --method random"]),
        (
            ("--size", "3", "--set", "batch.seq_len=32"),
            ["seq_len=32 exceeds the learned positions"],
        ),
        (
            ("--size", "3", "--data", "nothing", "--set", "parallel.tp=3"),
            ["no file nothing.idx", "tp=3 does not divide num_kv_heads=4"],
        ),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_with_every_problem(home, words, messages):
    done = select(home, *words, out=("--output", "no.json"))
    assert done.returncode == 2, done.stderr
    assert all(message in done.stderr for message in messages), done.stderr
    assert "hint:" in done.stderr and "Traceback" not in done.stderr
    assert not (home / "no.json").exists()


def test_gradients_need_a_model_and_the_file_a_folder(home):
    done = select(home, "--size", 3, model=None, out=("--output", "none/s.json"))
    assert done.returncode == 2
    assert "--model: it is missing" in done.stderr
    assert "--output: there is no folder 'none'" in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch.seq_len": 4}, "has sequences of seq_len=8 tokens, and the run batch.seq_len=4"),
        ({"data.train": "other"}, "chosen from data at data with the hash"),
        ({"data.split": "50,50,0"}, "training part has 239"),
        ({"data.subset": "missing.json"}, "missing.json cannot be read"),
        ({"data.subset": "run.toml"}, "run.toml is not JSON"),
        ({"data.train": '["data", "other"]'}, "is of 1 sources, and the run has 2"),
    ],
    ids=str,
)
def test_training_refuses_a_subset_of_other_sequences(home, subset, settings, message):
    done = train(home, "refused", **settings)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "hint:" in done.stderr
    assert not (home / "refused" / "checkpoints").exists()


@slow("four commands, 2 s")
def test_a_run_does_not_go_on_with_another_subset(home, subset):
    assert train(home, "first", **{"train.steps": 2}).returncode == 0
    chosen(home, "--fraction", "0.2", out=("--output", "more.json", *OUT[2:]))
    done = train(home, "first", "--resume", **{"data.subset": "more.json"})
    assert done.returncode == 2
    assert "and the run was trained on" in done.stderr
    (home / "moved.json").write_bytes((home / "s.json").read_bytes())
    assert train(home, "first", "--resume", **{"data.subset": "moved.json"}).returncode == 0


def test_a_trial_that_is_trained_on_a_subset_goes_on_with_it(home, subset):
    words = ("--vary", "optimizer.lr=1e-3", "--set", "data.subset=s.json", "--output", "swept")
    assert mtcli("sweep", "run.toml", *words, folder=home).returncode == 0
    done = train(home, "swept/lr=0.001", "--resume", **{"optimizer.lr": 1e-3})
    assert done.returncode == 0, done.stderr
    assert len(losses(home, "swept/lr=0.001")) == 6


def test_importance_resampling_needs_no_model_and_is_judged_by_one_that_is_named(home):
    out = ("--output", "d.json", *OUT[2:])
    words = ("--size", 20, "--method", "dsir", "--target", "other")
    found = chosen(home, *words, "--set", "batch.seq_len=8", model=None, out=out)
    assert found["objective"] is None and found["random_objective"] is None
    judged = chosen(home, *words, out=out)
    assert judged["indices"] == found["indices"] and judged["objective"] > 0
    assert train(home, "dsir", subset="d.json").returncode == 0


@slow("three runs, 3 s")
def test_a_run_that_selects_again_has_the_same_losses_resumed_on_two_ranks(home, subset):
    again = {"data.reselect_every": 2}
    assert train(home, "again", **again).returncode == 0
    tp = {"parallel.tp": 2}
    assert train(home, "apart", "--nproc", 2, **again, **tp, **{"train.steps": 3}).returncode == 0
    (home / "apart" / "subsets" / "step-00000002.json").rename(home / "second.json")
    done = train(home, "apart", "--resume", **again)  # selected anew from the checkpoint of step 2
    assert done.returncode == 0, done.stderr
    assert losses(home, "apart")[2:] == pytest.approx(losses(home, "again")[2:], rel=1e-5)
    names = [f"step-0000000{step}.json" for step in (2, 4)]
    found = []
    for run, name in zip(("again", "apart", "again"), (*names[:1], *names), strict=False):
        found.append(json.loads((home / run / "subsets" / name).read_text())["indices"])
    assert found[0] == json.loads((home / "second.json").read_text())["indices"]
    assert len(found[0]) == len(subset["indices"]) and found[0] != subset["indices"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.reselect_every": 2}, "reselect_every=2 with no data.subset"),
        (
            {"data.subset": "s.json", "data.format": "conversations"},
            "with data.format='conversations', whose rows are no fixed sequences",
        ),
    ],
    ids=str,
)
def test_subsets_are_of_fixed_sequences(home, settings, message):
    sets = [word for item in settings.items() for word in ("--set", "{}={}".format(*item))]
    done = mtcli("train", "run.toml", *sets, "--set", "train.output=fixed", folder=home)
    assert done.returncode == 2 and message in done.stderr, done.stderr
