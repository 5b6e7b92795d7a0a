"""Boxes read from files; the oracle is numpy slicing of the whole array."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtcli.core.checkpoint import resharding
from mtcli.core.checkpoint.resharding import read_box
from mtcli.core.config.errors import MtcliError
from mtcli.core.mesh.sharding import Box, intersection

PREFIX = 24  # bytes before the tensor


def store(path, array):
    path.write_bytes(bytes(PREFIX) + array.tobytes())
    return path


@st.composite
def shapes_and_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
    return shape, Box(start, size)


@given(case=shapes_and_boxes(), run=st.sampled_from([1, 16, 1 << 18]), window=st.integers(1, 200))
def test_a_box_is_the_slice_of_the_whole(tmp_path_factory, monkeypatch_module, case, run, window):
    shape, box = case
    monkeypatch_module.setattr(resharding, "RUN_BYTES", run)
    monkeypatch_module.setattr(resharding, "WINDOW_BYTES", window)
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    path = store(tmp_path_factory.mktemp("b") / "f", whole)
    into = torch.full(box.size, -1.0)
    read_box(path.open("rb", 0), PREFIX, shape, box, into)
    assert np.array_equal(into.numpy(), whole[box.slices])


def test_a_box_fills_strided_memory(tmp_path):
    whole = np.arange(60, dtype=np.float64).reshape(3, 4, 5)
    path = store(tmp_path / "f", whole)
    target = torch.zeros(5, 4, 3, dtype=torch.float64)
    read_box(
        path.open("rb", 0), PREFIX, (3, 4, 5), Box((0, 0, 0), (3, 4, 5)), target.permute(2, 1, 0)
    )
    assert np.array_equal(target.numpy(), whole.transpose(2, 1, 0))


def test_only_the_bytes_that_are_needed_are_read(tmp_path, monkeypatch):
    whole = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    path = store(tmp_path / "f", whole)
    read, preadv = [], os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda f, b, at: (read.append(len(b[0])), preadv(f, b, at))[1]
    )
    into = torch.empty(512, 1024)
    read_box(path.open("rb", 0), PREFIX, (1024, 1024), Box((256, 0), (512, 1024)), into)
    assert sum(read) == 512 * 1024 * 4
    read.clear()
    narrow = torch.empty(1024, 4)  # 16 bytes of every 4096: the gaps are not read
    read_box(path.open("rb", 0), PREFIX, (1024, 1024), Box((0, 8), (1024, 4)), narrow)
    assert sum(read) == 1024 * 4 * 4
    assert np.array_equal(narrow.numpy(), whole[:, 8:12])


def test_a_file_that_ends_early_is_named(tmp_path):
    path = store(tmp_path / "f", np.zeros(10, dtype=np.float32))
    with pytest.raises(MtcliError, match=r"f is damaged: it ends at byte 64 and 68 are needed"):
        read_box(path.open("rb", 0), PREFIX, (11,), Box((0,), (11,)), torch.empty(11))


def test_a_read_that_fails_is_named(tmp_path, monkeypatch):
    path = store(tmp_path / "f", np.zeros(4, dtype=np.float32))

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(MtcliError, match=r"byte 24 cannot be read \(Input/output error\)"):
        read_box(path.open("rb", 0), PREFIX, (4,), Box((0,), (4,)), torch.empty(4))


@given(shapes_and_boxes(), st.data())
def test_an_intersection_holds_the_elements_of_both(case, data):
    shape, a = case
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - b)) for n, b in zip(shape, start, strict=True))
    b = Box(start, size)
    marks = np.zeros(shape, dtype=int)
    marks[a.slices] += 1
    marks[b.slices] += 1
    both = intersection(a, b)
    if both is None:
        assert not (marks == 2).any()
    else:
        assert (marks[both.slices] == 2).all()
        assert (marks == 2).sum() == np.prod(both.size)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch
