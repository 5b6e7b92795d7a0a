"""Reads and writes rotary positions in config.json.

They are `rope_theta` and `rope_scaling` up to transformers 4, and both in `rope_parameters` since
5. The older form is written: every version reads it, and prefers `rope_scaling` where a file has
both.
"""

from typing import Any

from mtcli.core.checkpoint.huggingface.family import Table
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import is_number, shown

NAMES = {  # of RopeScaling's fields in config.json
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"),
    "yarn": ("factor",),
    "longrope": ("short_factors", "long_factors"),
}
OF_YARN = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
NESTED = "one rope_theta and rope_type for all layers"


def read_rope(theirs: Table) -> Table:
    """Reads rope_theta and rope_scaling. Raises MtcliError for a scaling that is not ours."""
    if (fraction := _fraction(theirs | {"partial_rotary_factor": 1.0})) != 1.0:
        raise wrong(f"partial_rotary_factor={shown(fraction)} cannot be represented", "1.0")
    return _read_rope(theirs)


def read_partial_rope(theirs: Table) -> Table:
    """Reads what `read_rope` does and partial_rotary_factor. Raises MtcliError likewise."""
    return _read_rope(theirs) | {"rotary_fraction": _fraction(theirs)}


def read_ropes(theirs: Table, theta: Any) -> tuple[Table, Any]:
    """Reads the rotary positions of layers without a window, which are scaled, and the theta of
    those with one, which are not; None where it is not given. Raises MtcliError."""
    given = theirs.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise wrong(f"rope_parameters is {shown(given)}, which is not a table", "a table")
    parts = [given.get(f"{kind}_attention") or {} for kind in ("full", "sliding")]
    if not all(isinstance(part, dict) for part in parts):
        raise wrong("rope_parameters has layers of no table", "tables of rope_type and rope_theta")
    full, local = parts
    if local.get("rope_type", "default") != "default":
        kind = f"rope_type={shown(local['rope_type'])} of sliding_attention"
        raise wrong(f"{kind} cannot be represented", "only default can")
    scaling = theirs.get("rope_scaling") or full
    flat = {"rope_parameters": None, "rope_scaling": scaling}
    flat["rope_theta"] = full.get("rope_theta", theta)
    return read_rope(theirs | flat), local.get("rope_theta")


def rope_table(theirs: Table) -> Table:
    """Returns the table of a scaling, which may be empty. Raises MtcliError for anything else."""
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise wrong(f"rope_scaling is {shown(given)}, which is not a table", "null or a table")
    return given


def _fraction(theirs: Table) -> Any:
    name = "partial_rotary_factor"
    inner = rope_table(theirs).get(name)
    return theirs.get(name, 1.0) if inner is None else inner


def _read_rope(theirs: Table) -> Table:
    given = rope_table(theirs)
    if nested := [name for name, value in given.items() if isinstance(value, dict)]:
        raise wrong(f"rope_parameters of {shown(nested[0])} alone cannot be represented", NESTED)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", *REQUIRED):
        hint = f"one of default, {', '.join(REQUIRED)}"
        raise wrong(f"rope_type={shown(kind)} cannot be represented", hint)
    theta = given.get("rope_theta", theirs.get("rope_theta", 10000.0))
    scaling = None
    if kind != "default":
        read = {ours: _number(given, ours, theirs, kind) for ours in REQUIRED[kind]}
        scaling = {"kind": kind} | read | _more(kind, given, theirs)
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_rope(model: ModelConfig) -> Table:
    """Writes the fields rope_theta and rope_scaling of config.json."""
    scaling = None
    if model.rope_scaling is not None:
        given, kind = model.rope_scaling.model_dump(), model.rope_scaling.kind
        scaling = {"rope_type": kind} | {NAMES[ours]: given[ours] for ours in REQUIRED[kind]}
        if kind in ("yarn", "longrope"):
            scaling[NAMES["original_max_seq_len"]] = given["original_max_seq_len"]
            names = OF_YARN if kind == "yarn" else ("factor", "attention_factor")
            scaling |= {x: given[x] for x in names if given[x] or given[x] is False}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def write_partial_rope(model: ModelConfig) -> Table:
    """Writes what `read_partial_rope` reads."""
    return write_rope(model) | {"partial_rotary_factor": model.rotary_fraction}


def _more(kind: str, given: Table, outer: Table) -> Table:
    """Reads the fields of a scaling that may be absent or null."""
    name, context = "original_max_seq_len", outer.get("max_position_embeddings")
    if kind == "dynamic":
        return {name: context}
    if kind not in ("yarn", "longrope"):
        return {}
    trained = outer.get(NAMES[name]) or context
    if given.get(NAMES[name]) is not None:
        trained = _number(given, name, outer, kind)
    names = OF_YARN if kind == "yarn" else ("factor", "attention_factor")
    fields = {field: given[field] for field in names if given.get(field) is not None}
    if kind == "longrope" and is_number(context) and is_number(trained) and trained > 0:
        fields.setdefault("factor", max(1.0, context / trained))
    return {x: value for x, value in ({name: trained} | fields).items() if value is not None}


def _number(given: Table, ours: str, outer: Table, kind: str) -> Any:
    name = NAMES[ours]
    if name not in given:
        raise wrong(f"rope_scaling of type {kind!r} has no {name}", "add it to config.json")
    outer_value = outer.get(name, given[name])  # which transformers 5 believes, and 4 does not
    if outer_value != given[name]:
        both = f"{shown(given[name])} in rope_scaling and {shown(outer_value)} beside it"
        raise wrong(f"{name} is {both}", f"leave one {name} of config.json out")
    return given[name]
