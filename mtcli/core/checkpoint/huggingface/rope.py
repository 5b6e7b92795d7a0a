"""Reads and writes rotary positions in config.json.

They are `rope_theta` and `rope_scaling` up to transformers 4, and both in `rope_parameters` since
5. The older form is written: every version reads it, and prefers `rope_scaling` where a file has
both.
"""

from typing import Any

from mtcli.core.checkpoint.huggingface.family import Table
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown

NAMES = {  # of RopeScaling's fields in config.json
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
REQUIRED = {"linear": ("factor",), "llama3": tuple(NAMES), "yarn": ("factor",)}
OF_YARN = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
NESTED = "one rope_theta and rope_type for all layers"


def read_rope(theirs: Table) -> Table:
    """Reads rope_theta and rope_scaling. Raises MtcliError for a scaling that is not ours."""
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise wrong(f"rope_scaling is {shown(given)}, which is not a table", "null or a table")
    if nested := [name for name, value in given.items() if isinstance(value, dict)]:
        raise wrong(f"rope_parameters of {shown(nested[0])} alone cannot be represented", NESTED)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", *REQUIRED):
        hint = f"one of default, {', '.join(REQUIRED)}"
        raise wrong(f"rope_type={shown(kind)} cannot be represented", hint)
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        factor = shown(given["partial_rotary_factor"])
        raise wrong(f"partial_rotary_factor={factor} cannot be represented", "1.0")
    theta = given.get("rope_theta", theirs.get("rope_theta", 10000.0))
    scaling = None
    if kind != "default":
        read = {ours: _number(given, ours, theirs, kind) for ours in REQUIRED[kind]}
        scaling = {"kind": kind} | read | (_yarn(given, theirs) if kind == "yarn" else {})
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_rope(model: ModelConfig) -> Table:
    """Writes the fields rope_theta and rope_scaling of config.json."""
    scaling = None
    if model.rope_scaling is not None:
        given, kind = model.rope_scaling.model_dump(), model.rope_scaling.kind
        scaling = {"rope_type": kind} | {NAMES[ours]: given[ours] for ours in REQUIRED[kind]}
        if kind == "yarn":
            name = "original_max_seq_len"
            scaling |= {NAMES[name]: given[name]} | {x: given[x] for x in OF_YARN if given[x] != 0}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def _yarn(given: Table, outer: Table) -> Table:
    """Reads the fields of YaRN, which may be absent or null."""
    name = "original_max_seq_len"
    trained = {name: outer.get("max_position_embeddings")}
    if given.get(NAMES[name]) is not None:
        trained = {name: _number(given, name, outer, "yarn")}
    fields = {field: given[field] for field in OF_YARN if given.get(field) is not None}
    return {field: value for field, value in (trained | fields).items() if value is not None}


def _number(given: Table, ours: str, outer: Table, kind: str) -> Any:
    name = NAMES[ours]
    if name not in given:
        raise wrong(f"rope_scaling of type {kind!r} has no {name}", "add it to config.json")
    outer_value = outer.get(name, given[name])  # which transformers 5 believes, and 4 does not
    if outer_value != given[name]:
        both = f"{shown(given[name])} in rope_scaling and {shown(outer_value)} beside it"
        raise wrong(f"{name} is {both}", "leave one of them out")
    return given[name]
