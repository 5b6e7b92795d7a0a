"""Builds the run config of a fine-tuning, whose initial weights define the model; without torch."""

from contextlib import suppress
from os.path import isfile  # false for names that no file can have, where Path's raises
from pathlib import Path
from shlex import quote
from typing import Any

from mtcli.core.checkpoint.folder import (
    ADAPTER_CONFIG,
    CONFIG,
    CheckpointFolder,
    find_checkpoint,
    find_checkpoints,
    model_of,
)
from mtcli.core.checkpoint.huggingface.json_files import CONFIG_JSON
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.loading import Table, read_table, without_steps
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.nameable import CONFIGS
from mtcli.core.config.schema import LoraConfig, RunConfig
from mtcli.core.runtime.hub import fetch_config, is_hub, pinned

# Of full fine-tuning, where nothing else is said: a hundredth of what pre-training takes, so that
# what the weights know is kept. The first step has it all, as few may follow.
OPTIMIZER = {"lr": 2e-5, "warmup_steps": 1, "weight_decay": 0.0}


def is_weights(source: str) -> bool:
    """Says whether a CONFIG is a Hugging Face model or peft adapters, in a folder or on the hub,
    which define the model."""
    if is_hub(source):
        return True
    path = Path(source)
    names = (CONFIG_JSON, ADAPTER_CONFIG)
    return any(map(isfile, (path / name for name in names))) and not (path / CONFIG).exists()


def source_of(config: str | None, init: str | None = None, base: str | None = None) -> str | Table:
    """Returns the table of a run's config, or the name of one that needs no change.

    A Hugging Face folder as CONFIG, or initial weights without a CONFIG, define the model and
    train.init. With a CONFIG, `init` sets train.init alone, and `base` sets train.base. The steps
    of a run folder's epochs depend on its data, so they are left out. Raises MtcliError where
    neither is given, the weights' model is unknown, or a base is given without adapters.
    """
    if config is None and init is None:
        hint = f"give a CONFIG ({CONFIGS}), or --init"
        raise wrong("there is no config to train", hint, "CONFIG")
    init = pinned(init) if init and is_hub(init) else init
    config = pinned(config) if config and is_hub(config) else config
    if config is None or is_weights(config):
        return _table_of_weights(init or config or "", config or init or "", base)
    is_run = isfile(Path(config) / CONFIG)
    if init is None and base is None and not is_run:
        return config
    table = read_table(config)
    table = without_steps(table) if is_run else table
    train = table.get("train", {})
    if not isinstance(train, dict) or not (init or base):
        return table
    if init:
        train = {key: value for key, value in train.items() if key != "base"} | {"init": init}
    if base:
        train = train | {"base": base}
        _require_adapters(train.get("init"), base)
    start = None
    with suppress(MtcliError):  # `require_weights` says what is wrong with them
        start = model_in(train["init"], base)
    return _with_biases(table | {"train": train}, start)


def _require_adapters(init: object, base: str) -> None:
    """Raises MtcliError where a base is named without adapters."""
    if not isinstance(init, str):
        message = "a base is of adapters that a run starts from, and it starts from none"
        raise wrong(message, "--init CHECKPOINT, or leave --base out", "--base")
    find_checkpoints([init], base)


def _table_of_weights(init: str, source: str, base: str | None) -> Table:
    """Builds the table that trains the model of `source` from the weights `init`."""
    model = model_in(source, base)
    if model is None:
        message = f"{source} does not tell its model"
        raise wrong(message, f"name a CONFIG of it: mtcli train CONFIG --init {init}", "--init")
    table = {
        "model": model.model_dump(mode="json", exclude_none=True),
        "optimizer": dict(OPTIMIZER),
        "train": {"init": init, "base": base} if base else {"init": init},
    }
    return _with_biases(table, model)


def model_in(source: str, base: str | None = None) -> ModelConfig | None:
    """Reads the model of the checkpoint in a folder; None where it does not state one. Raises
    MtcliError where there is no checkpoint, or a base without adapters."""
    return model_of(find_checkpoints([source], base, fetch_config)[0])


def _with_biases(table: Table, start: ModelConfig | None) -> Table:
    """Keeps the router biases of the initial weights in a run's table, though their rate is 0."""
    model = table.get("model")
    if start is None or not start.has_router_biases or not isinstance(model, dict):
        return table
    if not model.get("num_experts"):
        return table
    return table | {"model": {**model, "router_biases": True}}


def starting_folder(config: RunConfig) -> CheckpointFolder | None:
    """Finds the checkpoint that a run starts from, if any. Raises MtcliError where it is
    missing."""
    train = config.train
    return None if train.init is None else find_checkpoints([train.init], train.base)[0]


def starting_tokenizer(config: RunConfig) -> Path | None:
    """Returns the tokenizer folder of a run's initial weights, if any."""
    start = starting_folder(config)
    return start and start.tokenizer_folder


def checkpoint_of_config(config: str | None) -> CheckpointFolder | None:
    """Finds the checkpoint of the run folder, or of the checkpoint of ours, that a CONFIG names;
    None where it names none or that has saved none. Only its config is read."""
    if config is None or not isfile(Path(config) / CONFIG):
        return None
    with suppress(MtcliError):
        return find_checkpoint(Path(config))
    return None


def weights_note(config: str | None, start: str | None) -> str:
    """Notes that a run takes the config of a folder and not its weights, and begins from `start`
    (train.init) or with new ones; empty where the folder has none, or is `start`."""
    if config is None or config == start or not checkpoint_of_config(config):
        return ""
    begins = f"begins from {start}" if start else "begins with new weights"
    note = f"note: CONFIG {config} gives its config, not its weights: the run {begins}; "
    return f"{note}`--init {quote(config)}` in its place, or beside it, begins from its own"


def require_weights(config: RunConfig) -> None:
    """Raises MtcliError where a run's initial weights are missing, or of another model."""
    source = starting_folder(config)
    if source is None:
        if config.lora.rank:
            raise no_base(config.lora)
        return
    model = model_of(source)
    if model is None or config.model.num_experts != model.num_experts:
        return  # what opens it says more
    if config.train.new_tokens:
        size = max(model.vocab_size, config.model.vocab_size)
        model = model.model_copy(update={"vocab_size": size})
    differs = _differences(config.model.model_dump(), model.model_dump())
    if differs:
        command = f"mtcli train {config.train.init}" if source.format == "hf" else ""
        command = command or f"mtcli train --init {config.train.init}"
        problems = [
            Problem(f"{name}={ours} and {config.train.init} has {theirs}", "", f"model.{name}")
            for name, ours, theirs in differs
        ]
        hint = f"leave CONFIG out, and the model is that of the weights: {command}"
        if source.format == "hf":
            hint = f"give the folder as CONFIG, and the model is its own: {command}"
        raise MtcliError(*problems, hint=f"{hint} --set data.train=...")


def no_base(lora: LoraConfig) -> MtcliError:
    """Builds the error of adapters without base weights."""
    message = f"rank={lora.rank}: adapters are trained for weights, and the run starts from none"
    return wrong(message, "--init CHECKPOINT, or a Hugging Face folder as CONFIG", "lora.rank")


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Lists the fields that shape a model's parameters and differ: (field, ours, theirs)."""
    shapes: tuple[str, ...] = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    shapes += ("vocab_size", "position", "activation")
    with_experts = ("moe_ffn_hidden_size", "shared_expert_ffn_hidden_size", "first_dense_layers")
    shapes += with_experts if ours["num_experts"] else ("ffn_hidden_size",)
    shapes += ("ffn_hidden_size",) if ours["first_dense_layers"] else ()
    if ours["head"] == theirs["head"]:
        shapes += ("tie_embeddings",)
    return [(name, ours[name], theirs[name]) for name in shapes if ours[name] != theirs[name]]
