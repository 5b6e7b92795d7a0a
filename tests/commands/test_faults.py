"""Faults of a run: no checkpoint is lost, the message is clear, and resuming gives the same curve.

Every drill ends with the undisturbed run's losses, bit for bit. Stalls are in test_stalls.py.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from functools import cache, partial
from pathlib import Path

import pytest
from command_line import mtcli
from drills import STEPS, Drill
from marks import slow, slow_cases

from mtcli.core.checkpoint.opening import open_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By number of ranks, a run that nothing happens to; tests leave it as it is."""

    def run(nproc):
        drill = Drill(tmp_path_factory.mktemp("whole"))
        assert drill.train(nproc=nproc).codes == [0] * nproc
        assert list(drill.losses()) == list(range(1, STEPS + 1))
        return drill

    return cache(run)


@pytest.fixture(scope="module")
def undisturbed(whole):
    """The losses of such a run."""
    return lambda nproc: whole(nproc).losses()


@pytest.fixture
def drill(tmp_path):
    return Drill(tmp_path)


def goes_on(drill, losses, nproc, *words):
    """Resumes a run, which then has the losses of one that nothing happened to."""
    resumed = drill.train("--resume", *words, nproc=nproc)
    assert resumed.codes == [0] * nproc, resumed.errors
    assert drill.losses() == losses
    assert open_checkpoint(drill.output).step == STEPS
    assert not list(drill.output.glob("checkpoints/*.partial"))


def before_step(rank, step, act, *, on):
    """On rank `on`, calls act(trainer) when a step begins, once the save before it is written."""
    if rank != on:
        return
    from mtcli.core.training.step import Trainer

    real = Trainer.forward_backward

    def faulty(self, *arguments, **settings):
        if self.step + 1 == step:
            _await_save(self)
            act(self)
        return real(self, *arguments, **settings)

    Trainer.forward_backward = faulty


def _await_save(trainer):
    train, end = trainer.config.train, time.monotonic() + 60.0
    last = trainer.step // train.save_every * train.save_every
    folder = Path(train.output) / "checkpoints" / f"step-{last:08d}"
    while last and not folder.exists():
        assert time.monotonic() < end, f"{folder} is not written"
        time.sleep(0.01)


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_rank_killed_in_a_step(drill, undisturbed):
    run = drill.train(nproc=2, fault=partial(before_step, step=8, act=kill, on=1))
    assert run.codes == [1, -signal.SIGKILL]
    assert "rank 1" in run.errors[0] and "--resume" in run.errors[0]
    assert drill.steps() == [3, 6]
    goes_on(drill, undisturbed(2), 2)


def test_a_run_that_dies_before_its_first_save_begins_anew_only_where_that_is_asked_for(
    drill, undisturbed
):
    unsaved = ["train.save_every=1000"]
    fault = partial(before_step, step=8, act=kill, on=1)
    run = drill.train(nproc=2, fault=fault, settings=unsaved)
    assert run.codes == [1, -signal.SIGKILL] and drill.steps() == []
    again = "hint: no checkpoint is saved yet: run the same command with --start-over\n"
    assert again in run.errors[0]
    refused = drill.train("--resume", nproc=2, settings=unsaved)
    said = f"{drill.output} holds a run that has come to step 7 and saved no checkpoint\n\nhint: "
    assert refused.codes == [2, 2] and f"{said}--start-over" in refused.errors[0]
    assert len(drill.losses()) == 7, "and nothing is lost"
    anew = drill.train("--start-over", nproc=2, settings=unsaved)
    assert anew.returncode == 0, anew.errors
    aside = drill.output / "metrics.superseded.jsonl"
    assert f"note: metrics of steps 1 to 7 are kept in {aside}\n" in anew.stderr
    assert drill.losses() == undisturbed(2) and aside.read_text().count("\n") == 7
    finished = drill.train("--start-over", nproc=2, settings=unsaved)
    assert finished.returncode == 2 and "already holds a run" in finished.stderr


REPLICAS = {
    "lsgd": ["sync.method=lsgd", "sync.period=2", "optimizer.name=sgd", "optimizer.momentum=0.9"],
    "diloco": ["sync.method=diloco", "sync.period=2"],
}


@pytest.mark.parametrize(
    ("method", "nproc", "who", "start"),
    [
        ("diloco", 4, "all 4 replicas start", "the outer weights"),
        *slow_cases("four runs, 3 s", ("lsgd", 1, "the run goes on", "their average")),
    ],
)
def test_a_replica_killed_between_exchanges_and_one_or_three_others_that_go_on(
    tmp_path, method, nproc, who, start
):
    """The others wait for it and end; as many go on as if nothing had been, others from one start:
    DiLoCo's from the outer weights, LSGD's from the average."""
    sync, whole, drill = REPLICAS[method], Drill(tmp_path / "whole"), Drill(tmp_path / "killed")
    assert whole.train(nproc=2, settings=sync).codes == [0, 0]
    run = drill.train(nproc=2, settings=sync, fault=partial(before_step, step=8, act=kill, on=1))
    assert run.codes == [1, -signal.SIGKILL] and "--resume" in run.errors[0]
    assert drill.steps() == [3, 6]
    other = drill.folder / "other"
    shutil.copytree(drill.output, other)
    resumed = drill.train("--resume", nproc=nproc, settings=[*sync, f"train.output={other}"])
    assert resumed.codes == [0] * nproc, resumed.errors
    assert f"note: the checkpoint has 2 replicas: {who} from {start}\n" in resumed.errors[0]
    assert open_checkpoint(other).step == STEPS
    resumed = drill.train("--resume", nproc=2, settings=sync)
    assert resumed.codes == [0, 0] and drill.losses() == whole.losses()


def gone_while_meeting(rank):
    """Rank 0, whose store the ranks meet by, is killed before they all have."""
    from mtcli.core.runtime.attempts import Meeting

    if rank == 0:
        Meeting._convene = kill


@slow("a rank that waits for another, 3 s")
def test_a_rank_killed_while_ranks_meet(tmp_path):
    drill = Drill(tmp_path, timeout=3.0)  # rank 1 waits as long for each of what it might reach
    run = drill.train(nproc=2, fault=gone_while_meeting)
    assert run.codes == [-signal.SIGKILL, 1]
    said = "error: rank 1 does not reach another rank, or the run's store at localhost, port "
    assert said in run.errors[1] and "--resume" in run.errors[1]


def in_save(rank, name, act, *, on, calls):
    """On rank `on`, calls act() in place of one call of a function of the store's."""
    if rank != on:
        return
    from mtcli.core.checkpoint import store

    real, count = getattr(store, name), 0

    def faulty(*arguments):
        nonlocal count
        count += 1
        if count == calls:
            act(*arguments)
        return real(*arguments)

    setattr(store, name, faulty)


def half_written(folder, *_):
    (folder / "rank-00001.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    kill()


@pytest.mark.parametrize(
    ("name", "act", "on"),
    [
        ("commit", kill, 0),
        *slow_cases("2 s each", ("write_shards", half_written, 1), ("replace_folder", kill, 0)),
    ],
)
def test_a_rank_killed_in_a_save(drill, undisturbed, name, act, on):
    run = drill.train(nproc=2, fault=partial(in_save, name=name, act=act, on=on, calls=2))
    assert run.codes[on] == -signal.SIGKILL and run.codes[1 - on] == 1
    assert f"rank {on}" in run.errors[1 - on] and "--resume" in run.errors[1 - on]
    assert drill.steps() == [3] and drill.checkpoint(6).with_suffix(".partial").is_dir()
    goes_on(drill, undisturbed(2), 2)


def slow_disk(rank, seconds, *, on):
    """On rank `on`, every tensor of a save takes its time."""
    if rank != on:
        return
    from mtcli.core.checkpoint.blocks import BlockWriter

    write = BlockWriter.write

    def slow(self, data):
        time.sleep(seconds)
        write(self, data)

    BlockWriter.write = slow


@slow("two saves of 3 s")
def test_a_save_that_takes_longer_than_the_timeout_ends_no_run(tmp_path, undisturbed):
    drill = Drill(tmp_path, timeout=2.0)
    fault = partial(slow_disk, seconds=0.025, on=0)
    run = drill.train(nproc=2, fault=fault, settings=["train.save_every=5"])
    assert run.codes == [0, 0], run.errors
    rows = map(json.loads, (drill.output / "events.jsonl").read_text().splitlines())
    seconds = [row["write_seconds"] for row in rows if row["event"] == "saved"]
    assert len(seconds) == 2 and min(seconds) > 3.0, seconds
    assert drill.losses() == undisturbed(2) and drill.steps() == [5, 9]


def test_a_signal_to_stop(drill, undisturbed):
    run = drill.train(nproc=2, fault=partial(before_step, step=5, act=terminate, on=1))
    assert run.codes == [130, 130]
    assert drill.steps() == [3, 5]
    goes_on(drill, undisturbed(2), 2)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def damages(path):
    """Damages a checkpoint's file of tensors in each way that there is, and says how."""
    sound = path.read_bytes()
    flipped = bytearray(sound)
    flipped[-1000] ^= 4  # among the weights, whose file is smaller than a block
    path.unlink()
    yield "missing"
    for how, data in (("truncated", sound[:-100]), ("flipped", flipped)):
        path.write_bytes(data)
        yield how


def test_a_damaged_newest_checkpoint(whole):
    """It starts no run either, and without it the run goes on from the one before."""
    finished = whole(1)
    losses, file = finished.losses(), finished.checkpoint(9) / "rank-00000.safetensors"
    offer = f"the checkpoint before it is whole: {finished.checkpoint(6)}; move step-00000009 away"
    for how in damages(file):
        refused = finished.train("--resume", settings=["train.steps=10"])
        assert refused.codes == [2], how
        assert f"error: {file} is damaged: " in refused.errors[0] and offer in refused.errors[0]
    other = [f"train.output={finished.folder / 'other'}"]
    refused = finished.train("--init", str(finished.checkpoint(9)), settings=other)
    assert refused.codes == [2] and f"error: {file} is damaged: " in refused.errors[0]
    shutil.rmtree(finished.checkpoint(9))
    goes_on(finished, losses, 1)


def test_a_checkpoint_of_another_model_or_run(whole):
    """Every field that may not change is named, with both values; nothing is written."""
    finished, losses = whole(1), whole(1).losses()
    fields = ["model.hidden_size=32", "seed=8", "batch.global_batch_size=8"]
    refused = finished.train("--resume", settings=fields)
    assert refused.codes == [2]
    changes = {"seed": (7, 8), "batch.global_batch_size": (4, 8), "model.hidden_size": (16, 32)}
    for field, (old, new) in changes.items():
        said = f"error: {field}: it is {new}, and the run was trained with {old}\n"
        assert said in refused.errors[0]
    assert finished.losses() == losses and finished.steps() == [3, 6, 9]


def not_a_number(rank, step, *, on):
    """On rank `on`, the last MLP gives what is not a number in micro-batch 1 of a step."""
    before_step(rank, step, _break, on=on)


def _break(trainer):
    def hook(module, inputs, output):
        op = trainer.pipeline.current
        return output * float("nan") if op is not None and op.micro_batch == 1 else output

    trainer.stages[0].blocks["3"].mlp.register_forward_hook(hook)


def test_a_value_that_is_not_a_number(drill, undisturbed):
    run = drill.train(nproc=2, fault=partial(not_a_number, step=5, on=1))
    assert run.codes == [1, 1]
    where = "first the output of blocks.3.mlp on rank 1, micro-batch 1, "
    assert "error: step 5: loss nan" in run.errors[0] and where in run.errors[0]
    assert drill.steps() == [3]
    goes_on(drill, undisturbed(2), 2)


@slow("a stall of 3 s")
def test_a_rank_that_stalls(tmp_path, undisturbed):
    drill = Drill(tmp_path, timeout=3.0)
    run = drill.train(nproc=2, fault=partial(before_step, step=5, act=_sleep, on=1))
    assert run.codes == [1, 1]
    assert "rank 1 is absent" in run.errors[0] and "--resume" in run.errors[0]
    goes_on(drill, undisturbed(2), 2)


def _sleep(_):
    time.sleep(1000.0)


def test_a_disk_that_is_full_in_a_save(tmp_path, small_disk, undisturbed):
    drill = Drill(tmp_path)
    os.symlink(small_disk, drill.output)
    fill = partial(before_step, step=5, act=partial(_fill, small_disk), on=0)
    run = drill.train(fault=fill)
    assert run.codes == [1] and "No space left on device" in run.errors[0]
    assert drill.steps() == [3]
    (small_disk / "filler").unlink()
    goes_on(drill, undisturbed(1), 1)


def _fill(folder, _):
    """Leaves 16 KiB of a disk free."""
    free = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(bytes(free - 2**14))


def test_a_disk_that_is_full_in_preprocess(tmp_path, small_disk):
    (tmp_path / "text.txt").write_text("all the world is a stage\n" * 20_000)
    words = ["preprocess", tmp_path / "text.txt", "--tokenizer", "bytes"]
    words += ["--output", small_disk / "data"]
    (small_disk / "filler").write_bytes(bytes(2_800_000))
    full = mtcli(*words)
    assert full.returncode == 1 and "No space left on device" in full.stderr
    assert not [path for path in small_disk.iterdir() if path.suffix in (".bin", ".idx", ".json")]
    (small_disk / "filler").unlink()
    again = mtcli(*words, "--resume")
    assert again.returncode == 0, again.stderr
