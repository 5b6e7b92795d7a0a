"""Writes the config's JSON Schema, for editors and programs: types, ranges, options and help."""

from typing import Any

from mtcli.core.config.field_facts import PRESET
from mtcli.core.config.fields import section_at
from mtcli.core.config.loading import preset_names
from mtcli.core.config.origins import missing_default
from mtcli.core.config.schema import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# pydantic leaves bounds behind a validator of ours under its own names.
BOUNDS = {"ge": "minimum", "le": "maximum", "lt": "exclusiveMaximum"}


def config_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a config's TOML. What it refuses `load_config` refuses too; rules
    on several fields, and defaults that others decide, are beyond it."""
    schema: dict[str, Any] = _with_bounds(RunConfig.model_json_schema())
    model = schema["$defs"]["ModelConfig"]
    model["properties"]["preset"] = {"enum": list(preset_names()), "description": PRESET}
    section = section_at(RunConfig, ["model"])
    assert section
    needed = [
        name for name in model.pop("required") if missing_default(section, name) == "required"
    ]
    model["anyOf"] = [{"required": ["preset"]}, {"required": needed}]
    return {"$schema": DIALECT} | schema


def _with_bounds(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_bounds(item) for item in schema]
    if isinstance(schema, dict):
        return {BOUNDS.get(key, key): _with_bounds(value) for key, value in schema.items()}
    return schema
