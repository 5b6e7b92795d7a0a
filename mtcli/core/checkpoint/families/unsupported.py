"""Fields of config.json by which related models compute something that no family here does.

transformers ignores some of them in these families and reads others (`is_causal`). Whoever wrote
one meant it, so each is refused unless its value changes nothing.
"""

from mtcli.core.checkpoint.families.family import Demand, Table
from mtcli.core.spec.errors import Problem
from mtcli.core.spec.foreign import shown

FULL = "full_attention"
UNSUPPORTED = (
    Demand("is_causal", (None, True)),
    Demand("use_bidirectional_attention", (None, False)),
    Demand("partial_rotary_factor", (None, 1.0)),
    Demand("no_rope_layers", (None, [])),
    Demand("attention_chunk_size", (None,)),
    Demand("attention_multiplier", (None,)),
    Demand("query_pre_attn_scalar", (None,)),
    Demand("attn_logit_softcapping", (None, 0)),
    Demand("final_logit_softcapping", (None, 0)),
    Demand("logit_softcap", (None, 0)),
    Demand("logit_scale", (None, 1.0)),
    Demand("logits_scaling", (None, 1.0)),
    Demand("embedding_multiplier", (None, 1.0)),
    Demand("residual_multiplier", (None, 1.0)),
    Demand("clip_qkv", (None,)),
    Demand("qk_norm", (None, False)),
    Demand("use_qk_norm", (None, False)),
    Demand("num_nextn_predict_layers", (None, 0)),
    Demand("scoring_func", (None, "softmax")),
    Demand("routed_scaling_factor", (None, 1.0)),
    Demand("n_shared_experts", (None, 0)),
    Demand("first_k_dense_replace", (None, 0)),
    Demand("quantization_config", (None,)),
)


def windowed_layers(theirs: Table) -> list[Problem]:
    """A problem where a layer's attention does not see the whole context; none otherwise."""
    kinds = theirs.get("layer_types")
    if kinds is None or (isinstance(kinds, list) and all(kind == FULL for kind in kinds)):
        return []
    return [Problem(f"layer_types={shown(kinds)} cannot be represented", f"only {FULL} can")]
