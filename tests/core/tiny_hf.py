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
GEMMA = {"head_dim": 10, "sliding_window": 7, "query_pre_attn_scalar": 12}
GEMMA |= {"final_logit_softcapping": 0.4}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

LATENT = SIZES | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 9,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}
OF_LATENTS = {name for name in LATENT if name.startswith(("q_", "kv_", "qk_", "v_"))}
GLM = {name: size for name, size in LATENT.items() if name not in OF_LATENTS}
DEEPSEEK = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}
DEEPSEEK |= {"rope_theta": 99.0, "mscale": 0.7, "mscale_all_dim": 0.9}


OLMO3_ROPES = {
    "full_attention": DEEPSEEK,
    "sliding_attention": {"rope_type": "default", "rope_theta": 99.0},
}
WIDE = {"hidden_size": 32}
NO_PAD = {"pad_token_id": None}
UNROTATED = {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7}
LONG = {"rope_type": "longrope", "rope_theta": 99.0, "partial_rotary_factor": 0.7}
LONG |= {"short_factor": [1.0, 1.2], "long_factor": [1.5, 9.0]}
PHI3 = {"rope_parameters": LONG, "original_max_position_embeddings": 9, "sliding_window": 11}
NEOX = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"} | WIDE
FALCON = {name: SIZES[name] for name in NEOX if name != "intermediate_size"}

ENCODER = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
ROBERTA = ENCODER | {"type_vocab_size": 1, "layer_norm_eps": 1e-3}
ENCODERS = ("roberta", "modernbert")  # by model_type


def auto_model(config):
    """What transformers' folders of a config are loaded with."""
    import transformers as t

    is_encoder = config.model_type in ENCODERS
    return t.AutoModelForMaskedLM if is_encoder else t.AutoModelForCausalLM


def last_logits(model, ids, ends):
    """transformers' logits [b, ends, vocabulary] of the last of the first 1, 2, ... ids. Positions
    count every id, also RoBERTa's padding."""
    import torch

    with torch.no_grad():
        if model.config.model_type not in ENCODERS:
            return model(ids).logits[:, [end - 1 for end in ends]]
        first = model.config.pad_token_id + 1 if model.config.model_type == "roberta" else 0
        numbers = torch.arange(first, first + ids.shape[1])[None]
        rows = [model(ids[:, :end], position_ids=numbers[:, :end]).logits for end in ends]
    return torch.stack([row[:, -1] for row in rows], 1)


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
        "smollm3": t.SmolLM3Config(**SIZES | {"num_hidden_layers": 3}, **NO_PAD, **UNROTATED),
        "phi": t.PhiConfig(**SIZES | WIDE),
        "phi3": t.Phi3Config(**SIZES, **NO_PAD, **PHI3),
        "stablelm": t.StableLmConfig(**SIZES | WIDE, use_qkv_bias=True),
        "stablelm-parallel": t.StableLmConfig(**SIZES | WIDE, use_parallel_residual=True),
        "stablelm-heads": t.StableLmConfig(
            **SIZES | WIDE, use_parallel_residual=True, qk_layernorm=True
        ),
        "glm4": t.Glm4Config(**SIZES, **NO_PAD, head_dim=12),
        "gpt_neox": t.GPTNeoXConfig(**NEOX),
        "gpt_neox-sequential": t.GPTNeoXConfig(
            **NEOX, use_parallel_residual=False, attention_bias=False
        ),
        "falcon-7b": t.FalconConfig(**FALCON),
        "falcon-40b": t.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
        "falcon-heads": t.FalconConfig(**FALCON, multi_query=False, bias=True),
        "granite": t.GraniteConfig(**SIZES, **MULTIPLIERS, logits_scaling=4.0),
        "olmo2": t.Olmo2Config(**SIZES, rms_norm_eps=1e-3),
        "olmo3": t.Olmo3Config(
            **SIZES | {"num_hidden_layers": 4}, sliding_window=7, rope_parameters=OLMO3_ROPES
        ),
        "deepseek_v3": t.DeepseekV3Config(
            **LATENT,
            n_group=2,
            topk_group=1,
            n_routed_experts=4,
            rope_parameters=DEEPSEEK,
        ),
        "glm4_moe": t.Glm4MoeConfig(
            **GLM,
            head_dim=16,
            n_routed_experts=4,
            use_qk_norm=True,
            attention_bias=True,
        ),
        "deepseek_v2": t.DeepseekV2Config(
            **LATENT | {"q_lora_rank": None, "qk_nope_head_dim": 6},
            n_routed_experts=4,
            topk_method="greedy",
        ),
        "qwen3": t.Qwen3Config(**SIZES, head_dim=10, **WINDOW),
        "gemma2": t.Gemma2Config(**SIZES, **GEMMA, attn_logit_softcapping=0.3),
        "gemma3_text": t.Gemma3TextConfig(**SIZES, **GEMMA, sliding_window_pattern=2),
        "starcoder2": t.Starcoder2Config(**SIZES, sliding_window=7),
        "nemotron": t.NemotronConfig(**SIZES, head_dim=12),
        # by either field: the first layer, or the first two
        "qwen2_moe-dense": t.Qwen2MoeConfig(
            **SIZES,
            **experts,
            num_experts=3,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=16,
            decoder_sparse_step=2,
        ),
        "qwen3_moe-dense": t.Qwen3MoeConfig(
            **SIZES | {"num_hidden_layers": 3},
            **experts,
            num_experts=3,
            moe_intermediate_size=12,
            mlp_only_layers=[0, 1],
        ),
        "qwen3_moe": t.Qwen3MoeConfig(
            **SIZES, **experts, head_dim=10, num_experts=3, moe_intermediate_size=12
        ),
        "roberta": t.RobertaConfig(**ROBERTA),
        "modernbert": t.ModernBertConfig(
            **ENCODER | {"num_hidden_layers": 4}, **NO_PAD, local_attention=7, norm_eps=1e-3
        ),
    }


FAMILIES = ("smollm3", "phi", "phi3", "stablelm", "stablelm-parallel", "glm4", "gpt_neox")
FAMILIES += ("stablelm-heads", "qwen2_moe-dense", "qwen3_moe-dense")
FAMILIES += ("gpt_neox-sequential", "falcon-7b", "falcon-40b", "falcon-heads")
FAMILIES += ("gpt2", "llama", "llama-tied", "mistral", "qwen2", "mixtral", "qwen2_moe")
FAMILIES += ("deepseek_v2", "deepseek_v3", "glm4_moe")
FAMILIES += ("granite", "olmo2", "olmo3", "qwen3", "qwen3_moe")
FAMILIES += ("gemma2", "gemma3_text", "starcoder2", "nemotron", "gpt_oss")
FAMILIES += ("roberta", "modernbert")
