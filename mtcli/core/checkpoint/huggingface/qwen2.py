"""Qwen2 and Qwen2.5: Llama with biases on query, key and value."""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import RequiredValue
from mtcli.core.checkpoint.huggingface.llama import ATTENTION, CONSTANTS, LLAMA, MLP
from mtcli.core.checkpoint.huggingface.rope import read_rope
from mtcli.core.checkpoint.huggingface.rules import separate_qkv

QKV_BIAS = {"attention.qkv.bias": separate_qkv("self_attn.{}_proj.bias")}
NO_WINDOW = RequiredValue("use_sliding_window", (False, None))

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    constants=CONSTANTS | {"qkv_bias": True},
    demands=(NO_WINDOW,),
    read_more=read_rope,
    inner=ATTENTION | QKV_BIAS | MLP,
)
