"""Logits, loss and every gradient against transformers' own GPT-2 and Llama with the same weights,
also on documents in a row and with full attention; and parameters of presets against its classes.

The weights go through transformers' save_pretrained and our reader of Hugging Face folders.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from indexed_dataset import write_dataset
from tiny import DOCUMENTS

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.loading import config_of, load_config
from mtcli.core.data.indexed import token_dtype
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import count_parameters, parameters
from mtcli.core.model.build import build_stages
from mtcli.core.model.init import load_weights
from mtcli.core.model.inputs import KVCache, make_inputs
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import unsharded
from mtcli.core.training.loader import open_loader

B, S, VOCAB = 3, 12, 97
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": VOCAB}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, initializer_range=0.2))


def llama(**others):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        vocab_size=VOCAB,
        initializer_range=0.2,
        **others,
    )
    return LlamaForCausalLM(config)


FAMILIES = {
    "gpt2": gpt2,
    "llama": llama,
    "llama scaled": lambda: llama(rope_scaling=SCALING),
    "llama tied": lambda: llama(tie_word_embeddings=True, head_dim=16),
}


@pytest.fixture(params=FAMILIES)
def both(request, tmp_path):
    """(transformers' model in float64, our stage with its weights, its config)."""
    theirs, stage, config, _ = opened(request.param, tmp_path)
    return theirs, stage, config.model


def opened(family, folder, causal=True, **sections):
    """(transformers' model in float64, our stage with its weights, its config, its groups)."""
    torch.manual_seed(0)
    theirs = FAMILIES[family]().eval()
    with torch.no_grad():  # biases and norms too, which start as zeros and ones
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    theirs.save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    model = checkpoint.model.model_copy(update={"causal": causal})
    train = {"precision": "fp64", "steps": 1}
    config = config_of({"model": model.model_dump(exclude_none=True), "train": train} | sections)
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    stages = build_stages(config, groups)
    shards = unsharded(stages, parameters(config.model))
    load_weights(shards, replace(checkpoint, model=model), config.model, groups)
    return theirs.double(), stages[0], config, groups


def tokens():
    return torch.randint(VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(1))


# float64, yet both round rotary angles to float32: their sums differ in the last bits of that
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def test_logits_are_transformers(both):
    theirs, stage, model = both
    ids = tokens()[:, :S]
    x_TD = stage(None, make_inputs(model, torch.float64, ids))
    ours = stage.output.all_logits(stage.output.logits(x_TD), VOCAB)
    torch.testing.assert_close(ours.view(B, S, VOCAB), theirs(ids).logits, **CLOSE)


def test_loss_and_every_gradient_are_transformers(both):
    theirs, stage, model = both
    ids = tokens()
    inputs = make_inputs(model, torch.float64, ids[:, :-1], labels=ids[:, 1:])
    loss = stage.losses(stage(None, inputs), inputs).mean()
    loss.backward()
    logits = theirs(ids[:, :-1]).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    compare_gradients(stage, theirs)


def compare_gradients(stage, theirs):
    """Every one of our parameters' gradients with transformers' in its shape."""
    ours = {name: parameter.grad for name, parameter in stage.named_parameters()}
    named_like = gpt2_names if stage.model.architecture == "gpt" else llama_names
    for name, expected in named_like(stage.model, dict(theirs.named_parameters())).items():
        found = ours.pop(name)
        if "embedding" in name or name == "head.weight":  # padded
            found = found[: expected.shape[0]]
        error = (found - expected.reshape(found.shape)).norm() / expected.norm()
        assert error < 1e-5, (name, error)
    assert not ours, "not compared"


def gpt2_names(model, theirs):
    """GPT-2 keeps [in, out] matrices, and query, key and value one after another."""
    heads, d, width = model.num_heads, model.head_dim, model.hidden_size
    grads = {name.removeprefix("transformer."): p.grad for name, p in theirs.items()}
    named = {
        "embedding.weight": grads["wte.weight"],
        "position_embedding.weight": grads["wpe.weight"],
        "final_norm.weight": grads["ln_f.weight"],
        "final_norm.bias": grads["ln_f.bias"],
    }
    parts = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.out": "attn.c_proj"}
    parts |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for i in range(model.num_layers):
        for ours, name in parts.items():
            for kind in ("weight", "bias"):
                grad = grads[f"h.{i}.{name}.{kind}"]
                named[f"blocks.{i}.{ours}.{kind}"] = grad.T if grad.dim() == 2 else grad
        qkv = grads[f"h.{i}.attn.c_attn.weight"].T.reshape(3, heads, d, width)
        named[f"blocks.{i}.attention.qkv.weight"] = qkv.transpose(0, 1)
        bias = grads[f"h.{i}.attn.c_attn.bias"].reshape(3, heads, d)
        named[f"blocks.{i}.attention.qkv.bias"] = bias.transpose(0, 1)
    return named


def llama_names(model, theirs):
    """Llama keeps [out, in] matrices, one each for query, key, value, gate and up."""
    g, d, width = model.num_kv_heads, model.head_dim, model.hidden_size
    grads = {name.removeprefix("model."): p.grad for name, p in theirs.items()}
    named = {"embedding.weight": grads["embed_tokens.weight"]}
    named["final_norm.weight"] = grads["norm.weight"]
    if not model.tie_embeddings:
        named["head.weight"] = grads["lm_head.weight"]
    for i in range(model.num_layers):
        ours, layer = f"blocks.{i}", f"layers.{i}"
        named[f"{ours}.attention_norm.weight"] = grads[f"{layer}.input_layernorm.weight"]
        named[f"{ours}.mlp_norm.weight"] = grads[f"{layer}.post_attention_layernorm.weight"]
        q, k, v = (grads[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkv")
        heads = [x.view(g, -1, d, width) for x in (q, k, v)]
        named[f"{ours}.attention.qkv.weight"] = torch.cat(heads, 1)
        named[f"{ours}.attention.out.weight"] = grads[f"{layer}.self_attn.o_proj.weight"]
        gate, up = (grads[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        named[f"{ours}.mlp.gate_up.weight"] = torch.stack([gate, up])
        named[f"{ours}.mlp.down.weight"] = grads[f"{layer}.mlp.down_proj.weight"]
    return named


def test_cached_steps_are_the_whole_sequence_at_once(both):
    _, stage, model = both
    ids, cache, outputs = tokens()[:, :S], KVCache(), []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, S)):
        positions = torch.arange(start, stop).expand(B, -1)
        given = {"positions": positions, "cache": cache}
        inputs = make_inputs(model, torch.float64, ids[:, start:stop], **given)
        outputs.append(stage(None, inputs).view(B, stop - start, -1))
    unsharded = stage(None, make_inputs(model, torch.float64, ids)).view(B, S, -1)
    torch.testing.assert_close(torch.cat(outputs, 1), unsharded)


def test_a_mask_and_positions_pack_sequences_that_do_not_see_each_other(both):
    _, stage, model = both
    ids, half = tokens()[:1, :S], S // 2
    positions = torch.arange(half).repeat(2)[None]
    causal = torch.ones(half, half, dtype=torch.bool).tril()
    mask = torch.block_diag(causal, causal)[None]
    packed = stage(None, make_inputs(model, torch.float64, ids, positions=positions, paths=mask))
    apart = stage(None, make_inputs(model, torch.float64, ids.view(2, half)))
    torch.testing.assert_close(packed, apart)


ROWS, LENGTH, BEGIN = 8, 16, 0  # token 0 begins every document and stands nowhere else


def masked(tokens, causal):
    """(4D mask of 0 and the lowest float, position ids) of rows whose documents begin with 0.

    By hand: who sees whom is read off the tokens.
    """
    shape = ROWS, 1, LENGTH, LENGTH
    mask = torch.full(shape, torch.finfo(torch.float64).min, dtype=torch.float64)
    places = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    for b, row in enumerate(tokens.tolist()):
        begins = [i for i in range(LENGTH) if i == 0 or row[i] == BEGIN]
        for begin, end in zip(begins, [*begins[1:], LENGTH], strict=True):
            for i in range(begin, end):
                mask[b, 0, i, begin : i + 1 if causal else end] = 0.0
                places[b, i] = i - begin
    return mask, places


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_documents_of_a_row_train_as_transformers_does(family, causal, tmp_path):
    random = np.random.default_rng(0)
    lengths = [0, 9, 1, 12, 40, 3, 11, 0, 14] * 3
    texts = [[BEGIN, *random.integers(1, VOCAB, n - 1)] if n else [] for n in lengths]
    write_dataset(tmp_path / "data", texts, token_dtype(VOCAB))
    sections = {
        "batch": {"seq_len": LENGTH, "micro_batch_size": ROWS, "global_batch_size": ROWS},
        "data": {"train": [str(tmp_path / "data")], "split": "1,0,0", **DOCUMENTS},
    }
    theirs, stage, config, groups = opened(family, tmp_path / "theirs", causal, **sections)
    loader = open_loader(config, groups)
    inputs = loader.step(0, 1.0).load(0)
    loader.close()
    two = (inputs.tokens[:, 1:] == BEGIN).sum(1) == 1
    assert two.any(), "no sample is made of two documents"
    losses = stage.losses(stage(None, inputs), inputs).view(ROWS, LENGTH)
    mask, places = masked(inputs.tokens, causal)
    logits = theirs(inputs.tokens, attention_mask=mask, position_ids=places).logits
    expected = torch.nn.functional.cross_entropy(logits.mT, inputs.labels, reduction="none")
    torch.testing.assert_close(losses, expected, **CLOSE)
    losses.mean().backward()
    expected.mean().backward()
    compare_gradients(stage, theirs)


PRESETS = (  # one of each kind of model, and those whose papers print two digits
    "gpt2-124m", "llama-3.1-8b", "tinyllama-1.1b", "mixtral-8x7b", "qwen2-57b-a14b", "bert-110m",
    "megatron-bert-1.3b", "megatron-bert-3.9b",
)  # fmt: skip


def test_a_preset_has_the_parameters_of_transformers(subtests):
    for name in PRESETS:
        model = load_config(name).model
        with subtests.test(name):
            assert count_parameters(model) == count_by_transformers(model)


def count_by_transformers(model):
    from transformers import AutoModelForCausalLM, AutoModelForPreTraining

    head = AutoModelForPreTraining if model.head == "mlm" else AutoModelForCausalLM
    with torch.device("meta"):
        built = head.from_config(hugging_face(model))
    return sum(p.numel() for p in built.parameters())  # a tied head is the same Parameter


def hugging_face(m):
    from transformers import (
        BertConfig,
        GPT2Config,
        LlamaConfig,
        MegatronBertConfig,
        MixtralConfig,
        Qwen2MoeConfig,
    )

    if m.architecture == "bert":
        config = BertConfig if m.norm_order == "post" else MegatronBertConfig
        return config(
            vocab_size=m.vocab_size,
            hidden_size=m.hidden_size,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_heads,
            intermediate_size=m.ffn_hidden_size,
        )
    if m.architecture == "gpt":
        return GPT2Config(
            vocab_size=m.vocab_size, n_positions=m.max_seq_len, n_embd=m.hidden_size,
            n_layer=m.num_layers, n_head=m.num_heads,
        )  # fmt: skip
    common = {
        "vocab_size": m.vocab_size, "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size, "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_heads, "num_key_value_heads": m.num_kv_heads,
    }  # fmt: skip
    experts = {"num_experts_per_tok": m.top_k, "tie_word_embeddings": False}
    if m.architecture == "mixtral":
        return MixtralConfig(**common, **experts, num_local_experts=m.num_experts)
    if m.architecture == "qwen2-moe":
        return Qwen2MoeConfig(
            **common, **experts, num_experts=m.num_experts,
            moe_intermediate_size=m.moe_ffn_hidden_size,
            shared_expert_intermediate_size=m.shared_expert_ffn_hidden_size,
        )  # fmt: skip
    return LlamaConfig(**common, tie_word_embeddings=False)
