"""The lock on a run folder: who holds it is named, a dead holder's is taken over, others wait."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from marks import slow

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime.attempts import Attempt
from mtcli.core.training import run_lock
from mtcli.core.training.run_lock import Holder, lock_folder, require_startable

HOLD = """
import sys
from pathlib import Path
from mtcli.core.training.run_lock import lock_folder
from mtcli.core.config.errors import MtcliError
sys.stdin.readline()
try:
    with lock_folder(Path(sys.argv[1]), resume=True) as notice:
        print("held" + notice, flush=True)
        sys.stdin.readline()
except MtcliError as error:
    print(error.problems[0].message, flush=True)
"""


class Process:
    """A process that takes a folder when it is told to, and leaves it when it is told to."""

    def __init__(self, folder):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], **pipes)

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self):
        return self.process.stdout.readline().strip()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def other(tmp_path):
    """Another process, which holds the folder `run`."""
    process = Process(tmp_path / "run")
    process.go()
    assert process.answer() == "held"
    yield process
    process.kill()


LAUNCHER = """
import os, subprocess, sys
environment = os.environ | {"LOCAL_RANK": "0"}
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], env=environment)
rank.wait()
"""


def test_a_rank_whose_launcher_was_killed_is_waited_for(tmp_path):
    """It ends by itself, here as its input closes; one whose launcher lives is refused at once."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", LAUNCHER, HOLD, str(tmp_path / "run")]
    launcher = subprocess.Popen(command, **pipes)
    launcher.stdin.write("\n")
    launcher.stdin.flush()
    assert launcher.stdout.readline().strip() == "held"
    for by in (lock_folder, require_startable):
        assert "is held by another run" in refusal(tmp_path / "run", by=by)
    launcher.kill()
    launcher.wait()
    closing = threading.Timer(1.0, launcher.stdin.close)
    closing.start()
    with lock_folder(tmp_path / "run", resume=True):
        assert not closing.is_alive(), "it was taken once the rank had ended"


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.fixture(params=["flock", "no flock"])
def flock(request, monkeypatch):
    """With and without locks of the file system; without, holders are looked up."""
    if request.param == "no flock":
        monkeypatch.setattr(fcntl, "flock", no_locks)


def refusal(folder, resume=True, by=lock_folder):
    with pytest.raises(MtcliError) as caught:
        if by is lock_folder:
            with lock_folder(folder, resume):
                pytest.fail("it is held twice")
        else:
            by(folder, resume)
    assert caught.value.code == 2
    return str(caught.value)


@pytest.mark.parametrize("by", [lock_folder, require_startable])
def test_a_held_folder_is_refused_and_its_holder_named(tmp_path, other, by, flock):
    said = refusal(tmp_path / "run", by=by)
    assert f"error: train.output: {tmp_path}/run is held by another run (process " in said
    assert f"(process {other.process.pid} on {socket.gethostname()}, since 2" in said
    assert "hint: wait until it ends, or stop it; or set train.output" in said


def test_a_dead_holders_lock_is_taken_over_and_it_is_named(tmp_path, other, flock):
    other.kill()
    require_startable(tmp_path / "run", resume=False)
    with lock_folder(tmp_path / "run", resume=False) as notice:
        assert notice.startswith(f"took over {tmp_path}/run from process {other.process.pid} on ")
        assert notice.endswith(", which has died")
    assert not (tmp_path / "run" / "run.lock").exists()


def test_nobody_is_named_where_the_holder_before_has_left(tmp_path, other, flock):
    (tmp_path / "run" / "config.toml").touch()
    other.go()
    other.process.wait()
    with lock_folder(tmp_path / "run", resume=True) as notice:
        assert notice == ""


def test_of_many_that_start_at_once_one_holds_the_folder(tmp_path):
    processes = [Process(tmp_path / "a" / "run") for _ in range(6)]
    for process in processes:
        process.go()
    answers = sorted(process.answer() for process in processes)
    for process in processes:
        process.kill()
    assert answers[-1] == "held" and all("is held by another run" in a for a in answers[:-1])


@slow("three processes, 450 locks")
def test_a_lock_that_is_taken_again_and_again_is_held_by_one_at_a_time(tmp_path):
    """Each holder removes the lock as it leaves; one that had opened it must not hold it then."""
    count = """
import sys
from pathlib import Path
from mtcli.core.training.run_lock import lock_folder
from mtcli.core.config.errors import MtcliError
folder, done = Path(sys.argv[1]), 0
while done < 150:
    try:
        with lock_folder(folder, resume=True):
            (folder / "inside").mkdir()
            (folder / "inside").rmdir()
            done += 1
    except MtcliError:
        pass
"""
    command = [sys.executable, "-c", count, str(tmp_path / "run")]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]


def foreign(folder, **others):
    """A lock that names a holder of another machine, as this one's process with `others`."""
    me = run_lock._this_process()._asdict() | {"host": "far", "boot": "its boot"} | others
    folder.mkdir(exist_ok=True)
    (folder / "run.lock").write_text(json.dumps(me))
    return Holder(**me)


@pytest.mark.parametrize(
    ("kind", "options", "is_proof"),
    [
        ("nfs4", "rw,hard,local_lock=none", True),
        ("nfs", "rw,nolock,hard,local_lock=all", False),
        ("lustre", "rw,flock", True),
        ("lustre", "rw,localflock", False),
        ("beegfs", "rw", False),
    ],
)
def test_another_machines_holder_is_dead_only_where_its_lock_would_be_seen(
    tmp_path, monkeypatch, kind, options, is_proof
):
    holder = foreign(tmp_path / "run")
    device = os.stat(tmp_path).st_dev
    mount = f"1 1 {os.major(device)}:{os.minor(device)} / /x rw shared:1 - {kind} s:/x {options}\n"
    read = Path.read_text
    here = {Path("/proc/self/mountinfo"): mount}
    monkeypatch.setattr(Path, "read_text", lambda p, *a: here[p] if p in here else read(p, *a))
    if is_proof:
        with lock_folder(tmp_path / "run", resume=True) as notice:
            assert str(holder) in notice
    else:
        said = refusal(tmp_path / "run")
        assert str(holder) in said
        assert f"where that process has ended, remove {tmp_path}/run/run.lock" in said


def test_another_machines_holder_is_not_known_to_be_dead_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    foreign(tmp_path / "run", pid=2**30)
    assert f"remove {tmp_path}/run/run.lock" in refusal(tmp_path / "run")
    require_startable(tmp_path / "run", resume=True)  # which refuses only what is sure


@pytest.mark.parametrize(
    "dead", [{"started": 1}, {"pid": 2**22 + 1}, {"boot": "before"}], ids=lambda d: next(iter(d))
)
def test_a_holder_of_this_machine_is_dead_by_its_id_its_start_or_the_machines(
    tmp_path, monkeypatch, dead
):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    me = run_lock._this_process()
    here = {"host": me.host, "boot": me.boot}
    foreign(tmp_path / "run", **here)
    assert "is held by another run" in refusal(tmp_path / "run"), "this very process lives"
    foreign(tmp_path / "run", **here | dead)
    with lock_folder(tmp_path / "run", resume=True) as notice:
        assert notice


def test_a_zombie_holds_nothing(tmp_path, monkeypatch, other):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    other.process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    with lock_folder(tmp_path / "run", resume=True) as notice:
        assert notice


def test_without_locks_one_process_at_a_time_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock.taking").touch()
    said = refusal(tmp_path / "run")
    assert f"another run is taking {tmp_path}/run" in said and "remove " in said


@pytest.mark.parametrize("text", ["", "[]", "{}", "noise", '{"host": 1}', "9" * 9000])
def test_a_lock_that_names_nobody_is_free(tmp_path, text):
    (tmp_path / "run.lock").write_text(text)
    require_startable(tmp_path, resume=False)
    with lock_folder(tmp_path, resume=False) as notice:
        assert notice == ""


@pytest.mark.parametrize("trace", ["metrics.jsonl", "run.json", "checkpoints/step-00000003"])
@pytest.mark.parametrize("by", [lock_folder, require_startable])
def test_a_folder_with_a_run_is_refused_but_to_resume_it(tmp_path, trace, by):
    (tmp_path / trace).mkdir(parents=True)
    said = refusal(tmp_path, resume=False, by=by)
    assert f"error: train.output: {tmp_path} already holds a run\n" in said
    assert "hint: --resume goes on from it" in said
    require_startable(tmp_path, resume=True)
    with lock_folder(tmp_path, resume=True):
        pass


def test_a_refused_start_leaves_nothing_behind(tmp_path):
    with lock_folder(tmp_path / "run", resume=False):
        assert (tmp_path / "run" / "run.lock").exists()
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    with lock_folder(tmp_path / "mine", resume=False):
        pass
    assert (tmp_path / "mine").exists()


def test_a_folder_in_the_place_of_the_lock_is_named(tmp_path):
    lock = tmp_path / "run.lock"
    lock.mkdir()
    for start in (
        lock_folder(tmp_path, resume=False).__enter__,
        lambda: require_startable(tmp_path, False),
    ):
        with pytest.raises(MtcliError, match=f"{lock} is a folder, and a file is written there"):
            start()


def test_a_lock_that_was_removed_and_taken_by_another_is_left_to_it(tmp_path):
    lock = tmp_path / "run" / "run.lock"
    with lock_folder(tmp_path / "run", resume=False):
        lock.unlink()
        lock.write_text("another's")
    assert lock.read_text() == "another's"


def test_asking_loads_no_torch(tmp_path):
    code = "import sys; from pathlib import Path; import mtcli.core.training.run_lock as lock; "
    code += "lock.require_startable(Path(sys.argv[1]), False); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False\n"


FIRST = Attempt("a", "job", 1, False)
AGAIN = FIRST._replace(number=2, restarted=True)


def run_of(folder, attempt):
    """Leaves what a run of an attempt writes first."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"world": 2} | attempt.record()))


def refused_to(attempt, folder):
    """What an attempt without --resume is told, which has a minute's patience."""
    with pytest.raises(MtcliError) as caught, lock_folder(folder, False, attempt, patience=60.0):
        pass
    return str(caught.value)


def test_an_attempt_goes_on_in_the_folder_of_its_own_launch_alone(tmp_path):
    run_of(tmp_path / "run", FIRST)
    with lock_folder(tmp_path / "run", False, AGAIN):
        pass
    for stranger in (FIRST, AGAIN._replace(launch="b")):
        assert "already holds a run" in refused_to(stranger, tmp_path / "run")
        with lock_folder(tmp_path / "run", True, stranger):
            pass
    (tmp_path / "run" / "run.json").write_text("[1")
    assert "already holds a run" in refused_to(AGAIN, tmp_path / "run")


def test_an_attempt_waits_for_a_rank_of_its_launch_to_end_and_for_no_other(
    tmp_path, other, monkeypatch
):
    run_of(tmp_path / "run", FIRST)
    with monkeypatch.context() as patched:
        patched.setattr(run_lock, "sleep", lambda _: pytest.fail("it waits for another's run"))
        assert "is held by another run" in refused_to(AGAIN._replace(launch="b"), tmp_path / "run")
    threading.Timer(0.2, other.kill).start()
    with lock_folder(tmp_path / "run", False, AGAIN, patience=60.0) as notice:
        assert "which has died" in notice


def recorded(folder, *steps):
    """A run folder with rows of some steps and no checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    return folder


def entered(by, folder, **flags):
    """What is wrong with a folder, or ""."""
    try:
        if by is require_startable:
            require_startable(folder, **flags)
        else:
            with lock_folder(folder, **flags):
                pass
    except MtcliError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("by", [lock_folder, require_startable])
def test_a_run_without_a_checkpoint_begins_anew_only_where_that_is_asked_for(by, tmp_path):
    folder = recorded(tmp_path / "run", 70, 71)
    for resume in (False, True):
        said = entered(by, folder, resume=resume)
        assert f"{folder} holds a run that has come to step 71 and saved no checkpoint" in said
        assert "\n\nhint: --start-over begins it anew, and keeps its records; or set" in said
        assert not entered(by, folder, resume=resume, anew=True)


@pytest.mark.parametrize("by", [lock_folder, require_startable])
def test_a_run_that_has_done_no_step_is_resumed_from_its_start(by, tmp_path):
    folder = recorded(tmp_path / "run")
    assert "already holds a run" in entered(by, folder, resume=False)
    assert not entered(by, folder, resume=True) and not entered(by, folder, resume=False, anew=True)


@pytest.mark.parametrize("by", [lock_folder, require_startable])
def test_a_run_with_a_checkpoint_never_begins_anew(by, tmp_path):
    folder = recorded(tmp_path / "run", 1, 2)
    (folder / "checkpoints" / "step-00000001").mkdir()
    said = entered(by, folder, resume=False, anew=True)
    assert f"{folder} already holds a run" in said and "--resume goes on from it" in said
    assert not entered(by, folder, resume=True, anew=True)


def test_a_restarted_attempt_begins_its_own_run_anew_by_itself(tmp_path):
    folder = recorded(tmp_path / "run", 3)
    (folder / "run.json").write_text('{"launch": "a", "job": "b"}')
    assert not entered(lock_folder, folder, resume=False, attempt=AGAIN)
