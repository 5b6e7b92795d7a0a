"""Describes a model by GGUF's keys, as far as llama.cpp computes it; refuses what it does not.

llama.cpp has windows in a fixed pattern of layers in Gemma and gpt-oss, and none in the other
architectures here. A model with other windows is written with a context of its smallest window,
within which they change nothing.
"""

from math import isclose

from mtcli.core.checkpoint.huggingface import config_json
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.convert.gguf.tensors import ARCHITECTURES
from mtcli.core.model.rope import attention_factor

Facts = dict[str, int | float | str]
# Letters of the layers, repeated: L has the window.
WINDOWS = {"gemma2": "LG", "gemma3": "LLLLLG", "gpt-oss": "LG"}
# Their largest models scale scores by the width of a head that hidden_size would give.
WIDE_SCALES = {"gemma2": 46, "gemma3": 62}
PARTIAL = ("phi2", "phi3")  # may rotate a part of each head
SCALINGS = {"llama3": ("llama",), "longrope": ("phi3",)}  # the architectures; others: all
GATE_OF_GPT_OSS = (7.0, 1.702)


def architecture_of(model: ModelConfig, family: str | None) -> str:
    """Finds the architecture of llama.cpp that computes a model, which is of the Hugging Face
    family `family`, or the first that can say it. Raises MtcliError where there is none."""
    kind = family or config_json.family_of(model).model_type
    if kind not in ARCHITECTURES:
        hint = f"the families are {', '.join(ARCHITECTURES)}"
        raise wrong(f"no layout of GGUF is known for the family {kind}", hint, "--to")
    architecture = ARCHITECTURES[kind]
    if problems := _problems(model, architecture):
        raise MtcliError(*problems)
    return architecture


def facts_of(model: ModelConfig, architecture: str) -> Facts:
    """Returns the keys and values that describe a model, without the prefix of its architecture."""
    window, context = _window(model, architecture)
    of_norm = "layer_norm_rms_epsilon" if model.norm == "rmsnorm" else "layer_norm_epsilon"
    facts: Facts = {
        "vocab_size": model.vocab_size,
        "context_length": context,
        "embedding_length": model.hidden_size,
        "block_count": model.num_layers,
        "feed_forward_length": model.ffn_hidden_size,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.num_kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        f"attention.{of_norm}": model.norm_eps,
    }
    if model.position == "rope":
        facts |= {"rope.dimension_count": model.rotary_dim, "rope.freq_base": model.rope_theta}
        facts |= _scaling(model)
    if model.rope_local_theta:
        facts["rope.freq_base_swa"] = model.rope_local_theta
    if window:
        facts["attention.sliding_window"] = window
    if model.attention_softcap:
        facts["attn_logit_softcapping"] = model.attention_softcap
    if model.logit_softcap:
        facts["final_logit_softcapping"] = model.logit_softcap
    if model.num_experts:
        facts |= {"expert_count": model.num_experts, "expert_used_count": model.top_k}
        facts["expert_feed_forward_length"] = model.moe_ffn_hidden_size
        if width := model.shared_expert_ffn_hidden_size:
            facts["expert_shared_feed_forward_length"] = width
    return facts


def notes(model: ModelConfig, architecture: str) -> list[str]:
    """Lists what llama.cpp computes otherwise, within rounding or a shorter context."""
    found = []
    _, context = _window(model, architecture)
    if context < model.max_seq_len:
        found.append(f"a context of {context}, the window, as llama.cpp has none of these layers")
    if architecture in ("gpt2", "phi2") and model.activation == "gelu":
        found.append("llama.cpp approximates GELU by tanh: activations differ by up to 5e-4")
    return found


def _window(model: ModelConfig, architecture: str) -> tuple[int, int]:
    """Returns (the window of the architecture's local layers, 0 where it has none; the context)."""
    windows = [model.layer_window(layer) for layer in range(model.num_layers)]
    sizes, context = {size for size in windows if size}, model.max_seq_len
    if pattern := WINDOWS.get(architecture):
        size = min(sizes, default=context)
        letters = (pattern[layer % len(pattern)] for layer in range(model.num_layers))
        if sizes and [size * (letter == "L") for letter in letters] == windows:
            return size, context
        return min(size, context), min(size, context)
    return 0, min([context, *sizes])


def _scaling(model: ModelConfig) -> Facts:
    scaling = model.rope_scaling
    if scaling is None or scaling.kind == "llama3":
        return {}
    if scaling.kind == "longrope":
        size = scaling.original_max_seq_len
        factor = attention_factor(scaling)
        return {"rope.scaling.original_context_length": size, "rope.scaling.attn_factor": factor}
    facts: Facts = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        facts["rope.scaling.original_context_length"] = scaling.original_max_seq_len
        facts["rope.scaling.yarn_beta_fast"] = scaling.beta_fast
        facts["rope.scaling.yarn_beta_slow"] = scaling.beta_slow
    return facts


def _problems(model: ModelConfig, architecture: str) -> list[Problem]:
    """Lists the fields of a family's model that its architecture in llama.cpp cannot have."""
    normalizes = architecture != "qwen2moe"
    width = model.head_dim
    if model.num_layers == WIDE_SCALES.get(architecture):
        width = model.hidden_size // model.num_heads
    scale = model.attention_scale or model.head_dim**-0.5
    needed = {
        "attention_scale": isclose(scale, width**-0.5, rel_tol=1e-6),
        "rotary_fraction": model.rotary_fraction == 1.0 or architecture in PARTIAL,
        "rope_scaling.kind": _scales(model, architecture),
        "first_dense_layers": not model.first_dense_layers,
        "normalize_top_k": not model.num_experts or model.normalize_top_k == normalizes,
        "shared_expert_ffn_hidden_size": architecture != "qwen2moe"
        or model.shared_expert_ffn_hidden_size > 0,
        "activation_limit": model.activation != "swiglu_clamped"
        or model.activation_clamp == GATE_OF_GPT_OSS,
    }
    hint = "a Hugging Face folder holds it: --to hf"
    return [
        Problem(f"llama.cpp's {architecture} cannot have {name}={_value(model, name)}", hint)
        for name, is_met in needed.items()
        if not is_met
    ]


def _scales(model: ModelConfig, architecture: str) -> bool:
    """Says whether an architecture has the model's rotary scaling; of YaRN, with its usual factor
    of attention alone."""
    scaling = model.rope_scaling
    if scaling is None:
        return True
    if scaling.kind == "yarn":
        usual = scaling.model_copy(
            update={"attention_factor": 0.0, "mscale": 0.0, "mscale_all_dim": 0.0}
        )
        truncates = scaling.truncate or architecture == "gpt-oss"
        return truncates and isclose(attention_factor(scaling), attention_factor(usual))
    return scaling.kind != "dynamic" and architecture in SCALINGS.get(scaling.kind, (architecture,))


def _value(model: ModelConfig, name: str) -> object:
    field, _, inner = name.partition(".")
    value = getattr(model, field)
    return getattr(value, inner) if inner else value
