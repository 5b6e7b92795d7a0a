"""`mtcli` command lines in forks of the warm process: as if typed, without a start and imports.

The workers of `--nproc` are forked too, and see the variables that torchrun sets. What has to be
processes of a system's own, as a launcher and its workers, is started by stand-ins for commands.
"""

import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from ranks import begin_fork, warm

DEADLINE = 600.0  # seconds a command may take before its processes are killed
FORKS: dict[int, int] = {}  # the process that works for a stand-in, by their ids
LAUNCHERS = ("train", "sweep", "eval", "generate", "profile", "select")  # with ranks


class Done(NamedTuple):
    """What the processes of a command did: exit codes (negative for signals) and output."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]

    @property
    def returncode(self):
        return max(self.codes, key=abs)

    @property
    def stdout(self):
        return "".join(self.outputs)

    @property
    def stderr(self):
        return "".join(self.errors)


class Started:
    """A command that runs: a process per rank."""

    def __init__(self, words, folder, fault, stdin, environ):
        world, words = 1, list(words)
        if words[0] in LAUNCHERS and "--nproc" in words:
            at = words.index("--nproc")
            world = int(words[at + 1])
            del words[at : at + 2]  # a rank that a launcher started takes none
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        where |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(max(2, world))}  # a thread each
        self.room = tempfile.TemporaryDirectory(prefix="mtcli-")
        self.names = [Path(self.room.name) / name for name in ("in", "out", "err")]
        self.names[0].write_bytes(stdin)
        self.ranks = []
        for rank in range(world):
            for name in self.names[1:]:  # of a rank that is killed before it opens them, too
                _of(name, rank).touch()
            place = where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = (words, str(folder), os.environ | place | environ, self.names, fault)
            self.ranks.append(warm().Process(target=_run, args=arguments))
            self.ranks[-1].start()

    def ended(self, wanted=None):
        """Waits for some ranks, all if None are named; kills the others, and returns a Done."""
        end = time.monotonic() + DEADLINE
        wanted = range(len(self.ranks)) if wanted is None else wanted
        for rank in wanted:
            self.ranks[rank].join(max(0.0, end - time.monotonic()))
        late = [rank for rank in wanted if self.ranks[rank].exitcode is None]
        for process in self.ranks:
            process.kill()
            process.join()
        outputs, errors = (
            [
                _of(name, rank).read_bytes().decode(errors="replace")
                for rank in range(len(self.ranks))
            ]
            for name in self.names[1:]
        )
        self.room.cleanup()
        assert not late, f"ranks {late} did not end: {errors}"
        return Done([process.exitcode for process in self.ranks], outputs, errors)


def start(*words, folder=".", fault=None, stdin=b"", **environ):
    """Starts `mtcli <words>` in a folder; fault(rank) is called first on each rank."""
    return Started([str(word) for word in words], folder, fault, stdin, environ)


def mtcli(*words, **options):
    """Runs `mtcli <words>` to its end; options as of `start`."""
    return start(*words, **options).ended()


def in_process(*words, folder="."):
    """Runs `mtcli <words>` in this process, as rank 0 of 1: for lines that are refused at once."""
    from mtcli.__main__ import run

    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.chdir(folder)
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        code = run([str(word) for word in words])
    return Done([int(code)], [out.getvalue()], [errors.getvalue()])


def launched(*words, folder=".", **environ):
    """As `mtcli`, by a launcher of its own, which starts the workers of `--nproc`."""
    command = [stand_ins() / "mtcli", *map(str, words)]
    options = {"capture_output": True, "text": True, "timeout": DEADLINE}
    return subprocess.run(command, cwd=folder, env=os.environ | environ, **options)


@cache
def stand_ins():
    """A folder with `mtcli`, `torchrun` and `python`: each line of theirs is run by a fork of the
    warm process, and so is what it starts with its sys.executable."""
    folder = Path(tempfile.mkdtemp(prefix="mtcli-"))
    code = Path(__file__).with_name("stand_in.py").read_text()
    for name in ("mtcli", "torchrun", "python"):
        (folder / name).write_text(f"#!{sys.executable} -IS\n{code}")
        (folder / name).chmod(0o755)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(folder / "door"))
    door.listen(64)
    threading.Thread(target=_open, args=(door,), daemon=True).start()
    return folder


def fork_of(stand_in):
    """The process that works for a stand-in of this id, once that has started."""
    end = time.monotonic() + DEADLINE
    while stand_in not in FORKS:
        assert time.monotonic() < end, f"{stand_in} has not started"
        time.sleep(0.01)
    return FORKS[stand_in]


def workers_of(stand_in):
    """The workers of a launcher, which is a fork itself, in the order in which they started."""
    return [fork_of(pid) for pid in _stand_ins_of(fork_of(stand_in))]


def children_of(pid):
    """The processes that a process has started."""
    with suppress(FileNotFoundError, ProcessLookupError):
        found = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(word) for words in found for word in words]
    return []


def _stand_ins_of(pid):
    """The stand-ins that a process has started."""
    return [child for child in children_of(pid) if str(stand_ins()) in words_of(child)]


def words_of(pid):
    """The command line of a process; nothing where it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _kill(pid):
    """Kills a process and the stand-ins that it has started."""
    for one in (*_stand_ins_of(pid), pid):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _open(door):
    while True:
        threading.Thread(target=_serve, args=(door.accept()[0],), daemon=True).start()


def _serve(stand_in):
    """Forks a process for a stand-in, and tells it how that has ended."""
    with stand_in:
        size, files, _, _ = socket.recv_fds(stand_in, 8, 3)
        line = b""
        while len(line) < int.from_bytes(size, "little"):
            line += stand_in.recv(1 << 16)
        process = warm().Process(target=_run_line, args=(Files(files), *json.loads(line)))
        process.start()
        peer = stand_in.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        FORKS[int.from_bytes(peer[:4], sys.byteorder)] = process.pid
        for file in files:
            os.close(file)
        while process.sentinel not in wait([process.sentinel, stand_in]):
            numbers = stand_in.recv(16)
            for number in numbers:
                os.kill(process.pid, number)
            if not numbers:  # it was killed
                _kill(process.pid)
                break
        process.join()
        with suppress(OSError):  # where the stand-in was killed
            stand_in.send(str(process.exitcode).encode())


class Files:
    """Open files that a process which is started gets."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __getstate__(self):
        return [DupFd(number) for number in self.numbers]

    def __setstate__(self, copies):
        self.numbers = [copy.detach() for copy in copies]


def _run_line(files, stand_in, words, folder, environ):
    begin_fork()
    for number, file in enumerate(files.numbers):
        os.dup2(file, number)
        os.close(file)
    _become(folder, environ)
    sys.executable = str(Path(stand_in).with_name("python"))
    if words[0] == "-m":
        sys.argv = words[1:]
        if words[1] == "mtcli":
            main()
        else:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def own_address():
    """An address of this machine that others could reach, or None."""
    addresses = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    found = [one.address for one in addresses if one.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), None)


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _run(words, folder, environ, names, fault):
    begin_fork()
    rank = int(environ["RANK"])
    files = [os.open(names[0], os.O_RDONLY)]
    files += [os.open(_of(name, rank), os.O_WRONLY | os.O_CREAT, 0o600) for name in names[1:]]
    for number, file in enumerate(files):
        os.dup2(file, number)
    _become(folder, environ)
    if fault:
        fault(rank)
    sys.argv = ["mtcli", *words]
    main()


def _become(folder, environ):
    """Takes a folder, variables, and what files 0 to 2 are by now."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    from mtcli.core.runtime.peak_flops import SIDE

    SIDE["cpu"] = 256  # tests measure no machine: the GEMMs that MFU divides by took 0.15 s


def main():
    """`mtcli` on sys.argv, which ends the process."""
    from mtcli import __main__ as entry

    entry.main()


def _of(name, rank):
    return name.with_suffix(f".{rank}")
