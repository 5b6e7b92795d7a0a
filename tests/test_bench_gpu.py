"""The GPU benchmark of the training step, on a machine without one: small models, and its files."""

import importlib
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from marks import slow

import mtcli.kernels
from mtcli.kernels import autotune, swiglu
from mtcli.kernels.triton_launch import HAS_TRITON, TritonKernel, interpreted

ROOT = Path(__file__).parent.parent
GPU = ROOT / "benchmarks" / "gpu"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
KINDS = ["gpt2-124m", "llama-1b", "mixtral-8x7b/1", "qwen2-57b/1"]


@pytest.fixture
def scripts(monkeypatch):
    """The folder's modules can be imported, as its scripts import them."""
    monkeypatch.syspath_prepend(str(GPU))


@pytest.mark.parametrize("case", KINDS)
def test_transformers_has_our_losses_before_training_and_in_it(scripts, case):
    import contenders
    from cases import CASES
    from pair import BOUNDS, largest_gap, spread_apart
    from turns import WARMUP, batches

    config, device = CASES[case].config(tiny=True), torch.device("cpu")
    rows = batches(config, device)
    both = [make(config, device) for make in (contenders.ours, contenders.hugging_face)]
    first = [one.losses(rows[0]).tolist() for one in both]
    losses = [[float(one.train(rows[i])) for i in range(WARMUP)] for one in both]
    assert spread_apart(*first) < BOUNDS["fp32"][0]
    assert largest_gap(*losses) < BOUNDS["fp32"][1]


def test_other_weights_and_a_loss_of_one_percent_more_are_seen(scripts):
    import contenders
    from cases import CASES
    from pair import BOUNDS, spread_apart
    from turns import batches

    config, device = CASES["gpt2-124m"].config(tiny=True), torch.device("cpu")
    other = CASES["gpt2-124m"].config(["seed=7"], tiny=True)
    rows = batches(config, device)[0]
    ours, theirs = (contenders.ours(c, device).losses(rows).tolist() for c in (config, other))
    assert spread_apart(ours, theirs) > 2 * BOUNDS["bf16"][0]
    assert spread_apart(ours, [1.01 * loss for loss in ours]) > 2 * BOUNDS["bf16"][0]


@slow("three processes that build a model: 20 s")
def test_a_pair_is_measured_in_processes_of_their_own_and_kept(
    scripts, tmp_path, monkeypatch, capsys
):
    import bench_step

    flags = ["--device", "cpu", "--tiny", "--repeats", "2", "--output", str(tmp_path)]
    flags += ["--only", "gpt2-124m", "--contenders", "hf", "--budget", "900"]

    def said(*more):
        monkeypatch.setattr(sys, "argv", ["bench_step.py", *flags, *more])
        assert bench_step.measure(bench_step.parse()) == 0
        return capsys.readouterr().out

    more = ("--variant", "more", "batch.global_batch_size=8")
    first = said("--variant", "odd", "train.nothing=1", *more)
    assert "gpt2-124m beside odd: skipped: unknown key 'nothing' in [train]" in first
    (path,) = tmp_path.glob("step-cpu-*.json")
    record = json.loads(path.read_text())
    row, longer = (next(r for r in record["rows"] if r["contender"] == w) for w in ("hf", "more"))
    assert row["agrees"] and row["in_turns"] and len(row["other"]["seconds"]) == 2
    ours, theirs = row["mtcli"], row["other"]
    assert row["ratio"] == pytest.approx(theirs["median_s"] / ours["median_s"])
    assert ours["tokens_per_s"] == pytest.approx(2 * 64 / ours["median_s"])
    other = longer["other"]
    assert other["tokens_per_s"] == pytest.approx(4 * 64 / other["median_s"]) and longer["agrees"]
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert len(record["date"]) == 10
    again = said(*more)
    assert "beside" not in again and f"wrote {path}" in again
    assert json.loads(path.read_text())["rows"] == record["rows"]


class Ended(Exception):
    """A script that would begin again in a new process."""


@pytest.fixture
def kernels(scripts, monkeypatch, tmp_path):
    """bench_kernels.py on a GPU that is played: a function from entries and flags to the rows.

    A pass takes 2 ms, a copy moves 1 and a product makes 1 in a second.
    """
    import bench_kernels
    import harness

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Played")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(autotune, "device_name", lambda device: "Played")
    monkeypatch.setattr(autotune, "device_facts", lambda device: None)
    monkeypatch.setattr(autotune, "_milliseconds", lambda launch, config: config["BLOCK"])
    monkeypatch.setattr(harness, "milliseconds", lambda step, repeats: 2.0)
    measured = []
    floors = {"copy_bytes_per_s": 1.0, "flop_per_s": 1.0}
    monkeypatch.setattr(harness, "floors", lambda repeats: measured.append(repeats) or floors)

    def begin_again(path, words):
        raise Ended

    monkeypatch.setattr(bench_kernels.os, "execv", begin_again)

    def run(entries, *flags):
        monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--output", str(tmp_path), *flags])
        run.end = None
        try:
            bench_kernels.measure(entries, bench_kernels.parse())
        except (Ended, SystemExit) as end:
            run.end = end
        newest = max(tmp_path.glob("kernels-Played-*.json"), default=None)
        return json.loads(newest.read_text())["rows"] if newest else []

    run.floors = measured
    autotune._measured.cache_clear()
    yield run
    autotune._measured.cache_clear()


def entry(name, ours, sizes, **more):
    """An entry that squares, and compares with torch's square."""
    from harness import Entry

    def make(device, dtype, n):
        return (torch.linspace(1.0, 2.0, n),)

    rivals = {"torch": torch.square}
    return Entry(name, ours, rivals, make, sizes, (2,), torch_compiles="", **more)


def timed(rows):
    return [(row["entry"], *row["size"]) for row in rows if "ms" in row]


def test_a_size_that_fails_keeps_no_other_from_being_measured_and_floors_are_taken_once(kernels):
    def ours(x):
        if len(x) == 8:
            raise RuntimeError("no room")
        return x * x

    entries = [entry("some", ours, [(4,), (8,), (16,)]), entry("all", torch.square, [(4,)])]
    rows = kernels(entries)
    assert timed(rows) == [("some", 4), ("some", 16), ("all", 4)]
    (failed,) = (row for row in rows if row.get("failed"))
    assert (failed["size"], failed["why"]) == ([8], "RuntimeError: no room")
    assert str(kernels.end) == "error: these entries failed: some"
    assert kernels(entries) == rows and kernels.floors == [3]
    kernels(entries, "--afresh")
    assert kernels.floors == [3, 3]


def test_where_the_device_is_of_no_more_use_a_new_process_goes_on_with_the_next_size(
    kernels, monkeypatch
):
    broken = []

    def ours(x):
        if len(x) == 4:
            broken.append(True)
            raise RuntimeError("Triton Error [CUDA]: misaligned address")
        return x * x

    def synchronize():
        if broken:
            raise torch.AcceleratorError("CUDA error: misaligned address")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    entries = [entry("some", ours, [(4,), (8,)])]
    assert timed(kernels(entries)) == [] and isinstance(kernels.end, Ended)
    broken.clear()
    assert timed(kernels(entries)) == [("some", 8)] and kernels.floors == [3]


def test_a_size_that_was_cut_short_is_measured_again_and_no_size_begins_too_late(kernels):
    backwards = []

    def ours(x):
        if x.requires_grad and not backwards:
            backwards.append(True)
            raise KeyboardInterrupt
        return x * x

    def make(device, dtype, n):
        return (torch.linspace(1.0, 2.0, n, requires_grad=True),)

    whole = replace(entry("some", ours, [(4,)], backward_bytes=lambda *size: 0), make=make)
    late = kernels([whole], "--budget", "-1")
    assert str(kernels.end) == "error: the time was up before some (4,); the next run goes on"
    assert late == []
    with pytest.raises(KeyboardInterrupt):
        kernels([whole])
    assert [row["pass"] for row in kernels([whole]) if "ms" in row] == ["forward", "backward"]


def test_wrong_results_are_a_failure_and_a_row_is_a_part_of_the_floors(kernels):
    wrong = entry("wrong", lambda x: x * x * 1.03, [(4,)])
    right = entry("right", torch.square, [(4,)], forward_bytes=lambda itemsize, n: itemsize * n)
    rows = kernels([wrong, right])
    assert next(row["why"] for row in rows if "why" in row).startswith("AssertionError: wrong: res")
    (row,) = (row for row in rows if "ms" in row)
    assert row["of_copy"] == pytest.approx(2 * 4 / 2e-3) and row["ms"]["torch"] == 2.0


def test_configs_are_chosen_once_for_the_sizes_of_a_bucket_and_shipped(
    kernels, tmp_path, monkeypatch
):
    import run

    configs, launched = ({"BLOCK": 3}, {"BLOCK": 1}, {"BLOCK": 2}), []

    def launch(x):
        best = autotune.best_config("op._kernel", x, [len(x)], configs, lambda config: None)
        launched.append(best)
        return x * x

    rows = kernels([entry("some", launch, [(7,), (8,), (16,)])], "--tune")
    best = {"BLOCK": 1}
    assert [row["chosen"] for row in rows if "chosen" in row] == [
        {"op._kernel": {"float32 8": best}}, {}, {"op._kernel": {"float32 16": best}}
    ]  # fmt: skip
    assert launched == [best] * len(launched)
    run.ship(tmp_path, tmp_path / "choices.json")
    shipped = json.loads((tmp_path / "choices.json").read_text())
    assert shipped == {"Played": {"op._kernel": {"float32 8": best, "float32 16": best}}}


def test_the_whole_benchmark_begins_with_the_small_steps_and_shares_its_time(scripts, monkeypatch):
    import run

    commands = []

    class Measured:
        def __init__(self, words, env):
            commands.append((Path(words[1]).name, words[2:-6], float(words[-1])))

        def wait(self, timeout):
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run.subprocess, "Popen", Measured)
    monkeypatch.setattr(sys, "argv", ["run.py", "--budget", "540"])
    run.main()
    small = ["--only", "gpt2-124m", "--contenders", "mtcli-compile", "hf"]
    assert [command[:2] for command in commands] == [
        ("first.py", []), ("profile_step.py", []), ("bench_step.py", small),
        ("bench_kernels.py", ["--tune"]), ("bench_step.py", []), ("bench_fused_models.py", []),
    ]  # fmt: skip
    budgets = [budget for *_, budget in commands]
    assert budgets == pytest.approx([135, 135, 180, 270, 360, 540], abs=2)


def rows_of(script, folder, monkeypatch, *words):
    """The rows of a script's record, rehearsed in this process."""
    flags = ["--device", "cpu", "--tiny", "--output", str(folder), *words]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    importlib.import_module(script).main()
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())["rows"]


@slow("four models of two layers, twice: 10 s")
def test_the_first_minutes_have_gemms_launches_and_losses_like_the_cpus(
    scripts, monkeypatch, tmp_path
):
    rows = rows_of("first", tmp_path, monkeypatch)
    assert len([row for row in rows if row.get("wgrad added TFLOP/s", 0) > 0]) == 12
    assert all(row["us"] > 0 for row in rows if "launch" in row)
    models = [row for row in rows if "model" in row]
    assert len(models) == 4 and all(row["agrees"] and row["cpu"] > 5 for row in models)


@slow("a profile in a process of its own: 8 s")
def test_a_steps_operations_are_profiled(scripts, monkeypatch, tmp_path):
    (row,) = rows_of("profile_step", tmp_path, monkeypatch, "--only", "gpt2-124m")
    names = {one["name"]: one for one in row["operations"]}
    assert "aten::mm" in names or "aten::addmm" in names
    assert any(one["of_copy"] for one in names.values())
    assert 0 < sum(one["ms"] for one in names.values()) * 1e3 <= row["trace_us"] * 1.0001


def test_kernels_count_for_what_launched_them_and_gaps_for_what_follows(scripts):
    from profile_step import device_spans, gaps, operations

    def event(category, name, begin, length, number):
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length,
                "args": {"External id": number}, "tid": 1}  # fmt: skip

    events = [
        event("cpu_op", "mtcli::swiglu", 0, 3, 7), event("kernel", "_forward", 100, 50, 7),
        event("cpu_op", "aten::mm", 4, 2, 8), event("kernel", "gemm", 250, 40, 8),
        event("kernel", "copy", 295, 5, 9),
    ]  # fmt: skip
    spans, whole = device_spans(events)
    assert whole == 200
    # 50 us at 1e12 bytes/s are 5e7 bytes; half of them is half of a copy
    first, *_ = operations(spans, {"mtcli::swiglu": 2.5e7}, 1e12)
    assert first == {"name": "mtcli::swiglu", "kernels": 1, "ms": 0.05, "of_copy": 0.5}
    assert gaps(spans) == {"us": 100, "before": {"aten::mm": 100}}  # 5 us are no gap
    calls = [event("cpu_op", "linear", 0, 30, 1), event("cpu_op", "mm", 10, 15, 2)]
    assert device_spans(calls) == ([("linear", 0, 10), ("mm", 10, 25), ("linear", 25, 30)], 30)


def test_a_script_that_takes_too_long_may_end_what_it_started(scripts, monkeypatch, tmp_path):
    import run

    script = tmp_path / "endless.py"
    script.write_text("""
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("its contenders ended")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
time.sleep(600)
""")
    monkeypatch.setattr(run, "GRACE", 3.0)
    assert run.run([str(script), str(tmp_path / "said")], 0.0) == 143
    assert (tmp_path / "said").read_text() == "its contenders ended"


@needs_triton
@slow("every kernel is interpreted, forward and backward: 19 s")
def test_all_kernels_are_rehearsed_on_a_cpu_and_what_was_chosen_is_shipped_and_read(
    scripts, tmp_path, monkeypatch
):
    """As `make bench-gpu` measures them, with small inputs: results are the first rivals'."""
    import bench_kernels
    import run

    out, choices = tmp_path / "results", tmp_path / "choices.json"
    flags = f"--device cpu --tiny --only kernels --budget 1200 --output {out}"
    make = ["make", "-o", ".venv/installed-test", f"BIN={Path(sys.executable).parent}", "bench-gpu"]
    done = subprocess.run([*make, f"BENCH_ARGS={flags}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("kernels-cpu-*.json")
    rows = json.loads(path.read_text())["rows"]
    names = [entry.name for entry in bench_kernels.entries()]
    assert [row["entry"] for row in rows if row.get("whole")] == names
    words = ["run.py", "--ship", str(choices), "--output", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    run.main()
    table = json.loads(choices.read_text())
    assert {"norm._forward", "flash_forward._forward", "grouped_linear"} < table["cpu"].keys()
    other = swiglu._forward.configs(22)[-1]
    assert other != swiglu._forward.default(22)
    table["cpu"]["swiglu._forward"] = {"float32 32": other}
    choices.write_text(json.dumps(table))
    monkeypatch.setattr(autotune, "SHIPPED", choices)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    launched = []
    note = lambda self, grid, arguments, constants, config: launched.append(config)  # noqa: E731
    monkeypatch.setattr(TritonKernel, "_launch_as", note)
    autotune._measured.cache_clear()
    with interpreted():
        swiglu.swiglu(torch.ones(5, 44))
    autotune._measured.cache_clear()
    assert launched == [other]


def test_attention_is_measured_first_then_experts_and_optimizers(scripts):
    import bench_kernels

    names = [entry.name for entry in bench_kernels.entries()]
    order = [names.index(name) for name in ("flash", "route", "adamw", "rms_norm")]
    assert order == sorted(order) and order[0] == 0


REHEARSE = "error: a CPU measures nothing that is asked here; add --tiny to rehearse it\n"


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("run", ["--device", "cpu"], REHEARSE),
        ("bench_kernels", ["--device", "cpu"], REHEARSE),
        ("run", [], "error: torch sees no GPU here: nothing is measured without one\n"),
        ("bench_kernels", [], "error: torch sees no GPU here; try --device cpu --smoke\n"),
        ("bench_step", [], "error: torch sees no GPU here; try --device cpu --tiny\n"),
    ],
)
def test_without_a_gpu_each_script_says_so_and_ends_with_2(
    scripts, monkeypatch, capsys, name, flags, words
):
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert (end.value.code, *capsys.readouterr()) == (2, "", words)


@needs_triton
def test_a_smoke_test_runs_an_entry_once_and_compares_it(scripts, monkeypatch, capsys):
    import bench_kernels

    flags = ["--device", "cpu", "--smoke", "--only", "swiglu"]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *flags])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    bench_kernels.main()
    assert capsys.readouterr().out == "swiglu forward: as torch\nswiglu backward: as torch\n"


def test_a_contender_that_ends_says_why_in_its_last_words(scripts):
    from turns import Child

    child = Child(["-c", "import sys; print('{\"a\": 1}'); input(); sys.exit('no room left')"])
    assert child.hear(deadline=time.monotonic() + 60) == {"a": 1}
    assert child.ask(deadline=time.monotonic() + 60, turn=1) == {
        "failed": "ended with 1: no room left"
    }
    child.end()


def test_a_contender_that_takes_too_long_is_ended(scripts):
    from turns import Child

    child = Child(["-c", "import time; time.sleep(600)"])
    assert child.hear(deadline=0.0)["late"]
    assert child.process.poll() is not None


def test_a_record_goes_on_only_for_the_same_device_and_source(scripts, tmp_path, monkeypatch):
    import record

    first = record.open_record(tmp_path, "step", "NVIDIA H200")
    first.add({"case": "a", "contender": "hf"})
    assert record.open_record(tmp_path, "step", "NVIDIA H200").has(case="a", contender="hf")
    assert not record.open_record(tmp_path, "step", "NVIDIA H200", afresh=True).rows
    assert not record.open_record(tmp_path, "step", "NVIDIA H100").rows
    monkeypatch.setattr(record, "_source", lambda: "other source")
    other = record.open_record(tmp_path, "step", "NVIDIA H200")
    assert not other.rows and other.path != first.path


def test_a_case_that_a_device_is_too_small_for_is_left_out(scripts):
    from argparse import Namespace

    from cases import CASES
    from pair import Pair

    args = Namespace(device="cuda", tiny=True, repeats=1)
    with Pair(lambda *words: pytest.fail("begun"), args, {"memory_bytes": 80 * 2**30}) as pair:
        row = pair.measure(CASES["qwen2-57b/2"], "hf", None, float("inf"))
    assert row["skipped"] == "it needs 100 GiB of memory, not 80"


def test_the_six_shapes_of_the_goals_come_first_ours_before_others(scripts):
    from cases import CASES, contenders, pairs

    first = pairs(list(CASES), contenders())[:6]
    assert all(CASES[case].micro_batches >= 8 for case, _ in first)
    models = ["gpt2-124m", "llama-1b", "gpt-1.3b", "llama-8b", "mixtral-8x7b", "qwen2-57b"]
    assert [(case.split("/")[0], who) for case, who in first] == [
        (m, "mtcli-compile") for m in models
    ]
    assert CASES["gpt-1.3b"].config().model.hidden_size == 2048


def test_every_kernel_has_a_test_that_runs_it_on_a_gpu():
    tests = [path.read_text() for path in (Path(__file__).parent / "kernels").rglob("test_*.py")]
    given = re.compile(r"^def test_\w+\([^)]*\bdevice\b", re.M)  # by the fixture: CPU, and GPU
    on_gpu = "".join(text for text in tests if given.search(text))
    folder = Path(mtcli.kernels.__file__).parent
    files = [p for p in folder.rglob("*.py") if re.search("^@kernel", p.read_text(), re.M)]
    names = [".".join(path.relative_to(folder).with_suffix("").parts) for path in files]
    assert len(names) > 10
    assert [n for n in names if f"mtcli.kernels.{n} " not in on_gpu] == []


def side(seconds, rate, mfu, peak=None):
    return {"median_s": seconds, "tokens_per_s": rate, "mfu": mfu, "causal_flop_per_s": 4.2e14,
            "of_product": 0.55, "peak_bytes": peak,
            "phases": {"pipeline": 0.97, "end": 0.03}}  # fmt: skip


def made_up(layers, ours, theirs, flops):
    return {"case": f"big/{layers}", "contender": "hf", "layers": layers, "whole_layers": 32,
            "tokens": 1000, "goal_mfu": 0.5, "flops_per_token": flops, "in_turns": True,
            "agrees": True, "ratio": 1.5, "memory_ratio": 0.5, "mtcli": ours,
            "other": theirs}  # fmt: skip


def test_tables_are_written_from_a_record_and_extrapolate_layers(scripts):
    from table import page

    # 10 TFLOP/s at a utilisation of 1: a layer of 1e9 FLOPs a token takes 0.1 s at 1.
    few = made_up(2, side(1.0, 1000, 0.2, 2**30), side(2.0, 500, 0.1, 2**31), 2e9)
    many = made_up(4, side(1.4, 1000 / 1.4, 4 / 14, 2**30), side(3.0, 1000 / 3, 4 / 30), 4e9)
    rows = [many, few, {"case": "small", "contender": "plain", "skipped": "no such package"}]
    record = {"what": "step", "device": "X", "date": "2026-01-02", "versions": {"torch": "2.0"},
              "copy_bytes_per_s": 4.3e12, "flop_per_s": 7.9e14, "rows": rows}  # fmt: skip
    lines = page(record).splitlines()
    assert lines[0] == "X, 2026-01-02: copy 4.30 TB/s, product 790 TFLOP/s in bfloat16. torch 2.0."
    row = "| big | 2 of 32 | 1,000 | 1,000 | 20.0% | 50% | 420 | 0.55 | 3.0% | 1.0 "
    assert row + "| hf | 500 | 1.50 | 0.50 |" in lines
    assert "| big | mtcli, beside hf | 200.00 | 50.0% | 50% | 7.000 |" in lines
    assert "| big | hf, beside hf | 500.00 | 20.0% | 50% | 17.000 |" in lines
    assert "- small beside plain: no such package" in lines


def test_a_kernels_row_names_its_parts_of_the_ceilings(scripts):
    from table import page

    row = {"entry": "gelu", "pass": "forward", "size": [8, 4], "dtype": "torch.bfloat16",
           "ms": {"mtcli": 0.5, "torch": 1.0}, "of_copy": 0.91, "of_product": 0.0}  # fmt: skip
    broken = {"entry": "norm", "failed": True, "why": "a | b"}
    record = {"what": "kernels", "device": "X", "date": "2026-01-02", "versions": {},
              "copy_bytes_per_s": 4e12, "flop_per_s": 7e14, "rows": [row, broken]}  # fmt: skip
    text = page(record)
    assert "| gelu forward | 8 x 4 | bfloat16 | 0.500 | 0.91 |  | torch 1.000 |" in text
    assert "| norm |  |  | failed |  |  | a / b |" in text
