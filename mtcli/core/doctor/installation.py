"""Checks of the installation: versions of what mtcli requires, and of its extras."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from mtcli.core.doctor.diagnosis import Diagnosis, broken, ok, warn

EXTRAS = {  # what each gives
    "curate": "`mtcli curate`: web pages, languages, repaired text, .zst",
    "data": "Parquet, .zst, and a faster tokenizer",
    "eval": "the tasks of lm-evaluation-harness",
    "gguf": "`mtcli shard --to gguf`, for llama.cpp",
    "ray": "`mtcli curate --engine ray`, on many machines",
    "remote": "inputs from s3:// and gs://",
    "report": "pictures: --plot, and those of --report",
    "sweep": "`mtcli sweep --sampler optuna`",
    "trackers": "train.trackers: TensorBoard, Weights & Biases",
}
SHOWN = ("torch", "triton", "numpy", "numba", "pydantic")


def versions(gpus: int) -> Diagnosis:
    """Versions of Python, mtcli and what it always requires."""
    present = {name: _version(name) for name in ("mtcli", *SHOWN)}
    numbers = {"python": platform.python_version(), **present}
    shown = [f"{name} {number}" for name, number in numbers.items() if number]
    found = ", ".join(shown)
    unmet = [one for one in _required("") if not _is_met(one)]
    if unmet:
        wrong = ", ".join(f"{one.name} {_version(one.name) or 'missing'}" for one in unmet)
        return broken(f"{wrong}; {found}", _install(unmet), **numbers)
    if gpus and not present["triton"]:
        found += "; no triton, so a GPU computes by torch's own kernels"
        return warn(found, "pip install triton", **numbers)
    return ok(found, **numbers)


def extra(name: str) -> Diagnosis:
    """Whether an extra's packages are installed, and what they give."""
    gives = EXTRAS[name]
    if name not in (metadata("mtcli").get_all("Provides-Extra") or []):
        found = f"{gives}: the installed mtcli is older than the extra {name!r}"
        return warn(found, f"pip install --upgrade 'mtcli[{name}]'")
    required = list(_required(name))
    numbers = {one.name: _version(one.name) for one in required}
    unmet = [one for one in required if not _is_met(one)]
    if unmet:
        wrong = ", ".join(str(one).partition(";")[0] for one in unmet)
        return warn(f"{gives}: not installed: {wrong}", f"pip install 'mtcli[{name}]'", **numbers)
    return ok(gives, **numbers)


def _required(extra_name: str) -> Iterator[Requirement]:
    """Yields what an extra requires on this system; of an empty name, what mtcli always does."""
    for requirement in map(Requirement, requires("mtcli") or []):
        if not _applies(requirement, extra_name):
            continue
        if requirement.name == "mtcli":
            for name in sorted(requirement.extras):
                yield from _required(name)
        else:
            yield requirement


def _applies(requirement: Requirement, extra_name: str) -> bool:
    marker = requirement.marker
    always = marker is None or marker.evaluate({"extra": ""})
    of_extra = marker is None or marker.evaluate({"extra": extra_name})
    return always == (not extra_name) and of_extra


def _is_met(requirement: Requirement) -> bool:
    """Whether a version is installed that suffices; 2.11.0a0, of NVIDIA's containers, is 2.11."""
    present = _version(requirement.name)
    return present is not None and requirement.specifier.contains(Version(present).base_version)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _install(requirements: list[Requirement]) -> str:
    return "pip install " + " ".join(f"'{one.name}{one.specifier}'" for one in requirements)
