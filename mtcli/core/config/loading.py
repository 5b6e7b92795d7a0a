"""Reads and writes run configs: TOML or a preset with overrides, all problems at once."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from os.path import isdir, isfile  # false for names that no file can have, where Path's raise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import (
    LARGEST,
    divides,
    either,
    field_kind,
    refused_value,
    section_at,
    table_header,
)
from mtcli.core.config.model import ARCHITECTURES, ModelConfig
from mtcli.core.config.nameable import CONFIGS, download, near_path
from mtcli.core.config.phases import with_steps_of_tokens
from mtcli.core.config.schema import HEAD_OF_FORMAT, RunConfig, TrainConfig
from mtcli.core.config.synonyms import closest, meant_fields, meant_value
from mtcli.core.config.untrusted import MAX_TOML_BYTES, parse_toml, read_untrusted

Table = dict[str, Any]
MAX_PROBLEMS = 100
FOLLOWS = {  # fields of [model] that `with_model_defaults` derives, and from which
    "num_kv_heads": ("num_heads",),
    "head_dim": ("num_heads", "hidden_size"),
    "ffn_hidden_size": ("hidden_size", "moe_ffn_hidden_size"),
}
LENGTHS = {"train.steps", "train.tokens", "train.epochs"}  # of which one sets that of a run
USUAL_HEAD_DIM = 128  # breaks no rule of its own, where the model's is not known


def load_config(source: str | Table, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads the run config of a TOML file, preset or table, with `section.field=value` overrides.

    Raises MtcliError with every unknown key, missing field and illegal value at once.
    `rules.problems` checks the rules that join several fields, or need the world size.
    """
    return config_of(table_of(source, overrides))


def config_of(table: Table, overrides: Sequence[str] = ()) -> RunConfig:
    """Builds the run config of a table of sections, as `load_config` does from a file."""
    config, problems = validate(with_overrides(table, overrides))
    if config is None or problems:
        raise MtcliError(*problems)
    return config


def read_config(
    source: str | Table, overrides: Sequence[str] = ()
) -> tuple[RunConfig | None, list[Problem]]:
    """Reads a config and its problems; illegal fields get their defaults, so that the rules of
    `rules.py` can be applied to the others. None where too many are wrong."""
    return validate(table_of(source, overrides))


def table_of(source: str | Table, overrides: Sequence[str] = ()) -> Table:
    """Reads the table of a TOML file, run folder or preset, with overrides.

    An override of steps, tokens or epochs replaces what else sets the table's length. A shorter run
    also shortens the warm-up, unless that is overridden. An override of the head or of the data's
    format drops the settings that followed from the previous one.
    """
    base = source if isinstance(source, dict) else read_table(source)
    table = with_overrides(base, overrides)
    fields = {item.partition("=")[0].strip() for item in overrides}
    table = _of_other_data(base, table, fields)
    if named := fields & LENGTHS:
        for name in LENGTHS - named:
            table = _without(table, name.split("."))
    if "train.steps" in fields and "optimizer.warmup_steps" not in fields:
        match table:
            case {"train": {"steps": n}, "optimizer": {"warmup_steps": int(m)}} if (
                type(n) is int and 0 < n < m
            ):
                table = _with(table, ["optimizer", "warmup_steps"], n)
    return table


def without_steps(table: Table) -> Table:
    """Drops the steps of a table with epochs, as its data decides their number."""
    match table:
        case {"train": {"epochs": epochs}} if epochs:
            return _without(table, ["train", "steps"])
    return table


def _of_other_data(base: Table, table: Table, fields: set[str]) -> Table:
    """Drops the fields that follow from the previous format of data, or head, and that no override
    names."""

    (head, kind), (new_head, new_kind) = _head_and_format(base), _head_and_format(table)
    kinds = {kind, new_kind} if kind != new_kind else set()
    heads = {head, new_head} if None not in (head, new_head) and head != new_head else set()
    stale = []
    if kinds:
        stale += ["data.split", "data.document_mask", "data.document_positions"]
    if kinds & set(HEAD_OF_FORMAT) or heads & set(HEAD_OF_FORMAT.values()):
        stale += ["model.head", "model.tie_embeddings", "model.sentence_order", "model.num_labels"]
        stale += ["data.format", "data.split"]
    if "race" in kinds or "multiple_choice" in heads:
        stale += ["batch.seq_len"]
    for name in stale:
        if name not in fields:
            table = _without(table, name.split("."))
    return table


def _head_and_format(table: Table) -> tuple[Any, Any]:
    """Returns the head that a table names, and the format of its data."""
    model, data = (
        t if isinstance(t := table.get(name), dict) else {} for name in ("model", "data")
    )
    head = model.get("head")
    of_head = next((kind for kind, reader in HEAD_OF_FORMAT.items() if reader == head), "tokens")
    return head, data.get("format", of_head)


def train_settings(overrides: Sequence[str], **given: Any) -> TrainConfig:
    """Builds the train section from overrides alone, for commands whose model comes from elsewhere.

    `given` are fields with flags of their own, such as device.
    """
    section = with_overrides({"train": given}, overrides)["train"]
    try:
        return TrainConfig.model_validate(section)
    except ValidationError as error:
        details = [detail | {"loc": ("train", *detail["loc"])} for detail in error.errors()]
        raise MtcliError(*(_problem(ErrorDetails(**detail)) for detail in details)) from None


def validate(table: Table) -> tuple[RunConfig | None, list[Problem]]:
    """Builds the config of a table, and lists its problems; see `read_config`."""
    table, problems = _with_model_preset(table)
    table, more = _with_architecture(table)
    problems += more
    try:
        return _with_length(RunConfig.model_validate(table), problems)
    except ValidationError as error:
        causes, remaining = _causes(error.errors(), table), table
        problems += [_problem(detail) for detail in causes[:MAX_PROBLEMS]]
        if len(causes) > MAX_PROBLEMS:  # no config of ours: each costs a copy of its section
            return None, [*problems, Problem(f"{len(causes) - MAX_PROBLEMS} more fields are wrong")]
        for detail in causes:
            keys = [str(key) for key in detail["loc"]]
            remaining = _without(remaining, keys)
            if _no_whole_heads(detail):
                remaining = _with(remaining, keys, USUAL_HEAD_DIM)
    try:
        return _with_length(RunConfig.model_validate(remaining), problems)
    except ValidationError:
        return None, problems


def _with_length(config: RunConfig, problems: list[Problem]) -> tuple[RunConfig, list[Problem]]:
    """Sets the steps of train.tokens, and adds the problem of other steps that are set too."""
    given, config = config.train, with_steps_of_tokens(config)
    if given.tokens and "steps" in given.model_fields_set and given.steps != config.train.steps:
        message = f"tokens={given.tokens} are {config.train.steps} steps, and train.steps="
        problem = Problem(
            f"{message}{given.steps}", "leave train.steps or train.tokens out", "train.tokens"
        )
        return config, [*problems, problem]
    return config, problems


def dump_toml(config: RunConfig) -> str:
    """Writes a config as TOML that `load_config` reads back to an equal config."""
    import tomlkit

    left_out: dict[str, Any] = {"optimizer": config.optimizer.implied}
    left_out |= {"train": {"steps"}} if config.train.tokens else {}
    for name, field in RunConfig.model_fields.items():
        if field_kind(field).holds_tables and not getattr(config, name):
            left_out[name] = True  # as `name = []` another [[name]] could not follow
    return tomlkit.dumps(config.model_dump(mode="json", exclude_none=True, exclude=left_out))


@cache
def preset_names() -> tuple[str, ...]:
    """Lists the presets that ship with mtcli."""
    folder = files("mtcli").joinpath("presets")
    names = (path.name for path in folder.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def read_table(source: str) -> Table:
    """Reads the raw TOML table of a file, run folder or preset."""
    if source in preset_names():
        text = files("mtcli").joinpath("presets", f"{source}.toml").read_text()
        return parse_toml(text)
    path = Path(source)
    if isdir(path):
        path = path / "config.toml"  # a run folder
        if not path.exists():
            hint = "a run folder holds one; give it, a TOML file, or a preset. A folder of text: "
            hint += f"`mtcli train tiny --set data.train={source} --set data.tokenizer=train:8192`"
            raise wrong(f"the folder {source} has no config.toml", hint)
    try:
        return parse_toml(read_untrusted(path, 4 * MAX_TOML_BYTES).decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        if isfile(f"{source}.idx"):
            hint = f"name a config, and this in it: mtcli train tiny --set data.train={source}"
            raise wrong(f"{source} is a data set, and no config", hint) from None
        near = closest(source, preset_names()) or near_path(source) or download(source)
        hint = f"give {CONFIGS}{near}"
        raise wrong(f"there is no config file or preset named {source!r}", hint) from None
    except ValueError as error:
        hint = "a line is [section] or field = value, and text stands in quotes"
        if path.suffix in (".yaml", ".yml", ".json"):
            hint = "configs are TOML: `mtcli plan tiny --gpus 1 --output run.toml` writes one"
        raise wrong(f"{path} is not TOML: {error}", hint) from None
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "check its permissions") from None


def with_overrides(table: Table, overrides: Iterable[str], flag: str = "--set") -> Table:
    """Copies `table` with each `section.field=value` of a flag set; values are TOML, or plain
    text."""
    problems = []
    for item in overrides:
        path, equals, text = item.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            hint = f"write {flag} section.field=value, such as {flag} parallel.tp=2"
            problems.append(Problem(f"{flag} {item!r} names no field and value", hint))
            continue
        try:
            try:
                value = parse_toml(f"value = {text.strip()}")["value"]
            except ValueError:
                value = text.strip()
            table = _with(table, keys, value)
        except TypeError:
            hint = "name a field of a section, such as optimizer.lr"
            problems.append(Problem("it is inside a field that holds a value", hint, path))
    if problems:
        raise MtcliError(*problems)
    return table


def _with_model_preset(table: Table) -> tuple[Table, list[Problem]]:
    model = table.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return table, []
    name, own_fields = model["preset"], {k: v for k, v in model.items() if k != "preset"}
    if name in preset_names():
        return table | {"model": read_table(name)["model"] | own_fields}, []
    hint = "`mtcli plan --presets` lists them" + closest(str(name), preset_names())
    return table | {"model": own_fields}, [
        Problem(f"there is no preset {name!r}", hint, field="model.preset")
    ]


def _causes(details: list[ErrorDetails], table: Table) -> list[ErrorDetails]:
    """Drops the errors of fields of [model] that are not set and follow from a wrong one."""
    wrong, model = {detail["loc"] for detail in details}, table.get("model")

    def is_derived(detail: ErrorDetails) -> bool:
        section, *names = detail["loc"]
        if section != "model" or not isinstance(model, dict) or not names or names[0] in model:
            return False
        return any(("model", source) in wrong for source in FOLLOWS.get(str(names[0]), ()))

    return [detail for detail in details if not is_derived(detail)]


def _with_architecture(table: Table) -> tuple[Table, list[Problem]]:
    """Replaces an unknown architecture by the likeliest, so that its defaults are not reported as
    missing."""
    model = table.get("model")
    name = model.get("architecture", "gpt") if isinstance(model, dict) else "gpt"
    if name in list(ARCHITECTURES):
        return table, []
    kind = field_kind(ModelConfig.model_fields["architecture"])
    detail = ErrorDetails(type="literal_error", loc=("model", "architecture"), msg="", input=name)
    meant = meant_value("model.architecture", name, kind.options) or "gpt"
    return _with(table, ["model", "architecture"], meant), [refused_value(RunConfig, detail)]


def _problem(detail: ErrorDetails) -> Problem:
    path = [str(key) for key in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        return _unknown(path)
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], int):  # of a list
        return refused_value(RunConfig, detail | {"type": "too_short", "loc": detail["loc"][:-1]})
    if detail["type"] == "missing":
        hint = f"add {path[-1]} to {table_header('.'.join(path[:-1]))}"
        hint += " or name a preset" if path[0] == "model" else ""
        if path == ["model"]:
            hint = "model.preset = 'tiny', or [model] with num_layers, hidden_size and the others"
        missing = Problem("this field is missing", hint, ".".join(path))
        return _no_whole_heads(detail) or missing
    if detail["type"] == "no_path":
        hint = "give it a path without NUL bytes, such as runs/a"
        return Problem(detail["msg"], hint, ".".join(path))
    if detail["type"] == "no_file":
        return Problem(detail["msg"], "a file of one text a line, or a list", ".".join(path))
    return refused_value(RunConfig, detail)


def _unknown(path: list[str]) -> Problem:
    *parents, name = path
    section = ".".join(parents)
    where = f"in {table_header(section)}" if parents else "at the top level"
    meant = [field.removeprefix(f"{section}.") for field in meant_by(path)]
    hint = f"known: {', '.join(_fields_of(parents))}"
    if name in ("dp", "data_parallel", "data_parallel_size", "world_size"):
        hint = "dp is what the other axes leave of the ranks: world / (cp * tp * pp)"
    elif meant:
        hint = f"did you mean {either([repr(field) for field in meant])}?"
    return Problem(f"unknown key {name!r} {where}", hint, ".".join(path))


def meant_by(path: Sequence[str]) -> list[str]:
    """Returns the fields, as section.name, that an unknown path most likely stands for."""
    *parents, name = path
    likely = meant_fields(name, _fields_of(parents), all_fields())
    near = set(likely) & set(_fields_of(parents))
    return [".".join([*parents, field]) if field in near else field for field in likely]


def _no_whole_heads(detail: ErrorDetails) -> Problem | None:
    """Builds the problem of heads that do not divide the model's width, where that is why head_dim
    is missing."""
    if detail["type"] != "missing" or detail["loc"] != ("model", "head_dim"):
        return None
    heads, hidden = detail["input"].get("num_heads"), detail["input"].get("hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int) and heads > 0 < hidden <= LARGEST):
        return None
    (problem,) = divides("model.num_heads", heads, "hidden_size", hidden)
    return problem._replace(hint=f"{problem.hint}, or set model.head_dim")


def _fields_of(path: Sequence[str]) -> tuple[str, ...]:
    section = section_at(RunConfig, path)
    preset = ("preset",) if list(path) == ["model"] else ()
    return (*section.model_fields, *preset) if section else ()


@cache
def all_fields(with_repeated: bool = False) -> tuple[str, ...]:
    """Lists the fields that hold a value, as section.name. `with_repeated` adds a phase's copies of
    them, such as phase.batch.seq_len."""
    fields = tuple(_leaves(RunConfig, ""))
    repeated = set() if with_repeated else {f"phase.{field}" for field in fields}
    return tuple(field for field in fields if field not in repeated)


def value_named(word: str) -> str:
    """Returns section.name=value, such as train.precision=bf16, for the only field with an option
    of this name, or the one whose number formats others repeat; empty where none or several have
    it."""
    found = []
    for field in all_fields():
        *sections, name = field.split(".")
        section = section_at(RunConfig, sections)
        if section and word in field_kind(section.model_fields[name]).options:
            found.append(f"{field}={word}")
    formats = [value for value in found if value.startswith("train.precision=")]
    return found[0] if len(found) == 1 else "".join(formats)


def _leaves(section: type[BaseModel], path: str) -> Iterator[str]:
    for name in section.model_fields:
        if inner := section_at(section, [name]):
            yield from _leaves(inner, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _with(table: Any, keys: list[str], value: Any) -> Any:
    """Copies a table, or an array of tables, with the value at a path of names and of numbers; the
    number after the last one adds a table.

    Raises TypeError where the path leads into another value.
    """
    if isinstance(table, list) and keys[0].isdecimal() and int(keys[0]) <= len(table):
        numbered = dict(zip(map(str, range(len(table))), table, strict=True))
        return list(_with(numbered, [str(int(keys[0])), *keys[1:]], value).values())
    if not isinstance(table, dict):
        raise TypeError
    if len(keys) > 1:
        value = _with(table.get(keys[0], [] if keys[1].isdecimal() else {}), keys[1:], value)
    return table | {keys[0]: value}


def _without(table: Table, keys: list[str]) -> Table:
    if not isinstance(table, dict) or keys[0] not in table:
        return table
    if len(keys) == 1 or not isinstance(table[keys[0]], dict):
        return {key: value for key, value in table.items() if key != keys[0]}
    return table | {keys[0]: _without(table[keys[0]], keys[1:])}
