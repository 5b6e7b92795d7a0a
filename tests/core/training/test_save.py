"""Saves beside training: what is on disk after them, what the run says, and what faults leave."""

import io
import json
import os
import re
import shutil
import signal
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from indexed_dataset import write_dataset
from marks import slow
from ranks import run_ranks
from tiny import GPT, LLAMA, documents, metrics, run_config

from mtcli.core.checkpoint import async_save, store
from mtcli.core.checkpoint.async_save import Snapshot
from mtcli.core.checkpoint.integrity import verify_hashes
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import Shard
from mtcli.core.config.errors import MtcliError, failed
from mtcli.core.data.indexed import token_dtype
from mtcli.core.training.loop import train
from mtcli.core.training.run_log import RunLog
from mtcli.core.training.step import Trainer

EVERY_2 = {"steps": 6, "save_every": 2, "keep": 0}


@pytest.fixture
def config_for(tmp_path):
    """A function from an output's name, sections and a model to the config of a run on disk."""
    write_dataset(tmp_path / "data", documents(), token_dtype(101))

    def make(output, model=GPT, **sections):
        output = {"output": str(tmp_path / output)}
        sections["train"] = EVERY_2 | output | sections.get("train", {})
        return run_config(model, data={"train": [str(tmp_path / "data")]}, **sections)

    return make


def told(runtime, config, fault=None, resume=False):
    """(finished, or the error and its code; the events; stderr) of a run, with a fault put in."""
    if fault is not None:
        fault(runtime, Path(config.train.output))
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            answer = train(config, runtime, resume=resume)
        except MtcliError as error:
            answer = str(error), int(error.code)
    lines = (Path(config.train.output) / "events.jsonl").read_text().splitlines()
    return answer, [json.loads(line) for line in lines], said.getvalue()


def before_writing(do):
    """Has `do(path)` called before each tensor file is written."""
    write = store.write_tensors

    def with_it(path, *rest):
        do(path)
        return write(path, *rest)

    store.write_tensors = with_it


def saved(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def step(number):
    return f"step-{number:08d}"


def until_two_steps_on(runtime, output):
    """The first file waits until training has made two steps more."""

    def wait(path):
        end = time.monotonic() + 60.0
        while step(2) in str(path) and (output / "metrics.jsonl").read_text().count("\n") < 4:
            assert time.monotonic() < end, "training stands still"
            time.sleep(0.01)

    before_writing(wait)


@slow("six runs")
@pytest.mark.parametrize(
    ("world", "model", "parallel", "precision"),
    [
        (1, GPT, {}, "fp32"),
        (2, LLAMA, {"zero": 1}, "fp16"),
        (2, LLAMA, {"zero": 3}, "bf16"),
    ],
    ids=str,
)
def test_training_goes_on_while_the_bytes_of_a_synchronous_save_are_written(
    config_for, world, model, parallel, precision
):
    found = {}
    for mode in (False, True):
        settings = {"precision": precision, "async_save": mode}
        config = config_for(f"run-{mode}", model, parallel=parallel, train=settings)
        fault = until_two_steps_on if mode else None
        answer, events, _ = run_ranks(world, told, config, fault)[0]
        assert answer is True and [event["event"] for event in events] == ["saved"] * 3
        folder = Path(config.train.output) / "checkpoints"
        files = sorted(folder.rglob("rank-*.safetensors"))
        found[mode] = {str(file.relative_to(folder)): file.read_bytes() for file in files}
        sizes = [event["bytes"] for event in events]
        assert sizes == [sum(t.nbytes for t in tensors(folder, s)) for s in (2, 4, 6)]
    assert found[True] == found[False] and len(found[True]) == 3 * world


def tensors(folder, number):
    checkpoint = open_checkpoint(folder / step(number))
    return [checkpoint.read(name) for name in checkpoint.names()]


def slow(runtime, output):
    before_writing(lambda path: time.sleep(0.4))


@pytest.mark.parametrize("mode", [True, False], ids=["async", "sync"])
def test_the_stall_is_the_snapshot_and_the_wait_for_the_save_before(config_for, mode):
    config = config_for("run", train={"steps": 2, "save_every": 1, "async_save": mode})
    _, events, said = run_ranks(1, told, config, slow)[0]
    stalls = [event["stall_seconds"] for event in events]
    assert all(event["write_seconds"] > 0.4 for event in events)
    if not mode:  # beside training a save waits for as much of this as the next step leaves
        assert stalls[0] > 0.4
    assert (stalls[1] > 0.4) == (not mode), "after the last step nothing stands still"
    text = f"saved {config.train.output}/checkpoints/{step(1)}: {events[0]['bytes']:,} bytes"
    assert f"{text}, training waited {stalls[0]:.3f} s, written in " in said


def ruined_at_4(runtime, output):
    """Weights of rank 0 become infinite in the fourth step, and from then on all skip."""
    real = Trainer.train_step

    def train_step(self, loader):
        step = real(self, loader)
        if step.step == 4 and runtime.rank == 0:
            shard = next(iter(self.strategy.shards.values()))
            shard.tensor.fill_(float("inf"))
        return step

    Trainer.train_step = train_step


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"zero": 0}], ids=str)
def test_a_run_ends_after_so_many_skips_in_a_row_and_keeps_the_last_good_checkpoint(
    config_for, parallel
):
    limits = {"steps": 40, "keep": 1, "on_nonfinite": "skip", "max_skips": 5}
    config = config_for("run", parallel=parallel, train=limits)
    answer, events, said = run_ranks(2, told, config, ruined_at_4)[0]
    text, code = answer
    good = Path(config.train.output) / "checkpoints" / step(2)
    assert code == 1 and text.startswith(
        "error: step 9: 5 batches in a row were skipped, as many as train.max_skips allows\n\n"
        f"hint: the last good checkpoint is {good}: run the same command with --resume, and a "
    )
    assert saved(Path(config.train.output)) == [step(2)]
    failures = [(event["step"], event["last_good"]) for event in events
                if event["event"] == "save_failed"]  # fmt: skip
    assert failures == [(4, str(good)), (6, str(good)), (8, str(good))]
    assert "holds a value that is not finite" in events[1]["reason"]


def full_at_4(runtime, output):
    """Rank 1's disk is full at step 4."""

    def refuse(path):
        if step(4) in str(path) and runtime.rank == 1:
            raise OSError(28, "No space left on device", str(path))

    before_writing(refuse)


def too_large_at_4(runtime, output):
    """Rank 1 may write no file so large at step 4; a write that is refused knows no name."""

    def refuse(path):
        if step(4) in str(path) and runtime.rank == 1:
            raise OSError(27, "File too large")

    before_writing(refuse)


def no_memory_at_4(runtime, output):
    """Rank 1 has no memory for its second snapshot."""
    take = Snapshot.take
    calls = []

    def refuse(self, pieces):
        calls.append(1)
        if len(calls) == 2 and runtime.rank == 1:
            raise MemoryError("5 bytes of host memory: Cannot allocate memory")
        return take(self, pieces)

    Snapshot.take = refuse


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (full_at_4, r"No space left on device: the checkpoint takes \d+ bytes and \d+ are free"),
        (too_large_at_4, rf"/run/checkpoints/{step(4)}\.partial: File too large\)"),
        (no_memory_at_4, r"there is no room for a snapshot of 5 bytes of host memory"),
    ],
)
def test_a_save_that_fails_on_one_rank_leaves_the_run_and_the_checkpoint_before(
    config_for, fault, reason
):
    config = config_for("run", parallel={"tp": 2}, batch={"micro_batch_size": 2})
    (answer, events, said), (_, _, other) = run_ranks(2, told, config, fault)
    folder = Path(config.train.output)
    assert answer is True and saved(folder) == [step(2), step(6)]
    assert [(e["event"], e["step"]) for e in events] == [
        ("saved", 2), ("save_failed", 4), ("saved", 6),
    ]  # fmt: skip
    good = str(folder / "checkpoints" / step(2))
    assert events[1]["last_good"] == good
    (line,) = [line for line in said.splitlines() if "warning" in line]
    assert line.startswith("warning: step 4: the checkpoint was not saved (rank 1: ")
    assert line.endswith(f"the run goes on, the last good one is {good}")
    assert re.search(reason, line) and re.search(reason, events[1]["reason"])
    assert "warning" not in other, "rank 0 speaks"


def no_room_at_3(runtime, output):
    """The line of step 3 finds a full disk."""
    append = RunLog.step

    def refuse(self, step, *rest):
        records, file = self.records, self.records.metrics
        records.metrics = Full(file) if step.step == 3 else file
        append(self, step, *rest)
        records.metrics = file

    RunLog.step = refuse


class Full:
    """A file whose disk is full: what is written stays in the buffer."""

    def __init__(self, file):
        self.name, self.write = file.name, file.write

    def flush(self):
        raise OSError(28, "No space left on device")


def test_records_that_find_no_room_leave_the_run_and_are_said_once(config_for):
    config = config_for("run")
    answer, _, said = run_ranks(1, told, config, no_room_at_3)[0]
    assert answer is True and said.count("warning: ") == 1
    assert "metrics.jsonl: No space left on device; the run goes on" in said
    rows = metrics(Path(config.train.output))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6], "late, and all there"


def full_from_4(runtime, output):
    def refuse(path):
        if step(2) not in str(path):
            raise OSError(28, "No space left on device", str(path))

    before_writing(refuse)


def always_full(runtime, output):
    def refuse(path):
        raise OSError(28, "No space left on device", str(path))

    before_writing(refuse)


@pytest.mark.parametrize(
    ("fault", "good"), [(full_from_4, step(2)), (always_full, None)], ids=["one", "none"]
)
def test_a_run_whose_last_save_fails_ends_with_1_and_names_the_last_good_one(
    config_for, fault, good
):
    config = config_for("run")
    (message, code), events, _ = run_ranks(1, told, config, fault)[0]
    assert code == 1
    assert message.startswith("error: step 6: the checkpoint was not saved (rank 0: ")
    folder = Path(config.train.output) / "checkpoints"
    expected = f"the last good checkpoint is {folder / good}" if good else "there is no good"
    assert f"hint: {expected}" in message
    assert saved(folder.parent) == ([good] if good else [])


def gone_at_4(runtime, output):
    """Somebody removes the folder of checkpoints while step 4 is written."""
    before_writing(lambda path: shutil.rmtree(path.parents[1]) if step(4) in str(path) else None)


def test_a_folder_that_is_removed_during_a_save_is_made_again_by_the_next(config_for):
    config = config_for("run")
    answer, events, _ = run_ranks(1, told, config, gone_at_4)[0]
    assert answer is True and saved(Path(config.train.output)) == [step(6)]
    assert events[1]["event"] == "save_failed" and "No such file" in events[1]["reason"]


def killed_at_4(runtime, output):
    def kill(path):
        if step(4) in str(path):
            path.write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)

    before_writing(kill)


def test_a_run_killed_while_its_thread_writes_goes_on_from_the_checkpoint_before(config_for):
    config = config_for("run")
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, told, config, killed_at_4)
    folder = Path(config.train.output)
    assert saved(folder) == [step(2), step(4) + ".partial"]
    checkpoint = open_checkpoint(folder)
    verify_hashes(checkpoint)
    assert checkpoint.step == 2
    answer, events, _ = run_ranks(1, told, config, None, True)[0]
    assert answer is True and saved(folder) == [step(2), step(4), step(6)]
    found = [(event["event"], event["step"]) for event in events]
    assert found == [("saved", 2), ("resumed", 2), ("saved", 4), ("saved", 6)]


def slow_before_an_error(runtime, output):
    def train_step(self, loader):
        if self.step == 1:
            raise failed("the second step")
        return real(self, loader)

    slow(runtime, output)
    real, Trainer.train_step = Trainer.train_step, train_step


def test_an_error_in_training_waits_for_the_save_in_flight(config_for):
    config = config_for("run", train={"save_every": 1})
    (message, code), events, _ = run_ranks(1, told, config, slow_before_an_error)[0]
    assert code == 1 and message.startswith("error: the second step")
    assert [(event["event"], event["step"]) for event in events] == [("saved", 1), ("failed", 1)]
    assert events[1]["reason"] == "the second step"
    verify_hashes(open_checkpoint(Path(config.train.output)))


def test_a_snapshot_is_a_copy_in_memory_that_is_used_again():
    held = Snapshot(torch.device("cpu"))
    tensors = [
        torch.arange(5.0),
        torch.ones(3, 2).bfloat16(),
        torch.ones(0),
        torch.ones(4).view(2, 2).T,
    ]
    pieces = [Shard(str(i), t, (0,) * t.dim(), tuple(t.shape)) for i, t in enumerate(tensors)]
    taken = held.take(pieces).shards
    expected = [t.clone() for t in tensors]
    for tensor in tensors:
        tensor.fill_(9.0)
    assert all(torch.equal(p.tensor, e) for p, e in zip(taken, expected, strict=True))
    first = taken[0].tensor.data_ptr()
    again = held.take(pieces).shards
    assert again[0].tensor.data_ptr() == first and again[0].tensor.tolist() == [9.0] * 5
    assert [p.tensor.dtype for p in again] == [t.dtype for t in tensors]


def test_memory_that_was_reserved_is_what_the_first_snapshot_uses():
    held = Snapshot(torch.device("cpu"))
    pieces = [Shard("x", torch.arange(100.0), (0,), (100,))]
    held.reserve(pieces)
    held.close()
    assert len(held.memory) == 448 and not held.memory.any()
    place = held.memory.data_ptr()
    (taken,) = held.take(pieces).shards
    assert taken.tensor.data_ptr() == place and torch.equal(taken.tensor, torch.arange(100.0))


def test_a_snapshot_without_memory_says_how_much_it_needs(monkeypatch):
    def refuse(size):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(async_save, "aligned_bytes", refuse)
    piece = Shard("x", torch.ones(100), (0,), (100,))
    held = Snapshot(torch.device("cpu"))
    held.reserve([piece])
    with pytest.raises(MemoryError, match="448 bytes of host memory: .*Cannot allocate memory"):
        held.take([piece])


def interrupted_at_3(runtime, output):
    """A second Ctrl-C comes while a slow disk has not written step 2."""
    before_writing(lambda path: time.sleep(1000.0))
    train_step = Trainer.train_step

    def interrupted(self, loader):
        if self.step == 2:
            raise KeyboardInterrupt
        return train_step(self, loader)

    Trainer.train_step = interrupted


def test_a_second_signal_ends_a_run_without_waiting_for_the_disk(config_for):
    with pytest.raises(AssertionError, match="died without a word"):  # not: did not end in time
        run_ranks(1, told, config_for("run"), interrupted_at_3)
