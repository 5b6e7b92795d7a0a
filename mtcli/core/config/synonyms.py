"""Maps other tools' names to our fields and values, and a misspelt name to the nearest one."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

NEAR = 0.6  # of difflib's ratio; with 0.5 'finetune' is near 'generate'
ELSEWHERE = 0.75  # among the names of all sections and tools, which are many

# Our fields by the names they have in Megatron-LM, torchtitan, nanotron, litgpt and transformers.
FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(fields.split())
        for names, fields in (
            ("learning_rate max_lr peak_lr", "optimizer.lr"),
            ("min_learning_rate lr_min final_lr", "optimizer.min_lr"),
            ("adam_beta1 adam_beta2 beta1 beta2 momentum", "optimizer.betas"),
            ("adam_eps adam_epsilon epsilon", "optimizer.eps"),
            ("wd decay", "optimizer.weight_decay"),
            ("grad_clip clip_grad max_grad_norm gradient_clipping clip_norm", "optimizer.clip"),
            ("lr_schedule lr_scheduler lr_decay_style scheduler", "optimizer.schedule"),
            ("warmup lr_warmup_steps lr_warmup_iters num_warmup_steps", "optimizer.warmup_steps"),
            ("lr_decay_steps lr_decay_iters", "optimizer.decay_steps"),
            ("batch_size train_batch_size", "batch.global_batch_size batch.micro_batch_size"),
            ("gbs global_batch total_batch_size", "batch.global_batch_size"),
            ("gradient_accumulation_steps grad_accum", "batch.global_batch_size"),
            ("mbs micro_batch per_device_train_batch_size", "batch.micro_batch_size"),
            ("seq_length sequence_length context_length block_size", "batch.seq_len"),
            ("layers n_layer n_layers num_hidden_layers depth", "model.num_layers"),
            ("hidden d_model n_embd dim hidden_dim embed_dim width", "model.hidden_size"),
            ("heads n_head n_heads num_attention_heads", "model.num_heads"),
            ("kv_heads n_kv_heads num_key_value_heads num_query_groups", "model.num_kv_heads"),
            ("kv_channels head_size", "model.head_dim"),
            ("intermediate_size ffn_dim ffn_size d_ff n_inner", "model.ffn_hidden_size"),
            ("vocab n_vocab padded_vocab_size", "model.vocab_size"),
            ("max_position_embeddings n_positions n_ctx context", "model.max_seq_len"),
            ("hidden_act act activation_function", "model.activation"),
            ("normalization norm_type", "model.norm"),
            ("rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon", "model.norm_eps"),
            ("position_embedding_type positions", "model.position"),
            ("rope_base rotary_base", "model.rope_theta"),
            ("rope_local_base_freq local_rope_theta", "model.rope_local_theta"),
            ("partial_rotary_factor rotary_pct rotary_percent", "model.rotary_fraction"),
            ("tie_word_embeddings", "model.tie_embeddings"),
            ("initializer_range init_method_std", "model.init_std"),
            ("experts n_experts num_local_experts n_routed_experts", "model.num_experts"),
            ("num_experts_per_tok experts_per_token moe_top_k topk", "model.top_k"),
            ("moe_intermediate_size", "model.moe_ffn_hidden_size"),
            ("model_type arch", "model.architecture"),
            ("tensor_parallel tensor_parallel_size tensor_model_parallel_size", "parallel.tp"),
            (
                "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size",
                "parallel.pp",
            ),
            ("context_parallel context_parallel_size", "parallel.cp"),
            ("expert_parallel expert_parallel_size expert_model_parallel_size", "parallel.ep"),
            ("virtual_pipeline num_chunks", "parallel.vpp"),
            ("zero_stage fsdp", "parallel.zero"),
            ("activation_checkpointing gradient_checkpointing checkpointing", "parallel.recompute"),
            ("max_steps train_steps num_steps train_iters iterations max_iters", "train.steps"),
            ("o out out_dir output_dir save_dir run_dir", "train.output"),
            ("dtype mixed_precision torch_dtype", "train.precision"),
            ("save_interval save_steps checkpoint_every", "train.save_every"),
            ("eval_interval eval_steps", "train.eval_every"),
            ("log_interval logging_steps", "train.log_every"),
            ("tracker report_to logger", "train.trackers"),
            ("wandb_project", "train.tracker_project"),
            ("wandb_entity", "train.tracker_entity"),
            ("run_name wandb_name wandb_run_name", "train.tracker_name"),
            ("torch_compile", "train.compile"),
            ("data dataset data_path train_data", "data.train"),
            ("lora lora_rank lora_r", "lora.rank"),
            ("val validation valid_data val_data", "data.valid"),
        )
        for name in names.split()
    }
)
VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "train.precision": {
            **dict.fromkeys(("bfloat16", "bf16-mixed", "torch.bfloat16"), "bf16"),
            **dict.fromkeys(("float32", "single", "32", "tf32", "torch.float32"), "fp32"),
            **dict.fromkeys(("float16", "half", "16", "fp16-mixed", "torch.float16"), "fp16"),
            **dict.fromkeys(("float64", "double", "64", "torch.float64"), "fp64"),
            **dict.fromkeys(("float8", "8", "e4m3", "float8_e4m3fn"), "fp8"),
        },
        "optimizer.name": {"adam": "adamw", "fusedadam": "adamw", "onebit_lamb": "lamb"},
        "optimizer.schedule": {"none": "constant", "cosine_annealing": "cosine"},
        "model.architecture": {
            **dict.fromkeys(("gpt2", "gpt-2", "gpt3", "gpt-3", "transformer"), "gpt"),
            **dict.fromkeys(("llama2", "llama3", "llama-3", "mistral"), "llama"),
            **dict.fromkeys(("moe", "mistral-moe"), "mixtral"),
            **dict.fromkeys(("qwen2_moe", "qwen-moe"), "qwen2-moe"),
        },
        "model.activation": {
            **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "gelu_tanh"),
            **dict.fromkeys(("silu", "swish"), "swiglu"),
            **dict.fromkeys(("relu_squared", "squared_relu"), "relu2"),
        },
        "model.norm": {"rms_norm": "rmsnorm", "layer_norm": "layernorm"},
        "model.position": {"rotary": "rope", "learned_absolute": "learned", "absolute": "learned"},
        "parallel.schedule": {
            "zb": "zero_bubble",
            "interleaved_1f1b": "interleaved",
            "afab": "gpipe",
        },
        "parallel.recompute": {"true": "full", "false": "none", "block": "full"},
        **dict.fromkeys(("train.device", "--device"), {"gpu": "cuda"}),
        "--to": dict.fromkeys(("huggingface", "transformers", "safetensors"), "hf"),
        "stages": {
            **dict.fromkeys(("dedup", "deduplicate", "dedupe"), "exact"),
            **dict.fromkeys(("fuzzy_dedup", "near_dedup", "minhash", "lsh"), "fuzzy"),
            **dict.fromkeys(("html", "warc"), "extract"),
        },
        "train.trackers": {"tb": "tensorboard", "wb": "wandb"},
    }
)


def nearest(word: str, vocabulary: Iterable[str], cutoff: float = NEAR) -> str | None:
    """Returns the name in `vocabulary` that begins with a word of at least three letters, or the
    one with the nearest spelling; None where none is near."""
    names = list(vocabulary)
    if len(word) > 2 and (longer := [n for n in names if n.lower().startswith(word.lower())]):
        return min(longer, key=len)
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=cutoff)), None)


def closest(word: str, vocabulary: Iterable[str]) -> str:
    """Words the nearest name as a clause for a hint; empty where none is near."""
    near = nearest(word, vocabulary)
    return f"; did you mean {near!r}?" if near else ""


def meant_value(field: str, value: Any, options: Sequence[Any]) -> Any | None:
    """Returns the option of a field that a wrong value most likely stands for."""
    word = str(value).lower()
    option_of_word = dict(VALUES.get(field, {})) | {str(option): str(option) for option in options}
    near = nearest(word, option_of_word)
    return next(
        (option for option in options if near and str(option) == option_of_word[near]), None
    )


def fields_named(name: str, everywhere: Iterable[str]) -> list[str]:
    """Returns the fields, as section.name, that have this name in a section or in another tool.

    A field of a section inside another stands back behind one that is in a section itself.
    """
    word = name.lower().replace("-", "_")
    named = [field for field in everywhere if field.rpartition(".")[2] == word]
    depth = min((field.count(".") for field in named), default=0)
    return [field for field in named if field.count(".") == depth] or [*FIELDS.get(word, ())]


def meant_fields(name: str, siblings: Iterable[str], everywhere: Iterable[str]) -> list[str]:
    """Returns the fields that an unknown name most likely stands for.

    `siblings` are the names of its section, `everywhere` are all fields as section.name. A name of
    another section, or another tool's, takes precedence over one that is only spelled alike.
    """
    fields = list(everywhere)
    if exact := fields_named(name, fields):
        return exact
    if near := nearest(name, siblings):
        return [near]
    leaves = [field.rpartition(".")[2] for field in fields]
    other = nearest(name.lower().replace("-", "_"), [*leaves, *FIELDS], ELSEWHERE)
    return fields_named(other, fields) if other else []
