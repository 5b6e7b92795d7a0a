"""`mtcli` command lines in forks of the warm process: as if typed, without a start and imports.

The workers of `--nproc` are forked too, and see the variables that torchrun sets.
"""

import io
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from ranks import begin_fork, warm

DEADLINE = 600.0  # seconds a command may take before its processes are killed
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
            [_of(name, rank).read_text(errors="replace") for rank in range(len(self.ranks))]
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


def launched(*words, folder=".", **environ):
    """As `mtcli`, in a process of its own, which launches the workers of `--nproc`."""
    command = [sys.executable, "-m", "mtcli", *map(str, words)]
    options = {"capture_output": True, "text": True, "timeout": DEADLINE}
    return subprocess.run(command, cwd=folder, env=os.environ | environ, **options)


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
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    from mtcli import __main__ as entry
    from mtcli.core.profile.measure import SIDE

    SIDE["cpu"] = 256  # tests measure no machine: the GEMMs that MFU divides by took 0.15 s
    if fault:
        fault(rank)

    sys.argv = ["mtcli", *words]
    entry.main()


def _of(name, rank):
    return name.with_suffix(f".{rank}")
