"""What a run says of its progress: lines where there is no terminal, a bar where there is one."""

import re

import pytest
import torch
from tiny import run_config

from mtcli.core.runtime.launch import Runtime
from mtcli.core.training import metrics, run_log
from mtcli.core.training.metrics import StepFacts
from mtcli.core.training.run_log import RunLog
from mtcli.core.training.step import Step

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
LINE = re.compile(r"step (\d+)/20( [a-z_/]+ [\d.:e%+-]+)+")


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    """Makes 20 steps of 2 seconds by a clock, and gives what is said on stderr."""

    def steps(log_every=1, is_terminal=False, validated=()):
        clock = [100.0]
        monkeypatch.setattr(run_log, "monotonic", lambda: clock[0])
        monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
        monkeypatch.setattr(metrics, "run_peak_flops", lambda *_: 1e8)
        train = {"steps": 20, "log_every": log_every, "output": str(tmp_path / "run")}
        log = RunLog(run_config(train=train), True, 0)
        log.begin(ALONE, 1 << 20, "the seed", {})
        for number in range(1, 21):
            clock[0] += 2.0
            valid = 3.25 if number in validated else None
            step = Step(number, 2.0 / number, 1e-3, 0.5, 0.1, 1.0, "updated", tokens=32)
            log.step(step, StepFacts(4 * number, valid, 0, None))
        log.close()
        return capsys.readouterr().err

    return steps


def test_without_a_terminal_there_is_a_line_now_and_then_and_at_the_end(told):
    lines = told().splitlines()
    assert all(LINE.fullmatch(line) for line in lines)
    numbers = [int(LINE.fullmatch(line)[1]) for line in lines]
    assert numbers == [1, 4, 7, 10, 13, 16, 19, 20], "every 5 s of steps of 2 s, and the last"
    assert (
        "loss 0.1053 grad_norm 0.5 tokens/s 320 mfu " in lines[-2] and "left 0:00:02" in lines[-2]
    )


def test_lines_are_of_steps_that_are_logged_and_of_validations(told):
    lines = told(log_every=10, validated=(3,)).splitlines()
    assert [int(LINE.fullmatch(line)[1]) for line in lines] == [3, 10, 20]
    assert "loss 0.6667 valid 3.2500 grad_norm" in lines[0]


def test_on_a_terminal_80_columns_show_what_matters_first(told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = told(is_terminal=True, validated=(20,)).split("\r")[-1]
    assert re.search(r"100% 20/20 .* loss 0.1000 valid 3.2500 grad_norm 0.5", shown), shown
    assert "step 20/20" not in shown
