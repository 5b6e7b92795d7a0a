"""Maps Phi-3 and Phi-4: Llama with one tensor of all queries, keys and values, one of gate and up,
a rotated part of each head, and LongRoPE."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import (
    Table,
    WindowRule,
    joined,
    queries_keys_values,
    same,
)
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, LLAMA, NO_PADDING, SIZES
from mtcli.core.checkpoint.huggingface.rope import (
    read_partial_rope,
    rope_table,
    write_partial_rope,
)
from mtcli.core.checkpoint.huggingface.window import all_local
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown

KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def read_longrope(theirs: Table) -> Table:
    """Reads rotary positions, of which "su" and "yarn" are older names of LongRoPE. Raises
    MtcliError for other scalings."""
    given = rope_table(theirs)
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise wrong(f"rope_type={shown(kind)} cannot be represented", "one of default, longrope")
    return read_partial_rope(theirs | {"rope_scaling": given | {"rope_type": KINDS[kind]}})


def write_longrope(model: ModelConfig) -> Table:
    """Writes rotary positions, and the length trained first where transformers looks for it."""
    table, scaling = write_partial_rope(model) | NO_PADDING, model.rope_scaling
    if scaling is not None:
        table["original_max_position_embeddings"] = scaling.original_max_seq_len
    return table


PHI3 = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=tuple(field for field in SIZES if field.ours != "head_dim"),
    defaults={**LLAMA.defaults, "vocab_size": 32064, "hidden_size": 3072, "rms_norm_eps": 1e-5}
    | {"intermediate_size": 8192, "max_position_embeddings": 4096}
    | {"original_max_position_embeddings": 4096},
    inner={name: rule for name, rule in ATTENTION.items() if not name.startswith("attention.qkv")}
    | {
        "attention.qkv.weight": queries_keys_values("self_attn.qkv_proj.weight"),
        "mlp.gate_up.weight": joined("mlp.gate_up_proj.weight"),
        "mlp.down.weight": same("mlp.down_proj.weight"),
    },
    supports=("partial_rotary_factor",),
    window=WindowRule(all_local),
    read_more=read_longrope,
    write_more=write_longrope,
)
