"""The same run on one GPU: `make gpu` selects what is marked so, here and elsewhere."""

import subprocess
import sys

import pytest
import torch
from tiny import metrics

pytestmark = pytest.mark.gpu
SMALL = [
    "model.num_layers=2", "model.hidden_size=64", "model.vocab_size=512", "train.steps=20",
    "train.matmul=strict", "data.train=['text']",
]  # fmt: skip
ROUNDED = 2e-3  # 5 times what bfloat16 on a CPU differs from float32 in these 20 steps


@pytest.fixture
def losses(tmp_path):
    """A function from a device and a precision to the losses of 20 steps there."""
    (tmp_path / "text.txt").write_text(
        "all the world is a stage, and all the men and women\n" * 900
    )
    mtcli("preprocess", "text.txt", "--output", "text", "--tokenizer", "bytes", folder=tmp_path)

    def train(device, precision, *more, ranks=1):
        ways = [name for name in ("compile", "cuda_graphs") if f"train.{name}=true" in more]
        output = "-".join([device, precision, *ways])
        fields = [*SMALL, *more, f"train.device={device}", f"train.output={output}"]
        flags = [word for field in fields for word in ("--set", field)]
        flags += ["--set", f"train.precision={precision}", "--nproc", str(ranks)]
        mtcli("train", "tiny", *flags, folder=tmp_path)
        return [row["loss"] for row in metrics(tmp_path / output)]

    return train


LLAMA = ["model.num_kv_heads=2", "model.ffn_hidden_size=128"]
EXPERTS = [*LLAMA, "model.num_experts=4", "model.top_k=2"]
KINDS = {
    "gpt": [],
    "llama": ["model.architecture=llama", *LLAMA],
    "mixtral": ["model.architecture=mixtral", *EXPERTS],
    "qwen2-moe": ["model.architecture=qwen2-moe", *EXPERTS],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_gives_the_losses_of_the_cpu_and_learns_in_16_bits(losses, kind):
    cpu = losses("cpu", "fp32", *KINDS[kind])
    assert losses("cuda", "fp32", *KINDS[kind]) == pytest.approx(cpu, rel=1e-4)
    for precision in ("bf16", "fp16") if kind == "gpt" else ("bf16",):
        assert losses("cuda", precision, *KINDS[kind]) == pytest.approx(cpu, rel=ROUNDED)


@pytest.mark.parametrize("kind", ["gpt", "llama", "mixtral"])
def test_a_compiled_run_has_the_losses_of_the_run_as_written(losses, kind):
    written = losses("cuda", "fp32", *KINDS[kind])
    compiled = losses("cuda", "fp32", *KINDS[kind], "train.compile=true")
    assert compiled == pytest.approx(written, rel=1e-4)


@pytest.mark.parametrize(
    "more", [["model.dropout=0.1"], ["train.compile=true"], KINDS["mixtral"]], ids=str
)
def test_a_run_from_cuda_graphs_has_the_losses_of_the_run_as_written(losses, more):
    written = losses("cuda", "fp32", *more)
    replayed = losses("cuda", "fp32", *more, "train.cuda_graphs=true")
    assert replayed == pytest.approx(written, rel=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
@pytest.mark.parametrize("kind", ["gpt", "mixtral"])
def test_graphs_of_two_gpus_hold_their_tensor_parallel_collectives(losses, kind):
    layout = [*KINDS[kind], "parallel.tp=2"]
    written = losses("cuda", "fp32", *layout, ranks=2)
    replayed = losses("cuda", "fp32", *layout, "train.cuda_graphs=true", ranks=2)
    assert replayed == pytest.approx(written, rel=1e-6)


def mtcli(*arguments, folder):
    command = [sys.executable, "-m", "mtcli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
