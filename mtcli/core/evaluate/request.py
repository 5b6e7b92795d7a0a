"""Checks the flags of `mtcli eval` before torch is loaded."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.model import CLASSIFIERS, ModelConfig
from mtcli.core.config.schema import StoredDtype
from mtcli.core.evaluate.tasks.registry import HARNESS_PREFIX, WIKITEXT, TaskSpec
from mtcli.core.evaluate.tasks.task import ShotsPer
from mtcli.core.runtime.outputs import require_apart, require_no_link, require_writable
from mtcli.core.runtime.private_folder import user_cache


class EvalRequest(NamedTuple):
    """The flags of `mtcli eval`."""

    checkpoint: str
    ensemble: tuple[str, ...]
    tasks: tuple[TaskSpec, ...]
    overrides: tuple[str, ...]
    shots: int
    shots_per: ShotsPer
    seed: int
    limit: int | None
    overlap: int | None
    batch_tokens: int | None
    tokenizer: str | None
    contaminated: frozenset[tuple[str, ...]] | None  # n-grams that a corpus contained
    items: Path
    json_out: str | None
    base: str | None = None  # of adapters, where it has moved
    weights: StoredDtype | None = None  # the dtype that they are kept in
    chat: bool = False

    def items_beside_json(self) -> str:
        """Returns the name of a result's file of items: without the folder where both share one."""
        out = self.json_out
        of_json = Path(out).resolve().parent if out and out != "-" else None
        items = self.items.resolve()
        return items.name if items.parent == of_json else str(items)


def items_file(
    items: str | None, json_out: str | None, checkpoint: str, tasks: Sequence[TaskSpec]
) -> Path:
    """Chooses the file of items: --items, or one next to --json, or one in the user's cache that
    depends on the checkpoint and tasks."""
    if items is not None:
        require_writable(items, "--items")
        return Path(items)
    if json_out and json_out != "-":
        json_path = Path(json_out)
        if json_path.suffix and not json_path.is_char_device():
            derived = json_path.with_suffix(".items.jsonl")
            require_no_link(derived, "--json")
            require_apart((path for _, path in tasks if path), [derived], "--json")
            return derived
    folder = user_cache() / "eval"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"items cannot be kept in {folder}: {error.strerror}"
        raise wrong(message, "name a file", "--items") from None
    name = Path(checkpoint).resolve()
    identity = json.dumps([str(name), *tasks], default=str)
    return folder / f"{name.name}-{sha256(identity.encode()).hexdigest()[:8]}.items.jsonl"


USES = {  # flags that some tasks alone have a use for
    "wikitext": ("--overlap", "--items"),
    "choices": ("--shots", "--shots-per", "--seed", "--contaminated", "--items"),
    "lm_eval": ("--shots", "--seed", "--chat"),
    "labels": ("--ensemble", "--items"),
    "masked": ("--items",),
}


def require_used(
    flags: Sequence[str], tasks: Sequence[TaskSpec], model: ModelConfig | None
) -> None:
    """Raises MtcliError for each flag, of those in `USES`, that no task uses with the model's
    head."""
    if model is None:
        return
    used = {flag for name, _ in tasks for flag in USES[_kind(name, model)]}
    task_flags = {flag for flags in USES.values() for flag in flags}
    names = ", ".join(name for name, _ in tasks)
    problems = [
        Problem(f"{names} with head={model.head!r} has no use for it", f"leave {flag} out", flag)
        for flag in flags
        if flag in task_flags - used
    ]
    if problems:
        raise MtcliError(*problems)


def _kind(task: str, model: ModelConfig) -> str:
    if model.head != "lm":
        return "masked" if model.head == "mlm" else "labels"
    if task == WIKITEXT:
        return "wikitext"
    return "lm_eval" if task.startswith(HARNESS_PREFIX) else "choices"


def require_members(models: Mapping[str, ModelConfig | None]) -> None:
    """Raises MtcliError where the models of an ensemble do not classify the same tokens."""
    fields = ("head", "num_labels", "vocab_size", "max_seq_len")
    by_path = {
        path: {name: getattr(model, name) for name in fields}
        for path, model in models.items()
        if model is not None
    }
    heads = {facts["head"] for facts in by_path.values()}
    differ = [name for name in fields if len({facts[name] for facts in by_path.values()}) > 1]
    if len(models) == 1 or heads <= set(CLASSIFIERS) and not differ:
        return
    said = "; ".join(
        f"{path} has " + ", ".join(f"{name}={facts[name]!r}" for name in differ or fields[:1])
        for path, facts in by_path.items()
    )
    hint = "classifiers of one kind and tokenizer, classification or multiple_choice"
    raise wrong(f"--ensemble of models that do not vote on the same: {said}", hint, "--ensemble")
