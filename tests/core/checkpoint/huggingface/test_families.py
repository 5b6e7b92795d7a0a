"""Every family at sizes that no published model has: transformers' logits, and its bytes back."""

import filecmp
import os
from math import gcd

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_hf import auto_model, last_logits

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.inference.model import open_inference_model
from mtcli.core.model.inputs import KVCache
from mtcli.core.runtime.launch import Runtime

EXAMPLES = int(os.environ.get("MTCLI_EXAMPLES", "2"))
ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 3.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.5,
    "original_max_position_embeddings": 8,
    "rope_theta": 777.0,
}

SCALES = st.sampled_from([0.22, 1.0, 1.5])
WINDOWS = st.sampled_from([None, 2, 5, 7])


def gpt2(draw):
    """Heads of an odd width, and an MLP that is not 4 times as wide."""
    from transformers import GPT2Config

    heads, width = draw(st.integers(1, 3)), draw(st.sampled_from([5, 7, 9]))
    return GPT2Config(
        vocab_size=draw(st.integers(30, 61)),
        n_positions=draw(st.sampled_from([19, 23])),
        n_embd=heads * width,
        n_layer=draw(st.integers(1, 3)),
        n_head=heads,
        n_inner=draw(st.sampled_from([None, 13])),
        activation_function=draw(st.sampled_from(["gelu", "gelu_new"])),
    )


LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 99.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 9}
YARN |= {"rope_theta": 99.0, "beta_fast": 2.0, "beta_slow": 0.5}
DEEPSEEK = YARN | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 0.9}
ROPES = ({"rope_type": "default", "rope_theta": 99.0}, LLAMA3, LINEAR, YARN, DEEPSEEK)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 99.0}
ROPES += (YARN | {"attention_factor": 1.3}, DYNAMIC)


def sizes(draw, tied=(False, True), ropes=ROPES):
    """Sizes of a model with rotary positions: few key heads, wide or narrow heads, tied or not."""
    kv = draw(st.integers(1, 3))
    heads, rope = kv * draw(st.integers(1, 3)), dict(draw(st.sampled_from(ropes)))
    # transformers divides by 0 for one pair
    widths = [6, 14] if rope["rope_type"] == "dynamic" else [2, 6, 14]
    return {
        "vocab_size": draw(st.integers(30, 61)),
        "hidden_size": heads * draw(st.sampled_from([5, 7, 9])),
        "intermediate_size": heads * draw(st.sampled_from([5, 7, 11])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from(widths)),
        "max_position_embeddings": 23,
        "tie_word_embeddings": draw(st.sampled_from(tied)),
        "rope_parameters": rope,
        "rms_norm_eps": draw(st.sampled_from([1e-3, 1e-6])),
    }


def windowed(draw, config):
    """The sizes with a window of some layers."""
    layers, window = config["num_hidden_layers"], draw(WINDOWS)
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    if window and draw(st.booleans()):
        config["layer_types"] = draw(st.lists(kinds, min_size=layers, max_size=layers))
    first = draw(st.integers(0, layers))
    return config | {
        "use_sliding_window": bool(window), "sliding_window": window, "max_window_layers": first,
    }  # fmt: skip


def experts(draw, name):
    """How many experts there are, and how many a token meets."""
    count = draw(st.integers(2, 5))
    return {name: count, "num_experts_per_tok": draw(st.integers(1, count))}


def llama(draw):
    """Biases of either kind."""
    from transformers import LlamaConfig

    biases = {name: draw(st.booleans()) for name in ("attention_bias", "mlp_bias")}
    return LlamaConfig(**sizes(draw), **biases)


def granite(draw):
    """Multipliers of every kind."""
    from transformers import GraniteConfig

    multipliers = {f"{name}_multiplier": draw(SCALES) for name in ("embedding", "residual")}
    multipliers |= {"attention_multiplier": draw(SCALES), "logits_scaling": draw(SCALES)}
    biases = {name: draw(st.booleans()) for name in ("attention_bias", "mlp_bias")}
    return GraniteConfig(**sizes(draw), **biases, **multipliers)


def olmo2(draw):
    """Norms of outputs, and of the whole query and key."""
    from transformers import Olmo2Config

    return Olmo2Config(**sizes(draw), attention_bias=draw(st.booleans()))


def olmo3(draw):
    """Windows of listed layers or of three in four, and a base of their own."""
    from transformers import Olmo3Config

    config = sizes(draw)
    full = config["rope_parameters"]
    if full["rope_type"] == "yarn":
        full.pop("truncate", None)  # which transformers does not find for layers of a kind
    local = {"rope_type": "default", "rope_theta": draw(st.sampled_from([99.0, 7.0]))}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    layers, kinds = config["num_hidden_layers"], ["sliding_attention", "full_attention"]
    listed = st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers)
    window = draw(st.sampled_from([2, 5, 7]))
    return Olmo3Config(**config, sliding_window=window, layer_types=draw(st.none() | listed))


def latents(draw):
    """Sizes of a mixture with first dense layers and a shared expert, and of latents; rotary widths
    and what holds them are even, as transformers asks."""
    config, count = sizes(draw), draw(st.integers(1, 2))
    del config["head_dim"]
    config |= {"num_hidden_layers": count + draw(st.integers(1, 2)), "first_k_dense_replace": count}
    ranks = {f"{name}_lora_rank": draw(st.sampled_from([2, 6])) for name in ("q", "kv")}
    groups = draw(st.integers(1, 2))
    return config | ranks | {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": draw(st.sampled_from([2, 6])),
        "qk_rope_head_dim": draw(st.sampled_from([4, 6])),
        "v_head_dim": draw(st.sampled_from([4, 10])),
        "moe_intermediate_size": draw(st.sampled_from([4, 6])),
        "n_routed_experts": 3 * groups,
        "num_experts_per_tok": draw(st.integers(1, 3)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "n_group": groups,
        "topk_group": 1,
        "routed_scaling_factor": draw(SCALES),
        "attention_bias": draw(st.booleans()),
    }  # fmt: skip


def deepseek_v3(draw):
    """Latents, a biased choice among groups of experts, first dense layers."""
    from transformers import DeepseekV3Config

    flags = {name: draw(st.booleans()) for name in ("norm_topk_prob", "rope_interleave")}
    return DeepseekV3Config(**latents(draw), **flags)


def deepseek_v2(draw):
    """Latents, with one of queries or without, and a choice of one group or of all experts."""
    from transformers import DeepseekV2Config

    config = latents(draw) | {
        "topk_method": draw(st.sampled_from(["greedy", "group_limited_greedy"]))
    }
    config["q_lora_rank"] = draw(st.sampled_from([None, config["q_lora_rank"]]))
    return DeepseekV2Config(**config)


def glm4_moe(draw):
    """Half of a head rotates, and maybe each head has a norm."""
    from transformers import Glm4MoeConfig

    config = latents(draw) | {"use_qk_norm": draw(st.booleans()), "head_dim": 8}
    config["num_key_value_heads"] = 1
    return Glm4MoeConfig(**config)


def mixtral(draw):
    """Mixtral has no narrower experts than its MLP."""
    from transformers import MixtralConfig

    window = {"sliding_window": draw(WINDOWS)}
    return MixtralConfig(**sizes(draw), **experts(draw, "num_local_experts"), **window)


def mistral(draw):
    """A window of all layers, or none."""
    from transformers import MistralConfig

    return MistralConfig(**sizes(draw), sliding_window=draw(WINDOWS))


def qwen2(draw):
    """Windows of the last layers, or of those that are listed."""
    from transformers import Qwen2Config

    return Qwen2Config(**windowed(draw, sizes(draw)))


def qwen2_moe(draw):
    """Small experts, also in the last layer alone, and a shared one of another width."""
    from transformers import Qwen2MoeConfig

    config = sizes(draw)
    return Qwen2MoeConfig(
        **windowed(draw, config),
        **experts(draw, "num_experts"),
        moe_intermediate_size=draw(st.sampled_from([5, 9])),
        shared_expert_intermediate_size=draw(st.sampled_from([3, 10])),
        norm_topk_prob=draw(st.booleans()),
        decoder_sparse_step=draw(st.sampled_from([1, config["num_hidden_layers"]])),
    )


def qwen3(draw):
    """Windows of the last layers, or of those that are listed, and a norm of each head."""
    from transformers import Qwen3Config

    return Qwen3Config(**windowed(draw, sizes(draw)), attention_bias=draw(st.booleans()))


def gemma(draw):
    """Caps, a window of some layers, and scores of any scale."""
    layers, window = {}, draw(st.sampled_from([2, 5, 23]))
    config = sizes(draw)
    count = config["num_hidden_layers"]
    if draw(st.booleans()):
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        layers["layer_types"] = draw(st.lists(kinds, min_size=count, max_size=count))
    return config | layers | {
        "sliding_window": window,
        "query_pre_attn_scalar": draw(st.sampled_from([3, 8, 144])),
        "hidden_activation": draw(st.sampled_from(["gelu_pytorch_tanh", "gelu"])),
        "final_logit_softcapping": draw(st.sampled_from([None, 2.5])),
        "attention_bias": draw(st.booleans()),
    }  # fmt: skip


def gemma2(draw):
    from transformers import Gemma2Config

    return Gemma2Config(**gemma(draw), attn_logit_softcapping=draw(st.sampled_from([None, 0.5])))


def gemma3_text(draw):
    """The layers without a window are scaled alone."""
    from transformers import Gemma3TextConfig

    config = gemma(draw)
    scaled = draw(
        st.sampled_from([{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5}])
    )
    config["rope_parameters"] = {
        "full_attention": scaled | {"rope_theta": 99.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    }
    return Gemma3TextConfig(**config, sliding_window_pattern=draw(st.sampled_from([2, 6])))


def starcoder2(draw):
    """Biases everywhere or nowhere, and a window of all layers or none."""
    from transformers import Starcoder2Config

    config = sizes(draw)
    config["norm_epsilon"] = config.pop("rms_norm_eps")
    config["hidden_act"] = draw(st.sampled_from(["gelu", "gelu_pytorch_tanh"]))
    window = draw(WINDOWS)
    return Starcoder2Config(**config, sliding_window=window, use_bias=draw(st.booleans()))


def nemotron(draw):
    """A share of each head that rotates."""
    from transformers import NemotronConfig

    config = sizes(draw, ropes=[{"rope_type": "default", "rope_theta": 99.0}])
    config["head_dim"] = draw(st.sampled_from([8, 12]))
    config["norm_eps"] = config.pop("rms_norm_eps")
    biases = {name: draw(st.booleans()) for name in ("attention_bias", "mlp_bias")}
    fraction = draw(st.sampled_from([0.5, 1.0]))
    return NemotronConfig(**config, **biases, partial_rotary_factor=fraction)


def qwen3_moe(draw):
    """Small experts, also in all layers but the first, and a norm of each head."""
    from transformers import Qwen3MoeConfig

    window, config = draw(WINDOWS), sizes(draw)
    count = draw(st.integers(0, config["num_hidden_layers"] - 1))
    return Qwen3MoeConfig(
        **config, mlp_only_layers=list(range(count)), **experts(draw, "num_experts"),
        moe_intermediate_size=draw(st.sampled_from([5, 9])), norm_topk_prob=draw(st.booleans()),
        use_sliding_window=window is not None, sliding_window=window,
    )  # fmt: skip


def gpt_oss(draw):
    """A window of some layers, a limit that gates and ups pass, and scalings of all layers."""
    from transformers import GptOssConfig

    rows = sizes(draw)
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    layers = st.lists(kinds, min_size=rows["num_hidden_layers"], max_size=rows["num_hidden_layers"])
    return GptOssConfig(
        **rows, **experts(draw, "num_local_experts"), attention_bias=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([2, 5, 7])), layer_types=draw(st.none() | layers),
        swiglu_limit=draw(st.sampled_from([0.01, 7.0])), swiglu_alpha=draw(SCALES),
    )  # fmt: skip


def fixed_width(draw, config):
    """The sizes of a family whose heads are as wide as they are many, and 4 dimensions or more."""
    config.pop("head_dim")
    config["hidden_size"] = config["num_attention_heads"] * draw(st.sampled_from([8, 14]))
    return config


def smollm3(draw):
    """Layers that do not rotate, listed or every n-th, and windows of these or those listed."""
    from transformers import SmolLM3Config

    config = windowed(draw, fixed_width(draw, sizes(draw)))
    config.pop("max_window_layers")
    layers = config["num_hidden_layers"]
    if draw(st.booleans()):
        later = draw(st.lists(st.integers(0, 1), min_size=layers - 1, max_size=layers))
        config["no_rope_layers"] = [1, *later]
    elif layers > 1:
        config["no_rope_layer_interval"] = draw(st.sampled_from([2, 3]))
    biases = {name: draw(st.booleans()) for name in ("attention_bias", "mlp_bias")}
    return SmolLM3Config(**config, **biases, pad_token_id=0)


def partial(draw, width):
    """Rotary positions of a part of heads of a width: whole pairs of them."""
    dims = draw(st.sampled_from([d for d in (2, 4, 6, 8, width) if d <= width]))
    return {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": dims / width}


def phi(draw):
    """A head with a bias, and blocks of one norm."""
    from transformers import PhiConfig

    config = fixed_width(draw, sizes(draw, tied=(False,)))
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    width = config["hidden_size"] // config["num_attention_heads"]
    return PhiConfig(**config | {"rope_parameters": partial(draw, width)})


def phi3(draw):
    """Grouped queries in one tensor with keys and values, windows, and both lists of LongRoPE."""
    from transformers import Phi3Config

    config = fixed_width(draw, sizes(draw))
    width = config["hidden_size"] // config["num_attention_heads"]
    rope = partial(draw, width)
    if draw(st.booleans()):
        pairs = int(width * rope["partial_rotary_factor"]) // 2
        factors = st.lists(st.sampled_from([1.0, 1.5, 7.0]), min_size=pairs, max_size=pairs)
        rope |= {f"{kind}_factor": draw(factors) for kind in ("short", "long")}
        rope |= {"rope_type": "longrope"} | draw(st.sampled_from([{}, {"attention_factor": 1.3}]))
    return Phi3Config(
        **config | {"rope_parameters": rope}, pad_token_id=0, sliding_window=draw(WINDOWS),
        original_max_position_embeddings=draw(st.sampled_from([9, 30])),
    )  # fmt: skip


def stablelm(draw):
    """Blocks one after the other, or of one norm."""
    from transformers import StableLmConfig

    config = fixed_width(draw, sizes(draw))
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    width = config["hidden_size"] // config["num_attention_heads"]
    flags = {name: draw(st.booleans()) for name in ("use_qkv_bias", "use_parallel_residual")}
    flags["qk_layernorm"] = draw(st.booleans())
    return StableLmConfig(**config | {"rope_parameters": partial(draw, width)}, **flags)


def glm4(draw):
    """Neighbours of a part of each head rotate, and heads of any width."""
    from transformers import Glm4Config

    config = sizes(draw)
    rope = partial(draw, config["head_dim"])
    return Glm4Config(
        **config | {"rope_parameters": rope}, pad_token_id=0, attention_bias=draw(st.booleans())
    )


def gpt_neox(draw):
    """Blocks one after the other or of two norms, and biases of attention or none."""
    from transformers import GPTNeoXConfig

    config = fixed_width(draw, sizes(draw))
    config.pop("num_key_value_heads")
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    width = config["hidden_size"] // config["num_attention_heads"]
    flags = {name: draw(st.booleans()) for name in ("attention_bias", "use_parallel_residual")}
    act = draw(st.sampled_from(["gelu", "gelu_new"]))
    rope = partial(draw, width)
    return GPTNeoXConfig(**config | {"rope_parameters": rope}, **flags, hidden_act=act)


def falcon(draw):
    """7B's blocks, 40B's with one norm or two, those of the first Falcon, and one after another."""
    from transformers import FalconConfig

    config = fixed_width(draw, sizes(draw))
    heads = config.pop("num_key_value_heads")
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    config["ffn_hidden_size"] = config.pop("intermediate_size")
    new = {"new_decoder_architecture": True, "num_kv_heads": heads}
    plain = [{"multi_query": x, "parallel_attn": y} for x in (True, False) for y in (True, False)]
    forms = [new, new | {"num_ln_in_parallel_attn": 1}, *plain]
    return FalconConfig(**config, **draw(st.sampled_from(forms)), bias=draw(st.booleans()))


def roberta(draw):
    """Positions behind any padding id, one or two token types, and eps that config.json may leave
    to its default."""
    from transformers import RobertaConfig

    heads, padding = draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 4]))
    eps = draw(st.sampled_from([{}, {"layer_norm_eps": 1e-3}]))
    return RobertaConfig(
        vocab_size=draw(st.integers(30, 61)),
        hidden_size=heads * draw(st.sampled_from([5, 7, 9])),
        intermediate_size=heads * draw(st.sampled_from([5, 7, 11])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        max_position_embeddings=23 + padding + 1,
        type_vocab_size=draw(st.integers(1, 2)),
        pad_token_id=padding,
        **eps,
    )


def modernbert(draw):
    """Windows of listed layers or behind every n-th, bases of both kinds, and every bias."""
    from transformers import ModernBertConfig

    config = sizes(draw, tied=(True,))
    for name in ("num_key_value_heads", "head_dim"):
        del config[name]
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["hidden_size"] = config["num_attention_heads"] * draw(st.sampled_from([6, 8]))
    full = config["rope_parameters"]
    if full["rope_type"] == "yarn":
        full.pop("truncate", None)  # which transformers does not find for layers of a kind
    local = {"rope_type": "default", "rope_theta": draw(st.sampled_from([99.0, 7.0]))}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    layers, kinds = config["num_hidden_layers"], ["sliding_attention", "full_attention"]
    listed = st.lists(st.sampled_from(kinds), min_size=layers, max_size=layers)
    biases = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    return ModernBertConfig(
        **config, **{name: draw(st.booleans()) for name in biases}, pad_token_id=None,
        local_attention=draw(st.sampled_from([2, 5, 8, 60])), layer_types=draw(st.none() | listed),
        hidden_activation=draw(st.sampled_from(["gelu", "gelu_pytorch_tanh"])),
    )  # fmt: skip


FAMILIES = {
    "gpt2": (gpt2, "pp=PP"),
    "llama": (llama, "tp=TP,pp=PP"),
    "gpt_oss": (gpt_oss, "ep=EP,dp=EP,pp=PP"),
    "granite": (granite, "tp=TP,pp=PP"),
    "deepseek_v3": (deepseek_v3, "ep=EP,dp=EP,pp=PP"),
    "deepseek_v2": (deepseek_v2, "ep=EP,dp=EP,pp=PP"),
    "glm4_moe": (glm4_moe, "ep=EP,dp=EP"),
    "olmo2": (olmo2, "tp=TP,pp=PP"),
    "olmo3": (olmo3, "tp=TP,pp=PP"),
    "mistral": (mistral, "tp=TP,dp=2"),
    "qwen2": (qwen2, "tp=TP,pp=PP"),
    "mixtral": (mixtral, "ep=EP,dp=EP,pp=PP"),
    "qwen2_moe": (qwen2_moe, "ep=EP,dp=EP"),
    "qwen3": (qwen3, "tp=TP,pp=PP"),
    "smollm3": (smollm3, "tp=TP,pp=PP"),
    "phi": (phi, "tp=TP,pp=PP"),
    "phi3": (phi3, "tp=TP,pp=PP"),
    "stablelm": (stablelm, "tp=TP,dp=2"),
    "glm4": (glm4, "tp=TP,pp=PP"),
    "gpt_neox": (gpt_neox, "tp=TP,pp=PP"),
    "falcon": (falcon, "tp=TP,pp=PP"),
    "qwen3_moe": (qwen3_moe, "ep=EP,dp=EP,pp=PP"),
    "gemma2": (gemma2, "tp=TP,pp=PP"),
    "gemma3_text": (gemma3_text, "tp=TP,pp=PP"),
    "starcoder2": (starcoder2, "tp=TP,dp=2"),
    "nemotron": (nemotron, "tp=TP,pp=PP"),
    "roberta": (roberta, "tp=TP,pp=PP"),
    "modernbert": (modernbert, "tp=TP,pp=PP"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_any_sizes_has_transformers_logits_and_gives_its_bytes_back(
    name, tmp_path_factory
):
    make, layout = FAMILIES[name]

    @settings(max_examples=EXAMPLES)
    @given(st.data())
    def check_family(data):
        config = make(data.draw)
        folder = tmp_path_factory.mktemp(name)
        theirs = saved(config, folder / "hf", seed=data.draw(st.integers(0, 99)))
        model = open_checkpoint(folder / "hf").model
        kv = model.num_kv_heads  # as many ranks as share them
        tp = kv * gcd(model.num_heads // kv, model.head_dim)
        axes = {"TP": tp, "PP": model.num_layers, "EP": model.num_experts}
        text = layout
        for key, value in axes.items():
            text = text.replace(key, str(value))
        to_mtcli(open_checkpoint(folder / "hf"), folder / "x", *parse_layout(text), WriteOptions())
        to_hf(open_checkpoint(folder / "x"), folder / "back", 3000, WriteOptions())
        assert_same_bytes(folder / "hf", folder / "back")
        assert_logits(theirs, folder / "x", model.vocab_size)

    check_family()


def saved(config, folder, seed):
    """A random model of a config, none of whose parameters is zeros or ones, and its folder."""
    torch.manual_seed(seed)
    # Its grouped products need strides of 16 bytes, which these sizes do not have.
    has_experts = hasattr(config, "num_experts_per_tok")
    eager = {"experts_implementation": "eager"} if has_experts else {}
    model = auto_model(config).from_config(config, dtype=torch.float32, **eager).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer += torch.randn(buffer.shape)
    model.save_pretrained(folder)
    return model


def assert_same_bytes(before, after):
    expected, found = (
        {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}
        for folder in (before, after)
    )
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == found[key].dtype and tensor.shape == found[key].shape, key
        assert tensor.numpy().tobytes() == found[key].numpy().tobytes(), key
    assert filecmp.cmp(before / "config.json", after / "config.json", shallow=False)


def assert_logits(theirs, folder, vocab_size):
    """Float32 logits of every position of two sequences, to 1e-4 of the largest."""
    engine = open_inference_model(open_checkpoint(folder), (), ALONE)
    ids = torch.randint(vocab_size, (2, 17), generator=torch.Generator().manual_seed(5))
    ends = (1, 2, 9, 17)
    expected = last_logits(theirs, ids, ends)
    for number, end in enumerate(ends):
        positions = torch.arange(end).expand(2, end)
        found = engine.next_logits(ids[:, :end], positions, KVCache())
        assert found.shape == (2, vocab_size)
        error = (found - expected[:, number]).abs().max() / expected.abs().max()
        assert error < 1e-4, (end, float(error))
