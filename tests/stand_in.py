"""`mtcli`, `torchrun` and `python` of a test: a fork of the warm process runs the line.

The fork (command_line.py) has this process's files, folder and variables, and gets its signals. It
is killed where this process is killed, and this process ends as it ends.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

MODULES = ("mtcli", "torch.distributed.run")
BEGINNINGS = {"mtcli": ["-m", "mtcli"], "torchrun": ["-m", "torch.distributed.run"]}


def main():
    name, words = os.path.basename(__file__), sys.argv[1:]
    words = BEGINNINGS.get(name, []) + words[words[:1] == ["-u"] :]
    if not (words[0] == "-m" and words[1] in MODULES or words[0].endswith(".py")):
        os.execv(sys.executable, [sys.executable, *words])  # a python of its own
    door = socket.socket(socket.AF_UNIX)
    door.connect(os.path.join(os.path.dirname(os.path.abspath(__file__)), "door"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, frame: _forward(door, number))
    line = json.dumps([__file__, words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(door, [len(line).to_bytes(8, "little")], [0, 1, 2])
    door.sendall(line)
    code = int(door.recv(16) or -signal.SIGKILL)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _forward(door, number):
    """Sends a signal to the fork, which may have ended by now."""
    with suppress(BrokenPipeError):
        door.send(bytes([number]))


if __name__ == "__main__":
    main()
