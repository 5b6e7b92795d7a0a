"""Configs of tiny models of every family, of sizes that no two dimensions share by chance."""

SIZES = {
    "vocab_size": 51,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5000.0,
}
MULTIPLIERS = {f"{name}_multiplier": 0.4 for name in ("embedding", "attention", "residual")}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def configs():
    """The configs by name; imports transformers."""
    import transformers as t

    experts = {"num_experts_per_tok": 2}
    return {
        "gpt2": t.GPT2Config(
            vocab_size=51,
            n_positions=17,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_inner=27,
            layer_norm_epsilon=1e-3,
        ),
        "llama": t.LlamaConfig(**SIZES, head_dim=10, rope_parameters=LLAMA3, rms_norm_eps=1e-5),
        "llama-tied": t.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "mistral": t.MistralConfig(**SIZES, head_dim=10, sliding_window=None),
        "qwen2": t.Qwen2Config(**SIZES),
        "mixtral": t.MixtralConfig(**SIZES, **experts, num_local_experts=3),
        "qwen2_moe": t.Qwen2MoeConfig(
            **SIZES,
            **experts,
            num_experts=3,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=16,
        ),
        # gates and ups of this model pass the limit in places
        "gpt_oss": t.GptOssConfig(
            **SIZES,
            **experts,
            head_dim=10,
            num_local_experts=3,
            sliding_window=7,
            swiglu_limit=0.01,
        ),
        "granite": t.GraniteConfig(**SIZES, **MULTIPLIERS, logits_scaling=4.0),
        "olmo2": t.Olmo2Config(**SIZES, rms_norm_eps=1e-3),
        "qwen3": t.Qwen3Config(**SIZES, head_dim=10, **WINDOW),
        "qwen3_moe": t.Qwen3MoeConfig(
            **SIZES, **experts, head_dim=10, num_experts=3, moe_intermediate_size=12
        ),
    }


FAMILIES = ("gpt2", "llama", "llama-tied", "mistral", "qwen2", "mixtral", "qwen2_moe")
FAMILIES += ("granite", "olmo2", "qwen3", "qwen3_moe", "gpt_oss")
