"""Resharding: any layout to any other, with the optimizer, bit for bit."""

import errno
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch
from marks import slow
from ranks import run_ranks
from safetensors import safe_open
from saving import MODEL, save_halves, values

from mtcli.core.checkpoint.folder import require_free
from mtcli.core.checkpoint.integrity import verify_hashes
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import (
    Shard,
    commit,
    dump_written,
    merge_written,
    save,
    write_shards,
)
from mtcli.core.config import rules
from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import ParallelConfig, RunConfig
from mtcli.core.convert import verify
from mtcli.core.convert.layout import output_config, parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.verify import differences, shared_names
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.parallel.tree import ALONE
from mtcli.core.runtime import atomic_writes
from mtcli.core.runtime.atomic_writes import atomic_folder
from mtcli.core.runtime.work_folder import WorkFolder

DENSE = ModelConfig(
    num_layers=4, hidden_size=8, num_heads=4, vocab_size=300, max_seq_len=6, ffn_hidden_size=12
)
ENCODER = DENSE.model_copy(
    update={"head": "mlm", "sentence_order": True, "token_types": 2, "causal": False}
)
MOE = ModelConfig(
    architecture="qwen2-moe",
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=8,
    vocab_size=131,
    max_seq_len=6,
    num_experts=4,
    top_k=2,
    moe_ffn_hidden_size=4,
    shared_expert_ffn_hidden_size=8,
)


def legal_layouts(model):
    """Every legal layout of a model on at most 8 ranks, as the text of --layout."""
    axes = ("tp", "cp", "pp", "vpp", "dp") + (("ep", "etp") if model.num_experts else ())
    found = []
    for sizes in product((1, 2, 4), repeat=len(axes)):
        text = ",".join(f"{axis}={n}" for axis, n in zip(axes, sizes, strict=True))
        parallel, world = parse_layout(text)
        if world > 8:
            continue
        broken = rules.problems(RunConfig(model=model, parallel=parallel), world)
        if not [p for p in broken if p.field.startswith(("parallel.", "model."))]:
            found.append(text)
    return found


def write_layout(folder, tensors, model, text):
    """A checkpoint on a layout, made of the boxes of the parameter table and the store alone."""
    parallel, world = parse_layout(text)
    layout, table = ParallelLayout.of(parallel, world), parameters(model)
    per_stage = model.num_layers // layout.num_stages
    folder.mkdir(parents=True)
    written = []
    for rank in range(world):
        pieces = []
        for name, tensor in tensors.items():
            parameter = table[name.rpartition("/")[2]]
            last = layout.num_stages - 1
            ends = {"first": 0, "last": last}
            layer = parameter.layer
            stage = ends[layer] if layer in ends else layer // per_stage
            here = stage % layout.pp == layout.coordinates(rank)["pp"]
            if here and parameter.is_primary(layout, rank):
                box = parameter.box(layout, rank)
                pieces.append(Shard(name, tensor[box.slices], box.start, parameter.shape))
        written.append(dump_written(write_shards(folder, rank, pieces)))
    config = RunConfig(model=model, parallel=parallel)
    about = {"step": 5, "extra": {"consumed_samples": 40}}
    about["world"] = len(written)
    commit(folder, merge_written(written), about, dump_toml(config), {})
    return open_checkpoint(folder)


def test_a_layout_with_rows_is_a_grid_and_one_without_is_none(tmp_path):
    grid = write_layout(tmp_path / "grid", values(DENSE), DENSE, "tp=4,tp_rows=2")
    assert grid.config.parallel.grid_rows == 2
    for text, mode, rows in (("tp=2", "1d", 1), ("tp=4,tp_rows=4", "2d", 4), ("pp=2", "1d", 1)):
        parallel = output_config(grid, *parse_layout(text)).parallel
        assert (parallel.tp_mode, parallel.grid_rows) == (mode, rows)


GRIDS = ("tp=4,tp_rows=2", "tp=2,dp=2", "tp=4,tp_rows=4", "tp=2,pp=2")


@pytest.mark.parametrize(
    ("model", "count", "fixed"),
    [(DENSE, 7, GRIDS), (MOE, 7, ()), (ENCODER, 3, ())],
    ids=["dense", "moe", "encoder"],
)
def test_any_layout_to_any_other_and_on_is_bit_exact(tmp_path, model, count, fixed):
    tensors, layouts = values(model), legal_layouts(model)
    assert len(layouts) > 30
    layouts = [*fixed, *Random(0).sample(layouts, count)]
    last = write_layout(tmp_path / "first", tensors, model, layouts[-1])
    for number, layout in enumerate(layouts):
        to_mtcli(last, tmp_path / f"{number}", *parse_layout(layout), WriteOptions())
        last = open_checkpoint(tmp_path / f"{number}")
        for name, tensor in tensors.items():
            assert torch.equal(last.read(name), tensor), (layout, name)
        assert (last.step, last.extra) == (5, {"consumed_samples": 40})
        written = write_layout(tmp_path / f"by hand {number}", tensors, model, layout)
        assert cuts(last) == cuts(written), layout


def cuts(checkpoint):
    return {
        name: sorted((box.file, box.start, box.view) for box in stored.boxes)
        for name, stored in checkpoint.tensors.items()
    }


def test_each_rank_has_the_boxes_of_its_coordinates(tmp_path):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    to_mtcli(source, tmp_path / "dst", *parse_layout("tp=2,pp=2"), WriteOptions())
    with safe_open(tmp_path / "dst" / "rank-00003.safetensors", "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    weights = {n: s for n, s in found.items() if "/" not in n}
    assert weights == {  # the second stage, the second half of what tp cuts, nothing replicated
        "blocks.1.attention.qkv.weight": [1, 3, 6, 12],
        "blocks.1.attention.qkv.bias": [1, 3, 6],
        "blocks.1.attention.out.weight": [12, 6],
        "blocks.1.mlp.up.weight": [10, 12],
        "blocks.1.mlp.up.bias": [10],
        "blocks.1.mlp.down.weight": [12, 10],
    }
    assert {n.rpartition("/")[2] for n in found} == set(weights)
    config = open_checkpoint(tmp_path / "dst").config
    assert (config.parallel.tp, config.parallel.pp) == (2, 2)


def test_a_dtype_changes_weights_and_not_the_optimizer(tmp_path):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    to_mtcli(source, tmp_path / "dst", *parse_layout(""), WriteOptions(dtype=torch.bfloat16))
    found = open_checkpoint(tmp_path / "dst")
    name = "embedding.weight"
    assert torch.equal(found.read(name), values()[name].to(torch.bfloat16))
    assert torch.equal(found.read(f"optimizer.master/{name}"), values()[f"optimizer.master/{name}"])


def test_a_tensor_that_belongs_to_no_parameter_is_kept_whole(tmp_path):
    tensors = {"optimizer.scale/none": torch.arange(4.0), "embedding.weight": torch.ones(13, 12)}
    source = open_checkpoint(save_halves(tmp_path / "src", tensors=tensors)[0])
    to_mtcli(source, tmp_path / "dst", *parse_layout("dp=2"), WriteOptions())
    assert open_checkpoint(tmp_path / "dst").read("optimizer.scale/none").tolist() == [0, 1, 2, 3]


def test_the_optimizer_is_left_out_of_a_hugging_face_folder(tmp_path):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    to_hf(source, tmp_path / "dst", 10**9, WriteOptions())
    back = open_checkpoint(tmp_path / "dst")
    assert set(shared_names(source, back)) == set(parameters(MODEL))
    assert not list(differences(source, back))


UNREADABLE = {
    "tp": "'tp' is not a part",
    "tp=0": "'tp=0' is not",
    "zz=2": "'zz=2' is not",
    "tp=2,tp=4": "tp is given twice: 2 and 4",
    "zero=2": "zero=2 is no way to share",
    "dp=100000": "dp=100000 is a layout of 100,000 ranks",
}


def test_a_layout_that_cannot_be_read_or_makes_no_sense_is_refused():
    for text, message in UNREADABLE.items():
        with pytest.raises(MtcliError, match=message):
            parse_layout(text)
    with pytest.raises(MtcliError, match="tp, tp_rows, cp, pp, vpp, ep, etp, dp, zero"):
        parse_layout("zz=2")


def test_a_layout_that_says_nothing_of_zero_keeps_the_run_s(tmp_path):
    toml = dump_toml(RunConfig(model=MODEL, parallel=ParallelConfig(zero=1)))
    source = open_checkpoint(save_halves(tmp_path / "src", config_toml=toml)[0])
    for text, zero in (("tp=2", 1), ("tp=2,zero=0", 0)):
        to_mtcli(source, tmp_path / text, *parse_layout(text), WriteOptions())
        assert open_checkpoint(tmp_path / text).config.parallel.zero == zero


def test_a_layout_is_a_parallel_config_and_a_world():
    parallel, world = parse_layout("tp=2, pp=3,vpp=2,dp=5")
    assert parallel == ParallelConfig(tp=2, pp=3, vpp=2, schedule="interleaved")
    assert world == 30


def test_a_layout_that_does_not_divide_the_model_is_refused(tmp_path):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    with pytest.raises(MtcliError, match="tp=5 does not divide num_kv_heads=2") as error:
        to_mtcli(source, tmp_path / "dst", *parse_layout("tp=5,pp=3"), WriteOptions())
    assert len(error.value.problems) == 2
    assert str(error.value).endswith(
        "the nearest legal layouts:\n  --layout tp=2,pp=2\n  --layout pp=2\n  --layout tp=2"
    )
    assert not (tmp_path / "dst").exists()


def test_a_name_that_is_taken_is_refused_without_force(tmp_path):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    layout = parse_layout("")
    to_mtcli(source, tmp_path / "dst", *layout, WriteOptions())
    with pytest.raises(MtcliError, match=r"dst exists"):
        to_mtcli(source, tmp_path / "dst", *layout, WriteOptions())
    to_mtcli(source, tmp_path / "dst", *layout, WriteOptions(dtype=torch.float64, force=True))
    assert open_checkpoint(tmp_path / "dst").dtype("final_norm.weight") == torch.float64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def test_what_a_killed_conversion_left_is_written_over(tmp_path):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    left = WorkFolder(tmp_path / "dst.partial", tmp_path / "dst")
    (left.path / "dst").mkdir()
    (left.path / "dst" / "stale").write_text("half")
    left.close()
    to_mtcli(source, tmp_path / "dst", *parse_layout(""), WriteOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]
    assert not (tmp_path / "dst" / "stale").exists()


def test_what_a_killed_replacement_left_does_not_stop_the_next(tmp_path):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    to_mtcli(source, tmp_path / "dst", *parse_layout(""), WriteOptions())
    left = WorkFolder(tmp_path / "dst.partial", tmp_path / "dst")
    shutil.copytree(tmp_path / "dst", left.path / "dst")  # killed while it was removed
    left.close()
    to_mtcli(source, tmp_path / "dst", *parse_layout(""), WriteOptions(force=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def test_a_replacement_that_cannot_get_its_name_leaves_what_it_would_replace(tmp_path, monkeypatch):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    to_mtcli(source, tmp_path / "dst", *parse_layout(""), WriteOptions())
    rename = Path.rename

    def failing(self, target):
        if (self.parent.name, self.name) == ("dst.partial", "dst"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(atomic_writes, "_swap", lambda one, other: False)  # as on NFS
    with pytest.raises(MtcliError, match="dst was not written: Input/output error"):
        to_mtcli(source, tmp_path / "dst", *parse_layout("tp=2"), WriteOptions(force=True))
    verify_hashes(open_checkpoint(tmp_path / "dst"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def test_force_replaces_nothing_but_a_checkpoint(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    with pytest.raises(MtcliError, match="home exists and is not a checkpoint, and --force"):
        require_free(tmp_path / "home", force=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "precious"


def test_a_disk_that_is_too_small_is_known_before_anything_is_written(tmp_path):
    with (
        pytest.raises(
            MtcliError, match=rf"takes {10**18} bytes and the disk has \d+ free"
        ) as error,
        atomic_folder(tmp_path / "dst", 10**18),
    ):
        pass
    assert error.value.code == Exit.FAILED
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with (
        pytest.raises(MtcliError, match="dst was not written: No space left on device"),
        atomic_folder(tmp_path / "dst", 0) as partial,
    ):
        (partial / "half").write_text("half")
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


CHANGES = {
    "is not in": lambda t: t.pop("final_norm.bias"),
    "is [12] and [13]": lambda t: t.update({"final_norm.bias": torch.zeros(13)}),
    "differs in 1 of 12 elements, by": lambda t: t["final_norm.bias"].__setitem__(3, 9.0),
    "and float16": lambda t: t.update({"final_norm.bias": t["final_norm.bias"].half()}),
}


def test_a_difference_is_named(tmp_path):
    a = open_checkpoint(save_halves(tmp_path / "a")[0])
    assert not list(differences(a, a))
    for what, change in CHANGES.items():
        other = values()
        change(other)
        b = open_checkpoint(save_halves(tmp_path / what, tensors=other)[0])
        for first, second in ((a, b), (b, a)):
            found = list(differences(first, second))
            assert [difference.name for difference in found] == ["final_norm.bias"]
        assert what in next(differences(a, b)).what


def test_differences_are_counted_over_all_slabs(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "BOX_BYTES", 20)
    tensors = {"x": torch.arange(60.0).view(5, 12)}
    other = {"x": tensors["x"] + torch.eye(5, 12) * torch.tensor([0, 1, 0, 0.5, -3])[:, None]}
    a = open_checkpoint(save_halves(tmp_path / "a", tensors=tensors)[0])
    b = open_checkpoint(save_halves(tmp_path / "b", tensors=other)[0])
    (difference,) = differences(a, b)
    assert difference.what == "differs in 3 of 60 elements, by at most 3"
    assert not list(differences(a, a))


def test_zeros_of_different_signs_and_nans_are_compared_by_their_bits(tmp_path):
    zeros = {"x": torch.tensor([0.0, float("nan")])}
    minus = {"x": torch.tensor([-0.0, float("nan")])}
    a = open_checkpoint(save_halves(tmp_path / "a", tensors=zeros)[0])
    b = open_checkpoint(save_halves(tmp_path / "b", tensors=minus)[0])
    assert not list(differences(a, a))
    assert [difference.name for difference in differences(a, b)] == ["x"]


def save_zeros(runtime, model, root):
    """A checkpoint of a model of zeros."""
    pieces = [
        Shard(name, torch.zeros(parameter.shape), (0,) * len(parameter.shape), parameter.shape)
        for name, parameter in parameters(model).items()
    ]
    about = {"extra": {}, "config_toml": dump_toml(RunConfig(model=model)), "tokenizer": None}
    save(root, 1, pieces, ranks=ALONE, keep=0, **about)


@slow("writes 230 MB three times")
def test_peak_memory_is_bounded_by_a_slab_and_not_by_the_model_or_its_largest_tensor(tmp_path):
    layers, hidden, vocabulary = 2, 512, 100_000  # 2 layers of 12.6 MB, and a tensor of 205 MB
    slab = 2 << 20
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": 8, "vocab_size": vocabulary}
    run_ranks(1, save_zeros, ModelConfig(**sizes, max_seq_len=8), tmp_path)
    code = f"""
import resource, sys
from pathlib import Path
from mtcli.core.convert import to_mtcli as convert
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.layout import output_config, parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.checkpoint.opening import open_checkpoint
convert.BOX_BYTES = {slab}
root = Path(sys.argv[1])
source = open_checkpoint(root)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
to_mtcli(source, root / "out", *parse_layout("tp=2"), WriteOptions())
to_hf(open_checkpoint(root / "out"), root / "hf", 10**9, WriteOptions())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown = int(done.stdout) * 1024
    model_bytes = 4 * (layers * 12 * hidden * hidden + vocabulary * hidden)
    # Blocks being written; slabs read, reordered and cast; what malloc keeps of freed memory.
    limit = (8 << 20) + 4 * slab + (64 << 20)
    assert grown < limit < 2 * vocabulary * hidden < model_bytes / 2, f"{grown:,}"


@pytest.mark.parametrize("layout", ["dp=3,zero=1", "hf"])
def test_two_processes_write_the_bytes_of_one(tmp_path, layout):
    run_ranks(1, rank_of)  # the fork server has what other tests need, whichever come first
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    told = {1: [], 2: []}
    for nproc, bytes_told in told.items():
        options = WriteOptions(progress=bytes_told.append, nproc=nproc)
        if layout == "hf":
            to_hf(source, tmp_path / f"{nproc}", 1000, options)
        else:
            to_mtcli(source, tmp_path / f"{nproc}", *parse_layout(layout), options)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("1", "2")
    )
    assert len(one) > 3
    assert one == two
    assert sum(told[1]) == sum(told[2]) > 0


def rank_of(runtime):
    return runtime.rank


def test_a_worker_that_fails_leaves_nothing(tmp_path):
    source = open_checkpoint(save_halves(tmp_path / "src")[0])
    file = source.folder / "rank-00001.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(MtcliError, match=r"rank-00001.safetensors is damaged: it ends at byte"):
        to_mtcli(source, tmp_path / "dst", *parse_layout("pp=2,tp=2"), WriteOptions(nproc=2))
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
