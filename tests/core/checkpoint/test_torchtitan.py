"""torchtitan's checkpoints, saved by torch's DCP: read and written, against Meta's own forward pass
with complex rotations, and against torch's reader."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from command_line import mtcli
from ranks import run_ranks
from torch import nn

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.model import ModelConfig
from mtcli.core.convert.to_dcp import to_dcp
from mtcli.core.convert.verify import logits_of

SIZES = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
SIZES |= {"ffn_hidden_size": 20, "vocab_size": 51, "max_seq_len": 32, "rope_theta": 99.0}
LLAMA = ModelConfig(architecture="llama", **SIZES)
QWEN = ModelConfig(architecture="llama", **SIZES, qk_norm="head", norm_eps=1e-6)
MODELS = {"llama": LLAMA, "qwen3": QWEN}


def state_of(model, seed=0):
    """Random weights by torchtitan's names."""
    torch.manual_seed(seed)
    h, f, d, v = model.hidden_size, model.ffn_hidden_size, model.head_dim, model.vocab_size
    q, k = model.num_heads * d, model.num_kv_heads * d
    shapes = {"tok_embeddings.weight": (v, h), "norm.weight": (h,), "output.weight": (v, h)}
    for i in range(model.num_layers):
        block = {"attention.wq": (q, h), "attention.wk": (k, h), "attention.wv": (k, h)}
        block |= {"attention.wo": (h, q), "attention_norm": (h,), "ffn_norm": (h,)}
        block |= {"feed_forward.w1": (f, h), "feed_forward.w2": (h, f), "feed_forward.w3": (f, h)}
        if model.qk_norm == "head":
            block |= {"attention.q_norm": (d,), "attention.k_norm": (d,)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in block.items()}
    return {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}


def norm(x, weight, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x, theta, neighbours):
    """Meta's rotation [s, heads, d] by complex numbers, of neighbours or of halves."""
    s, _, d = x.shape
    angles = torch.outer(torch.arange(s), theta ** (-torch.arange(0, d, 2) / d))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = x.unflatten(-1, (-1, 2)) if neighbours else x.unflatten(-1, (2, -1)).mT
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return out.flatten(-2) if neighbours else out.mT.flatten(-2)


def meta_logits(state, model, tokens):
    """Logits [s, v] of one sequence, as Meta's and Qwen's reference code has them."""
    x, d, eps = state["tok_embeddings.weight"][tokens], model.head_dim, model.norm_eps
    for i in range(model.num_layers):
        w = {
            n.removeprefix(f"layers.{i}."): t
            for n, t in state.items()
            if n.startswith(f"layers.{i}.")
        }
        y = norm(x, w["attention_norm.weight"], eps)
        q, k, v = (F.linear(y, w[f"attention.w{n}.weight"]).unflatten(-1, (-1, d)) for n in "qkv")
        if model.qk_norm == "head":
            q = norm(q, w["attention.q_norm.weight"], eps)
            k = norm(k, w["attention.k_norm.weight"], eps)
        q, k = (rotated(z, model.rope_theta, model.qk_norm == "none") for z in (q, k))
        k, v = (z.repeat_interleave(model.num_heads // model.num_kv_heads, 1) for z in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        mask = torch.ones(len(tokens), len(tokens)).tril().log()
        mixed = torch.einsum("hqk,khd->qhd", (scores + mask).softmax(-1), v).flatten(1)
        x = x + F.linear(mixed, w["attention.wo.weight"])
        y = norm(x, w["ffn_norm.weight"], eps)
        gate, up = (F.linear(y, w[f"feed_forward.{n}.weight"]) for n in ("w1", "w3"))
        x = x + F.linear(F.silu(gate) * up, w["feed_forward.w2.weight"])
    return F.linear(norm(x, state["norm.weight"], eps), state["output.weight"])


def save(state, folder):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference_code(tmp_path, name):
    model, state = MODELS[name], state_of(MODELS[name])
    opened = open_checkpoint(save(state, tmp_path / "step-7"), model)
    assert (opened.step, opened.format, opened.unread) == (7, "dcp", ())
    ours = logits_of(opened)  # of the last of the first 1, 17 and 32 tokens of two rows
    tokens = torch.randint(model.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    for row, expected in zip(ours, tokens, strict=True):
        logits = meta_logits(state, model, expected)[[0, 16, 31]]
        assert torch.allclose(row, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))


def _save_sharded(_, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = state_of(LLAMA)
    sharded = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}
    moments = {
        f"state.{name}.{kind}": distribute_tensor(value + i, mesh, [Shard(0)])
        for name, value in state.items()
        for i, kind in enumerate(("exp_avg", "exp_avg_sq"), start=1)
    }
    steps = {f"state.{name}.step": torch.tensor(7.0) for name in state}
    groups_of = {f"param_groups.{name}.lr": 1e-3 for name in state}
    dcp.save(
        {**sharded, "optimizer": moments | steps | groups_of, "train_state": Counted()},
        checkpoint_id=folder,
    )


class Counted:
    """torchtitan's train_state: bytes that a pickle holds."""

    def state_dict(self):
        return {"step": torch.tensor(7), "ntokens_seen": torch.tensor(9)}

    def load_state_dict(self, _):
        pass


def test_shards_moments_and_the_state_of_a_run_are_read(tmp_path):
    run_ranks(2, _save_sharded, str(tmp_path / "step-7"))
    opened, state = open_checkpoint(tmp_path / "step-7", LLAMA), state_of(LLAMA)
    plain = open_checkpoint(save(state, tmp_path / "plain"), LLAMA)
    for name in plain.names():
        expected = plain.read(name)
        assert torch.equal(opened.read(name), expected), name
        for i, kind in enumerate(("exp_avg", "exp_avg_sq"), start=1):
            assert torch.equal(opened.read(f"optimizer.{kind}/{name}"), expected + i), name


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_what_torch_reads(tmp_path, name):
    model, state = MODELS[name], state_of(MODELS[name])
    source = open_checkpoint(save(state, tmp_path / "a"), model)
    facts = to_dcp(source, tmp_path / "b", None, verify=True)
    assert facts["tensors_equal"] == len(source.names())
    read = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(read, checkpoint_id=tmp_path / "b", no_dist=True)
    assert all(torch.equal(read[key], state[key]) for key in state)
    half = to_dcp(source, tmp_path / "c", torch.bfloat16, verify=True)
    assert half["dtype"] == "bfloat16" and half["bytes"] * 2 == facts["bytes"]


def test_moments_are_written_beside_their_weights(tmp_path):
    run_ranks(2, _save_sharded, str(tmp_path / "step-7"))
    source = open_checkpoint(tmp_path / "step-7", LLAMA)
    assert to_dcp(source, tmp_path / "b", torch.bfloat16, verify=True)["moments"]
    key = "optimizer.state.layers.1.attention.wk.weight.exp_avg_sq"
    read = {key: torch.zeros(12, 24)}
    dcp.load(read, checkpoint_id=tmp_path / "b", no_dist=True)
    assert torch.equal(read[key], state_of(LLAMA)["layers.1.attention.wk.weight"] + 2)


def test_a_tied_head_must_be_the_embedding(tmp_path):
    tied, state = LLAMA.model_copy(update={"tie_embeddings": True}), state_of(LLAMA)
    state["output.weight"] = state["tok_embeddings.weight"]
    assert open_checkpoint(save(state, tmp_path / "a"), tied).names()
    with pytest.raises(MtcliError, match=r"output.weight differs from the embedding"):
        open_checkpoint(save(state_of(LLAMA), tmp_path / "b"), tied)


def test_missing_unknown_and_wrong_tensors_are_refused(tmp_path):
    state = state_of(LLAMA)
    path = save({k: v for k, v in state.items() if "wk" not in k}, tmp_path / "a")
    with pytest.raises(MtcliError, match=r"no tensor layers.0.attention.wk.weight, which blocks.0"):
        open_checkpoint(path, LLAMA)
    path = save(state | {"layers.0.extra": torch.zeros(3)}, tmp_path / "b")
    with pytest.raises(MtcliError, match=r"this architecture has not: layers.0.extra"):
        open_checkpoint(path, LLAMA)
    wide = LLAMA.model_copy(update={"hidden_size": 28})
    with pytest.raises(MtcliError, match=r"tok_embeddings.weight is \[51, 24\] .* and \[51, 28\]"):
        open_checkpoint(save(state, tmp_path / "c"), wide)
    with pytest.raises(MtcliError, match="does not say its architecture"):
        open_checkpoint(tmp_path / "c")
    gpt = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=9, max_seq_len=8)
    with pytest.raises(MtcliError, match="torchtitan's models have no position_embedding.weight"):
        open_checkpoint(tmp_path / "c", gpt)


class Trap(nn.Module):
    """An object whose pickle runs a command."""

    def __reduce__(self):
        import os

        return os.system, ("touch trace",)


def test_no_pickle_of_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = save(state_of(LLAMA), tmp_path / "a")
    import pickle

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(replace(metadata, planner_data=Trap())))
    with pytest.raises(MtcliError, match=r"a pickle that names '(posix|nt|os).system'"):
        open_checkpoint(folder, LLAMA)
    assert not (tmp_path / "trace").exists()


def test_the_command_reads_inspects_and_writes(tmp_path):
    save(state_of(LLAMA), tmp_path / "step-7")
    lines = [f"{key} = {json.dumps(value)}" for key, value in SIZES.items()]
    (tmp_path / "llama.toml").write_text('[model]\narchitecture = "llama"\n' + "\n".join(lines))
    words = ("--config", "llama.toml")
    done = mtcli("shard", "inspect", "step-7", *words, folder=tmp_path)
    assert done.returncode == 0 and "dcp" in done.stdout, done.stderr
    done = mtcli("shard", "step-7", "hf", "--to", "hf", "--verify", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = mtcli("shard", "hf", "back", "--to", "dcp", "--verify", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = mtcli("shard", "verify", "step-7", "back", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = mtcli("shard", "hf", "back", "--to", "dcp", folder=tmp_path)
    assert done.returncode == 2 and "back exists" in done.stderr
    done = mtcli("shard", "inspect", "step-7", folder=tmp_path)
    assert done.returncode == 2 and "--config FILE" in done.stderr
