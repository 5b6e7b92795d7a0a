"""Plants the faults of package_faults.py in copies of the package and sees their tests turn red.

`python tests/plant_faults.py [WORDS]` plants them one at a time, or those whose file or phrase has
one of the words, and prints docs/reference/faults.md's table. It ends with 1 where a fault's test
is green with it, or red without. plant_parity_faults.py is the same for rows of the parity table.
"""

import os
import re
import shutil
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

from package_faults import PACKAGE_FAULTS

ROOT = Path(__file__).parent.parent
BROKEN = 70  # the exit code of a fork that could not run its tests


def main(words):
    """Prints a row for each fault of the package, and what its test said to stderr."""
    faults = [f for f in PACKAGE_FAULTS if not words or any(w in f.file + f.what for w in words)]
    tests = list(dict.fromkeys(fault.test for fault in faults))
    with copied() as folder:
        code, output, total = tested(folder, tests)
    assert code == 0, f"red without a fault:\n{output}"
    survived = []
    print("| room | fault | one line made wrong | seen by | | seconds |")
    print("|---|---|---|---|---|---|")
    for fault in faults:
        with copied(fault.path, fault) as folder:
            code, output, seconds = tested(folder, [fault.test], "-x")
        assert code in (0, 1), output
        total += seconds
        survived += [] if code else [fault.what]
        print(row_of(fault, "red" if code else "SURVIVED", seconds), flush=True)
        print("\n".join(re.findall("^E .*", output, re.MULTILINE)[:3]), file=sys.stderr, flush=True)
    print(f"{total} processor seconds, those of all tests without a fault among them")
    print("\n".join(f"survived: {what}" for what in survived) or "every fault was seen")
    return 1 if survived else 0


@contextmanager
def copied(file="", fault=None):
    """A folder with a copy of both packages, and in its file the fault, where there is one."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        for package in ("mtcli", "fused/mtcli_fused"):
            shutil.copytree(ROOT / package, Path(folder) / package)
        if fault:
            path = Path(folder) / file
            text = path.read_text()
            assert text.count(fault.old) == 1, f"{file}: {fault.old}"
            path.write_text(text.replace(fault.old, fault.new))
        yield folder


def tested(folder, tests, *options):
    """(exit code, output, processor seconds) of tests with the copies of packages in a folder.

    They run in a fork of this process, which has imported what is large and nothing of mtcli.
    """
    import conftest  # noqa: F401 - variables that come before torch
    import hypothesis.extra.numpy  # noqa: F401
    import pytest
    import torch.distributed  # noqa: F401

    assert "mtcli" not in sys.modules, "a fork imports the copy"
    with tempfile.TemporaryFile() as file:
        pid = os.fork()
        if not pid:
            try:  # whatever happens, this process goes no further
                for descriptor in (1, 2):
                    os.dup2(file.fileno(), descriptor)
                os.chdir(folder)  # not ROOT, which a forkserver would find first
                copies = [folder, f"{folder}/fused"]
                os.environ["PYTHONPATH"] = os.pathsep.join([*copies, str(ROOT)])
                sys.path[:] = [*copies, *sys.path, str(ROOT)]
                nodes = [str(ROOT / test) for test in tests]
                setup = ["-c", str(ROOT / "pyproject.toml"), "--tb=short"]
                code = pytest.main([*setup, *options, *nodes])
                sys.stdout.flush()
                os._exit(code)
            except BaseException:
                traceback.print_exc()
                os._exit(BROKEN)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        output = file.read().decode(errors="replace")
    seconds = re.search(r"([\d,]+) processor seconds", output)
    return code, output, int(seconds[1].replace(",", "")) if seconds else 0


def row_of(fault, verdict, seconds):
    """A row of docs/reference/faults.md."""
    line = f"`{fault.file}`: {code_of(fault.old)} -> {code_of(fault.new)}"
    return f"| {fault.room} | {fault.what} | {line} | {fault.seen_by} | {verdict} | {seconds} |"


def code_of(text):
    """Text of a program on one line of a table."""
    return f"`{' '.join(text.split())}`".replace("|", "\\|") if text.strip() else "nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
