"""Opening a checkpoint: a folder of ours, a run folder, Hugging Face's or Megatron's."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from mtcli.core.checkpoint.dtype_names import CODES
from mtcli.core.checkpoint.dtypes import DTYPES
from mtcli.core.checkpoint.folder import KINDS, CheckpointFolder, config_in, find_checkpoint
from mtcli.core.checkpoint.huggingface.reader import open_hf
from mtcli.core.checkpoint.manifest import TensorRecord, read_manifest
from mtcli.core.checkpoint.megatron.reader import open_megatron
from mtcli.core.checkpoint.names import step_folders
from mtcli.core.checkpoint.reader import Checkpoint, StoredBox, StoredTensor
from mtcli.core.checkpoint.retention import hold
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.model import ModelConfig


def open_checkpoint(path: Path, model: ModelConfig | None = None) -> Checkpoint:
    """The checkpoint in a folder: one of ours, the newest of a run folder, Hugging Face's, or
    Megatron's, whose architecture is `model` where that is given.

    Raises MtcliError where there is none, or where it is damaged; a damaged newest checkpoint of a
    run is refused, and the error offers the one before it.
    """
    return open_found(find_checkpoint(path), model)


def open_found(found: CheckpointFolder, model: ModelConfig | None = None) -> Checkpoint:
    """As `open_checkpoint`, of a folder that was found."""
    try:
        if found.format == "hf":
            return open_hf(found.folder)
        if found.format == "megatron":
            return open_megatron(found.folder, model)
        with offering_earlier(found.folder) if found.of_run else nullcontext():
            return _open_ours(found.folder)
    except OSError as error:  # of a folder that may not be read
        raise wrong(f"{found.folder} cannot be opened: {error.strerror}", KINDS) from None


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
    config = config_in(folder)
    checkpoint = Checkpoint(
        folder=folder,
        model=config.model,
        config=config,
        step=manifest.step,
        extra=manifest.extra,
        tensors={name: _stored(record) for name, record in manifest.tensors.items()},
        files=manifest.files,
        tokenizer_folder=CheckpointFolder("mtcli", folder).tokenizer_folder,
        world=manifest.world,
        held=held,
    )
    checkpoint.check_headers()
    return checkpoint


def _stored(record: TensorRecord) -> StoredTensor:
    regions = (
        StoredBox(
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
    return StoredTensor(DTYPES[record.dtype], record.shape, tuple(regions))
