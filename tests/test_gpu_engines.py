"""Every engine and kind of model that one rank can be, on a GPU: its steps are those of the CPU.

`make gpu` runs them; without a GPU they are skipped. Layouts of several ranks need several GPUs.
"""

import json
import os
import subprocess
import sys
from itertools import chain, repeat

import pytest
import torch
from tiny import BIASED, DOCUMENTS, DROPPING, GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import save
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.rules import require
from mtcli.core.data.tokenize import byte_tokenizer
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel import vocab_parallel
from mtcli.core.parallel.groups import make_groups
from mtcli.core.profile.clock import clock_for
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, resume, shards
from mtcli.core.training.step import Trainer
from mtcli.kernels.gradient_sink import GradientSink

pytestmark = pytest.mark.gpu
STEPS = 6
SCALED = {"factor": 8.0, "original_max_seq_len": 8}
QWEN = LLAMA | {
    "architecture": "qwen2-moe",
    "num_experts": 4,
    "top_k": 2,
    "moe_ffn_hidden_size": 12,
    "shared_expert_ffn_hidden_size": 20,
}
# fmt: off
RUNS = {  # name: (model, sections)
    "gpt": (GPT, {}),
    "gpt with dropout": (GPT | DROPPING, {}),
    "gpt of documents": (GPT, {"data": DOCUMENTS}),
    "gpt of exact gelu": (GPT | {"activation": "gelu"}, {}),
    "llama": (LLAMA, {}),
    "llama of documents": (LLAMA, {"data": DOCUMENTS}),
    "llama with scaled rope": (LLAMA | {"rope_scaling": SCALED}, {}),
    "llama in micro-batches of two": (LLAMA, {"batch": {"micro_batch_size": 2}}),
    "llama without clipping": (LLAMA, {"optimizer": {"clip": 0.0}}),
    "llama that keeps no activations": (LLAMA, {"parallel": {"recompute": "full"}}),
    "gpt with dropout that keeps few": (GPT | DROPPING, {"parallel": {"recompute": "selective"}}),
    "llama in one-op gpipe": (LLAMA, {"parallel": {"schedule": "gpipe"}}),
    "llama with split backwards": (LLAMA, {"parallel": {"schedule": "zero_bubble"}}),
    "llama with cut optimizer": (LLAMA, {"parallel": {"zero": 1}}),
    "llama with cut parameters": (LLAMA, {"parallel": {"zero": 3}}),
    "gpt by lamb": (GPT, {"optimizer": {"name": "lamb", "lr": 0.1}}),
    "llama in small buckets": (LLAMA, {"parallel": {"bucket_mib": 0.001}}),
    "mixtral": (MOE, {}),
    "mixtral by all-gather": (MOE, {"parallel": {"dispatcher": "all_gather"}}),
    "mixtral that keeps no activations": (MOE, {"parallel": {"recompute": "full"}}),
    "mixtral within capacity": (MOE | {"capacity_factor": 0.75}, {}),
    "mixtral padded to capacity": (MOE | {"capacity_factor": 1.0, "pad_to_capacity": True}, {}),
    "mixtral of groups with biases": (BIASED, {}),
    "qwen2-moe": (QWEN, {}),
}
# fmt: on


def trainer_on(device, model, sections):
    config = run_config(model, **sections)
    require(config, 1)
    trainer = Trainer(config, Runtime(0, 1, 0, 1, torch.device(device)))
    initialise(trainer)
    return trainer, MicroBatchLoader(Samples(config), config, trainer.groups)


def steps_on(device, model, sections):
    """[loss, gradient norm, expert load or 0] of STEPS steps."""
    trainer, loader = trainer_on(device, model, sections)
    done = [trainer.train_step(loader) for _ in range(STEPS)]
    loader.close()
    return [value for s in done for value in (s.loss, s.grad_norm, s.expert_load or 0.0)]


@pytest.mark.parametrize("name", RUNS)
def test_each_engine_gives_the_losses_and_norms_of_the_cpu(name):
    assert steps_on("cuda", *RUNS[name]) == pytest.approx(steps_on("cpu", *RUNS[name]), rel=1e-4)


@pytest.mark.parametrize("name", ["gpt with dropout", "llama", "mixtral of groups with biases"])
def test_a_checkpoint_of_a_gpu_goes_on_bit_for_bit_there_and_closely_on_a_cpu(name, tmp_path):
    whole = steps_on("cuda", *RUNS[name])[3 * 3 :]
    first, loader = trainer_on("cuda", *RUNS[name])
    for _ in range(3):
        first.train_step(loader)
    loader.close()
    how = {"rank": 0, "extra": {}, "tokenizer": None, "keep": 0, "gather": lambda x: [x]}
    folder = save(tmp_path, 3, shards(first), config_toml=dump_toml(first.config), **how)
    for device, close in (("cuda", 0.0), ("cpu", 1e-4)):
        again, loader = trainer_on(device, *RUNS[name])
        resume(again, open_checkpoint(folder))
        done = [again.train_step(loader) for _ in range(STEPS - 3)]
        loader.close()
        rest = [value for s in done for value in (s.loss, s.grad_norm, s.expert_load or 0.0)]
        assert rest == pytest.approx(whole, rel=close, abs=0.0)


def test_a_run_on_a_gpu_repeats_itself_bit_for_bit():
    assert steps_on("cuda", *RUNS["llama"]) == steps_on("cuda", *RUNS["llama"])


def test_the_phases_of_a_step_are_in_order_by_the_devices_clock():
    trainer, loader = trainer_on("cuda", *RUNS["llama"])
    trainer.pipeline.clock = clock = clock_for(torch.device("cuda"))
    clock.begin()
    trainer.train_step(loader)
    clock.end()
    loader.close()
    ends = [clock.seconds(stamp) for stamp in trainer.phases]
    assert ends == sorted(ends) and 0.0 < ends[-1] - ends[0] < 60.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_several_chunks_has_the_gradients_of_float64(monkeypatch, dtype):
    tokens, hidden, vocabulary = 300, 64, 512
    monkeypatch.setattr(vocab_parallel, "LOSS_CHUNK_BYTES", (0, 128 * vocabulary * dtype.itemsize))
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(0)
    made = [torch.randn(n, hidden, generator=generator) / 4 for n in (tokens, vocabulary)]
    x, table = (one.to(device, dtype).requires_grad_() for one in made)
    labels = torch.arange(tokens) * 7 % vocabulary
    groups = make_groups(ParallelLayout(1), 0, device)
    shard = vocab_parallel.VocabShard(0, vocabulary, groups.tp)
    inputs = x, labels.to(device), None, table, None, shard, 1.0 / tokens
    _, loss = vocab_parallel.ChunkedLoss.apply(*inputs)
    exact = [one.detach().double().cpu().requires_grad_() for one in (x, table)]
    expected = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, labels)
    found = [loss, *torch.autograd.grad(loss, (x, table))]
    wanted = [expected, *torch.autograd.grad(expected, exact)]
    sums = torch.full((1, vocabulary, hidden), torch.nan, device=device)
    sink = GradientSink(sums, vocabulary, chain([0], repeat(1)).__next__)
    vocab_parallel.ChunkedLoss.apply(*inputs, 0.0, sink)[1].backward()
    assert table.grad is None
    for ours, theirs in zip([*found, sums[0]], [*wanted, wanted[-1]], strict=True):
        error = (ours.detach().double().cpu() - theirs).norm() / theirs.norm()
        assert error < {torch.float32: 1e-5, torch.bfloat16: 6e-3}[dtype]


def test_a_gpu_generates_as_a_cpu_does(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.4)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save(tmp_path / "model")
    flags = ("generate", "model", "--prompt", "The cat", "--max-tokens", "20", "--json", "-")
    told = [json.loads(mtcli(tmp_path, *flags, "--device", d)) for d in ("cuda", "cpu")]
    assert told[0]["generated"] == told[1]["generated"]


def test_a_profile_on_a_gpu_attributes_the_step_and_writes_its_page(tmp_path):
    pytest.importorskip("matplotlib")
    small = ["--set", "model.num_layers=2", "--set", "model.hidden_size=64"]
    small += ["--set", "train.device=cuda", "--steps", "3", "--warmup", "1"]
    mtcli(tmp_path, "profile", "tiny", *small, "--report", "r.html", "--json", "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) and (tmp_path / "r.html").stat().st_size


def mtcli(folder, *arguments):
    command = [sys.executable, "-m", "mtcli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout
