"""Logits, loss and every gradient against transformers' own GPT-2 and Llama with the same weights.

The weights go through transformers' save_pretrained and our reader of Hugging Face folders.
"""

from dataclasses import replace

import pytest
import torch

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.loading import config_of
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.build import build_stages
from mtcli.core.model.init import load_weights
from mtcli.core.model.inputs import KVCache, make_inputs
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import unsharded

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
    """(transformers' model in float64, our stage with its weights)."""
    torch.manual_seed(0)
    theirs = FAMILIES[request.param]().eval()
    with torch.no_grad():  # biases and norms too, which start as zeros and ones
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    theirs.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = checkpoint.model.model_dump(exclude_none=True)
    config = config_of({"model": model, "train": {"precision": "fp64"}})
    groups = make_groups(ParallelLayout(1), 0, torch.device("cpu"))
    stages = build_stages(config, groups)
    shards = unsharded(stages, parameters(config.model))
    load_weights(shards, checkpoint, config.model, groups)
    return theirs.double(), stages[0], config.model


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
    ours, known = dict(stage.named_parameters()), dict(theirs.named_parameters())
    for name, found, wanted in gradients(ours, known, model):
        error = (found - wanted).norm() / wanted.norm()
        assert error < 1e-5, (name, error)


def gradients(ours, theirs, model):
    """(name, our gradient, transformers' in our shape) for every one of our parameters."""
    left = set(ours)
    named_like = gpt2_names if model.architecture == "gpt" else llama_names
    for name, wanted in named_like(model, theirs).items():
        found = ours[name].grad
        found = found[: wanted.shape[0]] if "embedding" in name or name == "head.weight" else found
        left.remove(name)
        yield name, found, wanted.reshape(found.shape)
    assert not left, f"not compared: {left}"


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
        inputs = make_inputs(
            model, torch.float64, ids[:, start:stop], positions=positions, cache=cache
        )
        if stop - start > 1 and start > 0:  # several new tokens need their own causal mask
            seen = torch.arange(stop) <= torch.arange(start, stop)[:, None]
            inputs = replace(inputs, mask=seen.expand(B, -1, -1))
        outputs.append(stage(None, inputs).view(B, stop - start, -1))
    unsharded = stage(None, make_inputs(model, torch.float64, ids)).view(B, S, -1)
    torch.testing.assert_close(torch.cat(outputs, 1), unsharded)


def test_a_mask_and_positions_pack_sequences_that_do_not_see_each_other(both):
    _, stage, model = both
    ids, half = tokens()[:1, :S], S // 2
    positions = torch.arange(half).repeat(2)[None]
    causal = torch.ones(half, half, dtype=torch.bool).tril()
    mask = torch.block_diag(causal, causal)[None]
    packed = stage(None, make_inputs(model, torch.float64, ids, positions=positions, mask=mask))
    apart = stage(None, make_inputs(model, torch.float64, ids.view(2, half)))
    torch.testing.assert_close(packed, apart)
