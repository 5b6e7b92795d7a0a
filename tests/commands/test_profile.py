"""`mtcli profile` from the command line: two pipeline ranks, a finished run, and wrong input."""

import json

import numpy as np
import pytest
from command_line import launched, mtcli
from indexed_dataset import write_dataset
from marks import slow

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.vocab_size=64",
    "model.max_seq_len=16",
    "batch.seq_len=16",
    "batch.micro_batch_size=1",
    "batch.global_batch_size=4",
]
SETTINGS = [word for item in SMALL for word in ("--set", item)]


def profile(*arguments, cwd, expect=0, by=mtcli):
    done = by("profile", *arguments, folder=cwd, OMP_NUM_THREADS="1")
    assert done.returncode == expect, done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def profiled(folder):
    """One run of two pipeline ranks with every output."""
    outputs = ["--json", "p.json", "--trace", "t.json", "--report", "r.html", "--plot", "p.png"]
    layout = ["--nproc", 2, "--set", "parallel.pp=2", "--steps", 3, "--warmup", 1]
    return profile("tiny", *SETTINGS, *layout, *outputs, cwd=folder, by=launched)


@pytest.fixture(scope="module")
def data(profiled, folder):
    return json.loads((folder / "p.json").read_text())


def test_it_says_first_what_it_will_do_and_last_what_it_wrote(profiled):
    lines = profiled.stderr.splitlines()
    assert lines[0] == "layout 2 ranks: tp=1 pp=2 dp=1"
    assert "3 timed" in lines[1] and "64 tokens" in lines[1]
    assert lines[-3:] == ["wrote t.json", "wrote r.html", "wrote p.png"]


@slow("a step of rows of 256")
def test_memory_at_its_peak_is_what_plan_says(tmp_path):
    sizes = ["--set", "batch.micro_batch_size=2", "--set", "batch.global_batch_size=4"]
    steps = ["--steps", 1, "--warmup", 0, "--json", "p.json"]
    profile("tiny", *sizes, *steps, "--set", "batch.seq_len=256", cwd=tmp_path)
    figures = json.loads((tmp_path / "p.json").read_text())["figures"]
    peak, process = figures["memory.peak"], figures["memory.process"]
    assert peak["planned"] == pytest.approx(peak["measured"], rel=0.006)
    assert process["planned"] > peak["planned"] and process["measured"] > peak["measured"]


def test_tables_and_both_timelines_are_on_stdout(profiled):
    for words in ("step time", "MFU", "bubble", "optimizer"):
        assert words in profiled.stdout
    order = [profiled.stdout.index(title) for title in ("Measured", "Beside the plan", "Planned")]
    assert order == sorted(order) and "roofline" not in profiled.stdout
    assert profiled.stdout.count("\nrank 1 ") == 2


def test_the_figures_fit_together(data):
    seconds = data["step_seconds"]
    assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
    assert data["tokens_per_second"] == pytest.approx(64 / seconds["median"])
    rate = data["model_flops_per_step"] / seconds["median"]
    assert data["mfu"] == pytest.approx(rate / (2 * data["peak_flops"]))
    assert data["world"] == 2 and data["layout"]["pp"] == 2
    assert sum(data["shares"].values()) == pytest.approx(1.0)


def test_an_op_never_starts_before_its_input_was_begun(data):
    """An op ends a moment after it has sent its output: the next may start before that."""
    spans = {row["op"]: row for row in data["timeline"]}
    assert len(spans) == 16
    for m in range(4):  # clocks of the two processes agree
        assert spans[f"F{m}.0"]["start"] < spans[f"F{m}.1"]["start"]
        assert spans[f"F{m}.1"]["start"] < spans[f"B{m}.1"]["start"] < spans[f"B{m}.0"]["end"]


def test_hops_move_the_activations_of_every_micro_batch(data):
    rows = {(r["axis"], r["from"], r["to"]): r for r in data["communication_by_axis"]}
    for way in (("pp_forward", 0, 1), ("pp_backward", 1, 0)):
        assert rows[way]["calls"] == 4
        assert rows[way]["bytes"] == 4 * 16 * 32 * 4  # micro-batches, tokens, hidden, float32
    ends = 128 * 32 * 4  # the tied embedding's gradient, vocabulary padded: half of it twice
    whole = data["communication_matrix_bytes"]
    assert whole[0][1] == rows["pp_forward", 0, 1]["bytes"] + ends + 16 and whole[0][0] == 0


def test_what_the_step_adds_is_told_by_how_long_it_lives(data):
    over_time = data["memory_by_kind_over_time"]
    added = [a + b for a, b in zip(over_time["activations"], over_time["temporary"], strict=True)]
    assert max(added) == data["memory_bytes"]["activations"]
    # 1F1B: one or two micro-batches of a block's saved inputs; 8 such tensors at the least.
    assert max(over_time["activations"]) > 8 * 16 * 32 * 4
    assert min(over_time["temporary"]) == 0


def test_the_trace_has_the_profilers_events_and_ours(profiled, folder):
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::mm", "B3.1", "F0.0", "mtcli: op F0.0"} <= names


def test_the_page_and_the_picture_are_there_and_nothing_else(profiled, folder):
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    assert b"mtcli-data" in (folder / "r.html").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["p.json", "p.png", "r.html", "t.json"]


def test_real_data_and_json_on_stdout_alone(tmp_path):
    documents = [np.arange(40) % 64 for _ in range(20)]
    write_dataset(str(tmp_path / "data"), documents, np.uint16)
    flags = ["--set", 'data.train=["data"]', "--steps", 2, "--warmup", 0, "--json", "-"]
    done = profile("tiny", *SETTINGS, *flags, "--no-calibrate", cwd=tmp_path)
    data = json.loads(done.stdout)
    assert data["world"] == 1 and data["predicted"]["device_rates"] == "roofline"


@pytest.fixture
def run_folder(tmp_path):
    rows = [
        {"step": s, "loss": 1.0, "grad_norm": 1.0, "step_seconds": 0.5, "mfu": 0.2}
        | {"tokens_per_second": 10.0}
        for s in (1, 2)
    ]
    (tmp_path / "run").mkdir()
    config = "[model]\n" + "\n".join(s.removeprefix("model.") for s in SMALL if "model." in s)
    (tmp_path / "run" / "config.toml").write_text(config + "\n")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    return tmp_path


def test_a_finished_runs_page_needs_no_step(run_folder):
    done = profile("run", "--report", "r.html", "--json", "r.json", cwd=run_folder)
    assert "2 steps" in done.stdout
    assert "wrote r.html" in done.stderr
    assert json.loads((run_folder / "r.json").read_text())["step_seconds"]["median"] == 0.5


def test_what_needs_steps_is_refused_for_a_finished_run(run_folder):
    flags = ["--trace", "t.json", "--set", "parallel.pp=2", "--steps", 10, "--nproc", 1]
    flags.append("--no-calibrate")
    done = profile("run", *flags, cwd=run_folder, expect=2, by=launched)
    for flag in ("--trace", "--set", "--steps", "--nproc", "--no-calibrate"):
        assert f"{flag} needs steps to run, and run is a run that is finished" in done.stderr
    assert "hint: mtcli profile run/config.toml" in done.stderr


def test_outputs_are_refused_before_any_step_runs(tmp_path):
    flags = ["--plot", "p.gif"]
    done = profile("tiny", *flags, cwd=tmp_path, expect=2)
    assert done.stderr.startswith("error: --plot: it does not write .gif")
    done = profile("tiny", "--report", "no/r.html", cwd=tmp_path, expect=2)
    assert "there is no folder 'no'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_illegal_layout_names_every_problem(tmp_path):
    flags = ["--set", "parallel.pp=3", "--set", "parallel.tp=3"]
    done = profile("tiny", *flags, cwd=tmp_path, expect=2)
    assert "tp=3 does not divide num_kv_heads=4" in done.stderr
    assert "pp*vpp=3*1=3 does not divide num_layers=4" in done.stderr
    *_, nearest, last = done.stderr.splitlines()
    assert nearest == "  --set parallel.tp=1 --set parallel.pp=1   tp=1 pp=1 dp=1"
    assert last == "`mtcli plan` says which fit in memory"
    assert "Traceback" not in done.stderr
