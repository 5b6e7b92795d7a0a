"""`mtcli plan` from outside: exit codes, the JSON contract, files it writes, its speed."""

import json
import re
import subprocess
import sys
import tomllib

import pytest
from marks import slow

from mtcli.core.config.loading import load_config
from mtcli.core.config.phases import tokens_of
from mtcli.core.data.tokenized import texts_of
from mtcli.core.plan.costs import Pass
from mtcli.core.plan.search import as_estimated

KEYS = {
    "ok", "problems", "layout", "parameters", "memory_bytes", "fits", "step_seconds",
    "tokens_per_second_per_gpu", "model_tflops_per_gpu", "hardware_tflops_per_gpu", "mfu", "hfu",
    "bubble_fraction", "communication_seconds", "candidates",
}  # fmt: skip


# Tests of what a plan shows of memory; the others are of a search, and need no real stages.
REHEARSED = {
    "test_the_json_holds_the_contract",
    "test_what_does_not_fit_is_shown_and_exits_1",
    "test_the_config_of_uneven_chunks_is_planned_as_it_was_found",
    "test_a_bare_preset_on_gpus_is_searched_and_its_best_config_written",
    "test_128k_tokens_fit_where_context_parallelism_cuts_them",
    "test_a_dry_run_is_in_the_json_and_agrees_with_the_plan",
    "test_the_plan_names_the_fullest_rank_and_what_each_pipeline_rank_holds",
}


@pytest.fixture(autouse=True)
def estimates(request, monkeypatch):
    """Leaves a search's predictions as estimated, where the test is of other things."""
    if request.node.originalname not in REHEARSED:
        monkeypatch.setattr("mtcli.core.rehearse.request.rehearsed", as_estimated)


def run(capsys, *arguments):
    from mtcli.__main__ import run as run_command

    code = int(run_command(["plan", *arguments]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_json_holds_the_contract(capsys):
    code, out, _ = run(capsys, "tiny", "--device", "h100", "--json", "-")
    data = json.loads(out)
    assert code == 0 and set(data) >= KEYS
    assert data["ok"] and data["problems"] == [] and data["candidates"] == []
    assert data["rehearsed"] is True
    assert set(data["parameters"]) == {"total", "active", "max_per_rank"}
    assert data["parameters"]["total"] == 5_322_240
    kinds = {"weights", "gradients", "optimizer", "activations", "other", "total"}
    assert set(data["memory_bytes"]) == kinds
    parts = sum(v for k, v in data["memory_bytes"].items() if k != "total")
    assert data["memory_bytes"]["total"] == pytest.approx(parts, abs=5)
    assert data["memory_bytes"]["weights"] == 4 * 5_322_240
    assert data["fits"] is True and data["step_seconds"] > 0
    assert data["bubble_fraction"] == 0.0


def test_a_step_time_has_the_range_of_published_runs_of_its_kind(capsys):
    flags = ["gpt2-345m", "--gpus", "8", "--set", "parallel.tp=2", "--device"]
    data = json.loads(run(capsys, *flags, "h100", "--json", "-")[1])
    low, high = (seconds / data["step_seconds"] for seconds in data["step_seconds_range"])
    assert (low, high) == (pytest.approx(0.796), pytest.approx(1.663))
    words = " ".join(run(capsys, *flags, "h100")[1].split())
    kind = "dense models on GPUs that have fp8, used or not"
    span = f"{data['step_seconds_range'][0]:.4g} to {data['step_seconds_range'][1]:.4g} s"
    assert f"how sure {span}, by the errors of 80% of 58 published runs of {kind}" in words
    assert json.loads(run(capsys, *flags, "cpu", "--json", "-")[1])["step_seconds_range"] is None


@pytest.mark.parametrize("pp", [1, 2])
def test_evaluation_is_told_with_its_time_and_memory(capsys, monkeypatch, tmp_path, pp):
    """A GEMM's FLOP alone costs something, so forwards are about a third of a step."""
    known = {"flops": 1e9, "memory_bandwidth": 1e30, "element": 1e-30, "call": 1e-30}
    known |= {"socket": 1e9, "widens": False}
    nothing = "mtcli.core.plan.gpu_time.attention_seconds"  # of which a backward is 2.5 forwards
    monkeypatch.setattr(nothing, lambda work, device: Pass())
    (tmp_path / "known.json").write_text(json.dumps(known))
    monkeypatch.setenv("MTCLI_CALIBRATION", str(tmp_path / "known.json"))
    flags = ["--device", "cpu", "--set", f"parallel.pp={pp}", "--global-batch", "320"]
    flags += ["--set", "train.eval_batches=3"]
    assert json.loads(run(capsys, "tiny", *flags, "--json", "-")[1])["evaluation"] is None
    flags += ["--set", "train.eval_every=5"]
    data, text = (
        json.loads(run(capsys, "tiny", *flags, "--json", "-")[1]),
        run(capsys, "tiny", *flags)[1],
    )
    found = data["evaluation"]
    assert (found["every"], found["batches"]) == (5, 3)
    assert found["seconds"] == pytest.approx(3 * data["step_seconds"] / 3, rel=0.1)
    assert found["seconds_per_step"] == pytest.approx(found["seconds"] / 5)
    assert found["memory_bytes"] == data["memory_bytes"]["total"]
    assert re.search(
        r"^evaluation +[\d.]+ s every 5 steps, 2[0-2].\d% more time", text, re.MULTILINE
    )


@pytest.mark.parametrize("search", [(), ("--top", "2")], ids=["planned", "searched"])
def test_without_calibration_a_roofline_is_marked_in_table_and_json(capsys, monkeypatch, search):
    monkeypatch.setattr("mtcli.core.plan.hardware.calibrated", lambda *_: pytest.fail("measured"))
    flags = ["--device", "cpu", "--no-calibrate", *search]
    _, out, _ = run(capsys, "tiny", *flags)
    assert re.search(r"^rates +a roofline, not calibrated: [\d.]+ TFLOP/s", out, re.MULTILINE)
    data = json.loads(run(capsys, "tiny", *flags, "--json", "-")[1])
    assert data["device_rates"] == "roofline"
    monkeypatch.undo()
    _, out, _ = run(capsys, "tiny", "--device", "cpu")
    assert "roofline" not in out


@pytest.mark.parametrize(("device", "precision"), [("h100", "bf16"), ("v100-32gb", "fp16")])
def test_a_config_without_precision_is_planned_in_the_half_precision_of_the_gpu(
    capsys, device, precision
):
    flags = ["--gpus", "1", "--device", device, "--json", "-"]
    code, out, _ = run(capsys, "tiny", *flags)
    assert (code, json.loads(out)["layout"]["precision"]) == (0, precision)


def test_the_world_without_gpus_is_the_smallest_that_holds_both_grids(capsys):
    _, out, _ = run(capsys, "mixtral-8x22b", "--device", "h200", "--json", "-")
    layout = json.loads(out)["layout"]
    # pp 8 times the least that tp*cp = 2 and ep*etp = 8 both divide
    assert (layout["world"], layout["dp"], layout["edp"]) == (64, 4, 1)


def test_an_illegal_layout_lists_every_problem_and_exits_2(capsys, tmp_path):
    target = tmp_path / "plan.json"
    wrong = ("--set", "parallel.tp=3", "--set", "parallel.pp=3", "--set", "optimizer.lr=-1")
    code, out, err = run(capsys, "tiny", "--gpus", "8", *wrong, "--json", str(target))
    data = json.loads(target.read_text())
    assert code == 2 and out == ""
    assert data["ok"] is False and set(data) >= KEYS
    fields = {problem["field"] for problem in data["problems"]}
    assert fields >= {"parallel.tp", "parallel.pp", "optimizer.lr", "parallel"}
    assert all(problem["message"] and problem["hint"] for problem in data["problems"])
    assert "tp=3 does not divide num_kv_heads=4" in err and "hint: 1, 2 or 4" in err


def test_what_does_not_fit_is_shown_and_exits_1(capsys):
    code, out, err = run(capsys, "gpt3-175b", "--set", "parallel.tp=1", "--device", "a100-40gb")
    assert code == 1 and "bytes per rank" in out
    assert (
        "a rank needs" in err
        and "can use 38.0 GiB of a100-40gb's 40.0 GiB" in err
        and "hint:" in err
    )


def test_flops_are_told_by_every_convention(capsys):
    _, out, _ = run(capsys, "gpt3-175b", "--gpus", "64", "--device", "h100", "--json", "-")
    told = json.loads(out)["flop_conventions"]
    rates = {name: one["tflops_per_gpu"] for name, one in told.items()}
    whole, causal, weights = (
        rates[f"3x forward, {kind}"]
        for kind in ("full attention", "causal attention", "no attention")
    )
    assert causal - weights == pytest.approx((whole - weights) / 2)
    # arXiv:2104.04473, equation 3, with and without recomputation: V/16lh and V/12lh.
    s, h, layers, vocab = 2048, 12288, 96, 50257
    again, once = (1 + s / (6 * h) + vocab / (n * layers * h) for n in (16, 12))
    four = rates["4x forward, full attention"]
    assert four / whole == pytest.approx(96 * again / (72 * once), rel=1e-3)
    assert told["3x forward, full attention"]["share_of_peak"] == pytest.approx(whole / 989.4)


def test_a_search_says_why_the_best_layouts_neighbours_fall_short(capsys):
    arguments = ("gpt2-1.5b", "--gpus", "16", "--device", "a100-40gb")
    _, out, _ = run(capsys, *arguments)
    assert "The best with one field changed" in out and "slower than best" in out
    _, out, _ = run(capsys, *arguments, "--json", "-")
    data = json.loads(out)
    told = {(one["field"], one["value"]): one for one in data["neighbours"]}
    assert told[("recompute", "full")]["reason"].startswith("+")
    assert all(one["step_seconds"] > 0 for one in told.values())


def test_no_neighbour_of_the_best_layout_is_quicker_than_it(capsys):
    arguments = ("gpt2-1.5b", "--gpus", "2048", "--device", "rtx-5000", "--top", "1", "--json", "-")
    data = json.loads(run(capsys, *arguments)[1])
    fitting = [one for one in data["neighbours"] if one["fits"] and one["field"] != "global-batch"]
    assert fitting and all(one["step_seconds"] >= data["step_seconds"] for one in fitting)


def test_the_config_of_uneven_chunks_is_planned_as_it_was_found(capsys, tmp_path):
    where = ("--gpus", "512", "--device", "gb200", "--json", "-")
    wanted = ("--fix", "parallel.vpp=2", "--top", "1", "--output", str(tmp_path / "run.toml"))
    found = json.loads(run(capsys, "mt-nlg-530b", *where, *wanted)[1])
    again = json.loads(run(capsys, str(tmp_path / "run.toml"), *where)[1])
    assert len(set(found["layout"]["stage_layers"])) == 2
    assert again["step_seconds"] == found["step_seconds"]
    assert again["memory_bytes"] == found["memory_bytes"]


@slow("two searches of 175B")
def test_a_search_that_finds_no_room_names_a_batch_that_more_layouts_divide(capsys):
    code, _, err = run(capsys, "gpt3-175b", "--gpus", "10", "--device", "a100-40gb")
    assert code == 1 and "layouts fits" in err and "such as --global-batch 1540" in err
    code, _, err = run(capsys, "gpt3-175b", "--gpus", "4", "--device", "a100-40gb")
    assert code == 1 and "--global-batch" not in err  # 4 ranks divide its own batch


@slow("seven searches")
def test_a_search_that_finds_no_room_says_from_how_many_devices_on_there_is(capsys):
    a100 = ("llama-3.1-8b", "--device", "a100-40gb")
    code, out, err = run(capsys, *a100, "--gpus", "1")
    assert code == 1 and "It fits from 4 x a100-40gb on" in out
    assert "none of 14 layouts fits; from 4 devices on one does (--gpus 4): tp=" in err
    for fewer in ("2", "3"):
        code, out, _ = run(capsys, *a100, "--gpus", fewer, "--json", "-")
        assert code == 1 and json.loads(out)["fits_from"]["layout"]["world"] == 4
    code, out, _ = run(capsys, *a100, "--gpus", "4", "--top", "1", "--json", "-")
    found = json.loads(out)
    assert code == 0 and found["fits_from"] is None
    code, out, _ = run(capsys, *a100, "--gpus", "1", "--json", "-")
    told = json.loads(out)
    assert not told["fits"] and told["fits_from"]["fits"]
    for key in ("layout", "memory_bytes", "step_seconds"):
        assert told["fits_from"][key] == found[key]


def test_a_search_says_where_no_number_of_devices_is_enough(capsys):
    fixed = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "batch.micro_batch_size=64")
    flags = [word for field in fixed for word in ("--fix", field)]
    device = ("--gpus", "1", "--device", "v100-32gb", "--json", "-")
    code, out, err = run(capsys, "llama-3.1-8b", *device, *flags)
    assert code == 1 and json.loads(out)["fits_from"] is None
    assert "nor does one on more devices" in err


def test_a_search_that_no_layout_could_help_names_no_layout(capsys):
    wrong, bounds = ("--set", "optimizer.trust_bounds=[2,1]"), ["optimizer.trust_bounds"] * 2
    for more, others in (((), []), (("--set", "optimizer.lrr=3"), ["optimizer.lrr"])):
        code, out, err = run(capsys, "tiny", "--gpus", "1", *wrong, *more, "--json", "-")
        fields = [problem["field"] for problem in json.loads(out)["problems"]]
        assert code == 2 and "no layout" not in err
        assert fields == [*others, *bounds]


def test_a_layout_of_another_world_is_told_with_plan_s_own_flag(capsys):
    code, _, err = run(capsys, "tiny", "--gpus", "4", "--set", "parallel.tp=3")
    assert code == 2 and "--nproc" not in err
    assert "hint: run 3 or 6 ranks (--gpus), or choose tp*cp*pp among 1, 2 or 4" in err
    assert "the nearest legal layouts on 4 ranks" in err


def test_a_search_names_a_batch_that_more_layouts_divide_where_that_is_quicker(capsys):
    arguments = ("llama-3.1-8b", "--gpus", "100", "--device", "h100", "--top", "1")
    _, out, _ = run(capsys, *arguments, "--json", "-")
    data = json.loads(out)
    other = data["neighbours"][0]
    assert (other["field"], other["value"], other["fits"]) == ("global-batch", 1100, True)
    _, out, _ = run(capsys, *arguments, "--global-batch", "1100", "--json", "-")
    best = json.loads(out)
    assert other["step_seconds"] == pytest.approx(best["step_seconds"])
    gain = best["tokens_per_second_per_gpu"] / data["tokens_per_second_per_gpu"] - 1
    assert gain > 1 and other["reason"].startswith(f"{gain:+.1%} tokens/s")
    assert all(one["field"] != "global-batch" for one in best["neighbours"])


def test_a_terminal_of_80_columns_holds_the_tables_and_breaks_no_word(capsys, monkeypatch):
    for name, value in (("COLUMNS", "80"), ("FORCE_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    arguments = ("mixtral-8x22b", "--gpus", "128", "--device", "h100", "--ranks", "--draw")
    _, out, _ = run(capsys, *arguments)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert max(map(len, lines)) == 80
    words = {word for line in lines for word in line.split()}
    assert words >= {"gradients", "activations", "communication", "schedule=zero_bubble"}
    assert "drawn with 16 of its 32 micro-batches" in lines


def test_a_bare_preset_on_gpus_is_searched_and_its_best_config_written(capsys, tmp_path):
    target = tmp_path / "run.toml"
    arguments = ("gpt2-1.5b", "--gpus", "16", "--device", "a100-40gb")
    code, out, err = run(capsys, *arguments, "--top", "3", "--output", str(target), "--json", "-")
    data = json.loads(out)
    assert code == 0 and len(data["candidates"]) == 3 and f"wrote {target}" in err
    seconds = [candidate["step_seconds"] for candidate in data["candidates"]]
    assert seconds == sorted(seconds) and seconds[0] == data["step_seconds"]
    written = tomllib.loads(target.read_text())
    assert written["parallel"]["tp"] == data["layout"]["tp"]
    header = [line[2:] for line in target.read_text().splitlines() if line.startswith("# ")]
    assert header[0].startswith("planned: 16 x a100-40gb, ")
    assert header[1] == f"a step: {seconds[0]:.4g} s"
    assert header[3] == "again: mtcli plan run.toml --gpus 16 --device a100-40gb"
    _, _, _, *flags = header[3].partition(": ")[2].split()
    code, again, _ = run(capsys, str(target), *flags, "--json", "-")
    assert code == 0 and json.loads(again)["step_seconds"] == pytest.approx(seconds[0])


def test_a_whole_run_is_in_table_and_json_and_wrong_figures_are_refused_together(capsys):
    where = ("gpt2-345m", "--gpus", "8", "--device", "h100", "--set", "parallel.tp=2")
    flags = ("--tokens", "300B", "--price", "2", "--assume", "storage=10,pue=1.2", "--json", "-")
    budget = json.loads(run(capsys, *where, *flags)[1])["budget"]
    assert budget["tokens"] == 300e9 and budget["assumed"]["storage"] == 10.0
    hours = budget["gpu_hours"]["planned"]
    assert budget["money"]["planned"] == 2 * hours == 2 * 8 * 24 * budget["days"]["planned"]
    assert budget["kwh"]["planned"] == pytest.approx(hours * 0.7 * 1.2)
    saves = budget["checkpoints"]
    assert saves["write_seconds"] == saves["bytes"] / 10e9 and saves["every_seconds"] == 1800
    assert saves["all_write_seconds"] == saves["count"] * saves["write_seconds"]
    words = " ".join(run(capsys, *where, *flags[:-2])[1].split())
    assert "3e+11 tokens" in words and f"checkpoints {saves['count']:,} of 4.97 GB" in words
    wrong = ("--tokens", "3X", "--assume", "storage=0", "--set", "optimizer.lr=-1", "--json", "-")
    code, out, _ = run(capsys, *where, *wrong)
    fields = [problem["field"] for problem in json.loads(out)["problems"]]
    assert code == 2 and fields == ["optimizer.lr", "--tokens", "--assume"]


def test_the_length_of_the_run_is_said_by_the_plan_its_config_and_its_launch_files(
    capsys, tmp_path
):
    where = ("gpt2-345m", "--gpus", "8", "--device", "h100", "--set", "parallel.tp=2")
    run_config = load_config("gpt2-345m")
    steps, tokens = run_config.train.steps, tokens_of(run_config)
    total = json.loads(run(capsys, *where, "--tokens", str(tokens), "--json", "-")[1])["budget"]
    length = f"{total['days']['planned']:.3g} days for {steps:,} steps, {tokens:.4g} tokens"
    config, script, jobs = (tmp_path / name for name in ("run.toml", "a.sbatch", "a.yaml"))
    files = ("--output", str(config), "--sbatch", str(script), "--jobset", str(jobs))
    said = " ".join(run(capsys, *where, *files)[1].split())
    assert f"the run {length}; train.steps sets it" in said
    assert f"# the run: {length}; train.steps sets it\n" in config.read_text()
    assert all(f"\n# The run: {length}\n" in path.read_text() for path in (script, jobs))
    said = run(capsys, *where, "--set", f"train.steps={steps // 100}")[1]
    ((count, unit),) = re.findall(rf"([\d.]+) (hours|min) for {steps // 100:,} steps", said)
    days = float(count) / {"hours": 24, "min": 24 * 60}[unit]
    assert days == pytest.approx(total["days"]["planned"] / 100, rel=0.05)
    chats = ("--set", "data.train=a.jsonl", "--set", "train.epochs=2")
    assert "train.steps sets it" not in run(capsys, *where, *chats)[1]


def test_launch_files_name_the_config_and_replace_none_without_force(capsys, tmp_path):
    where = ("gpt2-345m", "--gpus", "16", "--device", "h100", "--set", "parallel.tp=2")
    config, script, jobs = (tmp_path / name for name in ("run.toml", "a.sbatch", "a.yaml"))
    files = ("--sbatch", str(script), "--jobset", str(jobs))
    code, _, err = run(capsys, *where, *files)
    assert code == 2 and err.count("it names the config of a plan") == 2
    code, _, err = run(capsys, *where, *files, "--output", str(config))
    assert code == 0 and all(f"wrote {path}" in err for path in (config, script, jobs))
    assert f"config=${{1:-{config}}}" in script.read_text() and "--nodes=2\n" in script.read_text()
    assert "- /data/run.toml\n" in jobs.read_text() and "completions: 2\n" in jobs.read_text()
    assert len(list(tmp_path.iterdir())) == 3
    jobs.unlink()
    script.write_text("mine")
    again = (*where, "--sbatch", str(script), "--output", str(config))
    code, _, err = run(capsys, *again)
    assert code == 2 and "--force to replace it" in err and script.read_text() == "mine"
    assert run(capsys, *again, "--force")[0] == 0 and "srun" in script.read_text()
    config.unlink()
    flags = ("--global-batch", "48", "--jobset", str(jobs), "--output", str(config))
    code, _, err = run(capsys, *where[:2], "12", *where[3:], *flags)
    assert code == 2 and "12 GPUs fill no whole nodes of 8" in err and "--gpus 16" in err
    code, _, err = run(capsys, "tiny", "--jobset", str(jobs), "--output", str(config))
    assert code == 2 and "a launch file is for GPUs" in err
    assert not jobs.exists() and not config.exists()


def test_fixed_fields_and_sizes_are_kept_in_a_search(capsys):
    fixed = ("--fix", "parallel.tp=4", "--global-batch", "96", "--seq", "512", "--top", "4")
    code, out, _ = run(
        capsys, "gpt2-774m", "--gpus", "8", "--device", "h100", *fixed, "--json", "-"
    )
    data = json.loads(out)
    assert code == 0
    for candidate in data["candidates"]:
        layout = candidate["layout"]
        assert (layout["tp"], layout["global_batch_size"], layout["seq_len"]) == (4, 96, 512)


def test_fixing_what_is_not_searched_or_not_legal_is_refused(capsys):
    code, _, err = run(capsys, "tiny", "--gpus", "4", "--fix", "optimizer.lr=1")
    assert code == 2 and "--fix optimizer.lr pins a field that is not searched" in err
    code, _, err = run(capsys, "tiny", "--gpus", "8", "--fix", "parallel.tp=3")
    assert code == 2 and "tp=3 does not divide num_kv_heads=4" in err
    assert "  --set parallel.tp=4                                  tp=4 pp=1 dp=2\n" in err


def test_a_refused_layout_ends_with_the_nearest_legal_ones(capsys):
    wrong = ("--set", "parallel.tp=3", "--set", "parallel.pp=3")
    code, _, err = run(capsys, "tiny", *wrong, "--gpus", "8")
    assert code == 2 and "hint: the nearest legal layouts on 8 ranks:\n" in err
    assert "  --set parallel.tp=4 --set parallel.pp=2   tp=4 pp=2 dp=1\n" in err
    code, _, err = run(capsys, "tiny", *wrong)
    assert code == 2 and "hint: the nearest legal layouts:\n" in err


def test_a_batch_of_the_user_s_that_no_layout_divides_is_refused_without_other_words(capsys):
    wanted = ["--gpus", "7", "--device", "h100", "--top", "1", "--global-batch", "16"]
    code, _, err = run(capsys, "tiny", *wanted)
    assert code == 2 and "no layout of 7 ranks cuts this model and global_batch_size=16" in err
    assert "hint: --global-batch 21, or another" in err and err.count("error:") == 1
    code, _, err = run(capsys, "tiny", *wanted, "--fix", "parallel.tp=3")
    assert code == 2 and "tp=3 does not divide num_kv_heads" in err


def test_a_preset_s_batch_gives_way_to_one_that_the_ranks_divide(capsys):
    code, out, _ = run(capsys, "tiny", "--gpus", "7", "--device", "h100", "--top", "1")
    assert code == 0 and "layouts of 21 sequences, as none cuts the preset's 16" in out


def test_ranks_show_both_maps_and_every_group(capsys):
    sizes = [f"parallel.{axis}={n}" for axis, n in (("tp", 2), ("pp", 2), ("ep", 4))]
    sets = [word for size in sizes for word in ("--set", size)]
    arguments = ("mixtral-8x7b", "--gpus", "16", "--device", "h200", *sets, "--ranks")
    _, out, _ = run(capsys, *arguments, "--json", "-")
    data = json.loads(out)
    assert len(data["ranks"]) == 16
    assert data["groups"]["attention"]["tp"][0] == [0, 1]
    assert data["groups"]["experts"]["ep"][0] == [0, 1, 2, 3]
    assert data["groups"]["attention"]["pp"] == data["groups"]["experts"]["pp"]
    _, out, _ = run(capsys, *arguments)
    assert "attention tp: [0, 1] [2, 3]" in out and "experts ep: [0, 1, 2, 3]" in out


def test_text_that_a_run_would_tokenize_first_is_told_with_its_time(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("all the world is a stage\n" * 4000)
    words = ("tiny", "--set", "data.train=text.txt")
    code, out, _ = run(capsys, *words, "--set", "data.tokenizer=bytes", "--json", "-")
    (line,) = json.loads(out)["data"]
    assert code == 0 and re.fullmatch(
        r"text.txt: 1 file of 0.1 MB, to be tokenized by bytes into text.txt.tokenized "
        r"in about 0:00:0\d",
        line,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    config = load_config("tiny", ["data.train=text.txt", "data.tokenizer=bytes"])
    (text,) = texts_of(config, None)
    text.tokenize(lambda line: None)
    code, out, _ = run(capsys, *words, "--set", "data.tokenizer=bytes", "--json", "-")
    assert code == 0 and json.loads(out)["data"] == []
    code, out, error = run(capsys, *words)
    assert code == 2 and not out and "text.txt is text, and no tokenizer is known" in error


def test_the_timeline_is_drawn_and_plotted(capsys, tmp_path):
    target = tmp_path / "timeline.png"
    sets = ("--set", "parallel.pp=2", "--device", "h100", "--draw", "--plot", str(target))
    code, out, err = run(capsys, "tiny", *sets)
    assert code == 0 and "rank 1 " in out and f"wrote {target}" in err
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.png"]


def test_files_that_cannot_be_written_are_refused(capsys, tmp_path):
    code, _, err = run(capsys, "tiny", "--device", "h100", "--plot", str(tmp_path / "a.xyz"))
    assert code == 2 and "--plot: it does not write .xyz" in err
    missing = str(tmp_path / "no" / "a.png")
    code, _, err = run(capsys, "tiny", "--device", "h100", "--plot", missing)
    assert code == 2 and "there is no folder" in err
    code, _, err = run(capsys, "tiny", "--device", "h100", "--output", missing)
    assert code == 2 and "there is no folder" in err
    (tmp_path / "run.toml").mkdir()
    code, _, err = run(capsys, "tiny", "--device", "h100", "--output", str(tmp_path / "run.toml"))
    assert code == 2 and "run.toml is a folder" in err


def test_presets_are_listed_with_their_parameters(capsys):
    code, out, _ = run(capsys, "--presets", "--json", "-")
    names = {one["name"]: one for one in json.loads(out)}
    assert code == 0 and names["tiny"]["parameters"] == 5_322_240
    assert names["mixtral-8x22b"]["active"] < names["mixtral-8x22b"]["parameters"]
    assert "tiny" in run(capsys, "--presets")[1]


def test_a_missing_config_an_unknown_device_and_a_bad_set_are_refused(capsys):
    code, out, err = run(capsys, "--rank", "3", "--json", "-")
    assert code == 2 and "CONFIG: it is missing" in err
    assert [one["field"] for one in json.loads(out)["problems"]] == ["--rank", "CONFIG"]
    code, out, err = run(capsys, "tiny", "--device", "h100", "--output", "-")
    assert code == 2 and "- is stdout" in err and not out
    code, _, err = run(capsys, "tiny", "--device", "h1000", "--json", "-")
    assert code == 2 and "there is no device named 'h1000'" in err
    code, out, _ = run(capsys, "no-such-preset", "--json", "-")
    assert code == 2 and json.loads(out)["ok"] is False
    unread = ("--set", "train", "--fix", "tp", "--device", "h1000", "--json", "-")
    code, out, _ = run(capsys, "tiny", *unread)
    told = [one["message"].split(" names ")[0] for one in json.loads(out)["problems"]]
    assert code == 2 and told[0] == "--set 'train'" and "no device named 'h1000'" in told[-1]


def test_a_plan_is_quick_and_imports_no_torch():
    script = (
        "import sys, time; from mtcli.__main__ import run\n"
        "code = run(['plan', 'gpt2-345m', '--device', 'h100'])\n"
        "assert time.process_time() < 3, time.process_time()\n"  # 0.4 s on an idle core
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'imported'\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@slow("a process of its own, 5 s")
def test_the_530b_preset_is_planned_on_2240_gpus_without_torch(capsys):
    code, out, _ = run(
        capsys, "mt-nlg-530b", "--gpus", "2240", "--device", "a100-80gb", "--json", "-"
    )
    best = json.loads(out)
    assert code == 0 and best["fits"]
    assert best["layout"]["tp"] in (4, 8) and best["layout"]["pp"] >= 14
    assert len(best["candidates"]) == 5


def test_128k_tokens_fit_where_context_parallelism_cuts_them(capsys):
    found = {}
    for cp in (1, 2, 4, 8, 16):
        sizes = (f"parallel.cp={cp}", "batch.seq_len=131072", "batch.global_batch_size=16")
        flags = [word for value in (*sizes, "parallel.tp=8") for word in ("--set", value)]
        code, out, _ = run(
            capsys, "llama-3.1-8b", "--device", "h100", "--gpus", "128", *flags, "--json", "-"
        )
        found[cp] = json.loads(out)
        assert found[cp]["layout"]["cp"] == cp and code == (0 if found[cp]["fits"] else 1)
    held = {cp: plan["memory_bytes"]["activations"] for cp, plan in found.items()}
    for cp in (2, 4, 8, 16):  # 1/cp of the tokens, the ring's copies, the head's whole gradient
        assert held[cp] == pytest.approx(held[1] / cp, rel=0.05)
    assert found[16]["fits"] and not found[1]["fits"]
    assert found[16]["communication_seconds"]["cp"] > 0.0


def test_a_dry_run_is_in_the_json_and_agrees_with_the_plan(capsys):
    layout = ["--gpus", "64", "--device", "h100", "--set", "parallel.tp=2"]
    small = ["--set", "parallel.pp=2", "--set", "batch.global_batch_size=128"]
    code, out, err = run(
        capsys, "tiny", *layout, *small, "--dry-run", "--rank", "63", "--json", "-"
    )
    found = json.loads(out)["dry_run"]
    assert (code, found["rank"], found["problems"]) == (0, 63, []), err
    assert found["state_bytes"] == found["predicted_state_bytes"] > 0
    peaks = found["activation_peak_bytes"], found["predicted_activation_bytes"]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)


def test_the_plan_names_the_fullest_rank_and_what_each_pipeline_rank_holds(capsys):
    flags = ["--gpus", "8", "--device", "h100", "--set", "parallel.pp=4", "--json", "-"]
    _, out, _ = run(capsys, "tiny", *flags)
    data = json.loads(out)
    totals = [stage["total"] for stage in data["memory_by_stage"]]
    assert len(totals) == 4 and max(totals) == data["memory_bytes"]["total"]
    assert data["fullest_rank"] // 2 == totals.index(max(totals))


def test_a_rank_without_a_dry_run_is_refused(capsys):
    code, _, err = run(capsys, "tiny", "--rank", "0")
    assert code == 2 and "add --dry-run" in err


def test_a_list_of_presets_refuses_the_flags_of_a_plan(capsys):
    code, out, err = run(capsys, "--presets", "--gpus", "4", "--ranks")
    assert (code, out) == (2, "") and "has no use for --gpus, --ranks" in err
    code, out, err = run(capsys, "tiny", "--presets", "--rank", "0")
    assert (code, out) == (2, "") and "has no use for CONFIG, --rank" in err
