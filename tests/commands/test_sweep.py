"""`mtcli sweep` from its command line: what its run folders hold, and how it refuses."""

import fcntl
import json
import time
from itertools import count

import pytest
from chats import save_model, sums, write_lines
from command_line import mtcli, start
from marks import slow, slow_cases
from tiny import metrics, write_run

from mtcli.core.checkpoint.folder import step_folders, step_of
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import failed
from mtcli.core.sweep.rules import SMALL_GEMM
from mtcli.core.training import run_lock, save_schedule
from mtcli.core.training import save as saving

RUN = {"train": {"steps": 6, "precision": "fp64", "save_every": 3}}


def sweep(config, *words, out="out", **options):
    return mtcli("sweep", config, *words, "--output", config.parent / out, **options)


def start_sweep(config, *words, out="out", **options):
    return start("sweep", config, *words, "--output", config.parent / out, **options)


def curves(folder):
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in metrics(folder)]


def saved_steps(out):
    """The names of trials, and the steps of their checkpoints."""
    folders = sorted(out.glob("*/checkpoints"))
    return [(f.parent.name, [step_of(step) for step in step_folders(f)]) for f in folders]


def assert_same_run(made, wanted, tolerance=1e-10):
    """Two run folders have the same losses, and the same tensors in their newest checkpoints."""
    for a, b in zip(curves(made), curves(wanted), strict=True):
        assert a == pytest.approx(b, rel=tolerance)
    ours, alone = (
        x.adapters.own if x.adapters else x for x in map(open_checkpoint, (made, wanted))
    )
    assert (ours.step, sorted(ours.names())) == (alone.step, sorted(alone.names()))
    assert ours.extra == alone.extra
    for name in alone.names():
        x = alone.read(name)
        assert float((ours.read(name) - x).norm()) <= tolerance * max(1e-3, float(x.norm())), name


def test_every_trial_s_folder_is_that_of_a_run_alone_but_for_who_diverges(tmp_path):
    config = write_run(tmp_path, **RUN)
    done = sweep(config, "--vary", "optimizer.lr=1e-3,3e-3,1e6", "--vary", "model.dropout=0,0.2")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    found = json.loads((out / "sweep.json").read_text())
    assert [t["status"] for t in found["trials"]] == ["finished"] * 4 + ["diverged"] * 2
    assert all("lr=1e+06" in t["name"] and t["reason"] for t in found["trials"][4:])
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    for lr, drop in ((1e-3, 0.0), (3e-3, 0.2)):
        name = f"lr={lr:g}_dropout={drop:g}"
        words = (f"optimizer.lr={lr}", f"model.dropout={drop}", f"train.output={tmp_path / name}")
        alone = mtcli("train", config, *(w for word in words for w in ("--set", word)))
        assert alone.returncode == 0, alone.stderr
        assert_same_run(out / name, tmp_path / name)
        own, theirs = ((f / name / "config.toml").read_text() for f in (out, tmp_path))
        assert own.replace(str(out), str(tmp_path)) == theirs
    losses = [trial["loss"] for trial in found["trials"][:4]]
    assert losses == sorted(losses)
    title, *rows = done.stdout.splitlines()
    assert title.split() == ["trial", "loss,", "last", "10", "steps", "status"]
    assert [row.split()[0] for row in rows] == [trial["name"] for trial in found["trials"]]


@slow("three commands")
def test_a_trial_s_folder_goes_on_with_train_and_is_exported(tmp_path):
    config = write_run(tmp_path, train={"steps": 3, "precision": "fp32"})
    assert sweep(config, "--vary", "optimizer.lr=1e-3,3e-3").returncode == 0
    trial = tmp_path / "out" / "lr=0.003"
    words = ("--set", "train.steps=5", "--resume")
    done = mtcli("train", trial, *words)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(trial)] == [1, 2, 3, 4, 5]
    done = mtcli("shard", trial, tmp_path / "hf", "--to", "hf")
    assert done.returncode == 0, done.stderr


@slow("three sweeps of a wide model")
def test_models_that_fill_a_cpu_core_are_trained_in_turn_unless_asked_otherwise(tmp_path):
    batch = {"seq_len": 16, "micro_batch_size": 4}
    config = write_run(tmp_path, batch=batch, train={"steps": 2, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-3,3e-3", "--set", "model.hidden_size=64")
    columns, asked = SMALL_GEMM // (2 * 4 * 16 * 64), ("--max-fused", "2")  # of the logits
    for vocab, more, arrays in ((columns, (), 2), (columns, asked, 1), (columns - 1, (), 1)):
        out = f"{vocab}{''.join(more)}"
        done = sweep(config, *words, "--set", f"model.vocab_size={vocab}", *more, out=out)
        assert done.returncode == 0, done.stderr
        table = json.loads((tmp_path / out / "sweep.json").read_text())
        assert len(table["arrays"]) == arrays
        assert ("--max-fused B fuses" in done.stderr) == (arrays == 2)


def test_a_sweep_that_was_told_to_stop_saves_all_and_goes_on_bit_for_bit(tmp_path):
    words = ("--vary", "optimizer.lr=1e-3,3e-3,1e6", "--max-fused", "2")
    config = write_run(tmp_path, train={"steps": 8, "precision": "fp32"})
    assert sweep(config, *words, out="whole").returncode == 0
    done = sweep(config, *words, out="cut", fault=stop_after_two_steps)
    assert done.returncode == 130, done.stderr
    assert "stopped, as it was told to; " in done.stderr and "with --resume" in done.stderr
    first = json.loads((tmp_path / "cut" / "sweep.json").read_text())["trials"]
    assert {t["steps"] for t in first} == {2, 0} and {t["status"] for t in first} == {"waiting"}
    refused = sweep(config, *words, out="cut")
    assert refused.returncode == 2
    assert "2 of 3 trials have run folders" in refused.stderr and "--resume" in refused.stderr
    done = sweep(config, *words, "--resume", out="cut")
    assert done.returncode == 0, done.stderr
    for name in ("lr=0.001", "lr=0.003"):
        assert_same_run(tmp_path / "cut" / name, tmp_path / "whole" / name, tolerance=0.0)
    again = sweep(config, *words, "--resume", out="cut")
    assert "note: 3 of 3 trials have ended before" in again.stderr


def test_a_sweep_resumes_with_all_of_its_trials_their_models_and_a_whole_table(tmp_path):
    config = write_run(tmp_path, train={"steps": 3, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-3,3e-3,1e6")
    assert sweep(config, *words).returncode == 0
    table, found = tmp_path / "out" / "sweep.json", outcomes(tmp_path / "out")
    less = sweep(config, "--vary", "optimizer.lr=1e-3", "--resume")
    assert less.returncode == 2 and outcomes(tmp_path / "out") == found
    assert "2 of the 3 trials" in less.stderr and "the 1 that are asked for" in less.stderr
    other = sweep(config, *words, "--resume", "--set", "model.init_std=0.5")
    assert other.returncode == 2 and "the run was trained with 0.02" in other.stderr
    for text in ("{", "[]", '{"trials": 7}', '{"trials": [{"name": "a"}, 3]}'):
        table.write_text(text)
        damaged = sweep(config, *words, "--resume")
        assert damaged.returncode == 2 and "remove it: --resume goes on" in damaged.stderr
    row = {"name": "lr=1e+06", "status": "diverged", "steps": [9], "reason": 3}
    table.write_text(json.dumps({"trials": [row]}))
    assert sweep(config, *words, "--resume").returncode == 0
    assert {name: told[0] for name, told in outcomes(tmp_path / "out").items()} == {
        name: told[0] for name, told in found.items()
    }


@slow("two sweeps by optuna")
def test_a_sampler_s_sweep_that_resumes_has_all_trials_in_its_table(tmp_path):
    pytest.importorskip("optuna")
    config = write_run(tmp_path, train={"steps": 2, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-4..1e-2", "--sampler", "optuna")
    words += ("--vary", "optimizer.betas=[0.9,0.95]")
    assert sweep(config, *words, "--random", "2").returncode == 0
    before = outcomes(tmp_path / "out")
    assert sweep(config, *words, "--random", "3", "--resume").returncode == 0
    after = outcomes(tmp_path / "out")
    assert len(before) == 2 and len(after) == 3 and before.items() <= after.items()


def stop_after_two_steps(rank):
    """Puts a stop file into the folder of the sweep once the second step was recorded."""
    from pathlib import Path

    from mtcli.core.sweep import board

    stepped = board.Board.stepped

    def told(self, running, rate):
        stepped(self, running, rate)
        if len(running[0].losses) == 1:
            Path(self.output, "stop").touch()

    board.Board.stepped = told


def test_ranks_that_a_launcher_starts_again_go_on_with_their_sweep(tmp_path):
    config = write_run(tmp_path, train={"steps": 4, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-3,3e-3")
    job = {"TORCHELASTIC_RUN_ID": "one"}
    assert sweep(config, *words, fault=stop_after_two_steps, **job).returncode == 130
    refused = sweep(config, *words, TORCHELASTIC_RUN_ID="other", TORCHELASTIC_RESTART_COUNT="1")
    assert refused.returncode == 2 and "--resume goes on with them" in refused.stderr
    again = sweep(config, *words, **job, TORCHELASTIC_RESTART_COUNT="1")
    assert again.returncode == 0 and "from step 2 of 4" in again.stderr


def test_ranks_that_are_started_again_wait_for_an_earlier_rank_0_to_end(tmp_path):
    config = write_run(tmp_path, train={"steps": 4, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-3,3e-3")
    job = {"TORCHELASTIC_RUN_ID": "one"}
    assert sweep(config, *words, fault=stop_after_two_steps, **job).returncode == 130
    trial = tmp_path / "out" / "lr=0.003"
    (saved,) = step_folders(trial / "checkpoints")
    with open(trial / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        json.dump(run_lock._this_process()._asdict(), lock)
        lock.flush()
        saved.rename(tmp_path / "being saved")
        refused = sweep(config, *words, "--resume")
        assert refused.returncode == 2 and "lr=0.003 is held by another run" in refused.stderr
        again = start_sweep(config, *words, **job, TORCHELASTIC_RESTART_COUNT="1")
        time.sleep(3.0)  # longer than it takes to read the trials
        assert again.ranks[0].exitcode is None
        (tmp_path / "being saved").rename(saved)
    done = again.ended()
    assert done.returncode == 0, done.stderr
    assert f"note: took over {trial} from process" in done.stderr
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [array["first_step"] for array in found["arrays"]] == [2], "both trials are one array"
    assert [row["steps"] for row in found["trials"]] == [4, 4]


def test_a_launcher_s_ranks_refuse_the_study_of_another_sweep(tmp_path):
    pytest.importorskip("optuna")
    config = write_run(tmp_path, train={"steps": 2, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-4..1e-2", "--sampler", "optuna")
    assert sweep(config, *words, "--random", "2").returncode == 0
    refused = sweep(config, *words, "--random", "3")
    assert refused.returncode == 2 and "--resume" in refused.stderr
    assert len(outcomes(tmp_path / "out")) == 2


def outcomes(folder):
    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    return {t["name"]: (t["status"], t["steps"], t["reason"]) for t in trials}


@slow("two sweeps of 17 trials")
def test_hyperband_stops_the_same_trials_in_one_array_or_in_many(tmp_path):
    config = write_run(tmp_path, train={"steps": 9, "precision": "fp64"})
    words = ("--vary", "optimizer.lr=1e-4..1e-2", "--hyperband", "9,3")
    assert sweep(config, *words, out="one").returncode == 0
    assert sweep(config, *words, "--max-fused", "2", out="many").returncode == 0
    one, many = (outcomes(tmp_path / out) for out in ("one", "many"))
    assert one == many and len(one) == 9 + 5 + 3
    steps = sorted(steps for _, steps, _ in one.values())
    assert steps == [1] * 6 + [3] * (2 + 4) + [9] * (1 + 1 + 3)
    for name, (status, steps, reason) in one.items():
        made = tmp_path / "one" / name
        assert (status == "finished") == (steps == 9) == (not reason)
        assert open_checkpoint(made).step == steps == len(metrics(made))
        assert_same_run(tmp_path / "many" / name, made)
    least = {}
    for name, (_, steps, _) in one.items():
        if "bracket 1" in one[name][2] and steps == 1:
            least[name] = metrics(tmp_path / "one" / name)[0]["loss"]
    assert len(least) == 6


@slow("24 steps, and three commands")
def test_the_median_rule_stops_trials_and_a_run_goes_on_from_there(tmp_path):
    config = write_run(tmp_path, train={"steps": 24, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-6,1e-2,2e-2", "--median", "8")
    done = sweep(config, *words)
    assert done.returncode == 0, done.stderr
    found = outcomes(tmp_path / "out")
    assert found["lr=1e-06"][0] == "stopped" and found["lr=1e-06"][1] < 24
    assert "median" in found["lr=1e-06"][2]
    assert "finished" in {status for status, _, _ in found.values()}
    again = sweep(config, *words, "--resume")
    assert again.returncode == 0 and outcomes(tmp_path / "out") == found
    done = mtcli("train", tmp_path / "out" / "lr=1e-06", "--resume")
    assert done.returncode == 0, done.stderr


@slow("three sweeps")
def test_a_sweep_that_stops_at_a_step_of_the_median_rule_decides_as_it_would_have(tmp_path):
    config = write_run(tmp_path, train={"steps": 4, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-6,1e-2,2e-2,1e-1", "--median", "2")
    assert sweep(config, *words, out="whole").returncode == 0
    assert sweep(config, *words, out="cut", fault=stop_after_two_steps).returncode == 130
    assert sweep(config, *words, "--resume", out="cut").returncode == 0
    whole, cut = (outcomes(tmp_path / out) for out in ("whole", "cut"))
    assert whole == cut and ("stopped", 2) in [told[:2] for told in whole.values()]


@slow("two ranks, twice")
def test_arrays_over_data_ranks_are_runs_over_data_ranks(tmp_path):
    config = write_run(tmp_path, **RUN)
    done = sweep(config, "--vary", "optimizer.lr=1e-3,3e-3", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    alone = ("--set", "optimizer.lr=3e-3", "--set", f"train.output={tmp_path / 'alone'}")
    assert mtcli("train", config, *alone, "--nproc", "2").returncode == 0
    assert_same_run(tmp_path / "out" / "lr=0.003", tmp_path / "alone")
    own, theirs = (metrics(f)[-1] for f in (tmp_path / "out" / "lr=0.003", tmp_path / "alone"))
    # an array sends the elements that pad its rows too: 64 KiB of 4 in float64 for such a model
    assert theirs["sync_bytes"] <= own["sync_bytes"] < 1.1 * theirs["sync_bytes"]


@slow("two sweeps")
def test_trials_on_data_ranks_end_early_where_they_do_on_one(tmp_path):
    """One diverges at once, and the median rule stops another."""
    config = write_run(tmp_path, train={"steps": 8, "precision": "fp64"})
    words = ("--vary", "optimizer.lr=1e-6,1e-2,2e-2,1e6", "--median", "4")
    for nproc in (1, 2):
        done = sweep(config, *words, "--nproc", nproc, out=f"out{nproc}")
        assert done.returncode == 0, done.stderr
    one, two = (outcomes(tmp_path / out) for out in ("out1", "out2"))
    assert {name: told[:2] for name, told in two.items()} == {n: t[:2] for n, t in one.items()}
    assert sorted(told[0] for told in two.values())[0::3] == ["diverged", "stopped"]


def clock_of_hundred_seconds_a_look(rank):
    times = count(0.0, 100.0 * (rank == 0))
    save_schedule.monotonic = lambda: next(times)


@pytest.mark.parametrize("nproc", [2, *slow_cases("a sweep", 1)])
def test_all_models_of_a_sweep_save_by_the_clock_of_rank_0(nproc, tmp_path):
    config = write_run(tmp_path, train={"steps": 5, "save_minutes": 5, "keep": 0})
    words = ("--vary", "optimizer.lr=1e-3,1e-2", "--nproc", nproc)
    done = sweep(config, *words, fault=clock_of_hundred_seconds_a_look)
    assert done.returncode == 0, done.stderr
    assert dict(saved_steps(tmp_path / "out")) == {"lr=0.001": [3, 5], "lr=0.01": [3, 5]}


def test_a_model_that_only_skips_ends_and_the_others_go_on(tmp_path):
    skipping = {"steps": 6, "on_nonfinite": "skip", "max_skips": 3, "precision": "fp32"}
    config = write_run(tmp_path, train=skipping, optimizer={"warmup_steps": 0})
    done = sweep(config, "--vary", "optimizer.lr=1e-3,1e38")
    assert done.returncode == 0, done.stderr
    assert "lr=1e+38: diverged, step 4: 3 batches in a row were skipped" in done.stderr
    assert done.stderr.count("lr=1e+38: warning: skipped step ") == 3
    assert dict(saved_steps(tmp_path / "out"))["lr=0.001"] == [6]


def saves_fail_at_step_two(rank):
    def save(root, step, *arguments, **options):
        if step == 2:
            raise failed("no space left on device")
        return saves(root, step, *arguments, **options)

    saves, saving.save = saving.save, save


@pytest.mark.parametrize("nproc", [2, *slow_cases("two sweeps", 1)])
def test_a_save_that_fails_leaves_a_sweep_going(nproc, tmp_path):
    """Also where a rule compares trials at the step of that save, and one ends there unsaved."""
    config = write_run(tmp_path, train={"steps": 6, "save_every": 2, "precision": "fp32"})
    words = ("--vary", "optimizer.lr=1e-6,1e-2,2e-2", "--median", "2", "--nproc", nproc)
    done = sweep(config, *words, fault=saves_fail_at_step_two)
    assert done.stderr.count("the run goes on") == 4
    assert done.returncode == 1 and done.errors[0].count("error:") == 1
    saved = {"lr=0.01": [4, 6], "lr=0.02": [4, 6]}
    assert {name: steps for name, steps in saved_steps(tmp_path / "out") if steps} == saved
    again = sweep(config, *words, "--resume")
    assert again.returncode == 0, again.stderr
    assert dict(saved_steps(tmp_path / "out")) == saved | {"lr=1e-06": [2]}


@slow("a sweep and a run")
def test_seeds_of_shared_batches_are_runs_of_that_order(tmp_path):
    config = write_run(tmp_path, **RUN)
    words = ("--seeds", "2", "--shared-batches", "--vary", "optimizer.lr=1e-3")
    assert sweep(config, *words).returncode == 0
    alone = ("--set", "seed=8", "--set", "data.seed=7", "--set", "optimizer.lr=1e-3")
    output = ("--set", f"train.output={tmp_path / 'alone'}")
    assert mtcli("train", config, *alone, *output).returncode == 0
    assert_same_run(tmp_path / "out" / "lr=0.001_seed=8", tmp_path / "alone")


@slow("two arrays")
def test_json_on_stdout_has_all_trials_and_nothing_else(tmp_path):
    config = write_run(tmp_path, train={"steps": 4, "eval_every": 2, "eval_batches": 1})
    done = sweep(config, "--vary", "optimizer.name=adamw,sgd", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and len(found["arrays"]) == 2
    assert "optimizer.name" in done.stderr and "2 trials in 2 sets" in done.stderr
    scores = [trial["valid_loss"] for trial in found["trials"]]
    assert scores == sorted(scores)
    refused = sweep(config, "--vary", "optimizer.nam=adamw", "--json", "-")
    assert refused.returncode == 2 and not json.loads(refused.stdout)["ok"]


@slow("a model of transformers, four commands")
def test_adapters_of_a_hugging_face_folder_s_model_are_runs_alone_and_go_on(tmp_path):
    save_model(tmp_path / "llama")
    write_lines(tmp_path / "my.jsonl", [*sums(20), {"prompt": "no answer"}])
    settings = ["data.train=my.jsonl", "batch.seq_len=128", "batch.global_batch_size=2"]
    settings += ["optimizer.lr=1e-2", "train.precision=fp64", "train.epochs=2"]
    settings += ["lora.dropout=0.1"]
    words = [word for item in settings for word in ("--set", item)]
    varied = ("--vary", "lora.rank=2,5", "--vary", "lora.alpha=4,16")
    words += ["--skip-bad"]
    started = ("sweep", "llama", *words, *varied, "--output", "out")
    assert mtcli(*started, folder=tmp_path, fault=stop_after_two_steps).returncode == 130
    done = mtcli(*started, "--resume", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bad    1 no completion, my.jsonl:21" in done.stderr
    own = ("--set", "lora.rank=2", "--set", "lora.alpha=16", "--set", "train.output=alone")
    done = mtcli("train", "llama", *words, *own, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trial = tmp_path / "out" / "rank=2_alpha=16"
    assert_same_run(trial, tmp_path / "alone")
    assert {".adapter." in name for name in open_checkpoint(trial).adapters.own.names()} == {True}
    texts = [(f / "config.toml").read_text() for f in (trial, tmp_path / "alone")]
    assert texts[0].replace("out/rank=2_alpha=16", "alone") == texts[1]
    done = mtcli("shard", trial, "peft", "--to", "peft", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@slow("sixteen runs")
def test_sixteen_rates_are_sixteen_runs_and_the_one_that_diverges_is_alone_in_it(tmp_path):
    rates = (1e-5, 3e-5, 1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2)
    rates += (2e-2, 1e3)
    config = write_run(tmp_path, train={"steps": 30, "precision": "fp64"})
    done = sweep(config, "--vary", f"optimizer.lr={','.join(map(str, rates))}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert len(found["arrays"]) == 1 and found["arrays"][0]["last_step"] == 30
    assert [t["status"] for t in found["trials"]] == ["finished"] * 15 + ["diverged"]
    assert found["trials"][-1]["name"] == "lr=1000" and "lr=1000" in done.stderr
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 10_000
    for rate in rates[:-1]:
        output = ("--set", f"train.output={tmp_path / 'alone' / str(rate)}")
        alone = mtcli("train", config, "--set", f"optimizer.lr={rate}", *output)
        assert alone.returncode == 0, alone.stderr
        made, wanted = (
            [row["loss"] for row in metrics(folder)]
            for folder in (tmp_path / "out" / f"lr={rate:g}", tmp_path / "alone" / str(rate))
        )
        assert len(made) == 30 and made == pytest.approx(wanted, rel=1e-10), rate
