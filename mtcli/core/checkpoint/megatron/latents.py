"""Reads Megatron-LM's arguments of latent attention (MLA) and of YaRN.

Megatron-LM has two sets of YaRN's arguments: those of latent attention, and, for all other
attention, those whose names begin with yarn_.
"""

import math
from pathlib import Path
from typing import Any

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.untrusted import is_number, shown

Arguments = dict[str, Any]
WIDTHS = {
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_head_dim",
    "rope_dim": "qk_pos_emb_head_dim",
    "value_dim": "v_head_dim",
}
# What latent attention computes here in one way, with the values that say so.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "qk_layernorm": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "rope_type": ("rope", "yarn", None),
    "rotary_interleaved": (False, None),
    "rotary_percent": (1.0, None),
    "group_query_attention": (False, None),
}
OF_YARN: dict[str, tuple[Any, ...]] = {"rotary_interleaved": (False, None)}
OF_YARN |= {"rotary_percent": (1.0, None)}
NEEDED_BY_YARN = ("rotary_scaling_factor", "original_max_position_embeddings")


def latents(arguments: Arguments, norm_eps: Any, path: Path) -> Arguments:
    """Reads the widths of latents and heads, and rotary positions; norms of latents have the
    others' epsilon.

    Raises MtcliError for what cannot be represented, and for widths that are not there.
    """
    require(arguments, REQUIRED, path)
    mla = {ours: arguments.get(theirs) for ours, theirs in WIDTHS.items()}
    if missing := [WIDTHS[ours] for ours, width in mla.items() if width is None]:
        message = f"{path} does not say the widths of its latent attention: {', '.join(missing)}"
        raise wrong(message, "say what it is: --config FILE, a TOML file with [model]")
    mla |= {"q_rank": arguments.get("q_lora_rank") or 0, "norm_eps": norm_eps}
    scale, scaling = 0.0, None
    # without a type Megatron-LM takes YaRN
    if arguments.get("rope_type") == "rope":
        grown = _growth(arguments.get("rotary_scaling_factor"), arguments.get("mscale_all_dim"))
        if grown != 1.0:  # which it multiplies scores by all the same
            scale = grown**2 * _sum(mla["nope_dim"], mla["rope_dim"]) ** -0.5
    else:
        given = {"mscale": 1.0, "mscale_all_dim": 0.0, **_values(arguments)}
        scaling = yarn({"rotary_scaling_factor": 40.0, **given})
    return {
        "mla": mla,
        "num_kv_heads": arguments["num_attention_heads"],
        "qkv_bias": False,  # of the projections to latents, which never have one
        "position": "rope",
        "rope_theta": arguments.get("rotary_base") or 10000.0,
        "rope_interleaved": True,
        "rope_scaling": scaling,
        "attention_scale": scale,
    }


def scaled_by_yarn(arguments: Arguments, path: Path) -> Arguments:
    """Reads the scaling of position_embedding_type=yarn, of attention without latents. Raises
    MtcliError."""
    require(arguments, OF_YARN, path)
    given = _values(arguments, "yarn_")
    if missing := [f"yarn_{name}" for name in NEEDED_BY_YARN if name not in given]:
        message = f"{path} does not say how YaRN scales: {', '.join(missing)}"
        raise wrong(message, "say what it is: --config FILE, a TOML file with [model]")
    return {"rope_scaling": yarn(given)}


def yarn(given: Arguments) -> Arguments | None:
    """Converts the arguments of YaRN to a RopeScaling; None for a factor that scales nothing.

    The factor of rotated queries and keys is m(mscale) / m(mscale_all_dim), where m(x) is 1 + 0.1 *
    x * ln(factor), and m(1) where one of them is absent.
    """
    factor = given["rotary_scaling_factor"]
    if factor == 1.0:
        return None
    scaling = {
        "kind": "yarn",
        "factor": factor,
        "original_max_seq_len": given.get("original_max_position_embeddings", 4096),
        "beta_fast": given.get("beta_fast", 32.0),
        "beta_slow": given.get("beta_slow", 1.0),
        "truncate": given.get("correction_range_round_to_int", True),
    }
    mscale, of_all = given.get("mscale"), given.get("mscale_all_dim")
    if mscale is None or of_all is None:
        return scaling
    if mscale and of_all:
        return scaling | {"mscale": mscale, "mscale_all_dim": of_all}
    ratio = _growth(factor, mscale) / _growth(factor, of_all)
    return scaling | {"attention_factor": ratio, "mscale_all_dim": of_all}


def require(arguments: Arguments, required: dict[str, tuple[Any, ...]], path: Path) -> None:
    """Raises MtcliError with every argument that has none of its required values."""
    if unknown := [name for name, values in required.items() if arguments.get(name) not in values]:
        raise MtcliError(
            *(
                Problem(f"{path}: {name}={shown(arguments.get(name))} cannot be represented")
                for name in unknown
            )
        )


def _values(arguments: Arguments, prefix: str = "") -> Arguments:
    """Returns the arguments of YaRN that are there, without the prefix."""
    names = (*NEEDED_BY_YARN, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    given = {n: arguments.get(prefix + n) for n in (*names, "correction_range_round_to_int")}
    return {name: value for name, value in given.items() if value is not None}


def _growth(factor: Any, mscale: Any) -> float:
    """Returns m(mscale); 1 where a value is no number, which the model's own check then refuses."""
    if not is_number(factor) or not is_number(mscale) or factor <= 1:
        return 1.0
    return float(0.1 * mscale * math.log(factor) + 1.0)


def _sum(*widths: Any) -> float:
    """Returns the sum of widths; 1 where one is no number, which the model's own check refuses."""
    return float(sum(widths)) if all(is_number(w) and w > 0 for w in widths) else 1.0
