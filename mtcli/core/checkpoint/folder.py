"""Which checkpoint a path names, and the model that its config says: known without torch."""

from pathlib import Path
from typing import Literal, NamedTuple

from mtcli.core.checkpoint.huggingface import config_json
from mtcli.core.checkpoint.manifest import NAME as MANIFEST
from mtcli.core.checkpoint.names import CHECKPOINTS, CONFIG, TOKENIZER, step_folders
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.loading import load_config
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import open_untrusted

KINDS = "give a checkpoint, a run, or a Hugging Face or Megatron folder"
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")  # of a Hugging Face folder
METADATA = "metadata.json"  # of Megatron's torch_dist
LATEST = "latest_checkpointed_iteration.txt"
LEGACY = "mp_rank_00*"  # folders of Megatron's checkpoints before torch_dist
MAX_LATEST = 64  # characters of a step's number, or of "release"


class CheckpointFolder(NamedTuple):
    """A checkpoint's folder, whose format it has, and whether a run was named, of which it is the
    newest."""

    format: Literal["mtcli", "hf", "megatron"]
    folder: Path
    of_run: bool = False

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where its tokenizer is, if it has one."""
        if self.format == "mtcli":
            return self.folder / TOKENIZER if (self.folder / TOKENIZER).is_dir() else None
        names = TOKENIZERS if self.format == "hf" else ()
        return self.folder if any((self.folder / name).is_file() for name in names) else None


def find_checkpoint(path: Path) -> CheckpointFolder:
    """The checkpoint in a folder: one of ours, the newest of a run folder, Hugging Face's, or
    Megatron's. Raises MtcliError where there is none."""
    try:
        return _find(path)
    except OSError as error:  # of a name that is too long, or a folder that may not be read
        raise wrong(f"{path} cannot be opened: {error.strerror}", KINDS) from None


def model_of(source: CheckpointFolder) -> ModelConfig | None:
    """The model of a checkpoint by its config. None where that is damaged or Megatron's: whoever
    opens the checkpoint says more of it.

    Raises MtcliError where a Hugging Face config is of a model that we cannot represent.
    """
    if source.format == "hf":
        path = source.folder / config_json.NAME
        return config_json.model_of(config_json.read_json(path), path)
    try:
        return config_in(source.folder).model if source.format == "mtcli" else None
    except MtcliError:
        return None


def config_in(folder: Path) -> RunConfig:
    """The run config beside the tensors of a checkpoint of ours."""
    path = folder / CONFIG
    try:
        return load_config(str(path))
    except MtcliError as error:  # which names fields, and a user has set none
        raise MtcliError(*(_at(path, problem) for problem in error.problems)) from None


def _find(path: Path) -> CheckpointFolder:
    if (path / MANIFEST).exists():
        return CheckpointFolder("mtcli", path)
    if (path / config_json.NAME).exists():
        return CheckpointFolder("hf", path)
    if folder := _find_megatron(path):
        return CheckpointFolder("megatron", folder)
    for root in (path / CHECKPOINTS, path):
        if steps := step_folders(root):
            return CheckpointFolder("mtcli", steps[-1], of_run=True)
    if not path.is_dir():
        raise wrong(f"there is no folder {path}", KINDS)
    hint = f"a checkpoint has a {MANIFEST}, a run has {CHECKPOINTS}/step-..., "
    hint += "a Hugging Face folder has a config.json, Megatron's torch_dist a metadata.json"
    raise wrong(f"{path} holds no checkpoint", hint)


def _find_megatron(path: Path) -> Path | None:
    """The folder of Megatron's checkpoint that a path is or, as a run's, names as its latest."""
    latest = path / LATEST
    if latest.is_file():
        with open_untrusted(latest) as file:
            text = file.read(MAX_LATEST).decode(errors="replace").strip()
        name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 12 else "release"
        return path / name
    is_legacy = path.is_dir() and any(path.glob(LEGACY))
    return path if is_legacy or (path / METADATA).is_file() else None


def _at(path: Path, problem: Problem) -> Problem:
    if not problem.field:  # no file, or no TOML: the path is in the message
        return problem
    return Problem(f"{path}: {problem.field}: {problem.message}", problem.hint)
