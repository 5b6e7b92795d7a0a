"""`mtcli shard`: convert, reshard, inspect and compare checkpoints, on CPU, in bounded memory."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from mtcli.commands.options import JsonOut, write_json
from mtcli.core.spec.errors import wrong

if TYPE_CHECKING:
    import torch

    from mtcli.core.checkpoint.checkpoint import Checkpoint
    from mtcli.core.spec.upcycle import Recipe

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC DST | inspect SRC | verify A B",
        help="a checkpoint, run or Hugging Face folder, and the folder to write; or what to do "
        "with checkpoints that are there",
    ),
]
To = Annotated[
    Literal["mtcli", "hf"] | None,
    typer.Option(
        help="the format to write; default: the other one, or mtcli with --layout or --upcycle"
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        metavar="tp=2,pp=2", help="cut for tp, cp, pp, vpp, ep, etp, dp; default: one rank"
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="fp32|bf16|fp16|fp64", help="of the weights; default: as they are"),
]
Upcycle = Annotated[
    str | None,
    typer.Option(
        metavar="num_experts=8,top_k=2",
        help="make a mixture of experts that starts as the dense model SRC; also granularity "
        "(slices of the MLP that the experts are), seed (of the router), and the fields of "
        "[model] that concern routing, such as router_score",
    ),
]
MaxShardSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="of a Hugging Face file; default: 5GB")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="compare every bit, and logits on a seeded batch")
]
Force = Annotated[bool, typer.Option("--force", help="replace a checkpoint that has the name DST")]


class Plan(NamedTuple):
    """What a conversion will do."""

    to: str
    layout: str
    dtype: "torch.dtype | None"
    max_shard_bytes: int
    verify: bool
    force: bool
    recipe: "Recipe | None"


def shard(
    words: Words,
    to: To = None,
    layout: Layout = None,
    upcycle: Upcycle = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    verify: Verify = False,
    force: Force = False,
    json_out: JsonOut = None,
) -> None:
    """Convert and reshard checkpoints, ours and Hugging Face's; inspect, compare, upcycle them."""
    from mtcli.core.checkpoint.dtypes import parse_dtype
    from mtcli.core.checkpoint.opening import open_checkpoint
    from mtcli.core.spec.upcycle import recipe_of

    cast = None if dtype is None else parse_dtype(dtype)
    if words[0] in ("inspect", "verify") and upcycle is not None:
        raise wrong(f"--upcycle with {words[0]}", "it goes with SRC DST")
    if words[0] == "inspect" and len(words) == 2:
        _inspect(open_checkpoint(Path(words[1])), json_out)
    elif words[0] == "verify" and len(words) == 3:
        _compare(Path(words[1]), Path(words[2]), cast, verify, json_out)
    elif len(words) == 2:
        source = open_checkpoint(Path(words[0]))
        recipe = None if upcycle is None else recipe_of(upcycle, source.model)
        chosen = _target(source, to or ("mtcli" if recipe else None), layout, max_shard_size)
        size = _size(max_shard_size or "5GB")
        plan = Plan(chosen, layout or "", cast, size, verify, force, recipe)
        _convert(source, Path(words[1]), plan, json_out)
    else:
        given = " ".join(words)
        raise wrong(f"{given!r} is not SRC DST", "SRC DST, or inspect SRC, or verify A B")


def _inspect(source: "Checkpoint", json_out: str | None) -> None:
    from mtcli.core.checkpoint.describe import describe

    facts = describe(source)
    if json_out is not None:
        write_json(facts, json_out)
    if json_out == "-":
        return
    layout = ", ".join(f"{axis}={size}" for axis, size in facts["layout"].items())
    _print_table(
        {
            "path": facts["path"],
            "format": facts["format"],
            "step": f"{facts['step']:,}",
            "architecture": facts["model"]["architecture"],
            "parameters": f"{facts['parameters']:,}",
            "dtype": facts["dtype"],
            "optimizer state": ", ".join(facts["optimizer"]) or "none",
            "tokenizer": "yes" if facts["tokenizer"] else "none",
            "layout": layout,
            "tensors": f"{len(facts['tensors']):,} in {len(facts['files']):,} files",
            "bytes": f"{facts['bytes']:,}",
        }
    )


def _compare(
    a: Path, b: Path, dtype: "torch.dtype | None", logits: bool, json_out: str | None
) -> None:
    from mtcli.core.checkpoint.opening import open_checkpoint
    from mtcli.core.checkpoint.proof import require_same, require_same_logits

    facts = {"a": str(a), "b": str(b)}
    first, second = open_checkpoint(a), open_checkpoint(b)
    first.verify_hashes()
    facts |= require_same(first, second, dtype)
    if logits:
        facts |= require_same_logits(first, second, dtype)
    _finish(facts, json_out)


def _convert(dense: "Checkpoint", target: Path, plan: Plan, json_out: str | None) -> None:
    from time import perf_counter

    from mtcli.core.checkpoint.describe import describe
    from mtcli.core.checkpoint.opening import open_checkpoint
    from mtcli.core.checkpoint.upcycle import upcycled

    start, before = perf_counter(), describe(dense)
    source = dense if plan.recipe is None else upcycled(dense, plan.recipe)
    dropped = before["optimizer"] if plan.to == "hf" or plan.recipe else []
    _announce(before, source, target, plan, dropped)
    _write(source, target, plan)
    after = open_checkpoint(target)
    now = describe(after)
    facts = {name: now[name] for name in ("format", "step", "layout", "bytes", "dtype")}
    facts |= {"source": str(source.folder), "output": str(target), "dropped": dropped}
    facts |= {"parameters": now["parameters"], "seconds": perf_counter() - start}
    if plan.recipe:
        sizes = {name: now["model"][name] for name in ("num_experts", "top_k")}
        facts["upcycled"] = sizes | {"granularity": plan.recipe.granularity}
    if plan.verify:
        facts |= _proof(dense, source, after, plan)
    _finish(facts, json_out)
    typer.echo(f"wrote {target}", err=True)


def _announce(
    before: dict[str, Any], source: "Checkpoint", target: Path, plan: Plan, dropped: list[str]
) -> None:
    from mtcli.core.spec.model import count_active, count_parameters

    line = f"{before['path']}: {before['format']}, {before['parameters']:,} parameters, "
    line += f"{before['bytes']:,} bytes, step {before['step']:,}; writing {plan.to} to {target}"
    line += f", {plan.layout}" if plan.layout else ""
    model = source.model
    if plan.recipe:
        line += f"; {model.num_experts} experts of {model.moe_ffn_hidden_size}, {model.top_k} for "
        line += f"each token: {count_parameters(model):,} parameters, {count_active(model):,} used"
    if dropped:
        why = "the model is new" if plan.recipe else "Hugging Face has no place"
        line += f"; leaving out {', '.join(dropped)}: {why}"
    typer.echo(line, err=True)


def _proof(
    dense: "Checkpoint", source: "Checkpoint", after: "Checkpoint", plan: Plan
) -> dict[str, Any]:
    """Proves that `after` holds what `source` says, and that it is the function of `dense`."""
    from mtcli.core.checkpoint.proof import require_same, require_same_logits
    from mtcli.core.checkpoint.upcycle import rounding

    same = require_same(source, after, plan.dtype)
    if plan.recipe is None:
        return same | require_same_logits(dense, after, plan.dtype)
    dtype = rounding(dense, plan.recipe, plan.dtype)
    return same | require_same_logits(dense, after, dtype, dense.model.num_layers)


def _write(source: "Checkpoint", target: Path, plan: Plan) -> None:
    from tqdm import tqdm

    from mtcli.core.checkpoint.convert import Options, parse_layout, to_mtcli
    from mtcli.core.checkpoint.describe import tensor_bytes
    from mtcli.core.checkpoint.export import to_hf
    from mtcli.core.checkpoint.names import is_optimizer

    layout = parse_layout(plan.layout)
    names = [name for name in source.names() if plan.to == "mtcli" or not is_optimizer(name)]
    total = sum(tensor_bytes(source, name) for name in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc="shard", disable=None) as bar:
        options = Options(plan.dtype, plan.force, bar.update)
        if plan.to == "hf":
            to_hf(source, target, plan.max_shard_bytes, options)
        else:
            to_mtcli(source, target, *layout, options)


def _target(
    source: "Checkpoint", to: str | None, layout: str | None, max_shard_size: str | None
) -> str:
    is_ours = source.config is not None
    to = to or ("hf" if is_ours and layout is None else "mtcli")
    if to == "hf" and layout is not None:
        raise wrong(f"--layout {layout} with --to hf", "a Hugging Face folder has no layout")
    if to == "mtcli" and max_shard_size is not None:
        raise wrong(f"--max-shard-size {max_shard_size} with --to mtcli", "each rank has one file")
    return to


def _size(text: str) -> int:
    digits = text.rstrip("GgMmKkIiBb ")
    unit = text[len(digits) :].strip().upper()
    if not digits.replace(".", "", 1).isdigit() or unit not in UNITS or float(digits) == 0:
        raise wrong(f"{text!r} is not a size", "such as 5GB, 500MB or 2GiB", "--max-shard-size")
    return int(float(digits) * UNITS[unit])


def _finish(facts: dict[str, Any], json_out: str | None) -> None:
    if json_out is not None:
        write_json(facts, json_out)
    if json_out != "-":
        _print_table({name: _show(value) for name, value in facts.items()})


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={size}" for name, size in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return (
        f"{value:.3g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else value
    )


def _print_table(rows: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), value)
    Console(file=sys.stdout).print(table)
