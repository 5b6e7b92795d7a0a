"""`mtcli runs`, end to end: the table and what differs, the JSON, and without torch."""

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import in_process
from run_folders import age, lock, lock_dead, write_checkpoint, write_run


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with runs/: a finished run, an older one that was stopped, a trial of a sweep."""
    monkeypatch.setenv("COLUMNS", "200")
    write_run(tmp_path / "runs" / "a", 20, valid_every=10)
    write_run(tmp_path / "runs" / "b", 10, of=20, saved=[10], optimizer={"lr": 0.5})
    write_run(tmp_path / "runs" / "sweep" / "seed=3", 5, overrides=["seed=3"])
    for name, moment in (("a", 3000), ("b", 2000), ("sweep/seed=3", 1000)):
        age(tmp_path / "runs" / name, moment)
    return tmp_path


def listed(home, *words):
    done = in_process("runs", *words, folder=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_table_has_a_line_for_each_run_the_newest_first(home):
    title, *lines = [line.split() for line in listed(home).splitlines()]
    assert title == ["run", "state", "step", "loss,", "last", "10", "valid", "tokens", "time",
                     "size", "host", "differs"]  # fmt: skip
    assert [line[0] for line in lines] == ["runs/a", "runs/b", "runs/sweep/seed=3"]
    assert lines[0][1:5] == ["finished", "20", "of", "20"] and lines[0][7:9] == ["640", "0:00:10"]
    assert lines[0][6] == "0.9839"  # 1.1 * 4 / sqrt(20)
    assert lines[0][-3:] == ["seed=7", "lr=0.003", "steps=20"]
    assert lines[1][-3:] == ["seed=7", "lr=0.5", "steps=20"]
    assert lines[2][-3:] == ["seed=3", "lr=0.003", "steps=5"]


@pytest.mark.parametrize(
    ("sort", "names"),
    [("loss", ["a", "b", "seed=3"]), ("size", ["seed=3", "a", "b"]),
     ("valid", ["a", "b", "seed=3"]), ("name", ["a", "b", "seed=3"])],
)  # fmt: skip
def test_runs_are_sorted_as_asked(home, sort, names):
    write_checkpoint(home / "runs" / "sweep" / "seed=3", 5, size=9000)
    lines = listed(home, "--sort", sort).splitlines()[1:]
    assert [Path(line.split()[0]).name for line in lines] == names


def test_json_has_every_run_and_what_differs(home):
    lock_dead(home / "runs" / "b")
    data = json.loads(listed(home, "runs", "--json", "-"))
    assert data["varied"] == ["seed", "optimizer.lr", "train.steps"]
    by_name = {run["folder"]: run for run in data["runs"]}
    assert by_name["runs/b"]["state"] == "dead lock"
    assert by_name["runs/b"]["fields"] == {"seed": 7, "optimizer.lr": 0.5, "train.steps": 20}
    assert (by_name["runs/a"]["tokens"], by_name["runs/a"]["steps"]) == (640, 20)
    assert by_name["runs/a"]["valid_loss"] == pytest.approx(1.1 * 4 / 20**0.5, abs=1e-12)


def test_why_a_run_ended_is_below_the_table(home):
    lock_dead(home / "runs" / "b")
    assert listed(home).splitlines()[-1].startswith("runs/b: dead lock: run.lock names process ")


def test_a_folder_without_runs_is_told(home):
    (home / "empty").mkdir()
    assert listed(home, "empty") == "empty holds no run\n"
    done = in_process("runs", "run", folder=home)
    assert done.returncode == 2 and "there is no folder run" in done.stderr
    assert "did you mean 'runs'?" in done.stderr
    done = in_process("runs", "a", "b", folder=home)
    assert done.returncode == 2 and "list takes [FOLDER], and 2 names" in done.stderr


def test_runs_are_listed_without_torch_and_matplotlib(home):
    code = """
import sys
from mtcli.__main__ import run
code = run(["runs"])
print("torch" in sys.modules, "matplotlib" in sys.modules, code, file=sys.stderr)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
    assert done.stderr == "False False 0\n"


def test_plot_names_runs_in_a_table_and_in_a_picture(home):
    done = in_process("runs", "plot", "runs", "--output", "loss.svg", folder=home)
    assert done.returncode == 0 and done.stderr == "wrote loss.svg\n"
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        ["run", "step"], ["a", "20"], ["b", "10"], ["sweep/seed=3", "5"]
    ]  # fmt: skip
    assert lines[1][2:5] == ["4.0000", "to", "0.8944"] and lines[1][5][0] == "█"
    picture = (home / "loss.svg").read_text()
    assert all(f">{name}<" in picture for name in ("a", "b", "sweep/seed=3", "tokens"))
    done = in_process("runs", "plot", "runs/a", "--axis", "time", folder=home)
    assert done.returncode == 0 and "--output FILE.png" in done.stderr


def test_compare_shows_losses_configs_and_both_axes(home):
    words = ("compare", "runs/a", "runs/b", "--output", "both.html", "--json", "both.json")
    out = listed(home, *words)
    rows = [line.split() for line in out.splitlines()]
    assert out.startswith("Losses, means of the last 10 steps but for validation\n")
    assert rows[1] == ["run", "tokens", "time", "at", "the", "end", *["after", "320", "tokens"],
                       *["after", "5", "s"], "least", "valid"]  # fmt: skip
    assert ["optimizer.lr", "0.003", "0.5"] in rows and "train.output" not in out
    page = (home / "both.html").read_text()
    assert "Loss over tokens" in page and "Loss over time" in page and "optimizer.lr" in page
    data = json.loads((home / "both.json").read_text())
    assert [run["folder"] for run in data["runs"]] == ["runs/a", "runs/b"]
    assert data["fields"] == {"optimizer.lr": [0.003, 0.5]}


def test_a_picture_needs_no_torch(home):
    code = """
import sys
from mtcli.__main__ import run
code = run(["runs", "compare", "runs/a", "runs/b", "--output", "a.html"])
print("torch" in sys.modules, code, file=sys.stderr)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False 0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plot"], "plot takes RUN ..., and 0 names are given"),
        (["compare", "runs/a"], "runs/a holds 1 run, and at least 2 are compared"),
        (["plot", "runs/a", "--output", "x.gif"], "--output: it does not write .gif"),
        (["plot", "runs/a", "--sort", "loss"], "--sort goes with list"),
        (["--axis", "time"], "--axis goes with plot"),
        (["plot", "runs/c"], "there is no folder runs/c"),
    ],
)
def test_a_mistake_is_refused_with_what_is_right(home, words, message):
    done = in_process("runs", *words, folder=home)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_once_shows_the_run_and_its_end_is_the_exit_code(home):
    done = in_process("runs", "watch", "runs/a", "--once", folder=home)
    assert done.returncode == 0 and "run      runs/a, finished on node7" in done.stdout
    lock_dead(home / "runs" / "a")
    done = in_process("runs", "watch", "runs/a", "--once", "--json", "-", folder=home)
    data = json.loads(done.stdout)
    assert done.returncode == 1 and data["state"] == "dead lock" and data["step"] == 20


def test_without_a_terminal_watching_prints_a_line_for_each_change_until_the_run_ends(home):
    folder = home / "runs" / "b"
    lock(folder)
    command = [sys.executable, "-m", "mtcli", "runs", "watch", "runs/b", "--every", "0.1"]
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("step 10/20 loss 1.2649 tokens/s 64 ")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 11, "loss": 1.0}) + "\n")
        assert process.stdout.readline().startswith("step 11/20 loss 1.0000")
        (folder / "run.lock").unlink()
        last = process.stdout.read()
    assert process.returncode == 1
    assert last.startswith("step 11/20 loss 1.0000 failed: it ended at step 11 and saved step 10")


@pytest.mark.parametrize("end", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_on_a_terminal_a_panel_stays_until_a_key(home, end):
    lock(home / "runs" / "b")
    command = [sys.executable, "-m", "mtcli", "runs", "watch", "runs/b", "--every", "0.2"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(home)
        os.execv(sys.executable, command)
    shown = b""
    while b"q ends" not in shown:
        shown += os.read(terminal, 1 << 16)
    assert b"runs/b, running on" in shown and b"10 of 20" in shown
    os.write(terminal, end)
    with suppress(OSError):  # the terminal ends with the command
        while os.read(terminal, 1 << 16):
            pass
    assert os.waitpid(pid, 0)[1] == 0


def test_prune_lists_with_sizes_and_frees_only_when_told(home):
    for step in (2, 4, 6):
        write_checkpoint(home / "runs" / "b", step)
    done = in_process("runs", "prune", "--keep", "1", folder=home)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "--yes frees it" in done.stderr
    assert lines[1].split()[:4] == ["runs/b/checkpoints/step-00000002", "checkpoint", "1,002", "B"]
    assert lines[-1] == "2.9 KiB can be freed"
    left = home / "runs" / "b" / "checkpoints"
    assert len(list(left.iterdir())) == 4
    data = json.loads(listed(home, "prune", "--keep", "1", "--json", "-"))
    assert (data["bytes"], data["freed_bytes"], len(data["items"])) == (3006, 0, 3)
    assert len(list(left.iterdir())) == 4
    assert listed(home, "prune", "--keep", "1", "--yes").endswith("freed 2.9 KiB\n")
    assert [path.name for path in left.iterdir()] == ["step-00000010"]
    assert listed(home, "prune", "--keep", "1") == "runs has nothing to free\n"


@pytest.mark.parametrize(("word", "count"), [(b"n\n", 2), (b"y\n", 1)])
def test_on_a_terminal_prune_asks(home, word, count):
    write_checkpoint(home / "runs" / "b", 2)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(home)
        words = ["runs", "prune", "--keep", "1"]
        os.execv(sys.executable, [sys.executable, "-m", "mtcli", *words])
    shown = b""
    while b"free it?" not in shown:
        shown += os.read(terminal, 1 << 16)
    os.write(terminal, word)
    with suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list((home / "runs" / "b" / "checkpoints").iterdir())) == count
