"""The names of the linear layers that low-rank adapters are trained for, as peft has them."""

from mtcli.core.config.model import ModelConfig


def lora_targets(model: ModelConfig) -> tuple[str, ...]:
    """The targets of a model: the modules of its Hugging Face model that are linear layers of its
    blocks. Experts are none, as they are arrays; a shared one is."""
    is_gpt = model.position == "learned"
    attention = ("c_attn", "c_proj") if is_gpt else ("q_proj", "k_proj", "v_proj", "o_proj")
    if not model.dense_ffn_hidden_size:
        return attention
    gate = ("gate_proj",) if model.is_gated else ()
    feed_forward = ("c_fc", "c_proj") if is_gpt and not gate else (*gate, "up_proj", "down_proj")
    if model.num_experts:
        feed_forward = tuple(f"shared_expert.{name}" for name in feed_forward)
    return tuple(dict.fromkeys((*attention, *feed_forward)))
