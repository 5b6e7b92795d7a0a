"""What a run folder keeps of steps that are run again."""

import json

import pytest
import torch
from tiny import GPT, run_config

from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.metrics import RunRecords, StepFacts
from mtcli.core.training.run_folder import how_it_goes_on
from mtcli.core.training.step import Step

RUNTIME = Runtime(0, 1, 0, 1, torch.device("cpu"))
SAVED = {"event": "saved", "step": 2}


@pytest.fixture
def begin(tmp_path):
    """A function that opens the records of a run in tmp_path at a step, and returns what it says;
    before the first one there are rows of five steps, and half of a sixth."""
    (tmp_path / "checkpoints").mkdir()
    rows = "".join(json.dumps({"step": step, "loss": step / 2}) + "\n" for step in range(1, 6))
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 6, "lo')
    (tmp_path / "events.jsonl").write_text(json.dumps(SAVED) + "\n")

    def open_at(step):
        said = []
        config = run_config(GPT, train={"output": str(tmp_path)})
        records = RunRecords(config, True, said.append)
        records.begin(RUNTIME, step)
        records.close()
        return said

    return open_at


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_of_steps_that_are_run_again_are_kept_aside_and_counted(tmp_path, begin):
    aside = tmp_path / "metrics.superseded.jsonl"
    assert begin(4) == [f"note: metrics of steps 5 to 5 are kept in {aside}"]
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4] and steps(aside) == [5]
    assert begin(4) == []
    assert begin(0) == [f"note: metrics of steps 1 to 4 are kept in {aside}"]
    assert steps(tmp_path / "metrics.jsonl") == [] and steps(aside) == [5, 1, 2, 3, 4]
    kept = (tmp_path / "events.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in kept] == ["saved", "resumed", "resumed"]


def test_a_row_has_the_tokens_and_seconds_of_the_run_up_to_it_of_steps_that_count(tmp_path):
    def run(first, tokens, seconds):
        records = RunRecords(run_config(GPT, train={"output": str(tmp_path)}), True, print)
        records.begin(RUNTIME, first)
        for number, (count, time) in enumerate(zip(tokens, seconds, strict=True), start=first + 1):
            step = Step(number, 2.0, 1e-3, 0.5, time, 1.0, "updated", tokens=count)
            records.step(step, StepFacts(4 * number, None, 0, None))
        records.close()

    run(0, [32, 30, 31], [0.5, 0.25, 8.0])
    run(2, [7, 8], [1.0, 2.0])  # again from the second step
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["total_tokens"] for row in rows] == [32, 62, 69, 77]
    assert [row["total_seconds"] for row in rows] == [0.5, 0.75, 1.75, 3.75]
    assert all(row["memory_bytes"] > 1 << 20 for row in rows)


def test_rows_are_not_kept_through_a_link(tmp_path, begin):
    (tmp_path / "metrics.superseded.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(Exception, match="cannot be written"):
        begin(0)
    assert not (tmp_path / "mine").exists()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5


def test_advice_after_a_fault_is_of_what_is_saved(tmp_path):
    said = "no checkpoint is saved yet: run the same command with"
    assert how_it_goes_on(tmp_path) == f"{said} --resume"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert how_it_goes_on(tmp_path) == f"{said} --start-over"
    for name in ("step-00000020", "step-00000040", "step-00000060.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    newest = tmp_path / "checkpoints" / "step-00000040"
    said = f"the last good checkpoint is {newest}: run the same command with --resume"
    assert how_it_goes_on(tmp_path) == said
