"""Shards as tables: what proves that they tile, and manifests that hold them so."""

import base64
import json
import zlib
from math import prod

import numpy as np
import pytest
import torch
from hostile import write_manifest
from hypothesis import given
from hypothesis import strategies as st
from saving import save_halves, values

from mtcli.core.checkpoint import manifest, shard_index, store
from mtcli.core.checkpoint.integrity import verify_hashes
from mtcli.core.checkpoint.manifest import BLOCK_BYTES, MAX_BLOCKS, read_manifest
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.shard_index import boxes_fault, pack, unpack
from mtcli.core.checkpoint.store import block_bytes_of
from mtcli.core.config.errors import MtcliError
from mtcli.core.mesh.sharding import Box

SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def tilings(draw):
    """A shape and boxes, often those of a grid, of which one may be moved or left out."""
    shape = draw(SHAPES)
    cuts = [sorted({0, size, *draw(st.sets(st.integers(0, size)))}) for size in shape]
    sides = [list(zip(edges, edges[1:], strict=False)) or [(0, 0)] for edges in cuts]
    index = np.ndindex(*(len(side) for side in sides))
    ranges = [[side[i] for side, i in zip(sides, at, strict=True)] for at in index]
    boxes = [Box(tuple(a for a, _ in r), tuple(b - a for a, b in r)) for r in ranges]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(boxes) - 1))
        start = tuple(draw(st.integers(0, size)) for size in shape)
        boxes[at] = Box(start, tuple(draw(st.integers(0, 4)) for _ in shape))
    return shape, draw(st.permutations(boxes))


@given(tilings())
def test_boxes_tile_where_each_element_is_counted_once(case):
    shape, boxes = case
    counts = np.zeros(shape, dtype=int)
    inside = all(a + n <= s for box in boxes for a, n, s in zip(*box, shape, strict=True))
    for box in boxes:
        counts[box.slices] += 1
    sizes = sum(prod(box.size) for box in boxes)
    assert (boxes_fault(shape, boxes) == "") == (
        inside and sizes == prod(shape) and bool((counts == 1).all())
    )


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3), max_size=5))
def test_a_table_comes_back_from_its_text(rows):
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    assert (unpack(*pack(table), 1 << 20) == table).all()


@pytest.mark.parametrize(
    ("columns", "text", "words"),
    [
        (3, "!", "base64"),
        (3, base64.b64encode(b"x" * 24).decode(), "not deflated"),
        (3, base64.b64encode(zlib.compress(bytes(8))).decode(), "no rows of 3 numbers"),
        (3, base64.b64encode(zlib.compress(bytes(48))[:-5]).decode(), "no rows of 3 numbers"),
        (3, base64.b64encode(zlib.compress(bytes(24 << 20))).decode(), "or too many"),
    ],
)
def test_text_that_is_no_table_is_refused(columns, text, words):
    with pytest.raises(ValueError, match=f"(?i){words}"):
        unpack(columns, text, 1 << 20)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint whose manifest has tables."""
    monkeypatch.setattr(manifest, "MAX_RECORDS", 0)
    return save_halves(tmp_path)[0]


def test_stored_shards_are_a_sequence(folder):
    boxes = open_checkpoint(folder).tensors["embedding.weight"].boxes
    assert [boxes.index(box) for box in boxes] == list(range(len(boxes))) == [0, 1]


def test_a_manifest_of_tables_opens_to_the_same_tensors(folder):
    table = json.loads((folder / "manifest.json").read_text())
    assert table["version"] == 5 and "pieces" not in table["tensors"]["embedding.weight"]
    checkpoint = open_checkpoint(folder)
    verify_hashes(checkpoint)
    for name, tensor in values().items():
        assert torch.equal(checkpoint.read(name), tensor), name
    box = Box((5, 3), (4, 2))  # rows of both ranks
    assert torch.equal(
        checkpoint.read("embedding.weight", box), values()["embedding.weight"][box.slices]
    )


def test_tensors_of_equal_boxes_share_a_table(folder):
    tensors = json.loads((folder / "manifest.json").read_text())["tensors"]
    name = "blocks.{}.mlp.up.weight"
    of = [
        tensors[kind + name.format(layer)]["table"]
        for kind in ("", "optimizer.exp_avg/")
        for layer in (0, 1)
    ]
    assert len(set(of)) == 1


def test_records_and_tables_say_the_same(tmp_path, monkeypatch):
    records = read_manifest(save_halves(tmp_path / "a")[0])
    monkeypatch.setattr(manifest, "MAX_RECORDS", 0)
    tables = read_manifest(save_halves(tmp_path / "b")[0])
    assert tables.tensors == records.as_tables().tensors
    assert tables.as_short().version == 5
    monkeypatch.setattr(manifest, "MAX_RECORDS", 1 << 16)
    assert tables.as_short().to_bytes() == records.to_bytes()


def change_rows(do):
    def change(table):
        tensor = table["tensors"]["embedding.weight"]
        rows = unpack(*table["tables"][tensor["table"]], 1 << 20).copy()
        table["tables"].append(pack(do(rows)))
        tensor["table"] = len(table["tables"]) - 1

    return change


def put(at, number):
    def do(rows):
        rows[at] = number
        return rows

    return change_rows(do)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put((1, shard_index.FILE), 9), "name a file that it does not list"),
        (put((1, shard_index.FILE), -1), "name a file that it does not list"),
        (put((1, shard_index.KEY), 1), "name a key that it does not list"),
        (put((1, shard_index.FILE), 0), "is in it twice"),
        (put((1, shard_index.REPLICA), 1), "has replica 1 of embedding.weight and says .* 1"),
        (put((1, shard_index.BOX), 0), "overlap at"),
        (put((1, shard_index.BOX), 12), "leave its shape"),
        (put((1, shard_index.BOX), -1), "negative numbers"),
        (put((1, shard_index.BOX + 2), 5), "elements"),
        (change_rows(lambda rows: rows[:, :5]), "do not have the 2 dimensions"),
        (change_rows(lambda rows: rows[:0]), "hold 0 of its"),
        (lambda table: table["tensors"]["embedding.weight"].update(table=99), "no table 99"),
        (lambda table: table["tensors"]["embedding.weight"].pop("table"), "as version 5 has"),
        (lambda table: table["tables"].__setitem__(0, [5, "!"]), "base64"),
        (lambda table: table.update(version=3), "as version 3 has"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_true_is_refused(folder, change, words):
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    change(table)
    write_manifest(path, table)
    with pytest.raises(MtcliError, match=f"(?i)manifest.json is damaged: .*{words}"):
        open_checkpoint(folder)


def test_blocks_of_hashes_grow_so_that_a_checkpoint_has_a_bounded_number(tmp_path, monkeypatch):
    assert [block_bytes_of(n) // BLOCK_BYTES for n in (0, MAX_BLOCKS * BLOCK_BYTES, 5 << 40)] == [
        1,
        1,
        32,
    ]
    monkeypatch.setattr(store, "MAX_BLOCKS", 1)
    ones = {"x": torch.ones(3 * BLOCK_BYTES // 4)}  # of each rank 1.5 times BLOCK_BYTES
    folder = save_halves(tmp_path, tensors=ones)[0]
    record = json.loads((folder / "manifest.json").read_text())["files"]["rank-00000.safetensors"]
    assert record["block_bytes"] == 4 * BLOCK_BYTES and len(record["xxh3_128"]) == 1
    verify_hashes(open_checkpoint(folder))
    with (folder / "rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    with pytest.raises(MtcliError, match="rank-00001.safetensors is damaged: the bytes from 0 do"):
        verify_hashes(open_checkpoint(folder))
