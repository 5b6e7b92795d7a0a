"""Reading and writing run configs: TOML or a preset, overrides, all problems at once."""

import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mtcli.core.spec.config import RunConfig, TrainConfig
from mtcli.core.spec.divisors import divides
from mtcli.core.spec.errors import MtcliError, Problem, wrong
from mtcli.core.spec.foreign import parse_toml, shown
from mtcli.core.spec.section import LARGEST

Table = dict[str, Any]
MAX_PROBLEMS = 100
USUAL_HEAD_DIM = 128  # breaks no rule of its own, where the model's is not known


def load_config(source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run config of a TOML file or preset, with `section.field=value` overrides on top.

    Raises MtcliError with every unknown key, missing field and illegal value at once. Rules that
    join several fields, or need the world size, are `check.problems`.
    """
    return config_of(read_table(source), overrides)


def config_of(table: Table, overrides: Sequence[str] = ()) -> RunConfig:
    """As `load_config`, for a table of sections."""
    config, problems = validate(with_overrides(table, overrides))
    if config is None or problems:
        raise MtcliError(*problems)
    return config


def read_config(
    source: str, overrides: Sequence[str] = ()
) -> tuple[RunConfig | None, list[Problem]]:
    """The config and its problems; illegal fields are left at their defaults, so that the rules
    of `check.py` can still be applied to the rest. None where too little is left."""
    return validate(with_overrides(read_table(source), overrides))


def train_settings(overrides: Sequence[str], **given: Any) -> TrainConfig:
    """The train section that overrides alone give, for commands whose model comes from elsewhere.

    `given` are fields with flags of their own, such as device.
    """
    section = with_overrides({"train": given}, overrides)["train"]
    try:
        return TrainConfig.model_validate(section)
    except ValidationError as error:
        found = [detail | {"loc": ("train", *detail["loc"])} for detail in error.errors()]
        raise MtcliError(*(_problem(ErrorDetails(**detail)) for detail in found)) from None


def validate(table: Table) -> tuple[RunConfig | None, list[Problem]]:
    """As `read_config`, for a table that was already read."""
    table, problems = _with_model_preset(table)
    try:
        return RunConfig.model_validate(table), problems
    except ValidationError as error:
        found, rest = error.errors(), table
        problems += [_problem(detail) for detail in found[:MAX_PROBLEMS]]
        if len(found) > MAX_PROBLEMS:  # no config of ours: each costs a copy of its section
            return None, [*problems, Problem(f"{len(found) - MAX_PROBLEMS} more fields are wrong")]
        for detail in found:
            keys = [str(key) for key in detail["loc"]]
            rest = _without(rest, keys)
            if _no_whole_heads(detail):
                rest = _with(rest, keys, USUAL_HEAD_DIM)
    try:
        return RunConfig.model_validate(rest), problems
    except ValidationError:
        return None, problems


def dump_toml(config: RunConfig) -> str:
    """The config as TOML that `load_config` reads back to an equal config."""
    import tomlkit

    return tomlkit.dumps(config.model_dump(mode="json", exclude_none=True))


@cache
def preset_names() -> tuple[str, ...]:
    """Names of the presets that ship with mtcli."""
    folder = files("mtcli").joinpath("presets")
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if _is_toml(p.name)))


def read_table(source: str) -> Table:
    """The raw TOML table of a file or preset."""
    if source in preset_names():
        text = files("mtcli").joinpath("presets", f"{source}.toml").read_text()
        return parse_toml(text)
    path = Path(source)
    if path.is_dir():
        path = path / "config.toml"  # a run folder
        if not path.exists():
            hint = "a run folder holds one; give it, a TOML file, or a preset"
            raise wrong(f"the folder {source} has no config.toml", hint)
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        hint = "give a TOML file, a run folder, or a preset" + closest(source, preset_names())
        raise wrong(f"there is no config file or preset named {source!r}", hint) from None
    except ValueError as error:
        raise wrong(f"{path} is not TOML: {error}", "see docs/config.md") from None
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "check its permissions") from None


def with_overrides(table: Table, overrides: Iterable[str], flag: str = "--set") -> Table:
    """A copy of `table` with each `section.field=value` of a flag set; values are TOML, or plain
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
            table = _with(table, keys, _value(text.strip()))
        except TypeError:
            hint = "name a field of a section, such as optimizer.lr"
            problems.append(Problem("it is inside a field that holds a value", hint, path))
    if problems:
        raise MtcliError(*problems)
    return table


def closest(word: str, known: Iterable[str]) -> str:
    """A clause for a hint: the closest known name, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _with_model_preset(table: Table) -> tuple[Table, list[Problem]]:
    model = table.get("model")
    if not isinstance(model, dict) or "preset" not in model:
        return table, []
    name, rest = model["preset"], {k: v for k, v in model.items() if k != "preset"}
    if name in preset_names():
        return table | {"model": read_table(name)["model"] | rest}, []
    hint = "`mtcli plan --presets` lists them" + closest(str(name), preset_names())
    return table | {"model": rest}, [
        Problem(f"there is no preset {name!r}", hint, field="model.preset")
    ]


def _problem(detail: ErrorDetails) -> Problem:
    path = [str(key) for key in detail["loc"]]
    field = ".".join(path)
    if detail["type"] == "extra_forbidden":
        near = closest(path[-1], _fields_of(path[:-1]))
        where = f"in [{'.'.join(path[:-1])}]" if path[1:] else "at the top level"
        known = ", ".join(_fields_of(path[:-1]))
        return Problem(
            f"unknown key {path[-1]!r} {where}", (near[2:] if near else f"known: {known}"), field
        )
    if detail["type"] == "missing":
        add = f"add {path[-1]} to [{path[0]}] or name a preset"
        return _no_whole_heads(detail) or Problem("this field is missing", add, field)
    if detail["type"] == "tuple_type" and isinstance(detail["input"], str):
        value = shown(detail["input"])
        return Problem(f"{value} should be a list", f"{path[-1]} = [{value}]", field)
    if detail["type"] == "no_path":
        return Problem(detail["msg"], "give it a path without NUL bytes, such as runs/a", field)
    message = detail["msg"].replace("Input should be", f"{shown(detail['input'])} should be")
    return Problem(message[0].lower() + message[1:], "see docs/config.md", field)


def _no_whole_heads(detail: ErrorDetails) -> Problem | None:
    """What is wrong where a head's width is missing because the heads do not divide the width."""
    if detail["type"] != "missing" or detail["loc"] != ("model", "head_dim"):
        return None
    heads, hidden = detail["input"].get("num_heads"), detail["input"].get("hidden_size")
    if not (isinstance(heads, int) and isinstance(hidden, int) and heads > 0 < hidden <= LARGEST):
        return None
    (problem,) = divides("model.num_heads", heads, "hidden_size", hidden)
    return problem._replace(hint=f"{problem.hint}, or set model.head_dim")


def _fields_of(path: list[str]) -> tuple[str, ...]:
    section: type[BaseModel] = RunConfig
    for key in path:
        annotation = section.model_fields[key].annotation if key in section.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ()
        section = annotation
    preset = ("preset",) if path == ["model"] else ()
    return (*section.model_fields, *preset)


def _value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _with(table: Table, keys: list[str], value: Any) -> Table:
    if not isinstance(table, dict):
        raise TypeError
    if len(keys) > 1:
        value = _with(table.get(keys[0], {}), keys[1:], value)
    return table | {keys[0]: value}


def _without(table: Table, keys: list[str]) -> Table:
    if not isinstance(table, dict) or keys[0] not in table:
        return table
    if len(keys) == 1 or not isinstance(table[keys[0]], dict):
        return {key: value for key, value in table.items() if key != keys[0]}
    return table | {keys[0]: _without(table[keys[0]], keys[1:])}


def _is_toml(name: str) -> bool:
    return name.endswith(".toml")
