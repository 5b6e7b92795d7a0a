"""Saving from several ranks: what is there after, and what is left after a failure."""

import errno
import json
import os
import shutil
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from saving import CONFIG, MODEL, on_ranks, save_halves, values

from mtcli.core.checkpoint import store
from mtcli.core.checkpoint.integrity import verify_hashes
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.safetensors_file import read_header
from mtcli.core.checkpoint.store import Shard, save
from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.config.loading import dump_toml
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.parallel.tree import ALONE
from mtcli.core.runtime import atomic_writes


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_rank_gets_the_folder_and_every_tensor_comes_back(tmp_path):
    results = save_halves(tmp_path, step=7)
    assert results == [tmp_path / "step-00000007"] * 2
    checkpoint = open_checkpoint(results[0])
    assert checkpoint.step == 7
    assert checkpoint.extra == {"consumed_samples": 8}
    assert checkpoint.config == CONFIG
    assert checkpoint.model == MODEL
    assert checkpoint.world == 2
    assert checkpoint.tokenizer_folder is None
    for name, tensor in values().items():
        assert torch.equal(checkpoint.read(name), tensor), name
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype
    assert set(checkpoint.names()) == set(values())


def test_the_files_are_safetensors_of_each_ranks_pieces(tmp_path):
    folder, _ = save_halves(tmp_path)
    found = load_file(folder / "rank-00001.safetensors")
    expected = values()["embedding.weight"].tensor_split(2)[1]
    assert torch.equal(found["embedding.weight"], expected)
    assert names(folder) == [
        "config.toml",
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def test_several_pieces_of_one_tensor_and_mixed_dtypes_fit_in_one_file(tmp_path):
    x, y = torch.randn(4, 3).to(torch.bfloat16), torch.randn(5, dtype=torch.float64)
    pieces = [Shard("x", x[i : i + 1], (i, 0), (4, 3)) for i in range(4)]
    pieces += [Shard("y", y, (0,), (5,)), Shard("x", x[:0], (0, 0), (4, 3))]
    about = {"extra": {}, "config_toml": dump_toml(CONFIG), "tokenizer": None, "keep": 0}
    folder = save(tmp_path, 1, pieces, ranks=ALONE, **about)
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.read("x"), x)
    assert torch.equal(checkpoint.read("y"), y)


def test_tensors_start_at_multiples_of_their_item_size(tmp_path):
    odd, wide = torch.ones(3, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    pieces = [Shard("odd", odd, (0,), (3,)), Shard("wide", wide, (0,), (2,))]
    about = {"extra": {}, "config_toml": dump_toml(CONFIG), "tokenizer": None, "keep": 0}
    folder = save(tmp_path, 1, pieces, ranks=ALONE, **about)
    header = read_header(folder / "rank-00000.safetensors")
    assert header["wide"].offset % 8 == 0
    assert header["odd"].offset % 2 == 0


def test_a_rank_that_owns_nothing_writes_no_file(tmp_path):
    def work(rank, ranks):
        pieces = [Shard("x", torch.ones(2), (0,), (2,))] if rank else []
        about = {"extra": {}, "config_toml": dump_toml(CONFIG), "tokenizer": None, "keep": 0}
        return save(tmp_path, 1, pieces, ranks=ranks, **about)

    folder = on_ranks(2, work)[0]
    assert "rank-00000.safetensors" not in names(folder)
    assert open_checkpoint(folder).read("x").tolist() == [1.0, 1.0]


def test_the_tokenizer_is_copied_and_hashed(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / ".hidden").write_text("not copied")
    folder, _ = save_halves(tmp_path / "run", tokenizer=source)
    checkpoint = open_checkpoint(folder)
    assert names(checkpoint.tokenizer_folder) == ["tokenizer.json"]
    (folder / "tokenizer" / "tokenizer.json").write_text("[]")
    with pytest.raises(MtcliError, match=r"tokenizer\.json is damaged: the bytes from 0"):
        verify_hashes(open_checkpoint(folder))


def test_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save_halves(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    save_halves(tmp_path, 5, keep=0)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]


def test_the_checkpoint_just_written_is_kept_even_where_later_steps_exist(tmp_path):
    for step in (8, 9):
        save_halves(tmp_path, step)
    save_halves(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-00000003", "step-00000009"]


def test_retention_leaves_links_and_what_a_user_keeps_in_a_checkpoint(tmp_path):
    root, warnings = tmp_path / "checkpoints", []
    for step in (1, 2, 3):
        save_halves(root, step)
    (root / "step-00000001").rename(tmp_path / "elsewhere")
    (root / "step-00000001").symlink_to(tmp_path / "elsewhere")
    (root / "step-00000002" / "notes.txt").write_text("precious")
    shutil.copytree(root / "step-00000002", root / "step-00000009.partial")
    save_halves(root, 4, keep=1, warn=warnings.append)
    expected = ["step-00000001", "step-00000002", "step-00000004", "step-00000009.partial"]
    assert names(root) == expected
    assert (tmp_path / "elsewhere" / "manifest.json").exists()
    assert warnings == [f"{root}/step-00000002 stays: notes.txt in it is of no checkpoint"]


def test_a_step_saved_again_replaces_the_first(tmp_path):
    save_halves(tmp_path, 1)
    folder, _ = save_halves(tmp_path, 1, tensors=values(seed=1))
    assert names(tmp_path) == ["step-00000001"]
    name = "final_norm.weight"
    assert torch.equal(open_checkpoint(folder).read(name), values(seed=1)[name])


def test_what_a_killed_run_left_is_neither_opened_nor_kept(tmp_path):
    save_halves(tmp_path / "checkpoints", 1)
    left = tmp_path / "checkpoints" / "step-00000002.partial"
    shutil.copytree(tmp_path / "checkpoints" / "step-00000001", left)
    assert open_checkpoint(tmp_path).step == 1
    save_halves(tmp_path / "checkpoints", 3)
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_full_disk_on_one_rank_fails_every_rank_and_keeps_the_last_checkpoint(
    tmp_path, monkeypatch, broken
):
    save_halves(tmp_path, 1)
    write = store.write_tensors

    def full(path, *rest):
        if path.name == f"rank-{broken:05d}.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *rest)

    monkeypatch.setattr(store, "write_tensors", full)
    for error in save_halves(tmp_path, 2, keep=1):
        assert isinstance(error, MtcliError)
        assert error.code == Exit.FAILED
        assert f"rank {broken}: " in str(error)
        assert "No space left on device" in str(error)
        assert "the checkpoints saved before are whole" in str(error)
    assert names(tmp_path) == ["step-00000001"]
    verify_hashes(open_checkpoint(tmp_path))


def test_a_disk_with_too_little_room_fails_before_a_byte_is_written(tmp_path, monkeypatch):
    needed, room = sum(tensor.nbytes for tensor in values().values()), []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=room[-1]))
    room.append(needed)
    assert save_halves(tmp_path, 1) == [tmp_path / "step-00000001"] * 2
    room.append(needed - 1)
    monkeypatch.setattr(store, "write_tensors", lambda *_: pytest.fail("it writes"))
    first, second = save_halves(tmp_path, 2)
    both = f"step-00000002 takes {needed} bytes and the disk has {needed - 1} free"
    assert both in str(first) and str(first) == str(second)
    assert names(tmp_path) == ["step-00000001"]


def test_a_manifest_that_cannot_be_written_fails_every_rank(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(store, "write_bytes", full)
    assert all(isinstance(error, MtcliError) for error in save_halves(tmp_path, 2))
    assert names(tmp_path) == []


def test_a_root_that_cannot_be_made_fails_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    for error in save_halves(tmp_path / "file" / "checkpoints"):
        assert "Not a directory" in str(error)


def test_an_error_of_any_kind_is_told_to_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "write_tensors", lambda *_: 1 / 0)
    for error in save_halves(tmp_path):
        assert "rank 0: ZeroDivisionError: division by zero" in str(error)


def test_pieces_that_do_not_tile_their_tensor_are_refused(tmp_path):
    about = {"extra": {}, "config_toml": dump_toml(CONFIG), "tokenizer": None, "keep": 0}
    pieces = [Shard("x", torch.ones(2), (0,), (3,))]
    with pytest.raises(MtcliError, match="the pieces of x hold 2 of its 3 elements"):
        save(tmp_path, 1, pieces, ranks=ALONE, **about)
    pieces = [Shard("x", torch.ones(2), (i,), (4,)) for i in (0, 1)]
    with pytest.raises(MtcliError, match=r"the pieces of x overlap at \[1\]"):
        save(tmp_path, 1, pieces, ranks=ALONE, **about)


def test_ranks_that_disagree_on_a_shape_are_refused(tmp_path):
    def work(rank, ranks):
        about = {"extra": {}, "config_toml": dump_toml(CONFIG), "tokenizer": None, "keep": 0}
        pieces = [Shard("x", torch.ones(1), (rank,), (2 + rank,))]
        return save(tmp_path, 1, pieces, ranks=ranks, **about)

    for error in on_ranks(2, work):
        assert "x is ('float32', (3,)) on one rank and ('float32', (2,)) before" in str(error)


def test_a_dtype_that_checkpoints_do_not_hold_is_refused(tmp_path):
    about = {"extra": {}, "config_toml": dump_toml(CONFIG), "tokenizer": None, "keep": 0}
    with pytest.raises(MtcliError, match="a checkpoint cannot hold int64 tensors"):
        piece = Shard("x", torch.ones(2, dtype=torch.int64), (0,), (2,))
        save(tmp_path, 1, [piece], ranks=ALONE, **about)


def test_the_manifest_is_plain_json(tmp_path):
    folder, _ = save_halves(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == 3
    assert manifest["step"] == 1
    assert manifest["tensors"]["embedding.weight"]["shape"] == [13, 12]
    assert manifest["tensors"]["embedding.weight"]["pieces"][1] == {
        "file": "rank-00001.safetensors",
        "key": "embedding.weight",
        "start": [7, 0],
        "size": [6, 12],
    }
    size = manifest["files"]["rank-00000.safetensors"]["bytes"]
    assert size == os.path.getsize(folder / "rank-00000.safetensors")


@pytest.fixture
def durable(monkeypatch, tmp_path):
    """Checks at each rename that what gets its name is durable; the names that were given.

    A file is durable once it is fsynced, and its name once its folder is, after that.
    """
    synced, named, clock = {}, [], count()
    fsync, rename, swap = os.fsync, os.rename, atomic_writes._swap

    def noted(file):
        fsync(file)
        synced[os.readlink(f"/proc/self/fd/{file}")] = next(clock)

    def checked(source, target, name=rename):
        source, target = str(source), str(target)
        for path in (path for path in Path(source).rglob("*") if path.is_file()):
            assert str(path) in synced, f"{path} was not fsynced"
            for folder in path.parents[: len(path.relative_to(source).parts)]:
                assert synced.get(str(folder), -1) > synced[str(path)], f"{folder}: {path.name}"
        answer = name(Path(source), Path(target))
        for path in [path for path in synced if f"{path}/".startswith(f"{source}/")]:
            synced[target + path.removeprefix(source)] = synced.pop(path)
        synced.pop(str(Path(target).parent), None)
        named.append(Path(target))
        return answer

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", checked)
    monkeypatch.setattr(atomic_writes, "_swap", partial(checked, name=swap))
    yield named
    above = {folder for path in named for folder in path.parents if tmp_path in folder.parents}
    assert not {str(folder) for folder in above} - synced.keys(), "names that may be lost"


def test_a_checkpoint_is_durable_before_it_has_its_name_and_its_name_when_it_is_told(
    tmp_path, durable
):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    save_halves(tmp_path / "runs" / "x" / "checkpoints", 1, tokenizer=source)
    save_halves(tmp_path / "runs" / "x" / "checkpoints", 1, tokenizer=source)  # over it
    name = tmp_path / "runs/x/checkpoints/step-00000001"
    assert durable == [name, name]


def test_a_conversion_is_durable_before_it_has_its_name(tmp_path, durable):
    save_halves(tmp_path / "run", 1)
    target = tmp_path / "a" / "b" / "c"
    to_mtcli(open_checkpoint(tmp_path / "run"), target, *parse_layout(""), WriteOptions())
    assert durable[1:] == [target]
