"""What `mtcli plan` was asked: a config with its gaps filled in, a world, and a device."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtcli.core.config.errors import Problem
from mtcli.core.config.loading import Table, preset_names, table_of, validate, with_overrides
from mtcli.core.config.rules import problems as broken_rules
from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.hardware import Device, device_named

TOKENS_PER_STEP = 4 * 2**20  # the global batch of a preset that states none
SEARCHED = ("tp", "tp_mode", "cp", "pp", "vpp", "ep", "etp", "zero", "recompute", "schedule")


@dataclass(frozen=True)
class PlanRequest:
    """A plan to make. `config` is None where too little of it is legal."""

    config: RunConfig | None
    problems: tuple[Problem, ...]
    gpus: int | None  # as asked for
    world: int
    device: Device
    pinned: frozenset[str]
    wants_search: bool  # a preset on some number of devices, with no layout of the user's own
    keeps_batch: bool  # the global batch is the user's, not a preset's
    calibrates: bool = True  # this machine, where it is what is planned for


def read_request(
    source: str,
    overrides: Sequence[str],
    fixed: Sequence[str],
    gpus: int | None,
    device: str | None,
) -> PlanRequest:
    """The request of a config file or preset with `--set` and `--fix` on top.

    Raises MtcliError where the source cannot be read or the device is unknown; what is wrong inside
    the config is in `problems`.
    """
    table = with_overrides(table_of(source, overrides), fixed, "--fix")
    chosen = device_named(device or ("cpu" if gpus is None else "h100"))
    own_layout = any(item.strip().startswith("parallel.") for item in overrides)
    own_batch = any(item.strip().startswith("batch.global_") for item in (*overrides, *fixed))
    bare = source in preset_names() and gpus is not None and not own_layout
    table = _filled(table, gpus, chosen)
    config, problems = validate(table)
    world = gpus or (config.parallel.smallest_world if config else 1)
    pinned = frozenset(item.partition("=")[0].strip() for item in fixed)
    problems += _not_searched(pinned)
    found = tuple(problems)
    search = bare or bool(fixed)
    keeps = own_batch or source not in preset_names()
    return PlanRequest(config, found, gpus, world, chosen, pinned, search, keeps)


def rule_problems(request: PlanRequest) -> list[Problem]:
    """Everything wrong with the request, its layout on its world included."""
    found = list(request.problems)
    if request.config:
        found += broken_rules(request.config, request.world)
    return found


def _filled(table: Table, gpus: int | None, device: Device) -> Table:
    """The table with what a bare preset leaves open: sequence, global batch and precision."""
    config, _ = validate(table)
    if config is None or gpus is None:
        return table
    batch, train = dict(table.get("batch", {})), dict(table.get("train", {}))
    seq_len = batch.setdefault("seq_len", config.model.max_seq_len)
    if "global_batch_size" not in batch and isinstance(seq_len, int) and seq_len > 0:
        batch["global_batch_size"] = round_batch(TOKENS_PER_STEP // seq_len, gpus)
    if device.name != "cpu":
        train.setdefault("precision", device.half_precision)
    return table | {"batch": batch, "train": train}


def round_batch(sequences: int, gpus: int) -> int:
    """At least that many sequences, which the data ranks of many layouts divide: a multiple of the
    world's odd part and of its powers of two up to 64."""
    odd = gpus // (gpus & -gpus)
    unit = odd * min(64, gpus & -gpus)
    return max(1, -(-sequences // unit)) * unit


def _not_searched(pinned: frozenset[str]) -> list[Problem]:
    known = {f"parallel.{name}" for name in SEARCHED} | {"batch.micro_batch_size"}
    hint = f"one of {', '.join(sorted(known))}; set others with --set"
    return [
        Problem(f"--fix {field} pins a field that is not searched", hint, field)
        for field in sorted(pinned - known)
    ]
