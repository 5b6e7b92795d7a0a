"""`mtcli train` on eight processes of this machine: the losses it prints are one process's."""

import json
import os
import re
import subprocess
import sys

import pytest
from tiny import MOE, documents

from mtcli.core.data.indexed import token_dtype, write_dataset
from mtcli.core.spec.load import dump_toml, load_config

ALL_AT_ONCE = "tp=2 cp=2 pp=2 ep=2 etp=2"  # docs/parity.md runs parts of it


@pytest.fixture
def home(tmp_path):
    """A folder with run.toml, the config of a tiny mixture of experts, and its data."""
    write_dataset(tmp_path / "data", documents(), token_dtype(MOE["vocab_size"]))
    model = [f"model.{name}={json.dumps(value)}" for name, value in MOE.items()]
    sizes = ["batch.seq_len=8", "batch.micro_batch_size=1", "batch.global_batch_size=8"]
    run = [f'data.train=["{tmp_path}/data"]', "train.steps=3", "train.device=cpu"]
    config = load_config("tiny", [*model, *sizes, *run])
    (tmp_path / "run.toml").write_text(dump_toml(config))
    return tmp_path


def train(home, name, nproc, layout):
    """(metrics, printed losses) of a run on `nproc` processes."""
    axes = [word for axis in layout.split() for word in ("--set", f"parallel.{axis}")]
    flags = ["--nproc", str(nproc), "--set", f"train.output={home / name}", *axes]
    done = subprocess.run(
        [sys.executable, "-m", "mtcli", "train", str(home / "run.toml"), *flags],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{nproc} ranks: " in done.stdout and set(layout.split()) <= set(done.stdout.split())
    rows = [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()]
    return rows, re.findall(r"loss (\d+\.\d+)", done.stderr)


def test_eight_processes_print_the_losses_of_one(home):
    alone, printed_alone = train(home, "one", 1, "")
    rows, printed = train(home, "all", 8, ALL_AT_ONCE)
    assert printed[-1] == printed_alone[-1] == f"{rows[-1]['loss']:.4f}"
    for key in ("loss", "grad_norm"):
        expected = [row[key] for row in alone]
        assert [row[key] for row in rows] == pytest.approx(expected, rel=1e-5), key
