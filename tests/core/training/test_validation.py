"""Which checkpoints a run keeps by its validation loss, and when it ends early."""

import errno
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from indexed_dataset import write_dataset
from ranks import run_ranks
from tiny import documents, metrics, run_config

from mtcli.core.checkpoint import store
from mtcli.core.checkpoint.folder import find_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import TrainConfig
from mtcli.core.data.indexed import token_dtype
from mtcli.core.training.loop import train
from mtcli.core.training.state import StartingPoint
from mtcli.core.training.step import Trainer
from mtcli.core.training.validation import ValidationLosses

EVERY = 2
LOSSES = dict(zip(range(EVERY, 21, EVERY), [5, 4, 6, 4.5, 3, 3.5, 7, 3, 2.5, 9], strict=True))


@pytest.fixture
def config_for(tmp_path):
    """A function from an output's name and fields of [train] to the config of a run on disk."""
    write_dataset(tmp_path / "data", documents(), token_dtype(101))

    def make(output, **fields):
        fields = {"steps": 20, "eval_every": EVERY, "output": str(tmp_path / output)} | fields
        data = {"train": [str(tmp_path / "data")], "split": "80,20,0"}
        return run_config(data=data, train=fields)

    return make


def run(runtime, config, losses=None, faults=(), resume=False):
    """(result or error, stdout, stderr) of a run whose validation losses are given by step.

    `faults` are steps that raise: a negative one's save, or else the step itself.
    """
    evaluate, step, commit = Trainer.evaluate, Trainer.train_step, store.commit
    if losses:
        Trainer.evaluate = lambda self, valid: losses[self.step]

    def train_step(self, loader):
        if self.step + 1 in faults:
            raise RuntimeError("killed")
        return step(self, loader)

    def commit_or_fail(partial, *rest):
        if -int(partial.name[5:13]) in faults:
            raise OSError(errno.ENOSPC, "No space left on device", str(partial))
        commit(partial, *rest)

    Trainer.train_step, store.commit = train_step, commit_or_fail
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            answer = train(config, runtime, resume=resume)
        except (MtcliError, RuntimeError) as error:
            answer = str(error)
    Trainer.evaluate, Trainer.train_step, store.commit = evaluate, step, commit
    return answer, out.getvalue(), err.getvalue()


def steps_in(config):
    """(the steps of a run's checkpoints, that of the link `best` or None)."""
    root = Path(config.train.output) / "checkpoints"
    link = root / "best"
    steps = sorted(int(path.name[5:]) for path in root.glob("step-*") if not path.is_symlink())
    return steps, int(link.readlink().name[5:]) if link.is_symlink() else None


def by_brute_force(keep, keep_best, save_every=0, until=20):
    """The checkpoints and the best one after all saves, each time by looking at all losses."""
    there = set()
    for step in range(1, until + 1):
        seen = {s: loss for s, loss in LOSSES.items() if s <= step}
        by_loss = sorted(seen, key=lambda s: (seen[s], s))
        due = step == 20 or (save_every and step % save_every == 0)
        if due or (step in seen and step in by_loss[:keep_best]):
            there.add(step)
            best = [s for s in by_loss if s in there][:keep_best]
            newest = sorted(there)[-keep:] if keep else there
            there = {*newest, *best}
    return sorted(there), best[0] if best else None


KEPT = [
    {"keep": 1, "keep_best": 1},
    {"keep": 2, "keep_best": 3, "save_every": 5},
    {"keep": 1, "keep_best": 2, "save_every": 4},
    {"keep": 0, "keep_best": 1, "save_every": 3},
    {"keep": 1, "keep_best": 0},
]


@pytest.mark.parametrize("fields", KEPT, ids=str)
def test_the_best_checkpoints_stay_beside_the_newest(config_for, fields):
    config = config_for("run", **fields)
    assert run_ranks(1, run, config, LOSSES)[0][0] is True
    assert steps_in(config) == by_brute_force(**fields)


@pytest.mark.parametrize("killed", [7, 11, 18])
def test_a_run_that_is_killed_and_resumed_keeps_what_one_that_is_not_does(config_for, killed):
    fields = KEPT[1]
    config = config_for("run", **fields)
    (answer,) = run_ranks(1, run, config, LOSSES, (killed,))
    assert answer[0] == "killed"
    assert steps_in(config) == by_brute_force(**fields, until=killed - 1)
    assert run_ranks(1, run, config, LOSSES, (), True)[0][0] is True
    assert steps_in(config) == by_brute_force(**fields)


def test_the_best_before_stays_where_the_save_of_a_better_one_fails(config_for):
    config = config_for("run", keep=1, keep_best=1)
    ((answer, _, said),) = run_ranks(1, run, config, LOSSES, (-18,))
    assert answer is True and "No space left on device" in said
    assert steps_in(config) == ([10, 20], 10), "step 18 has the lowest loss, and no checkpoint"


def test_the_best_is_opened_by_its_link_under_the_name_of_its_step(config_for):
    config = config_for("run", keep=1, keep_best=1)
    run_ranks(1, run, config, LOSSES)
    root = Path(config.train.output) / "checkpoints"
    assert find_checkpoint(root / "best").folder == root / "step-00000018"
    assert find_checkpoint(Path(config.train.output)).folder == root / "step-00000020"


def test_the_link_goes_with_the_best_checkpoints_of_a_run_that_keeps_none(config_for):
    config = config_for("run", keep=1, keep_best=1, steps=10)
    run_ranks(1, run, config, LOSSES)
    assert steps_in(config)[1] == 10
    config = config_for("run", keep=1, keep_best=0)
    run_ranks(1, run, config, LOSSES, (), True)
    assert steps_in(config) == ([20], None)


def test_another_s_link_of_that_name_stays_in_a_run_that_keeps_no_best(config_for, tmp_path):
    config = config_for("run", keep=1, steps=4)
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    (root / "best").symlink_to(tmp_path)
    run_ranks(1, run, config, LOSSES)
    assert (root / "best").readlink() == tmp_path


def test_a_run_ends_after_so_many_evaluations_without_a_lower_loss(config_for):
    config = config_for("run", keep=1, keep_best=1, patience=3)
    ((answer, out, err),) = run_ranks(1, run, config, LOSSES)
    early = "stopped early at step 16, as valid_loss was not below 3.0000 of step 10 in 3 "
    early += "evaluations"
    assert answer is True and f"finished: {early}\n" in err
    assert out.endswith(f"wrote {config.train.output}/checkpoints/step-00000016\n")
    assert steps_in(config) == ([10, 16], 10)
    event = json.loads((Path(config.train.output) / "events.jsonl").read_text().splitlines()[-1])
    assert event["event"] == "stopped_early" and event["step"] == 16
    assert [row["step"] for row in metrics(Path(config.train.output))][-1] == 16

    ((answer, out, _),) = run_ranks(1, run, config, LOSSES, (), True)
    assert (
        answer is True and f"nothing to do: finished: {early}; set a larger train.patience" in out
    )
    assert steps_in(config) == ([10, 16], 10)

    longer = config_for("run", keep=1, keep_best=1, patience=4)
    assert run_ranks(1, run, longer, LOSSES, (), True)[0][0] is True
    assert steps_in(longer) == ([18, 20], 18), "step 18 is lower, so that the run goes to its end"


def test_patience_counts_on_through_a_kill(config_for):
    config = config_for("run", keep=1, patience=3, save_every=1)
    run_ranks(1, run, config, LOSSES, (15,))
    ((_, _, err),) = run_ranks(1, run, config, LOSSES, (), True)
    assert "stopped early at step 16" in err


def test_several_ranks_agree_on_the_best_and_on_the_end(config_for):
    config = config_for("run", keep=1, keep_best=2, patience=3)
    answers = run_ranks(2, run, config)
    assert [answer for answer, *_ in answers] == [True, True]
    rows = [row for row in metrics(Path(config.train.output)) if "valid_loss" in row]
    losses = {row["step"]: row["valid_loss"] for row in rows}
    best = sorted(losses, key=losses.get)[:2]
    newest = max(losses)
    assert steps_in(config) == (sorted({*best, newest}), best[0])


def test_a_loss_that_is_not_finite_is_no_better():
    losses = ValidationLosses(TrainConfig(patience=2, keep_best=1), StartingPoint(None, False))
    assert not losses.note(1, float("nan")) and "not finite" in str(losses)
    assert losses.note(2, 4.0) and not losses.note(3, float("inf")) and not losses.has_ended
    assert not losses.note(4, 4.0) and losses.has_ended, "as low is not lower"
    assert str(losses) == "valid_loss was not below 4.0000 of step 2 in 2 evaluations"
