"""Contenders whose packages are optional: megatron-core's local layers and torchtitan's Llama.

Megatron's are the layers that need neither Transformer Engine nor Apex, with 16-bit weights and
float32 masters as in its mixed precision; the step around them is the one of every rival.
"""

import os
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender, hf_state, initial_weight, stepper
from torch import Tensor

from mtcli.core.checkpoint.megatron.gpt import alternatives
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import parameters
from mtcli.kernels.gemm import DTYPES


def megatron(config: RunConfig, device: torch.device) -> Contender:
    """megatron-core's GPTModel of local layers, in one process."""
    _start_megatron(device)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    m, dtype = config.model, DTYPES[config.train.precision]
    norm = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[m.norm]
    model = GPTModel(
        _described(m, dtype, norm, device),
        get_gpt_layer_local_spec(num_experts=m.num_experts or None, normalization=norm),
        m.vocab_size,
        m.max_seq_len,
        position_embedding_type={"learned": "learned_absolute", "rope": "rope"}[m.position],
        rotary_base=int(m.rope_theta),
        rope_scaling=m.rope_scaling is not None,  # with Llama 3.1's numbers, which it knows alone
        share_embeddings_and_output_weights=m.tie_embeddings,
    )
    model = model.to(device=device, dtype=dtype).train()
    _take_weights(model, config, device)
    s = config.batch.seq_len
    future = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1)
    positions = torch.arange(s, device=device)

    def logits_of(tokens: Tensor) -> Tensor:
        return model(tokens, positions.expand(tokens.shape), future)

    masters = dtype != torch.float32
    found = stepper(model, logits_of, config, device, masters, compiles=False)
    found.facts |= {"attention": "local, unfused"}
    return found


def torchtitan(config: RunConfig, device: torch.device) -> Contender:
    """torchtitan's Llama 3 in one process, without its parallelism."""
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    m, scaling = config.model, config.model.rope_scaling
    if 8 * m.hidden_size // 3 > m.ffn_hidden_size or m.tie_embeddings:
        raise wrong("torchtitan's Llama is wider than 8/3 of hidden_size, and not tied")
    turns = RoPEScalingArgs(scaling_factor=1.0)
    if scaling is not None:
        turns = RoPEScalingArgs(
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_max_seq_len,
        )
    arguments = TransformerModelArgs(
        dim=m.hidden_size,
        n_layers=m.num_layers,
        n_heads=m.num_heads,
        n_kv_heads=m.num_kv_heads,
        vocab_size=m.vocab_size,
        multiple_of=m.ffn_hidden_size,  # to which it rounds 8/3 of its width up
        norm_eps=m.norm_eps,
        rope_theta=m.rope_theta,
        rope_scaling_args=turns,
        max_seq_len=m.max_seq_len,
    )
    with device:
        model = Transformer(arguments)
    state = hf_state(config, device)
    model.load_state_dict(Llama3StateDictAdapter(arguments, None).from_hf(state))
    model.train()
    return stepper(model, model, config, device)


def _start_megatron(device: torch.device) -> None:
    """Groups of one rank. Without a GPU, megatron-core's calls to CUDA stand for nothing."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    store = os.path.join(tempfile.mkdtemp(prefix="megatron-"), "store")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1)
        return
    torch.cuda.synchronize, torch.cuda.current_device = (lambda *_: None), (lambda: "cpu")
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    moe_utils.te_general_gemm = None  # what it is where Transformer Engine is missing


def _described(m: ModelConfig, dtype: torch.dtype, norm: str, device: torch.device) -> Any:
    from megatron.core.transformer import TransformerConfig

    gated = m.activation == "swiglu"
    experts: dict[str, Any] = {
        "num_moe_experts": m.num_experts,
        "moe_router_topk": m.top_k,
        "moe_ffn_hidden_size": m.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": m.shared_expert_ffn_hidden_size or None,
        "moe_shared_expert_gate": m.shared_expert_gate,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_pre_softmax": not m.normalize_top_k,
        "moe_token_dispatcher_type": "allgather",
    }
    return TransformerConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_heads,
        num_query_groups=m.num_kv_heads,
        kv_channels=m.head_dim,
        ffn_hidden_size=m.ffn_hidden_size,
        normalization=norm,
        layernorm_epsilon=m.norm_eps,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        bias_activation_fusion=not m.num_experts,  # its fused GELU is the tanh one, as ours here
        add_bias_linear=m.bias,
        add_qkv_bias=m.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,  # its kernel is an extension of Megatron-LM's, not in wheels
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # `_take_weights` fills all of them
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        **(experts if m.num_experts else {}),
    )


@torch.no_grad()
def _take_weights(model: torch.nn.Module, config: RunConfig, device: torch.device) -> None:
    """Copies our initial weights by the names that its checkpoints have."""
    theirs, filled = dict(model.named_parameters()), set()
    for name in parameters(config.model):
        value = initial_weight(config, name, device)
        found = [t for t, place in alternatives(name) if place is None and t in theirs]
        if found:
            theirs[found[0]].copy_(value.reshape(theirs[found[0]].shape))
            filled.add(found[0])
            continue
        fused = next(t for t, place in alternatives(name) if place is None)
        for expert, part in enumerate(value):  # each expert is a module of its own here
            own = fused.replace("experts.experts", f"experts.local_experts.{expert}")
            theirs[own].copy_(part.reshape(theirs[own].shape))
            filled.add(own)
    assert filled == set(theirs), f"without weights: {sorted(set(theirs) - filled)}"
