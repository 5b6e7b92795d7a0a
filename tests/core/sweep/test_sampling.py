"""Optuna's proposals: within the ranges, told of their losses, and the same study after a stop."""

import sys

import pytest
from tiny import write_run

from mtcli.core.config.errors import MtcliError
from mtcli.core.sweep.sampling import Proposals, SamplingPlan
from mtcli.core.sweep.trials import SweepSpace

optuna = pytest.importorskip("optuna")


OF = '"worker_id": "w", "study_id": 0, "trial_id": 1'
DEEP = [
    f'{{"op_code": 2, {OF}, "user_attr": {{"x": @}}}}',  # of the study
    f'{{"op_code": 8, {OF}, "user_attr": {{"x": @}}}}',  # of a trial
    f'{{"op_code": 9, {OF}, "system_attr": {{"x": @}}}}',
]


def proposals(folder, trials, seed="seed=3,4"):
    space = SweepSpace(str(write_run(folder)), [], folder / "out")
    fields = ("optimizer.lr=1e-4..1e-1", "optimizer.warmup_steps=0..5", seed)
    return Proposals(SamplingPlan("tpe", space.read(fields), trials, seed=1), folder)


def test_a_study_proposes_legal_trials_and_is_told_their_losses(tmp_path):
    study = proposals(tmp_path, 40)
    seen = []
    while asked := study.ask(4):
        assert len(asked) == 4
        for number, values in asked:
            rate = values["optimizer.lr"]
            assert 1e-4 <= rate <= 1e-1 and values["seed"] in (3, 4)
            assert values["optimizer.warmup_steps"] in range(6)
            seen.append(rate)
            study.tell(number, None if rate > 0.05 else abs(rate - 0.01))
    assert len(seen) == 40
    states = [trial.state.name for trial in study.study.trials]
    assert states.count("FAIL") == sum(rate > 0.05 for rate in seen)
    assert study.study.best_value == min(abs(rate - 0.01) for rate in seen)


def test_what_was_asked_and_not_told_is_proposed_again(tmp_path):
    before = proposals(tmp_path, 5)
    told, *waiting = before.ask(3)
    before.tell(told[0], 1.0)
    after = proposals(tmp_path, 5)
    assert after.ask(2) == waiting
    new = after.ask(9)[2:]
    assert len(new) == 2 and told[1] not in [values for _, values in new]
    assert after.done() == [told[1]]
    with pytest.raises(MtcliError, match="the study of other fields or values"):
        proposals(tmp_path, 5, seed="seed=3,5")


@pytest.mark.parametrize("left", [1, 2, 20, -1])
def test_a_study_whose_last_line_was_cut_goes_on_without_it(tmp_path, left):
    """Optuna says of such a file that it is no log, and all trials would be lost."""
    asked = proposals(tmp_path, 5).ask(2)
    log = tmp_path / "optuna.log"
    *lines, last = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines) + last[:left])
    again = proposals(tmp_path, 5).ask(2)
    assert again[0] == asked[0] and len(again) == 2
    assert log.read_bytes().startswith(b"".join(lines))


@pytest.mark.parametrize("text", ["garbage\n{}\n", "{}\n{}\n", "[1]\n[1]\n"])
def test_a_damaged_study_is_refused(tmp_path, text):
    (tmp_path / "optuna.log").write_text(text)
    with pytest.raises(MtcliError, match="is no study of Optuna's"):
        proposals(tmp_path, 5)


@pytest.fixture
def plain_recursion():
    """Python's own limit, which torch's compiler doubles in a process that it has compiled in."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize("depth", [100, 600, 900, 100_000])  # read; copied; parsed, at most
@pytest.mark.parametrize("line", ["[@]", *DEEP])
def test_a_study_with_a_deep_line_is_read_or_refused(tmp_path, line, depth, plain_recursion):
    proposals(tmp_path, 5).ask(2)
    with (tmp_path / "optuna.log").open("a") as log:
        log.write(line.replace("@", "[" * depth + "]" * depth) + "\n")
    if depth == 100 and line in DEEP:
        assert len(proposals(tmp_path, 5).ask(5)) == 5
    else:
        with pytest.raises(MtcliError, match="is no study of Optuna's: ."):
            proposals(tmp_path, 5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"op_code":4', '"op_code":99'),
        ("[0, 1]", "[1, 0]"),
        ('"param_name":"seed"', '"param_name":"sead"'),
        ('lr","param_value_internal":', 'lr","param_value_internal":"x","y":'),
    ],
)
def test_a_study_with_a_line_that_no_optuna_wrote_is_refused(tmp_path, old, new):
    proposals(tmp_path, 5).ask(2)
    log = tmp_path / "optuna.log"
    log.write_text(log.read_text().replace(old, new))
    with pytest.raises(MtcliError, match="is no study of Optuna's: ."):
        proposals(tmp_path, 5)
