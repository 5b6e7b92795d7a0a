"""Opening a checkpoint: a folder of ours, a run folder, Hugging Face's or Megatron's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtcli.core.checkpoint import manifest as manifests
from mtcli.core.checkpoint.checkpoint import Checkpoint, Region, Stored
from mtcli.core.checkpoint.dtypes import CODES, DTYPES
from mtcli.core.checkpoint.hf import CONFIG as HF_CONFIG
from mtcli.core.checkpoint.hf import open_hf
from mtcli.core.checkpoint.manifest import TensorRecord, read_manifest
from mtcli.core.checkpoint.megatron import find_megatron, open_megatron
from mtcli.core.checkpoint.names import CHECKPOINTS, CONFIG, TOKENIZER, step_folders
from mtcli.core.checkpoint.retention import hold
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.errors import MtcliError, Problem, wrong
from mtcli.core.spec.load import load_config
from mtcli.core.spec.model_config import ModelConfig

KINDS = "give a checkpoint, a run, or a Hugging Face or Megatron folder"


def open_checkpoint(path: Path, model: ModelConfig | None = None) -> Checkpoint:
    """The checkpoint in a folder: one of ours, the newest of a run folder, Hugging Face's, or
    Megatron's, whose architecture is `model` where that is given.

    Raises MtcliError where there is none, or where it is damaged; a damaged newest checkpoint of a
    run is refused, and the error offers the one before it.
    """
    newest = newest_of(path)
    with _readable(path):
        if newest == path:
            return _open_any(path, model)
        with offering_earlier(newest):
            return _open_ours(newest)


def newest_of(path: Path) -> Path:
    """The newest checkpoint of a run, where a path is a run's folder; any other path as it is.

    Raises MtcliError where the system does not let it be read.
    """
    with _readable(path):
        formats = (manifests.NAME, HF_CONFIG)
        if any((path / name).exists() for name in formats) or find_megatron(path):
            return path
        steps = step_folders(path / CHECKPOINTS) or step_folders(path)
    return steps[-1] if steps else path


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # of a name that is too long, or a folder that may not be read
        raise wrong(f"{path} cannot be opened: {error.strerror}", KINDS) from None


def _open_any(path: Path, model: ModelConfig | None) -> Checkpoint:
    if (path / manifests.NAME).exists():
        return _open_ours(path)
    if (path / HF_CONFIG).exists():
        return open_hf(path)
    if folder := find_megatron(path):
        return open_megatron(folder, model)
    if not path.is_dir():
        raise wrong(f"there is no folder {path}", KINDS)
    hint = f"a checkpoint has a {manifests.NAME}, a run has {CHECKPOINTS}/step-..., "
    hint += "a Hugging Face folder has a config.json, Megatron's torch_dist a metadata.json"
    raise wrong(f"{path} holds no checkpoint", hint)


@contextmanager
def offering_earlier(folder: Path) -> Iterator[None]:
    """Adds to an error about a run's checkpoint which one before it is whole, if any is."""
    try:
        yield
    except MtcliError as error:
        steps = step_folders(folder.parent)
        earlier = steps[: steps.index(folder)] if folder in steps else []
        whole = next((path for path in reversed(earlier) if _opens(path)), None)
        if whole is None:
            raise
        offer = f"the checkpoint before it is whole: {whole}; "
        offer += f"move {folder.name} away to go on there"
        raise MtcliError(*(p._replace(hint=offer) for p in error.problems)) from None


def _opens(folder: Path) -> bool:
    try:
        _open_ours(folder)
    except MtcliError:
        return False
    return True


def _open_ours(folder: Path) -> Checkpoint:
    held = hold(folder)
    manifest = read_manifest(folder)
    config = _config(folder / CONFIG)
    checkpoint = Checkpoint(
        folder=folder,
        model=config.model,
        config=config,
        step=manifest.step,
        extra=manifest.extra,
        tensors={name: _stored(record) for name, record in manifest.tensors.items()},
        files=manifest.files,
        tokenizer_folder=folder / TOKENIZER if (folder / TOKENIZER).is_dir() else None,
        world=manifest.world,
        held=held,
    )
    checkpoint.check_headers()
    return checkpoint


def _config(path: Path) -> RunConfig:
    try:
        return load_config(str(path))
    except MtcliError as error:  # which names fields, and a user has set none
        raise MtcliError(*(_at(path, problem) for problem in error.problems)) from None


def _at(path: Path, problem: Problem) -> Problem:
    if not problem.field:  # no file, or no TOML: the path is in the message
        return problem
    return Problem(f"{path}: {problem.field}: {problem.message}", problem.hint)


def _stored(record: TensorRecord) -> Stored:
    regions = (
        Region(
            file=piece.file,
            key=piece.key,
            code=CODES[record.dtype],
            shape=piece.size,
            view=piece.size,
            axes=tuple(range(len(piece.size))),
            start=piece.start,
        )
        for piece in record.pieces
    )
    return Stored(DTYPES[record.dtype], record.shape, tuple(regions))
