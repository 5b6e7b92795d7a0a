"""Says where each value of a run config comes from."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from mtcli.core.config.fields import field_kind, section_at
from mtcli.core.config.loading import Table
from mtcli.core.config.model import ARCHITECTURES, ModelConfig
from mtcli.core.config.schema import RunConfig

# `derived` is a default that other fields decide, and `weights` the model of a Hugging Face folder.
Origin = Literal["default", "derived", "preset", "file", "weights", "flag", "data"]
# A field's default in words, which ends its help.
FOLLOWS = re.compile(r"\[([^\[\]]+)\]$")


def values_of(config: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (section.name, value) of each field; a section that is None is a value itself, and an
    array of tables is a list of dicts."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if value and field_kind(field).holds_tables:
            value = [table.model_dump(exclude_none=True) for table in value]
        if isinstance(value, BaseModel):
            yield from values_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def entries(table: Table, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (section.name, value) of each entry of a config's table; a field that is a table of
    names is an entry."""
    for name, value in table.items():
        if isinstance(value, dict) and section_at(RunConfig, f"{path}{name}".split(".")):
            yield from entries(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def origins(
    config: RunConfig, layers: Sequence[tuple[Origin, Mapping[str, Any]]]
) -> dict[str, Origin]:
    """Returns the origin of each field: the first of some layers of `entries` that has it."""

    def of_field(field: str, value: Any) -> Origin:
        for origin, layer in layers:
            if field in layer:
                return origin
        return "default" if value == own_default(field) else "derived"

    return {field: of_field(field, value) for field, value in values_of(config)}


def own_default(field: str) -> Any:
    """Returns a field's default, where no other field decides it; None where there is none, or no
    such field."""
    *parents, name = field.split(".")
    section = section_at(RunConfig, parents)
    known_field = section.model_fields.get(name) if section else None
    return known_field.get_default() if known_field and not known_field.is_required() else None


def missing_default(section: type[BaseModel], name: str) -> str:
    """Says how the value of a field without a default comes about; empty where it has one."""
    field = section.model_fields[name]
    if not field.is_required():
        return ""
    if section is ModelConfig and name in ARCHITECTURES["gpt"]:
        return "by architecture"
    return "derived" if "[" in help_of(section, name) else "required"


def what_decides(config: RunConfig, field: str) -> str:
    """Says what decides the default of a field; empty where that is the field alone."""
    *parents, name = field.split(".")
    section = section_at(RunConfig, parents)
    assert section, field
    kind = config.model.architecture
    by_kind = ARCHITECTURES[kind] if parents == ["model"] else {}
    if name in by_kind and by_kind[name] == getattr(config.model, name):
        return f"architecture = {kind}"
    match = FOLLOWS.search(help_of(section, name))
    return match[1] if match else ""


def help_of(section: type[BaseModel], name: str) -> str:
    """Returns a field's help in one line."""
    return " ".join((section.model_fields[name].description or "").split())


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Lists (field, value in a, value in b) of fields that differ, in the config's order; None
    where one has no such field."""
    return [(f, a.get(f), b.get(f)) for f in dict.fromkeys((*a, *b)) if a.get(f) != b.get(f)]
