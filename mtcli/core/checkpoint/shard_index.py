"""Holds the shards of a checkpoint as tables of numbers, for thousands of ranks and millions of
shards.

A table has a row for each shard of a tensor [shards, 3 + 2 * dims]: its file, its key in the file,
its replica (-1: all have it), and the start and size of its box. Tensors with equal rows share a
table: a layer's weights and moments do, and those of a stage's layers.
"""

import zlib
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtcli.core.checkpoint.safetensors_file import StoredBox
from mtcli.core.mesh.sharding import Box

FILE, KEY, REPLICA, BOX = 0, 1, 2, 3  # columns of a table; the box takes the rest
MAX_CELLS = 1 << 24  # of the grid that proves that boxes tile a tensor
MAX_UNPACKED = 1 << 30  # bytes of all tables
Table = NDArray[np.int64]
Packed = tuple[int, str]  # columns, and their rows' differences: int64, deflated, base64


class IndexedTensor(NamedTuple):
    """A global tensor: the keys of its shards in their files, and the number of its table."""

    dtype: str
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    table: int


class ShardIndex:
    """The shards of tensors, by name. A table numbers `files` from 0."""

    def __init__(self, files: Iterable[str], packed: Sequence[Packed] = ()) -> None:
        self.files, self.packed = list(files), list(packed)
        self.tensors: dict[str, IndexedTensor] = {}
        self._tables: dict[int, Table] = {}
        self._numbers: dict[Any, int] = {}  # of tables by what they hold
        self._left = MAX_UNPACKED

    def add(
        self, name: str, kind: tuple[str, tuple[int, ...]], rows: list[tuple[Any, ...]]
    ) -> None:
        """Adds a tensor of (dtype, shape); in `rows`, the key is a name, which becomes a number."""
        keys = tuple(dict.fromkeys(row[KEY] for row in rows))
        number = {key: index for index, key in enumerate(keys)}
        numbers = tuple((row[FILE], number[row[KEY]], *row[REPLICA:]) for row in rows)
        width = BOX + 2 * len(kind[1])
        table = self.number_of(
            numbers, lambda: np.array(numbers, dtype=np.int64).reshape(len(numbers), width)
        )
        self.tensors[name] = IndexedTensor(*kind, keys, table)

    def number_of(self, content: Any, make: Any) -> int:
        """Returns the number of the table for `content`; calls `make` for a new one."""
        if content not in self._numbers:
            number = self._numbers[content] = len(self._numbers)
            self._tables[number] = make()
        return self._numbers[content]

    def table(self, tensor: IndexedTensor) -> Table:
        """Returns the rows of a tensor's shards. Raises ValueError where they are damaged."""
        if tensor.table not in self._tables:
            if not 0 <= tensor.table < len(self.packed):
                raise ValueError(f"there is no table {tensor.table}")
            columns, text = self.packed[tensor.table]
            rows = self._tables[tensor.table] = unpack(columns, text, self._left)
            self._left -= rows.nbytes
        return self._tables[tensor.table]

    def packed_tables(self) -> list[Packed]:
        """Encodes all tables as text."""
        return self.packed or [pack(self._tables[number]) for number in range(len(self._tables))]

    def num_shards(self) -> int:
        """Counts the shards of all tensors."""
        return sum(len(self.table(tensor)) for tensor in self.tensors.values())

    def records(self, tensor: IndexedTensor) -> list[dict[str, Any]]:
        """Converts the shards of a tensor to a manifest's records."""
        boxes = StoredShards(self, tensor, "")
        return [
            {"file": b.file, "key": b.key, "start": b.start, "size": b.shape, "replica": b.replica}
            for b in boxes
        ]


def pack(rows: Table) -> Packed:
    """Compresses a table to text, by differences of rows, which are mostly equal."""
    steps = np.diff(rows, axis=0, prepend=np.zeros((1, rows.shape[1]), dtype=np.int64))
    data = np.ascontiguousarray(steps.T, dtype="<i8").tobytes()
    return rows.shape[1], b64encode(zlib.compress(data)).decode()


def unpack(columns: int, text: str, most: int) -> Table:
    """Decodes the rows [shards, columns] of `pack`. Raises ValueError for other text and over
    `most` bytes."""
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(b64decode(text, validate=True), max(most, 1))
    except zlib.error as error:
        raise ValueError(f"a table is not deflated: {error}") from None
    if not inflate.eof or inflate.unused_data or len(data) % (8 * columns):
        raise ValueError(f"a table has no rows of {columns} numbers, or too many")
    return np.cumsum(np.frombuffer(data, "<i8").reshape(columns, -1), axis=1).T


def merge(parts: Sequence[ShardIndex]) -> ShardIndex:
    """Merges the shards of several indices, in order; each numbers its own files.

    Raises ValueError where a tensor has different dtypes or shapes.
    """
    merged = ShardIndex(file for part in parts for file in part.files)
    holders: dict[str, list[tuple[int, IndexedTensor]]] = defaultdict(list)
    for number, part in enumerate(parts):
        for name, tensor in part.tensors.items():
            holders[name].append((number, tensor))
    first_file = np.cumsum([0, *(len(part.files) for part in parts)])

    def rows_of(number: int, table: int, new_keys: tuple[int, ...]) -> Table:
        rows = parts[number].table(IndexedTensor("", (), (), table)).copy()
        rows[:, FILE] += first_file[number]
        rows[:, KEY] = np.array(new_keys)[rows[:, KEY]]
        return rows

    for name, numbered in holders.items():
        kind = numbered[0][1][:2]
        for _, tensor in numbered:
            if tensor[:2] != kind:
                raise ValueError(f"{name} is {tensor[:2]} on one rank and {kind} before")
        keys = tuple(dict.fromkeys(key for _, tensor in numbered for key in tensor.keys))
        new = {key: index for index, key in enumerate(keys)}
        content = tuple(
            (number, tensor.table, tuple(new[key] for key in tensor.keys))
            for number, tensor in numbered
        )
        table = merged.number_of(
            content, lambda content=content: np.concatenate([rows_of(*entry) for entry in content])
        )
        merged.tensors[name] = IndexedTensor(*kind, keys, table)
    return merged


def fault_of(index: ShardIndex, replicas: int) -> str:
    """Words a contradiction in an index; "" where each tensor's shards, of each replica, tile it,
    their files are listed, and no stored tensor is used twice."""
    sound: set[tuple[tuple[int, ...], int]] = set()
    with_key: dict[str, list[tuple[int, int]]] = defaultdict(list)  # of a key: tables, its number
    for name, tensor in index.tensors.items():
        for number, key in enumerate(tensor.keys):
            with_key[key].append((tensor.table, number))
        if (tensor.shape, tensor.table) in sound:
            continue
        try:
            rows = index.table(tensor)
        except ValueError as error:
            return f"{name}: {error}"
        if fault := _table_fault(name, tensor, rows, len(index.files), replicas):
            return fault
        sound.add((tensor.shape, tensor.table))
    tables = {tensor.table: index.table(tensor) for tensor in index.tensors.values()}
    once: set[tuple[int, int]] = set()
    for key, uses in with_key.items():
        if len(uses) == 1 and uses[0] in once:
            continue
        files = np.concatenate(
            [tables[table][tables[table][:, KEY] == number, FILE] for table, number in uses]
        )
        file_numbers, counts = np.unique(files, return_counts=True)
        if (counts > 1).any():  # a small file would be a model of any size
            return f"{key} of {index.files[file_numbers[counts > 1][0]]} is in it twice"
        once.update(uses)
    return ""


def _table_fault(
    name: str, tensor: IndexedTensor, rows: Table, num_files: int, replicas: int
) -> str:
    dims = len(tensor.shape)
    if rows.shape[1] != BOX + 2 * dims:
        return f"the pieces of {name} do not have the {dims} dimensions of its shape"
    for column, end, what in ((FILE, num_files, "file"), (KEY, len(tensor.keys), "key")):
        if ((rows[:, column] < 0) | (rows[:, column] >= end)).any():
            return f"the pieces of {name} name a {what} that it does not list"
    if len(rows) and (most := rows[:, REPLICA].max()) >= replicas:
        return f"it has replica {most} of {name} and says that there are {replicas}"
    if (rows[:, REPLICA] < -1).any() or (rows[:, BOX:] < 0).any():
        return f"the pieces of {name} have negative numbers"
    differs = (rows[:, REPLICA] >= 0).any()
    for replica in range(replicas) if differs else (-1,):
        boxes = rows[(rows[:, REPLICA] == -1) | (rows[:, REPLICA] == replica), BOX:]
        if fault := tiling_fault(tensor.shape, boxes[:, :dims], boxes[:, dims:]):
            which = name if replica < 0 else f"replica {replica} of {name}"
            return f"the pieces of {which} {fault}"
    return ""


def boxes_fault(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """Applies `tiling_fault` to boxes of non-negative numbers of any size."""
    for box in boxes:
        if not len(box.start) == len(box.size) == len(shape):
            return f"do not have the {len(shape)} dimensions of its shape"
        if any(a + n > size for a, n, size in zip(*box, shape, strict=True)):
            return f"leave its shape {list(shape)}: start {box.start}, size {box.size}"
    table = np.array(boxes, dtype=np.int64).reshape(len(boxes), 2, len(shape))
    return tiling_fault(shape, table[:, 0], table[:, 1])


def tiling_fault(shape: tuple[int, ...], starts: Table, sizes: Table) -> str:
    """Words how boxes [n, dims] fail to cover every element of a tensor once; "" if they do.

    Neither starts nor sizes are negative.
    """
    outside = (starts > np.array(shape, dtype=np.int64) - sizes).any(axis=1)
    if outside.any():
        first = int(outside.argmax())
        start, size = (tuple(numbers[first].tolist()) for numbers in (starts, sizes))
        return f"leave its shape {list(shape)}: start {start}, size {size}"
    exact = np.int64 if prod(n or 1 for n in shape) * max(1, len(sizes)) < 2**63 else object
    count = int(sizes.astype(exact).prod(axis=1).sum()) if len(sizes) else 0
    if count != prod(shape):
        return f"hold {count} of its {prod(shape)} elements"
    return "" if len(sizes) < 2 else _overlap(starts, starts + sizes)


def _overlap(starts: Table, ends: Table) -> str:
    """Says where boxes overlap, by counting them in the cells of the grid of all edges."""
    split = ((starts != starts[0]) | (ends != ends[0])).any(axis=0)  # other dims are alike in all
    split[0] |= not split.any()
    empty = (starts == ends).any(axis=1)
    where, low, high = starts[~empty], starts[~empty][:, split], ends[~empty][:, split]
    edges = [np.unique(np.concatenate([a, b])) for a, b in zip(low.T, high.T, strict=True)]
    if prod(len(edge) for edge in edges) > MAX_CELLS:
        return f"are cut in more than {MAX_CELLS} ways"
    corners = [
        (np.searchsorted(edge, a), np.searchsorted(edge, b))
        for edge, a, b in zip(edges, low.T, high.T, strict=True)
    ]
    # +1 where a box begins and -1 where it ends, in each dim: sums along dims count boxes
    counts = np.zeros([len(edge) for edge in edges], dtype=np.int32)
    for ends_of in product((0, 1), repeat=len(corners)):
        sign = -1 if sum(ends_of) % 2 else 1
        np.add.at(counts, tuple(c[end] for c, end in zip(corners, ends_of, strict=True)), sign)
    for dim in range(counts.ndim):
        np.cumsum(counts, axis=dim, out=counts)
    if (counts <= 1).all():
        return ""
    cells = np.zeros(counts.shape, dtype=bool)
    for box in range(len(where)):
        index = tuple(slice(a[box], b[box]) for a, b in corners)
        if cells[index].any():
            return f"overlap at {where[box].tolist()}"
        cells[index] = True
    raise AssertionError("a cell that two boxes have is met twice")


class StoredShards(Sequence[StoredBox]):
    """The stored boxes of a tensor of an index, built on demand; only those of `replica` where
    given."""

    def __init__(
        self, index: ShardIndex, tensor: IndexedTensor, code: str, replica: int | None = None
    ) -> None:
        self.shards, self.tensor, self.code, self.replica = index, tensor, code, replica

    @cached_property
    def rows(self) -> Table:
        """The table's rows."""
        rows = self.shards.table(self.tensor)
        if self.replica is None:
            return rows
        of_replica: Table = rows[(rows[:, REPLICA] == -1) | (rows[:, REPLICA] == self.replica)]
        of_replica[:, REPLICA] = -1
        return of_replica

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        return self._box(self.rows[at].tolist())

    def __iter__(self) -> Iterator[StoredBox]:
        return map(self._box, self.rows.tolist())

    @property
    def differs(self) -> bool:
        """True where replicas have different elements."""
        return bool((self.rows[:, REPLICA] >= 0).any())

    def of_replica(self, index: int) -> "StoredShards":
        return StoredShards(self.shards, self.tensor, self.code, index)

    def meeting(self, box: Box, replica: int | None) -> Iterator[StoredBox]:
        """Yields the boxes of a replica, or of all, that overlap a box."""
        dims, rows = len(box.start), self.rows
        low = np.maximum(rows[:, BOX : BOX + dims], box.start)
        high = np.minimum(
            rows[:, BOX : BOX + dims] + rows[:, BOX + dims :], np.add(box.start, box.size)
        )
        meets = (low < high).all(axis=1)
        meets &= (rows[:, REPLICA] == -1) | (
            rows[:, REPLICA] == (-1 if replica is None else replica)
        )
        return map(self._box, rows[meets].tolist())

    def in_files(self, chosen: NDArray[np.bool_]) -> Iterator[StoredBox]:
        """Yields the boxes in the files that `chosen` [files] marks."""
        return map(self._box, self.rows[chosen[self.rows[:, FILE]]].tolist())

    def _box(self, row: list[int]) -> StoredBox:
        dims = len(self.tensor.shape)
        box = Box(tuple(row[BOX : BOX + dims]), tuple(row[BOX + dims :]))
        replica = None if row[REPLICA] < 0 else row[REPLICA]
        file, key = self.shards.files[row[FILE]], self.tensor.keys[row[KEY]]
        return StoredBox.plain(file, key, self.code, box, replica)
