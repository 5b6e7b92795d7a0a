"""Tiny GPT models that megatron-core makes and saves as torch_dist, and its logits of them.

`save_models` is for a process of its own: without a GPU, it makes megatron-core's calls to CUDA
stand for nothing. The arguments in common.pt are those that Megatron-LM's training keeps there.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

MOMENT = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
VOCABULARY, LENGTH = 64, 16
COMMON = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "padded_vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "norm_epsilon": 1e-5,
    "bias_gelu_fusion": False,
}
LLAMA = COMMON | {
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 12,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
GPT = COMMON | {"ffn_hidden_size": 128}
MOE = LLAMA | {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "add_qkv_bias": True,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
}
SIGMOID = MOE | {"moe_router_score_function": "sigmoid"}
MODELS = {"llama": LLAMA, "gpt": GPT, "moe": MOE, "sigmoid": SIGMOID}
QWEN3 = LLAMA | {"qk_layernorm": True, "rotary_percent": 0.5, "rotary_interleaved": True}
QWEN3_MOE = MOE | {"qk_layernorm": True, "add_qkv_bias": False, "apply_layernorm_1p": True}
QWEN3_MOE |= {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
NEMOTRON = GPT | {"squared_relu": True, "add_bias_linear": False, "apply_layernorm_1p": True}
NEMOTRON |= {"position_embedding_type": "rope", "rotary_percent": 0.5}
YARN = QWEN3 | {
    "position_embedding_type": "yarn",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}
YARN |= {"yarn_rotary_scaling_factor": 8.0, "yarn_original_max_position_embeddings": 100}
YARN |= {"yarn_mscale": None, "yarn_mscale_all_dim": None}
YARN |= {"yarn_beta_fast": 3.0, "yarn_beta_slow": 0.25, "yarn_correction_range_round_to_int": False}
LATENTS = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "group_query_attention": False,
    "num_query_groups": 1,  # as Megatron-LM has it then
    "kv_channels": 10,
    "add_qkv_bias": False,
    "q_lora_rank": 14,
    "kv_lora_rank": 11,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "rotary_scaling_factor": 8.0,
    "original_max_position_embeddings": 6,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
DEEPSEEK_V3 = SIGMOID | LATENTS
DEEPSEEK_V3 |= {
    "num_layers": 3,
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_layer_freq": [0, 1, 1],
    "moe_shared_expert_intermediate_size": 48,
    "moe_shared_expert_gate": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_pre_softmax": True,
    "moe_router_group_topk": 3,
    "q_lora_rank": None,
    "mscale_all_dim": 0.0,
}
ROPE = LLAMA | LATENTS | {"rope_type": "rope"}
MODELS |= {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "nemotron": NEMOTRON, "yarn": YARN}
MODELS |= {"deepseek_v2": DEEPSEEK_V2, "deepseek_v3": DEEPSEEK_V3, "latents": ROPE}
MODELS |= {"sigmoid_top_1": SIGMOID | {"moe_router_topk": 1}}


def save_models(root):
    """Saves every model in a folder of its name, with tokens and logits beside it."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils
    from safetensors.torch import save_file

    torch.cuda.synchronize, torch.cuda.current_device = (lambda: None), (lambda: "cpu")
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    plain = DotProductAttention.__init__  # which takes the values' width of its config alone
    widths = {"k_channels", "v_channels"}
    DotProductAttention.__init__ = lambda *words, **options: plain(
        *words, **{name: value for name, value in options.items() if name not in widths}
    )
    multi_latent_attention.TELinear = type("TELinear", (), {})  # for isinstance
    moe_utils.te_general_gemm = None  # what it is where Transformer Engine is missing
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    for name, arguments in MODELS.items():
        torch.manual_seed(len(name))
        model = build(arguments)
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        with torch.no_grad():
            logits = model(tokens, positions, future).contiguous()
        if arguments.get("apply_layernorm_1p"):  # which Transformer Engine alone computes
            for key, parameter in model.named_parameters():
                parameter.data -= 1.0 if "norm" in key and key.endswith("weight") else 0.0
        state = cut(model.sharded_state_dict())
        args = argparse.Namespace(**arguments, params_dtype=torch.float32, rank=0, path=Path("x"))
        (root / name).mkdir()
        content = {"model": state, "args": args, "iteration": 7, "checkpoint_version": 3.0}
        dist_checkpointing.save(content, root / name)
        save_file({"tokens": tokens, "logits": logits}, root / f"{name}.safetensors")


def build(arguments):
    """megatron-core's model of Megatron-LM's arguments, with norms and biases that do something."""
    import torch
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    gated, bias = arguments.get("swiglu", False), arguments.get("add_bias_linear", True)
    norm, experts = arguments.get("normalization", "LayerNorm"), arguments.get("num_experts")
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    names += ("ffn_hidden_size", "moe_router_topk", "moe_ffn_hidden_size", "add_qkv_bias")
    names += ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
    names += ("moe_router_score_function", "moe_router_enable_expert_bias", "moe_layer_freq")
    names += ("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor")
    names += ("moe_router_pre_softmax", "qk_layernorm", "rotary_interleaved")
    if not arguments.get("group_query_attention"):
        names = tuple(name for name in names if name != "num_query_groups")
    is_latent = arguments.get("multi_latent_attention")
    if is_latent:
        names += ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        names += ("rotary_scaling_factor", "original_max_position_embeddings", "rope_type")
        names += ("mscale", "mscale_all_dim", "rotary_base")
    more = {"num_moe_experts": experts, "moe_token_dispatcher_type": "allgather"} if experts else {}
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        **{name: arguments[name] for name in names if name in arguments},
        **more,
        normalization=norm,
        layernorm_epsilon=arguments["norm_epsilon"],
        gated_linear_unit=gated,
        activation_func=F.silu if gated else squared if arguments.get("squared_relu") else F.gelu,
        add_bias_linear=bias,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    for name, value in arguments.items():
        if name.startswith("yarn_"):
            setattr(config, name, value)
    options = {"qk_layernorm": config.qk_layernorm, "multi_latent_attention": bool(is_latent)}
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization=norm, **options)
    if isinstance(arguments.get("moe_layer_freq"), list):
        spec = get_gpt_decoder_block_spec(config, False, norm)
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        position_embedding_type=arguments.get("position_embedding_type", "learned_absolute"),
        rotary_base=arguments.get("rotary_base", 10000),
        rotary_percent=arguments.get("rotary_percent", 1.0),
        share_embeddings_and_output_weights=not arguments.get(
            "untie_embeddings_and_output_weights", False
        ),
    )
    biases = (x for name, x in model.named_buffers() if name.endswith("expert_bias"))
    for parameter in (*model.parameters(), *biases):
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def squared(x):
    """Nemotron's activation."""
    return x.relu().square()


def cut(state):
    """The state with linear layers cut in two, as by tensor parallel ranks, and a moment added."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    dims = {"linear_qkv.weight": 0, "linear_proj.weight": 1, "word_embeddings.weight": 0}
    moment = ShardedTensor.from_rank_offsets(MOMENT, torch.ones(3))
    found = {"moment": moment}
    for name, value in state.items():
        dim = next((dim for end, dim in dims.items() if name.endswith(end)), None)
        if dim is None:
            found[name] = value
            continue
        layers = value.prepend_axis_num
        stack = [(0, value.global_offset[0], value.global_shape[0])] * layers
        for rank, part in enumerate(value.data.chunk(2, dim)):
            place = (*stack, (dim + layers, rank, 2))
            found[f"{name}.{rank}"] = ShardedTensor.from_rank_offsets(
                value.key, part.contiguous(), *place, prepend_axis_num=layers
            )
    return found
