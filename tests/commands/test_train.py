"""`mtcli train` from the command line, on a few thousand tokens."""

import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from command_line import free_port, launched, mtcli, stand_ins, workers_of
from indexed_dataset import write_dataset
from marks import slow, slow_cases
from tiny import metrics, write_run

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.loading import load_config

STEPS = 6
KEYS = ["step", "consumed_samples", "tokens", "loss", "lr", "grad_norm", "loss_scale", "skipped"]
KEYS += ["step_seconds", "tokens_per_second", "mfu", "sync_bytes"]
KEYS += ["total_tokens", "total_seconds", "memory_bytes"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with data.bin/.idx and run.toml of a run in base/, which has been run."""
    folder = tmp_path_factory.mktemp("train")
    train = {"steps": STEPS, "output": str(folder / "base")}
    write_run(folder, data={"split": "80,20,0"}, train=train)
    return folder


@pytest.fixture(scope="module")
def base(home):
    """(output folder, stdout, stderr) of a run on one process that saves, evaluates and tracks."""
    settings = ["train.save_every=2", "train.eval_every=3", "train.eval_batches=1"]
    trackers = 'train.trackers=["tensorboard", "wandb"]'
    done = train(home, *settings, trackers)
    assert done.returncode == 0, done.stderr
    return home / "base", done.stdout, done.stderr


def words(home, *settings, flags=()):
    """The words after `mtcli` that train by run.toml with some settings."""
    sets = [word for setting in settings for word in ("--set", setting)]
    return ["train", str(home / "run.toml"), *sets, *flags]


def train(home, *settings, flags=(), by=mtcli):
    return by(*words(home, *settings, flags=flags), WANDB_MODE="disabled")


def losses(folder):
    return [row["loss"] for row in metrics(folder)]


def to(folder):
    return f'train.output="{folder}"'


def copied(base, tmp_path, step):
    """A copy of a run as it was after `step`, with the metrics of a run that went on and died."""
    shutil.copytree(base, tmp_path / "copy")
    for path in (tmp_path / "copy" / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    with (tmp_path / "copy" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    return tmp_path / "copy"


def test_a_run_folder_holds_config_metrics_and_the_newest_checkpoints(home, base):
    folder, out, _ = base
    assert load_config(str(folder)).train.save_every == 2
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["consumed_samples"] for row in rows] == [4 * n for n in range(1, STEPS + 1)]
    assert all([*row] == KEYS + ["valid_loss"] * (row["step"] % 3 == 0) for row in rows)
    assert {(row["loss_scale"], row["skipped"]) for row in rows} == {(1.0, False)}
    assert {row["mfu"] for row in rows} == {None}, "a CPU's peak is not known"
    others = ("lr", "skipped", "sync_bytes", "mfu")  # 0 of one rank, or at the end
    assert all(row[key] > 0.0 for row in rows for key in row if key not in others)
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(32 / row["step_seconds"])
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["step-00000004", "step-00000006"], "train.keep=2 of steps 2, 4 and 6"
    assert open_checkpoint(folder).step == STEPS


def test_numbers_come_first_and_the_checkpoint_last_on_stdout(base):
    folder, out, errors = base
    lines = out.splitlines()
    # 101 + 16 rows of 16, 4 * (12 * 16^2 + 13 * 16), and 2 * 16 (arXiv:2104.04473, equation 2)
    assert lines[0] == "model  gpt, 15,024 parameters"
    assert "1 rank: tp=1 pp=1 dp=1" in lines[1] and "32 tokens, fp32" in lines[2]
    assert f"run    {STEPS} steps, {STEPS * 32} tokens" in lines
    saves = [
        line
        for line in lines
        if line.startswith("saves  every 2 steps, 30 min after the last save")
    ]
    assert len(saves) == 1
    assert lines[-1] == f"wrote {folder}/checkpoints/step-00000006"
    assert "mfu" not in errors, "a CPU's peak is not known"
    line = next(line for line in errors.splitlines() if line.startswith(f"step {STEPS}/{STEPS} "))
    _, _, *figures = line.split(" ")
    told = dict(zip(figures[::2], figures[1::2], strict=True))
    row = metrics(folder)[-1]
    assert float(told["loss"]) == pytest.approx(row["loss"], abs=1e-4) and row["mfu"] is None
    assert float(told["valid"]) == pytest.approx(row["valid_loss"], abs=1e-4)
    assert float(told["tokens/s"]) == pytest.approx(row["tokens_per_second"], abs=1)
    assert float(told["memory_gib"]) > 0.1 and told["left"] == "0:00:00"


def test_tensorboard_reads_the_run_and_a_missing_tracker_only_warns(base):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _, errors = base
    (events,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    accumulator = EventAccumulator(str(events)).Reload()
    seen = [(event.step, event.value) for event in accumulator.Scalars("loss")]
    expected = [(row["step"], row["loss"]) for row in metrics(folder)]
    assert seen == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in expected]
    assert len(accumulator.Scalars("valid_loss")) == 2
    try:
        import wandb  # noqa: F401
    except ImportError:
        assert "warning: wandb is off" in errors


def test_a_run_goes_on_bit_for_bit_on_the_same_layout(home, base, tmp_path):
    again = copied(base[0], tmp_path, 4)
    done = train(home, to(again), "train.save_every=2", flags=["--resume"])
    assert done.returncode == 0, done.stderr
    assert f"{again}/checkpoints/step-00000004, step 4" in done.stdout
    assert losses(again) == losses(base[0]), "and the torn line of a killed run is gone"
    one, other = open_checkpoint(base[0]), open_checkpoint(again)
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.names())


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_run_prunes_the_checkpoint_that_it_has_resumed_from(nproc, home, base, tmp_path):
    again = copied(base[0], tmp_path, 4)
    flags = ["--resume", "--nproc", nproc]
    done = train(home, to(again), "train.keep=1", flags=flags, by=launched)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (again / "checkpoints").iterdir()] == ["step-00000006"]


def test_a_run_goes_on_with_the_same_curve_on_another_layout(home, base, tmp_path):
    again = copied(base[0], tmp_path, 4)
    layout = ["parallel.tp=2", "batch.micro_batch_size=2"]
    done = train(home, to(again), *layout, flags=["--resume", "--nproc", "2"], by=launched)
    assert done.returncode == 0, done.stderr
    assert losses(again) == pytest.approx(losses(base[0]), rel=1e-5)


def test_an_output_that_holds_a_run_is_refused_by_every_worker_in_one_voice(home, base):
    done = train(home, flags=["--nproc", "2"], by=launched)
    assert done.returncode == 2
    assert done.stderr.count(f"error: train.output: {base[0]} already holds a run") == 1
    assert "hint: --resume goes on from it" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("field", ["train", "valid"])
def test_an_id_that_the_vocabulary_lacks_ends_all_ranks_with_its_place(home, tmp_path, field):
    other = [np.full(40, 7), np.array([1, 2, 60_000, 3]), np.full(40, 7)]  # and no PREFIX.json
    write_dataset(tmp_path / "other", other, np.dtype("<i4"))
    settings = {
        "train": [f'data.train=["0.7", "{home}/data", "0.3", "{tmp_path}/other"]'],
        "valid": [f'data.valid=["{tmp_path}/other"]', "train.eval_every=1", "train.eval_batches=2"],
    }[field]
    done = train(home, to(tmp_path / "run"), *settings, flags=["--nproc", "2"], by=launched)
    where = f"{tmp_path}/other: token 2 of document 1 is id 60000, and vocab_size="
    assert done.returncode == 2
    assert done.stderr.count(f"error: model.vocab_size: {where}") == 1
    assert "Traceback" not in done.stderr


def test_an_output_that_cannot_be_a_folder_is_refused(home, tmp_path):
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "checkpoints").touch()
    for output, why in (
        ("taken", "File exists"),
        ("half", "File exists"),
        ("taken/x", "Not a dir"),
        ("x" * 300, "File name"),
    ):
        done = train(home, to(tmp_path / output))
        assert done.returncode == 2
        said = f"error: train.output: {tmp_path / output} cannot be written: {why}"
        assert said in done.stderr and "\nhint: " in done.stderr
    assert (tmp_path / "taken").read_text() == "mine"


def test_weights_of_another_run_start_a_new_one_at_step_0(home, base, tmp_path):
    done = train(home, to(tmp_path / "tuned"), "train.steps=1", flags=["--init", str(base[0])])
    assert done.returncode == 0, done.stderr
    (row,) = metrics(tmp_path / "tuned")
    assert row["step"] == 1 and row["loss"] < losses(base[0])[0]


@pytest.mark.parametrize(
    ("number", "to_workers", "nproc"),
    [
        (signal.SIGTERM, False, 1),
        (signal.SIGTERM, False, 2),
        *slow_cases(
            "three processes of their own, 9 s",
            (signal.SIGINT, True, 2),
            (signal.SIGHUP, True, 1),
            (signal.SIGHUP, False, 2),
            (signal.SIGQUIT, True, 2),
        ),
    ],
    ids=[
        "term",
        "term with workers",
        "ctrl-c with workers",
        "a lost terminal",
        "a launcher without its terminal",
        "quit with workers",
    ],
)
def test_a_signal_saves_and_ends_with_130(home, tmp_path, spawn, number, to_workers, nproc):
    folder = tmp_path / "long"
    line = words(home, to(folder), "train.steps=100000", flags=["--nproc", str(nproc)])
    process = spawn(*line, alone=to_workers)
    wait_for(process, lambda: lines_in(folder / "metrics.jsonl") >= 2)
    (os.killpg if to_workers else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "error" not in errors
    last = metrics(folder)[-1]["step"]
    assert open_checkpoint(folder).step == last
    said = rf"stopped by {number.name} after step {last:,} of 100,000; the last good checkpoint is "
    ranks = " --nproc 2" * (nproc > 1)
    assert said in errors and errors.endswith(f": mtcli train {folder}{ranks} --resume\n")


def test_a_killed_worker_is_named_and_the_last_checkpoint_kept(home, tmp_path, spawn):
    folder = tmp_path / "killed"
    settings = [to(folder), "train.steps=100000", "train.save_every=1", "train.timeout=30"]
    process = spawn(*words(home, *settings, flags=["--nproc", "2"]))
    wait_for(process, lambda: any((folder / "checkpoints").glob("step-*[0-9]")))
    os.kill(workers_of(process.pid)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "failed: it was killed by SIGKILL" in errors and "--resume" in errors
    assert "Traceback" not in errors
    assert open_checkpoint(folder).step >= 1


def wait_for(process, condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def lines_in(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


@slow("processes of their own, 7 s: a fork has chosen its temporary folder")
def test_several_processes_leave_nothing_in_the_temporary_folder(home, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    settings = [to(tmp_path / "run"), "train.steps=1"]
    command = [sys.executable, "-m", "mtcli", *words(home, *settings, flags=["--nproc", "2"])]
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = {path.name for path in temporary.iterdir()}
    assert left <= {f"mtcli-{os.getuid()}"}, "that is this user's own, until the next boot"


def test_torchrun_starts_it_and_bf16_keeps_float32_masters(home, tmp_path):
    folder = tmp_path / "torchrun"
    settings = [to(folder), "parallel.pp=2", 'train.precision="bf16"', "train.steps=8"]
    launcher = [stand_ins() / "torchrun", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [*launcher, "-m", "mtcli", *words(home, *settings, "optimizer.lr=1e-2")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 ranks: tp=1 pp=2 dp=1" in done.stdout
    assert losses(folder)[-1] < losses(folder)[0]
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype("embedding.weight") == torch.bfloat16
    assert checkpoint.dtype("optimizer.master/embedding.weight") == torch.float32


def test_slurm_tasks_find_each_other(home, base, tmp_path, spawn):
    job = free_port() % 12000  # its port, 20000 more, is none that a system gives to others
    place = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(job)}
    tasks = [
        spawn(*words(home, to(tmp_path / "slurm")), SLURM_PROCID=str(rank),
              SLURM_LOCALID=str(rank), **place)
        for rank in range(2)
    ]  # fmt: skip
    answers = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], answers
    assert "2 ranks: tp=1 pp=1 dp=2" in answers[0][0] and answers[1][0] == "", "rank 0 speaks"
    assert losses(tmp_path / "slurm") == pytest.approx(losses(base[0]), rel=1e-5)


def test_every_problem_of_a_layout_is_listed_at_once(home, tmp_path):
    settings = ["parallel.tp=3", "parallel.pp=3", "batch.global_batch_size=5", "model.lr=1"]
    done = train(home, *settings, flags=["--nproc", "4"], by=launched)
    assert done.returncode == 2 and done.stdout == ""
    assert "unknown key 'lr' in [model]" in done.stderr
    done = train(home, to(tmp_path / "x"), *settings[:3], flags=["--nproc", "4"], by=launched)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    for part in ("3*1*3 = 9", "tp=3 does not divide num_kv_heads=4", "num_layers=4"):
        assert part in done.stderr
    assert not (tmp_path / "x").exists()


def test_without_data_a_run_ends_with_2_and_writes_nothing(home, tmp_path):
    done = train(home, to(tmp_path / "x"), "data.train=[]")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: data.train: there is no training data" in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("layout", ["parallel.tp=1", "parallel.tp=3"])
def test_every_file_that_is_missing_is_named_at_once_and_with_the_layout_s_problems(home, layout):
    absent = ['data.train=["one", "two"]', 'data.valid=["three"]', "train.eval_every=1"]
    done = train(home, layout, *absent, flags=["--nproc", "1"])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(done.stderr.count(f"no file {name}.idx") == 1 for name in ("one", "two", "three"))
    assert ("tp=3 does not divide num_kv_heads=4" in done.stderr) is layout.endswith("3")
