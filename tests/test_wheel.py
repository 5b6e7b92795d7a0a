"""The wheel of `make wheel` runs the demo in an environment that has nothing else of ours."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import torch
from marks import slow

ROOT = Path(__file__).parent.parent


def run(*words, folder):
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@slow("a minute: a wheel, an environment, and the demo's commands on two ranks")
def test_the_wheel_runs_the_demo_in_an_empty_environment(tmp_path):
    """Packages that mtcli depends on are those of this environment, by a path whose own .pth files
    are not read: an editable installation is not found there."""
    wheels = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    source = tmp_path / "source"  # a build writes into its own
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "mtcli", source / "mtcli")
    run(sys.executable, *wheels, "--wheel-dir", tmp_path, source, folder=tmp_path)
    (wheel,) = tmp_path.glob("mtcli-*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, *install, wheel, folder=tmp_path)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))

    named = run(python, "-c", "import mtcli; print(mtcli.__file__)", folder=tmp_path)
    assert named.startswith(str(packages)), named
    demo = run(python, ROOT / "scripts" / "demo.py", "--steps", "3", folder=tmp_path)
    assert "│ profile" in demo and demo.splitlines()[-1].startswith("in "), demo
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000
