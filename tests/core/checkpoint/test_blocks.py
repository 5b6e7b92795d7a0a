"""Files written in hashed blocks; oracles are safetensors and XXH3's own figures."""

import errno
import os
from time import sleep

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from mtcli.core.checkpoint import blocks
from mtcli.core.checkpoint.blocks import hash_of, write_bytes, write_tensors
from mtcli.core.checkpoint.manifest import BLOCK_BYTES


def write(path, tensors):
    codes = {torch.float32: "F32", torch.bfloat16: "BF16"}
    plan = [(name, codes[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    return write_tensors(path, plan, iter(tensors.values()), {"format": "pt"})


def blocks_of(path):
    data = path.read_bytes()
    starts = range(0, len(data), BLOCK_BYTES)
    return [streamed(data[at : at + BLOCK_BYTES]) for at in starts]


def streamed(data):
    hasher = xxhash.xxh3_128()
    for at in range(0, len(data), 1000):
        hasher.update(data[at : at + 1000])
    return hasher.hexdigest()


def test_the_hash_is_the_published_one_of_128_bits():
    # of nothing, and of the first byte of the sanity buffer of the algorithm's own test vectors
    assert hash_of(b"") == "99aa06d3014798d86001c324468d497f"
    assert hash_of(b"\x00") == "a6cd5e9392000f6ac44bdff4074eecdb"


@pytest.fixture(params=["direct", "buffered", "refused"])
def direct(request, monkeypatch):
    """With direct I/O, without any, and on a file system that refuses it at the first write."""
    if request.param == "buffered":
        monkeypatch.setattr(blocks, "DIRECT", 0)
    if request.param == "refused":
        pwrite, refused = os.pwrite, []

        def first_refused(file, data, offset):
            if not refused:
                refused.append(1)
                raise OSError(errno.EINVAL, "Invalid argument")
            return pwrite(file, data, offset)

        monkeypatch.setattr(os, "pwrite", first_refused)


@pytest.mark.parametrize("count", [1, BLOCK_BYTES // 4 - 40, BLOCK_BYTES // 4 * 4 + 333])
def test_the_library_reads_what_was_written(tmp_path, direct, count):
    tensors = {"x": torch.arange(count, dtype=torch.float32), "y": torch.ones(5).to(torch.bfloat16)}
    record = write(tmp_path / "f", tensors)
    found = load_file(tmp_path / "f")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert record.bytes == (tmp_path / "f").stat().st_size
    assert record.xxh3_128 == blocks_of(tmp_path / "f")


def test_strided_tensors_and_scalars_are_written_in_order(tmp_path):
    tensors = {"t": torch.arange(12.0).view(3, 4).T, "s": torch.tensor(7.0)}
    write(tmp_path / "f", tensors)
    found = load_file(tmp_path / "f")
    assert torch.equal(found["t"], torch.arange(12.0).view(3, 4).T)
    assert found["s"].item() == 7.0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES])
def test_a_file_system_that_refuses_direct_files_gets_ordinary_ones(tmp_path, monkeypatch, number):
    opened = os.open

    def refuse(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    if number == errno.EINVAL:
        write(tmp_path / "f", {"x": torch.arange(9.0)})
        assert torch.equal(load_file(tmp_path / "f")["x"], torch.arange(9.0))
    else:
        with pytest.raises(OSError, match="Permission denied"):
            write(tmp_path / "f", {"x": torch.arange(9.0)})


def test_a_failed_write_is_raised(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "f", {"x": torch.zeros(BLOCK_BYTES)})


def test_a_small_file_is_hashed_by_block(tmp_path):
    data = bytes(range(256)) * (BLOCK_BYTES // 256 + 1)
    record = write_bytes(tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == data
    assert (record.bytes, record.xxh3_128) == (len(data), blocks_of(tmp_path / "f"))


def test_a_buffer_is_filled_again_only_when_it_has_been_written(tmp_path, monkeypatch):
    """On a disk that is slower than the hashes, so that every write is waited for."""

    def slow(file, view, offset):
        sleep(0.05)
        write_at(file, view, offset)

    write_at = blocks._write_at
    monkeypatch.setattr(blocks, "_write_at", slow)
    monkeypatch.setattr(blocks, "WRITE_BYTES", BLOCK_BYTES)
    tensors = {f"{i}": torch.full((BLOCK_BYTES // 4,), float(i)) for i in range(8)}
    write(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_byte_that_moves_from_a_file_to_the_next_changes_their_sampled_hash(tmp_path):
    hashes = set()
    for number, contents in enumerate([(b"ab", b"c"), (b"a", b"bc")]):
        paths = [tmp_path / f"{number}{suffix}" for suffix in (".bin", ".idx")]
        for path, data in zip(paths, contents, strict=True):
            path.write_bytes(data)
        hashes.add(blocks.sampled_hash(paths))
    assert len(hashes) == 2
