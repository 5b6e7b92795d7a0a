"""A watched run: its panel and line, how long it is silent, and what happened besides steps."""

import json

from run_folders import add_events, age, lock, lock_elsewhere, loss_at, write_run

from mtcli.core.runs.run_watch import RunWatcher, line, panel

NOW = 1_800_000_000.0


def test_the_panel_has_step_loss_speed_time_left_memory_and_events(tmp_path):
    folder = write_run(tmp_path / "a", 20, of=50, valid_every=8)
    lock(folder)
    add_events(
        folder,
        {"event": "resumed", "step": 4, "world": 1},
        {"event": "saved", "step": 10, "bytes": 3 << 20},
        {"event": "save_failed", "step": 12, "reason": "disk full"},
        {"event": "reselected", "step": 13},
        {"event": "saved", "step": 20, "bytes": 5 << 30},
    )
    age(folder, NOW - 7)
    lines = panel(RunWatcher(folder, clock=lambda: NOW).look(), 100).splitlines()
    host = json.loads((folder / "run.lock").read_text())["host"]
    curve = lines.pop(3).strip()
    assert len(curve) == 20 and curve[0] == "█" and curve[-1] == "▁"
    assert lines == [
        f"run      {folder}, running on {host}",
        "step     20 of 50 (40.0%)",
        f"loss     {loss_at(20):.4f}",
        f"valid    {1.1 * loss_at(16):.4f}",
        "speed    64 tokens/s, 0.5 s a step",
        "tokens   640",
        "left     0:00:15",
        "memory   1.5 GiB at most, of the first rank",
        "wrote    0:00:07 ago",
        "- saved step 10, 3.0 MiB",
        "- the save of step 12 failed: disk full",
        "- reselected at step 13",
        "- saved step 20, 5.0 GiB",
    ]
    assert max(map(len, panel(RunWatcher(folder).look(), 30).splitlines())) <= 30


def test_a_line_has_the_figures_while_it_runs_and_the_end_after(tmp_path):
    folder = write_run(tmp_path / "a", 20, of=50, valid_every=8)
    lock(folder)
    figures = f"step 20/50 loss {loss_at(20):.4f} valid {1.1 * loss_at(16):.4f} tokens/s 64 "
    figures += "memory_gib 1.50 "
    assert line(RunWatcher(folder).look()) == figures + "left 0:00:15"
    (folder / "run.lock").unlink()
    add_events(folder, {"event": "failed", "step": 20, "reason": "loss nan"})
    assert line(RunWatcher(folder).look()) == figures + "failed: loss nan"


def test_a_run_that_has_made_no_step_is_shown_too(tmp_path):
    folder = write_run(tmp_path / "a", 0, of=50)
    lock(folder)
    glance = RunWatcher(folder).look()
    assert line(glance) == "step 0/50" and "step     0 of 50 (0.0%)" in panel(glance, 80)


def test_silence_is_by_this_machine_s_clock_once_the_run_has_changed(tmp_path):
    """The file system's clock is a day ahead, and then a day behind."""
    for skew in (86_400.0, -86_400.0):
        folder = write_run(tmp_path / f"a{skew}", 20, of=50)
        lock_elsewhere(folder)
        age(folder, NOW + skew)
        ticks = [1000.0]
        watcher = RunWatcher(folder, clock=lambda: NOW, ticks=lambda ticks=ticks: ticks[0])
        assert watcher.look().run.state == ("running" if skew > 0 else "dead lock")
        age(folder, NOW + skew + 5)
        for seconds, state in ((0, "running"), (599, "running"), (601, "dead lock")):
            ticks[0] = 1000.0 + seconds
            glance = watcher.look()
            assert (glance.run.state, glance.silent_seconds) == (state, seconds)


def test_figures_are_named_for_json(tmp_path):
    folder = write_run(tmp_path / "a", 20, of=50)
    figures = RunWatcher(folder).look().figures()
    assert (figures["step"], figures["steps"], figures["left_seconds"]) == (20, 50, 15.0)
    assert figures["memory_bytes"] == 3 << 29 and figures["tokens_per_second"] == 64.0
