"""Parses the target layout of a conversion: `--layout tp=2,pp=2` as a legal config."""

from typing import TYPE_CHECKING

from pydantic import ValidationError

from mtcli.core.config import rules
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import refused_value
from mtcli.core.config.schema import BatchConfig, ParallelConfig, RunConfig
from mtcli.core.config.suggest import Near, layout_sizes, nearest_layouts
from mtcli.core.config.untrusted import shown

if TYPE_CHECKING:  # it imports torch, and a layout that is none is refused without
    from mtcli.core.checkpoint.reader import Checkpoint

LAYOUT_AXES = ("tp", "tp_rows", "cp", "pp", "vpp", "ep", "etp", "dp", "zero")
ZEROS = (0, 1, 3)
MAX_RANKS = 1 << 16
MAX_DIGITS = 9  # of a size: a larger one is none of a config either
SECTIONS = ("parallel", "model")  # whose rules decide how a model may be sharded


def parse_layout(text: str) -> tuple[ParallelConfig, int]:
    """Parses a layout such as "tp=2,pp=2" into a parallel config and world size.

    Raises MtcliError that names the axes.
    """
    sizes: dict[str, int] = {}
    problems = []
    for item in filter(None, text.split(",")):
        axis, _, number = item.strip().partition("=")
        least = 0 if axis == "zero" else 1
        is_size = number.isdecimal() and len(number) <= MAX_DIGITS and int(number) >= least
        if axis not in LAYOUT_AXES or not is_size:
            hint = f"sizes of {', '.join(LAYOUT_AXES)}, such as tp=2,pp=2"
            problems.append((f"{shown(item.strip())} is not a part of a layout", hint))
        elif axis in sizes:
            twice = f"{axis} is given twice: {sizes[axis]} and {number}"
            problems.append((twice, f"leave {axis}={sizes[axis]} or {axis}={number} out"))
        else:
            sizes[axis] = int(number)
    if sizes.get("zero", 0) not in ZEROS:
        problems.append((f"zero={sizes['zero']} is no way to share", "zero 0, 1 or 3"))
    if problems:
        raise MtcliError(*(Problem(*problem, "--layout") for problem in problems))
    dp = sizes.pop("dp", 1)
    schedule = "interleaved" if sizes.get("vpp", 1) > 1 else "1f1b"
    mode = "2d" if "tp_rows" in sizes else "1d"
    try:
        parallel = ParallelConfig.model_validate(sizes | {"schedule": schedule, "tp_mode": mode})
    except ValidationError as error:
        refused = (refused_value(ParallelConfig, detail) for detail in error.errors())
        raise MtcliError(
            *(Problem(f"{p.field}: {p.message}", p.hint, "--layout") for p in refused)
        ) from None
    world = parallel.tp * parallel.cp * parallel.pp * dp
    if world > MAX_RANKS:
        raise wrong(f"{text} is a layout of {world:,} ranks", f"at most {MAX_RANKS:,}", "--layout")
    return parallel, world


def output_config(source: "Checkpoint", parallel: ParallelConfig, world: int) -> RunConfig:
    """Builds the config of a checkpoint converted to a layout, which keeps zero unless the layout
    sets it.

    Raises MtcliError with everything that is illegal, and the nearest legal layouts.
    """
    dp = world // (parallel.tp * parallel.cp * parallel.pp)
    base = source.config or RunConfig.model_validate(
        {"model": source.model, "batch": {"seq_len": min(1024, source.model.max_seq_len)}}
    )
    changes = parallel.model_dump(include={*LAYOUT_AXES, "tp_mode", "schedule"})
    if "zero" not in parallel.model_fields_set:
        changes["zero"] = base.parallel.zero
    changes |= {"stage_layers": ()}
    config = base.model_copy(update={"parallel": base.parallel.model_copy(update=changes)})
    if broken := _broken(config, world):
        near = nearest_layouts(config, None, lambda candidate, n: not _broken(candidate, n))
        lines = dict.fromkeys(f"  --layout {_words(config, candidate, dp)}" for candidate in near)
        hint = "\n".join(["the nearest legal layouts:", *lines]) if lines else ""
        raise MtcliError(*broken, hint=hint)
    return config


def _broken(config: RunConfig, world: int) -> list[Problem]:
    """Lists problems of a layout by the sharding rules, without those of the batch, which is the
    run's."""
    fits = BatchConfig(seq_len=2 * config.parallel.cp * config.parallel.tp)
    candidate = config.model_copy(update={"batch": fits})
    problems = rules.problems(candidate, world, rules.TRAINING_RULES)
    return [problem for problem in problems if problem.field.split(".")[0] in SECTIONS]


def _words(config: RunConfig, near: Near, dp: int) -> str:
    """Words a legal layout as --layout takes it, with dp or edp as asked for."""
    sizes = dict(zip(layout_sizes(config), near.sizes, strict=True))
    inner = sizes["tp"] * sizes["cp"]
    fits = inner * dp % (sizes["ep"] * sizes["etp"]) == 0
    sizes["dp"] = dp if fits else near.world // (inner * sizes["pp"])
    sizes |= {"tp_rows": config.parallel.tp_rows, "zero": config.parallel.zero}
    said = {axis: sizes[axis] for axis in LAYOUT_AXES if sizes[axis] > (axis != "zero")}
    return ",".join(f"{axis}={size}" for axis, size in said.items()) or "tp=1"
