"""`mtcli shard`: converts, reshards, inspects and compares checkpoints, on CPU, in bounded
memory."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.commands.options import JsonOut, MovedBase, Nproc, Overrides, given_flags, named
from mtcli.commands.output import answer, answering, echo, print_facts, say_wrote
from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.nameable import CHECKPOINTS

if TYPE_CHECKING:
    from mtcli.core.checkpoint.folder import CheckpointFolder
    from mtcli.core.checkpoint.reader import Checkpoint
    from mtcli.core.config.model import ModelConfig
    from mtcli.core.convert.shard import ConversionPlan

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Parameters that have no use where no checkpoint is written, and where none are compared.
OF_TARGETS = (
    "to",
    "layout",
    "average",
    "upcycle",
    "force",
    "max_shard_size",
    "merge_lora",
    "push",
    "text",
)
REFUSED = {"convert": (), "verify": OF_TARGETS, "inspect": (*OF_TARGETS, "dtype", "verify")}
QUANTISED = "q8_0"  # a dtype of GGUF alone
TEMPLATES = ("tokenizer.chat_template",)  # of many lines
COUNTS = {"inspect": 2, "verify": 3}  # words of what reads checkpoints and writes none


Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC DST | inspect SRC | verify A B",
        help=f"SRC, A and B: {CHECKPOINTS}; DST: the folder to write",
    ),
]
To = Annotated[
    Literal["mtcli", "hf", "peft", "gguf", "dcp"] | None,
    typer.Option(
        help="the format to write; default: the other one, or mtcli with --layout or --upcycle; "
        "peft has adapters alone; gguf is a file, DST.gguf, that llama.cpp runs; dcp torchtitan's"
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        metavar="tp=2,pp=2",
        help="shard for tp, tp_rows, cp, pp, vpp, ep, etp, dp, zero; default: one rank",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="fp32|bf16|fp16|fp64|q8_0",
        help="dtype of the weights; default: as they are; q8_0 goes with gguf",
    ),
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
ModelSource = Annotated[
    str | None,
    typer.Option(
        metavar="CONFIG",
        help="whose [model] a Megatron or DCP folder holds, where that does not say it itself",
    ),
]
MaxShardSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="size of a Hugging Face file; default: 5GB")
]
FamilyName = Annotated[
    str | None,
    typer.Option(
        "--family",
        metavar="NAME",
        help="the Hugging Face family to write, by its model_type; default: SRC's own, or the "
        "first that can say the model",
    ),
]
Average = Annotated[
    str | None,
    typer.Option(
        metavar="K|ema",
        help="write the mean of the weights of a run's last K checkpoints, or ema: the moving "
        "average that it kept (train.ema)",
    ),
]
MergeLora = Annotated[
    bool, typer.Option("--merge-lora", help="add a run's adapters to the weights they are for")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="compare every bit, and logits on a seeded batch")
]
Text = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="with --to gguf: also print what the rounding changes of a text's perplexity",
    ),
]
Push = Annotated[
    str | None,
    typer.Option(
        metavar="owner/name",
        help="upload DST, a Hugging Face folder, to the hub, with a card of the model",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="replace a checkpoint that has the name DST")]


@answering
def shard(
    context: typer.Context,
    words: Words,
    overrides: Overrides,
    to: To = None,
    layout: Layout = None,
    upcycle: Upcycle = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    family: FamilyName = None,
    config: ModelSource = None,
    merge_lora: MergeLora = False,
    average: Average = None,
    base: MovedBase = None,
    push: Push = None,
    text: Text = None,
    nproc: Nproc = 1,
    verify: Verify = False,
    force: Force = False,
    json_out: JsonOut = None,
) -> None:
    """Convert and reshard checkpoints, ours and Hugging Face's; inspect, compare, upcycle them."""
    from mtcli.core.checkpoint.folder import find_checkpoints, require_free
    from mtcli.core.checkpoint.safetensors_file import parse_dtype
    from mtcli.core.convert.layout import parse_layout

    if words[0] == "inspect" and words[-1].endswith(".gguf"):
        _verb(words, context)
        return _inspect_gguf(Path(words[1]), json_out)
    # Before torch is imported.
    name, model, size, where, verb, sources = collect_errors(
        lambda: None if dtype in (None, QUANTISED) else parse_dtype(dtype),
        lambda: _model(config, overrides),
        lambda: _size(max_shard_size or "5GB"),
        lambda: parse_layout(layout or ""),
        lambda: _verb(words, context),
        lambda: find_checkpoints(_read(words), base),
    )
    target_format = to or ("mtcli" if upcycle else None)
    if verb == "convert":
        chosen = _target(sources[0], words[1], target_format, layout, max_shard_size)
        _require_format(chosen, family, push, text)
        if chosen != "gguf":
            require_free(Path(words[1]), force)
    if dtype == QUANTISED and (verb != "convert" or chosen != "gguf"):
        raise wrong(f"--dtype {dtype} without --to gguf", "fp32, bf16, fp16 or fp64", "--dtype")
    from mtcli.core.checkpoint.opening import open_folder
    from mtcli.core.checkpoint.resharding import DTYPES
    from mtcli.core.convert.shard import ConversionPlan, compare
    from mtcli.core.convert.upcycle_recipe import recipe_of

    cast = None if name is None else DTYPES[name]
    opened = collect_errors(*(partial(open_folder, source, model) for source in sources))
    if verb == "inspect":
        _inspect(opened[0], json_out)
    elif verb == "verify":
        _finish(compare(opened[0], opened[1], cast, verify, nproc), json_out)
    else:
        source = _averaged(opened[0], words[0], average, nproc) if average else opened[0]
        _require_adapters(source, chosen, merge_lora)
        if upcycle and chosen not in ("mtcli", "hf"):
            hint = "write a checkpoint of mtcli first, and the other format from it"
            raise wrong(f"--upcycle with --to {chosen}", hint, "--upcycle")
        recipe = None if upcycle is None else recipe_of(upcycle, source.model)
        plan = ConversionPlan(chosen, where, cast, size, verify, force, recipe, nproc, family)
        writers: dict[str, Callable[..., None]] = {
            "gguf": partial(_to_gguf, text),
            "dcp": _to_dcp,
            "peft": _to_peft,
        }
        if chosen in writers:
            return writers[chosen](source, Path(words[1]), plan, dtype, json_out)
        _convert(source, Path(words[1]), plan, layout or "", push, json_out)


def _require_format(to: str, family: str | None, push: str | None, text: Path | None) -> None:
    """Raises MtcliError where --family, --push or --text do not fit the format, or --push has no
    token."""
    from mtcli.core.runtime.hub import require_token

    if family and to not in ("hf", "gguf"):
        hint = "--to hf, or leave --family out"
        raise wrong(f"--family {family} with --to {to}", hint, "--family")
    if text and to != "gguf":
        raise wrong(f"--text {text} with --to {to}", "--to gguf, or mtcli eval", "--text")
    if push and to != "hf":
        raise wrong(f"--push {push} with --to {to}", "--to hf", "--push")
    if push:
        require_token(push, "--push")


def _require_adapters(source: "Checkpoint", to: str, merge: bool) -> None:
    """Raises MtcliError where --merge-lora and --to peft do not fit the source's adapters."""
    has = source.adapters
    if has and to != "peft" and not merge:
        message = f"{source.folder} holds adapters of {has.base.folder}, no model"
        hint = "--merge-lora adds them to its weights; --to peft writes them alone"
        raise wrong(message, hint, "--merge-lora")
    if not has and (merge or to == "peft"):
        flag = "--merge-lora" if merge else "--to peft"
        hint = f"leave {flag} out" if merge else "--to hf"
        raise wrong(f"{source.folder} holds no adapters", hint, flag)
    if merge and to == "peft":
        raise wrong(
            "--merge-lora with --to peft, which has adapters alone",
            "leave --merge-lora out, or --to hf",
            "--to",
        )


def _averaged(source: "Checkpoint", path: str, average: str, nproc: int) -> "Checkpoint":
    """Views a source as an average of weights. Raises MtcliError where there is none such."""
    from mtcli.core.checkpoint.averages import mean_of, with_ema
    from mtcli.core.checkpoint.folder import CHECKPOINTS, find_checkpoint, step_folders
    from mtcli.core.checkpoint.opening import open_folder
    from mtcli.core.convert.verify import verify_in_processes

    if source.adapters or source.format != "mtcli":
        what = "adapters" if source.adapters else f"a checkpoint of {source.format}"
        hint = "leave --average out; weights are averaged of runs that train all of them"
        raise wrong(f"--average {average} of {what}", hint, "--average")
    if average == "ema":
        return with_ema(source)
    folders = step_folders(Path(path) / CHECKPOINTS)
    count = int(average) if average.isdecimal() and len(average) < 10 else 0
    if not 2 <= count <= len(folders):
        said = f"--average {average}, and {path} is a run of {len(folders)} checkpoints"
        hint = f"2 to {len(folders)}" if len(folders) > 1 else "a run that keeps more: train.keep"
        raise wrong(said, f"{hint}; or ema", "--average")
    earlier = [open_folder(find_checkpoint(folder)) for folder in folders[-count:-1]]
    for checkpoint in earlier:
        verify_in_processes(checkpoint, nproc, lambda _: None)
    return mean_of([*earlier, source])


def _to_peft(
    source: "Checkpoint",
    target: Path,
    plan: "ConversionPlan",
    dtype: str | None,
    json_out: str | None,
) -> None:
    from mtcli.core.convert.to_peft import to_peft

    _finish(to_peft(source, target, plan.force), json_out)
    say_wrote(str(target))


def _to_gguf(
    text: Path | None,
    source: "Checkpoint",
    target: Path,
    plan: "ConversionPlan",
    dtype: str | None,
    json_out: str | None,
) -> None:
    from mtcli.core.convert.gguf.perplexity import perplexities, read_tokens
    from mtcli.core.convert.gguf.write import plan_gguf, require_free_file, to_gguf

    require_free_file(target, plan.force)
    file = plan_gguf(source, plan.family, dtype)
    tokens = None if text is None else read_tokens(source, text)
    line = f"{source.folder}: {len(file.tensors)} tensors; writing {file.architecture} as "
    echo(f"{line}{file.dtype} to {target}", err=True)
    facts = to_gguf(source, target, file, plan.verify)
    if tokens is not None:
        facts |= perplexities(source.averaged(), file, tokens)
    _finish(facts, json_out)
    say_wrote(str(target))


def _to_dcp(
    source: "Checkpoint",
    target: Path,
    plan: "ConversionPlan",
    dtype: str | None,
    json_out: str | None,
) -> None:
    from mtcli.core.convert.to_dcp import to_dcp

    echo(f"{source.folder}: writing dcp, as torchtitan has it, to {target}", err=True)
    _finish(to_dcp(source, target, plan.dtype, plan.verify), json_out)
    say_wrote(str(target))


def _model(config: str | None, overrides: list[str]) -> "ModelConfig | None":
    from mtcli.core.config.loading import load_config

    if overrides and config is None:
        raise wrong(
            f"--set {overrides[0]} without --config", "it sets a field of --config", "--set"
        )
    return None if config is None else load_config(config, overrides).model


def _read(words: list[str]) -> list[str]:
    """The words that name checkpoints to read."""
    return [named(word) for word in (words[1:] if words[0] in COUNTS else words[:1])]


def _verb(words: list[str], context: typer.Context) -> str:
    """Reads the verb, convert, inspect or verify; refuses flags that belong to another one."""
    verb = words[0] if words[0] in COUNTS else "convert"
    if flags := given_flags(context, REFUSED[verb]):
        raise MtcliError(*(Problem(f"{f} with {verb}", "it goes with SRC DST") for f in flags))
    if len(words) != COUNTS.get(verb, 2):
        said = " ".join(words)
        raise wrong(f"{said!r} is not SRC DST", "SRC DST, or inspect SRC, or verify A B")
    return verb


def _inspect(source: "Checkpoint", json_out: str | None) -> None:
    from mtcli.core.convert.inspect import describe, progress_rows

    facts = describe(source)
    if not answer(facts, json_out):
        return
    layout = ", ".join(f"{axis}={size}" for axis, size in facts["layout"].items())
    largest, files = facts["largest_tensor"], len(facts["files"])
    print_facts(
        {
            "path": facts["path"],
            "format": facts["format"],
            "step": _show(facts["step"]),
            "architecture": facts["model"]["architecture"],
            "shape": _shape(facts["model"]),
            "parameters": f"{facts['parameters']:,}",
            "adapters": _adapters(facts["adapters"]),
            "dtype": facts["dtype"],
            "optimizer state": ", ".join(facts["optimizer"]) or "none",
            "tokenizer": "yes" if facts["tokenizer"] else "none",
            "layout": layout,
            "tensors": f"{len(facts['tensors']):,} in {files:,} file{'s' * (files != 1)}",
            "largest tensor": f"{largest}, {facts['largest_tensor_bytes']:,} bytes",
            "bytes": f"{facts['bytes']:,}",
        }
        | progress_rows(source)
    )


def _inspect_gguf(path: Path, json_out: str | None) -> None:
    from mtcli.core.convert.gguf.header import describe_gguf
    from mtcli.core.runtime.console import print_table

    facts = describe_gguf(path)
    if not answer(facts, json_out):
        return
    counts = [
        f"{count['tensors']:,} {kind} of {count['bytes']:,} bytes"
        for kind, count in facts["types"].items()
    ]
    rows = {name: _show(facts[name]) for name in ("path", "format", "architecture", "name")}
    rows |= {"parameters": f"{facts['parameters']:,}", "tensors": ", ".join(counts)}
    print_facts(rows | {"bytes": f"{facts['file_bytes']:,}"})
    stated = [
        [name, _show(value)] for name, value in facts["facts"].items() if name not in TEMPLATES
    ]
    print_table("", ("", ""), stated)


def _adapters(adapters: dict[str, Any] | None) -> str:
    """The adapters' number, scale, layers and base in one line."""
    if adapters is None:
        return "none"
    sizes = f"{adapters['parameters']:,} of rank {adapters['rank']}, alpha {adapters['alpha']:g}"
    return f"{sizes}, on {', '.join(adapters['targets']) or 'all layers'} of {adapters['base']}"


def _shape(model: dict[str, Any]) -> str:
    """A model's sizes in one line."""
    heads = f"{model['num_heads']} heads ({model['num_kv_heads']} of keys) of {model['head_dim']}"
    sizes = f"{model['num_layers']} layers of {model['hidden_size']}, {heads}"
    sizes += f", vocabulary {model['vocab_size']:,}"
    if not model["num_experts"]:
        return f"{sizes}, MLP {model['ffn_hidden_size']:,}"
    experts = f"{model['num_experts']} experts of {model['moe_ffn_hidden_size']:,}"
    return f"{sizes}, {experts}, {model['top_k']} for each token"


def _convert(
    source: "Checkpoint",
    target: Path,
    plan: "ConversionPlan",
    layout: str,
    push: str | None,
    json_out: str | None,
) -> None:
    from mtcli.core.convert.model_card import CARD, model_card
    from mtcli.core.convert.shard import convert, require_target
    from mtcli.core.runtime.hub import push_folder

    require_target(source, target, plan)
    echo(_announcement(source, target, plan, layout), err=True)
    facts = convert(source, target, plan)
    if push:
        (target / CARD).write_text(model_card(source, push))
        facts["pushed"] = push_folder(target, push, "Upload a model")
    _finish(facts, json_out)
    say_wrote(facts.get("pushed", str(target)))


def _announcement(source: "Checkpoint", target: Path, plan: "ConversionPlan", layout: str) -> str:
    from mtcli.core.convert.inspect import describe
    from mtcli.core.convert.shard import left_out, replicas_kept
    from mtcli.core.mesh.parameters import count_active, count_parameters

    facts = describe(source)
    line = f"{facts['path']}: {facts['format']}, {facts['parameters']:,} parameters, "
    step = "" if facts["step"] is None else f", step {facts['step']:,}"
    line += f"{facts['bytes']:,} bytes{step}; writing {plan.to} to {target}"
    line += f", {layout}" if layout else ""
    if replicas_kept(source, plan).averages:
        line += f"; {source.averaging}"
    if plan.recipe:
        model = plan.recipe.model
        line += f"; {model.num_experts} experts of {model.moe_ffn_hidden_size}, {model.top_k} for "
        line += f"each token: {count_parameters(model):,} parameters, {count_active(model):,} used"
    if dropped := left_out(source, plan):
        why = "the model is new" if plan.recipe else "Hugging Face's format has no place for it"
        why = "it belongs to the adapters" if source.adapters else why
        line += f"; leaving out {', '.join(dropped)}, since {why}"
    if source.unread:
        line += f"; not reading {', '.join(source.unread)}"
    return line


def _target(
    source: "CheckpointFolder",
    target: str,
    to: str | None,
    layout: str | None,
    max_shard_size: str | None,
) -> str:
    if target.endswith(".gguf") and layout is None:
        to = to or "gguf"
    to = to or ("hf" if source.format == "mtcli" and layout is None else "mtcli")
    if to == "hf" and layout is not None:
        raise wrong(f"--layout {layout} with --to hf", "a Hugging Face folder has no layout")
    if to in ("gguf", "dcp") and layout is not None:
        raise wrong(f"--layout {layout} with --to {to}", "every layout reads the same files")
    if to in ("mtcli", "gguf", "dcp") and max_shard_size is not None:
        why = "each rank has one file" if to != "gguf" else "it is one file"
        raise wrong(f"--max-shard-size {max_shard_size} with --to {to}", why)
    return to


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Z]*)", text.strip().upper())
    unit = UNITS.get(match[2], 0) if match else 0
    size = int(float(match[1]) * unit) if match else 0
    if not size:
        raise wrong(f"{text!r} is not a size", "such as 5GB, 500MB or 2GiB", "--max-shard-size")
    return size


def _finish(facts: dict[str, Any], json_out: str | None) -> None:
    if answer(facts, json_out):
        print_facts({name: _show(value) for name, value in facts.items()})


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={size}" for name, size in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, float):
        return f"{value:.3g}"
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else value
