"""Names the files of run and checkpoint folders, and finds the checkpoint of a path; without
torch."""

import re
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from mtcli.core.checkpoint.huggingface.json_files import CONFIG_JSON, GENERATION_JSON, read_json
from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.loading import load_config, preset_names
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.nameable import CHECKPOINTS as NAMEABLE
from mtcli.core.config.nameable import HUB_NAME, download, near_path
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import listed, open_untrusted, shown
from mtcli.core.runtime.atomic_writes import folder_of
from mtcli.core.runtime.hub import fetch_small, is_hub

CHECKPOINTS = "checkpoints"  # of a run folder
BEST = "best"  # among them, a link to the one with the lowest validation loss
CONFIG = "config.toml"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
HUGGINGFACE = "huggingface"  # the config.json that converted weights came with
KINDS = f"give {NAMEABLE}"
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")  # of a Hugging Face folder
TOKENIZER_FILES = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
ADAPTER_CONFIG = "adapter_config.json"  # of peft
SUBFOLDERS = (TOKENIZER, HUGGINGFACE)
# All that is written to a checkpoint's folder, in any format, besides tensors.
WRITTEN = {MANIFEST, CONFIG, CONFIG_JSON, GENERATION_JSON, ADAPTER_CONFIG}
WRITTEN |= {".metadata", *TOKENIZER_FILES, "README.md"}  # the card of a model that was pushed
_TENSORS = re.compile(
    r"(rank|model|adapter_model)[-\d]*(-of-\d+)?\.safetensors(\.index\.json)?|__\d+_\d+\.distcp"
)
METADATA = "metadata.json"  # of Megatron's torch_dist
DCP_METADATA = ".metadata"  # of torch.distributed.checkpoint, which torch_dist has too
LATEST = "latest_checkpointed_iteration.txt"
LEGACY = "mp_rank_00*"  # folders of Megatron's checkpoints before torch_dist
MAX_LATEST = 64  # characters of a step's number, or of "release"
_STEP = re.compile(r"step-(\d{8,})")


Fetch = Callable[[Path], Path]  # a model of the hub, into its folder in the cache
Format = Literal["mtcli", "hf", "peft", "megatron", "dcp"]
# The files by which a format is known, in the order of their precedence; Megatron's has more.
MARKS: dict[str, Format] = {MANIFEST: "mtcli", ADAPTER_CONFIG: "peft", CONFIG_JSON: "hf"}


class CheckpointFolder(NamedTuple):
    """A checkpoint's folder and format; `of_run` where it is the newest of a run that the user
    named.

    `base` is a folder of base weights that replaces the one its adapters name. `hub` is its name
    there, where its files are fetched.
    """

    format: Format
    folder: Path
    of_run: bool = False
    base: Path | None = None
    hub: str = ""

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of the checkpoint's tokenizer, if any."""
        if self.format == "mtcli":
            return self.folder / TOKENIZER if (self.folder / TOKENIZER).is_dir() else None
        names = TOKENIZERS if self.format in ("hf", "peft") else ()
        if any((self.folder / name).is_file() for name in names):
            return self.folder
        if self.format == "peft":
            return find_checkpoint(peft_base(self)).tokenizer_folder
        return None

    @property
    def has_adapters(self) -> bool:
        """True where the folder holds adapters without base weights."""
        is_ours = self.format == "mtcli"
        return self.format == "peft" or (is_ours and config_in(self.folder).lora.rank > 0)


def find_checkpoints(
    paths: Sequence[str], base: str | None, fetch: Fetch = fetch_small
) -> list[CheckpointFolder]:
    """Finds the checkpoint in each folder; `base`, if given, holds the base weights of all
    adapters. `fetch` gets what is needed of a model of the hub.

    Raises MtcliError where there is none, and for a base where none holds adapters.
    """
    sources = collect_errors(*(partial(find_checkpoint, Path(path), fetch) for path in paths))
    if base is None:
        return sources
    if not any(source.has_adapters for source in sources):
        raise wrong(f"{' and '.join(paths)} holds no adapters", "leave --base out", "--base")
    try:
        find_checkpoint(Path(base), fetch)
    except MtcliError as error:
        raise error.about("--base") from None
    return [source._replace(base=Path(base)) for source in sources]


def find_checkpoint(path: Path, fetch: Fetch = fetch_small) -> CheckpointFolder:
    """Finds the checkpoint in a folder: ours, the newest of a run folder, Hugging Face's,
    Megatron's, or torchtitan's; or a Hugging Face model by its name on the hub.

    Raises MtcliError where there is none."""
    if is_hub(path):
        source = _find_local(fetch(path))
        if source.format not in ("hf", "peft"):
            raise wrong(f"{path} holds no Hugging Face model", KINDS)
        return source._replace(hub=str(path))
    if path.name == BEST and path.is_symlink():
        path = path.parent / path.readlink()  # whose name has the step
    return _find_local(path)


def _no_folder(path: Path) -> MtcliError:
    if path.exists():
        return wrong(f"{path} is a file, and a checkpoint is a folder", KINDS)
    if str(path) in preset_names():
        hint = f"train it, `mtcli train {path} --set data.train=DATA`, and give the run"
        return wrong(f"{path} is a preset, which has no weights", hint)
    near = near_path(str(path), is_folder=True) or download(str(path))
    return wrong(f"there is no folder {path}", KINDS + near)


def _find_local(path: Path) -> CheckpointFolder:
    try:
        for name, kind in MARKS.items():
            if (path / name).exists():
                return CheckpointFolder(kind, path)
        if folder := _find_megatron(path):
            return CheckpointFolder("megatron", folder)
        if (path / DCP_METADATA).is_file():
            return CheckpointFolder("dcp", path)
        for root in (path / CHECKPOINTS, path):
            if steps := step_folders(root):
                return CheckpointFolder("mtcli", steps[-1], of_run=True)
    except OSError as error:  # of a name that is too long, or a folder that may not be read
        raise wrong(f"{path} cannot be opened: {error.strerror}", KINDS) from None
    if not path.is_dir():
        raise _no_folder(path)
    hint = f"a checkpoint has a {MANIFEST}, a run has {CHECKPOINTS}/step-..., "
    hint += "a Hugging Face folder has a config.json, Megatron's torch_dist a metadata.json, "
    hint += "torch's DCP a .metadata"
    raise wrong(f"{path} holds no checkpoint", hint)


def _find_megatron(path: Path) -> Path | None:
    """Finds the Megatron checkpoint at a path, or the latest one of a Megatron run."""
    latest = path / LATEST
    if latest.is_file():
        with open_untrusted(latest) as file:
            text = file.read(MAX_LATEST).decode(errors="replace").strip()
        name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 12 else "release"
        if not (path / name).is_dir():
            iterations = [folder.name for folder in sorted(path.glob("iter_*"))]
            message = f"{latest} says {shown(text)}, and there is no {path / name}"
            raise wrong(
                message, f"give the folder of a checkpoint: {listed(iterations) or 'none is here'}"
            )
        return path / name
    is_legacy = path.is_dir() and any(path.glob(LEGACY))
    return path if is_legacy or (path / METADATA).is_file() else None


def model_of(source: CheckpointFolder) -> ModelConfig | None:
    """Reads the model of a checkpoint from its config. None where the config is damaged or
    Megatron's, as opening the checkpoint then gives the error.

    Raises MtcliError where a Hugging Face config is of a model that we cannot represent.
    """
    if source.format == "hf":
        path = source.folder / CONFIG_JSON
        from mtcli.core.checkpoint.huggingface import config_json  # loads every family

        return config_json.model_of(read_json(path), path)
    if source.format == "peft":
        return model_of(find_checkpoint(peft_base(source)))
    try:
        return config_in(source.folder).model if source.format == "mtcli" else None
    except MtcliError:
        return None


def peft_base(source: CheckpointFolder) -> Path:
    """Returns the folder of the base weights of peft's adapters.

    Raises MtcliError where their config names none on this machine, and no other is given.
    """
    if source.base is not None:
        return source.base
    path = source.folder / ADAPTER_CONFIG
    name = read_json(path).get("base_model_name_or_path")
    if not isinstance(name, str) or not name or not Path(name).is_dir():
        message = f"{path}: base_model_name_or_path={shown(name)} is no folder here"
        hint = "name the folder of the model there, or by --base FOLDER"
        if isinstance(name, str) and HUB_NAME.fullmatch(name):
            hint += f"; --base hub:{name} downloads it"
        raise wrong(message, hint)
    if (Path(name) / ADAPTER_CONFIG).exists() and not (Path(name) / MANIFEST).exists():
        message = f"{path}: base_model_name_or_path={shown(name)} holds adapters, and no weights"
        raise wrong(message, "name the folder of the model that they are for there")
    return Path(name)


def config_in(folder: Path) -> RunConfig:
    """Reads the run config of a checkpoint of ours."""
    path = folder / CONFIG
    if not path.exists():
        raise wrong(f"{folder} has no {CONFIG}, and its manifest no model", "use another copy")
    try:
        return load_config(str(path))
    except MtcliError as error:  # it names fields, where a user has set none
        raise MtcliError(
            *(
                Problem(f"{path}: {p.field}: {p.message}", p.hint) if p.field else p
                for p in error.problems
            )
        ) from None


def step_name(step: int) -> str:
    """Names the folder of a step, such as step-00000100."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Names the tensor file of a rank, such as rank-00003.safetensors."""
    return f"rank-{rank:05d}.safetensors"


def step_folders(root: Path) -> list[Path]:
    """Lists the complete checkpoints under a folder, oldest step first."""
    if not root.is_dir():
        return []
    steps = (path for path in root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())
    return sorted(steps, key=step_of)


def step_of(folder: Path) -> int:
    """Parses the step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def require_free(final: Path, force: bool) -> None:
    """Raises MtcliError where a new checkpoint cannot have a name: it is taken by something that
    may not be replaced, or its parent folder is a file."""
    with folder_of("DST", final):
        inside = next(path for path in final.absolute().parents if path.exists())
        if not inside.is_dir():
            message = f"{inside} is a file, and {final} would be inside of it"
            raise wrong(message, "name another folder", "DST")
        if not final.exists() or (final.is_dir() and not any(final.iterdir())):
            return
    marks = (*MARKS, DCP_METADATA)
    if final.is_symlink() or not any((final / name).is_file() for name in marks):
        what = "a link" if final.is_symlink() else "not a checkpoint"
        message = f"{final} exists and is {what}, and --force replaces nothing but a checkpoint"
        raise wrong(message, "name another folder, or remove it yourself")
    if unrelated := unrelated_files(final):
        message = f"{final} holds {len(unrelated)} files of no checkpoint: {listed(unrelated)}"
        raise wrong(message, "name another folder, or move them out of it")
    if not force:
        raise wrong(f"{final} exists", "name another folder, or give --force to replace it")


def unrelated_files(folder: Path) -> list[str]:
    """Lists the files of a folder that belong to no checkpoint format, and would be lost with
    it."""
    unrelated = []
    for path in folder.iterdir():
        if path.name in SUBFOLDERS and path.is_dir() and not path.is_symlink():
            inner = (file.name for file in path.iterdir())
            unrelated += [f"{path.name}/{name}" for name in inner if name not in WRITTEN]
        elif path.name not in WRITTEN and not _TENSORS.fullmatch(path.name):
            unrelated.append(path.name)
    return sorted(unrelated)


def require_inside(folder: Path, path: Path) -> Path:
    """Returns `path`, a file of `folder` that is to be copied unchanged.

    Raises MtcliError where a link leads out of the folder: otherwise an untrusted checkpoint could
    have any file of this machine copied into what its user publishes. Links of the Hugging Face
    cache, from snapshots/<revision>/ to blobs/, are allowed.
    """
    root, real = folder.resolve(), path.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise wrong(f"{path} is a link out of {folder}, to {real}", "copy the file in its place")
    return path


def tokenizer_files(
    tokenizer: Path | None, root: Path | None = None, names: Container[str] | None = None
) -> dict[str, Path]:
    """Returns the files of a tokenizer's folder by name; only `names` where given.

    Raises MtcliError where a link leads out of that folder, or out of `root` where that contains
    the folder: an adapter's folder may use its base's tokenizer.
    """
    if tokenizer is None:
        return {}
    if root is None or not tokenizer.absolute().is_relative_to(root.absolute()):
        root = tokenizer
    return {
        path.name: require_inside(root, path)
        for path in sorted(tokenizer.iterdir())
        if path.is_file() and path.name[0] != "." and (names is None or path.name in names)
    }
