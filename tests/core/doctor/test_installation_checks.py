"""Checks of the installation, by planted metadata; the extras against pyproject.toml."""

import re
import tomllib
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mtcli.core.doctor import installation
from mtcli.core.doctor.installation import EXTRAS, extra, versions

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
REQUIRED = [
    "numpy>=2.0",
    "torch>=2.11",
    'colorama>=0.4; sys_platform == "none"',
    'ray>=2.52; extra == "ray"',
    'mtcli[curate]; extra == "ray"',
    'ftfy>=6.3; extra == "curate"',
    'pywin>=1.0; sys_platform == "none" and extra == "curate"',
]
PRESENT = {"mtcli": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0+cpu", "triton": "3.7.1"}
PRESENT |= {"ray": "2.52.0", "ftfy": "6.3.1"}


@pytest.fixture
def plant(monkeypatch):
    """Plants packages by their versions; None removes one."""

    def planted(**changes):
        present = PRESENT | changes

        def version(name):
            if present.get(name) is None:
                raise PackageNotFoundError(name)
            return present[name]

        about = Message()
        for name in ("curate", "ray"):
            about["Provides-Extra"] = name
        monkeypatch.setattr(installation, "version", version)
        monkeypatch.setattr(installation, "requires", lambda _: REQUIRED)
        monkeypatch.setattr(installation, "metadata", lambda _: about)

    return planted


def test_what_suffices_is_shown_by_version(plant):
    plant()
    diagnosis = versions(gpus=1)
    assert diagnosis.state == "ok" and "torch 2.13.0+cpu, triton 3.7.1" in diagnosis.found
    assert diagnosis.numbers["numpy"] == "2.4.6" and diagnosis.numbers["numba"] is None


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"torch": "2.10.1"}, "torch 2.10.1; ", "pip install 'torch>=2.11'"),
        ({"torch": None}, "torch missing; ", "pip install 'torch>=2.11'"),
        (
            {"torch": "2.9", "numpy": "1.26"},
            "numpy 1.26, torch 2.9; ",
            "pip install 'numpy>=2.0' 'torch>=2.11'",
        ),
    ],
)
def test_what_mtcli_requires_must_suffice(changes, found, fix, plant):
    plant(**changes)
    diagnosis = versions(gpus=0)
    assert diagnosis.state == "broken" and diagnosis.found.startswith(found)
    assert diagnosis.fix == fix


def test_a_pre_release_of_nvidia_s_containers_suffices(plant):
    plant(torch="2.11.0a0+nv26.1")
    assert versions(gpus=0).state == "ok"


def test_a_gpu_without_triton_is_a_warning(plant):
    plant(triton=None)
    assert versions(gpus=0).state == "ok"
    assert versions(gpus=1).state == "warn" and versions(gpus=1).fix == "pip install triton"


def test_an_extra_is_the_sum_of_its_packages_and_of_the_extras_in_it(plant):
    plant()
    assert extra("ray") == ("ok", EXTRAS["ray"], {"ray": "2.52.0", "ftfy": "6.3.1"}, "")
    assert extra("curate").numbers == {"ftfy": "6.3.1"}
    plant(ftfy=None, ray="2.51.9")
    diagnosis = extra("ray")
    assert diagnosis.state == "warn" and diagnosis.fix == "pip install 'mtcli[ray]'"
    assert diagnosis.found.endswith("not installed: ray>=2.52, ftfy>=6.3")
    assert diagnosis.numbers == {"ray": "2.51.9", "ftfy": None}


def test_an_extra_that_the_installed_mtcli_does_not_know_is_no_success(plant):
    plant()
    diagnosis = extra("sweep")
    assert diagnosis.state == "warn" and diagnosis.fix == "pip install --upgrade 'mtcli[sweep]'"


def test_every_extra_of_users_has_a_line():
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"test", "fuzz"}


def test_the_flags_that_extras_give_are_flags():
    from mtcli.cli import COMMANDS, load

    flags = {flag for name in COMMANDS for param in load(name).params for flag in param.opts}
    named = set(re.findall(r"--\w+", " ".join(EXTRAS.values())))
    assert named and named <= flags
