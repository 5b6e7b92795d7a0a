"""Reads the flags of `mtcli select`, and checks them before torch is imported."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

from mtcli.core.checkpoint.folder import CheckpointFolder, config_in, find_checkpoints, model_of
from mtcli.core.config.errors import MtcliError, Problem, collect_errors
from mtcli.core.config.loading import config_of as table_config
from mtcli.core.config.model import CLASSIFIERS, ModelConfig
from mtcli.core.config.rules import FORMATS, forward_config, of_training
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.blend import chosen
from mtcli.core.data.loader import open_blend, require_stated_ids
from mtcli.core.data.subset import TokenSequences
from mtcli.core.select.budgets import budgets_of, total_of

Method = Literal["craig", "dsir", "random"]
Proxy = Literal["gradient", "kronecker", "features"]
# The model of a config without one; only the config's data and batch sections are read.
NO_MODEL = {"architecture": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 1}
NO_MODEL |= {"ffn_hidden_size": 8, "vocab_size": 1, "max_seq_len": 1024}


class SelectRequest(NamedTuple):
    """The flags of `mtcli select`."""

    data: tuple[str, ...]  # the words of a blend
    model: str | None
    overrides: tuple[str, ...]
    fraction: float | None
    size: int | None
    cover: float | None
    method: Method
    proxy: Proxy
    target: tuple[str, ...]
    greedy: Literal["lazy", "naive", "stochastic"] = "lazy"
    base: str | None = None  # of the model's adapters, where it has moved


def require_request(request: SelectRequest, world: int) -> None:
    """Raises MtcliError with all that is wrong with a request and can be seen without weights."""
    collect_errors(partial(_require_flags, request), partial(_require_data, request, world))


def config_of(
    request: SelectRequest, weights: CheckpointFolder | None, world: int, model: ModelConfig | None
) -> RunConfig:
    """The config of a selection: forward passes of a model, if any, and the data to choose from.

    Sequences are as long as those of the model's own run, or else as `mtcli train` has them.
    Raises MtcliError with all that is wrong with it.
    """
    shapes = table_config({"model": NO_MODEL}).model if model is None else model
    return forward_config(shapes, overrides_of(request, weights, shapes), world)


def overrides_of(
    request: SelectRequest, weights: CheckpointFolder | None, model: ModelConfig
) -> list[str]:
    """The overrides of a request's config: a selection's defaults, then the user's."""
    size = min(1024, model.max_seq_len)
    if weights is not None and weights.format == "mtcli":
        size = config_in(weights.folder).batch.seq_len
    defaults = {"batch.seq_len": str(size), "data.format": json.dumps(FORMATS[model.head][0])}
    if model.head in CLASSIFIERS:
        defaults["data.split"] = '"1,0,0"'
        if weights is not None and weights.tokenizer_folder is not None:
            defaults["data.tokenizer"] = json.dumps(str(weights.tokenizer_folder))
    given = [f"{field}={value}" for field, value in defaults.items()]
    return [*given, f"data.train={json.dumps(request.data)}", *request.overrides]


def _require_flags(request: SelectRequest) -> None:
    if problems := [*_flags(request), *_unused(request)]:
        raise MtcliError(*problems)


def _flags(request: SelectRequest) -> Iterator[Problem]:
    amounts = {name: getattr(request, name) for name in ("fraction", "size", "cover")}
    given = [f"--{name}" for name, value in amounts.items() if value is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none of --fraction, --size and --cover"
        yield Problem(f"{said} given", "say how much to choose in one way: --fraction 0.1")
    if request.fraction == 0.0:
        yield Problem("0 of the sequences", "above 0 and at most 1", "--fraction")
    if request.cover is not None and request.method != "craig":
        hint = "--fraction or --size"
        yield Problem(f"--method {request.method} covers nothing", hint, "--cover")
    if request.model is None and request.method == "craig":
        yield Problem("it is missing: gradients are of a model", "--model CHECKPOINT", "--model")
    if request.target and request.method != "dsir":
        message = f"--method {request.method} reads no target"
        yield Problem(message, "--method dsir, or leave --target out", "--target")
    if not request.target and request.method == "dsir":
        hint = "--target PREFIX: tokens that the chosen sequences are to resemble"
        yield Problem("it is missing", hint, "--target")


def _unused(request: SelectRequest) -> Iterator[Problem]:
    """Yields a problem for each flag or field that this selection does not read."""
    if request.method != "craig" and request.greedy != "lazy":
        message = f"--method {request.method} picks nothing by its gain"
        yield Problem(message, "--method craig, or leave --greedy out", "--greedy")
    if request.model is None:
        hint = "--model CHECKPOINT, or leave {} out"
        if request.proxy != "gradient":
            yield Problem(
                "proxies are of a model, and there is none", hint.format("--proxy"), "--proxy"
            )
        if request.base is not None:
            said = "a base is of a model's adapters, and there is none"
            yield Problem(said, hint.format("--base"), "--base")
    for field in (override.partition("=")[0].strip() for override in request.overrides):
        if field.partition(".")[0] in ("optimizer", "sync", "lora"):
            yield of_training(field)
        elif field == "data.train":
            yield Problem("--data names what is chosen from", "--data PREFIX", field)


def _require_data(request: SelectRequest, world: int) -> None:
    weights = None
    if request.model is not None:
        weights = find_checkpoints([request.model], request.base)[0]
    model = None if weights is None else model_of(weights)
    if weights is not None and model is None:
        return  # Megatron's, or damaged: opening it tells
    (config,) = collect_errors(
        lambda: config_of(request, weights, world, model),
        otherwise=lambda: open_blend(request.data, "--data"),
    )
    head = config.model.head
    if head == "mlm":
        message = f"{request.model} has head='mlm', whose masks differ with each epoch"
        hint = "select by a language model, or a classifier of labelled examples"
        raise MtcliError(Problem(message, hint, "--model"))
    if config.data.format not in FORMATS[head][:1]:
        message = f"data.format={config.data.format!r} with head={head!r}"
        raise MtcliError(Problem(message, repr(FORMATS[head][0]), "data.format"))
    if head in CLASSIFIERS:
        _require_labelled(request, config)
        return
    opened = [lambda: open_tokens(config)]
    if request.target:
        opened.append(lambda: open_tokens(config, request.target))
    sequences = collect_errors(*opened)[0]
    if request.model is not None:
        require_stated_ids(sequences.prefixes, config.model.vocab_size)
    if request.cover is None and (request.fraction or request.size):
        total = total_of(request.fraction, request.size, len(sequences))
        budgets_of(sequences.counts, sequences.shares or sequences.counts, total)


def _require_labelled(request: SelectRequest, config: RunConfig) -> None:
    refused: list[Problem] = []
    if request.method == "dsir":
        message = f"dsir compares tokens, and the data is of data.format={config.data.format!r}"
        refused.append(Problem(message, "--method craig or random", "--method"))
    if request.proxy != "gradient":
        message = f"--proxy {request.proxy} of labelled examples, whose gradient is p - y exactly"
        refused.append(Problem(message, "--proxy gradient", "--proxy"))
    if refused:
        raise MtcliError(*refused)


def open_tokens(config: RunConfig, target: tuple[str, ...] = ()) -> TokenSequences:
    """Opens the candidates of a config's token data, or all windows of a target's.

    Raises MtcliError for files that are missing, wrong or too short.
    """
    words, split = (target, "1,0,0") if target else chosen(config.data, "train")
    return TokenSequences(words, split, config.batch.seq_len)
