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
NESTED = "one rope_theta and rope_type for all layers"


def read_rope(theirs: Table) -> Table:
    """Reads rope_theta and rope_scaling. Raises MtcliError for another scaling than llama3's."""
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise wrong(f"rope_scaling is {shown(given)}, which is not a table", "null or a table")
    if nested := [name for name, value in given.items() if isinstance(value, dict)]:
        raise wrong(f"rope_parameters of {shown(nested[0])} alone cannot be represented", NESTED)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise wrong(f"rope_type={shown(kind)} cannot be represented", "'default' or 'llama3'")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        factor = shown(given["partial_rotary_factor"])
        raise wrong(f"partial_rotary_factor={factor} cannot be represented", "1.0")
    theta = given.get("rope_theta", theirs.get("rope_theta", 10000.0))
    scaling = None
    if kind == "llama3":
        scaling = {ours: _number(given, name, theirs) for ours, name in NAMES.items()}
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_rope(model: ModelConfig) -> Table:
    """Writes the fields rope_theta and rope_scaling of config.json."""
    scaling = None
    if model.rope_scaling is not None:
        given = model.rope_scaling.model_dump()
        scaling = {"rope_type": "llama3"} | {NAMES[ours]: n for ours, n in given.items()}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling}


def _number(given: Table, name: str, outer: Table) -> Any:
    if name not in given:
        raise wrong(f"rope_scaling of type 'llama3' has no {name}", "add it to config.json")
    outer_value = outer.get(name, given[name])  # which transformers 5 believes, and 4 does not
    if outer_value != given[name]:
        both = f"{shown(given[name])} in rope_scaling and {shown(outer_value)} beside it"
        raise wrong(f"{name} is {both}", "leave one of them out")
    return given[name]
