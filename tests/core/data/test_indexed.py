"""`.bin` and `.idx` against megatron-core's own reader and builder, and against nonsense."""

import struct
from pathlib import Path

import numpy as np
import pytest
from indexed_dataset import write_dataset

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.indexed import Indexed, token_dtype
from mtcli.core.data.tokenized import is_text


@pytest.mark.parametrize("vocab", [65499, 65500])
def test_megatron_reads_what_we_write(make_dataset, vocab):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset

    prefix, documents = make_dataset(vocab=vocab)
    theirs = IndexedDataset(prefix)
    assert theirs.index.dtype == DType.optimal_dtype(vocab)
    assert len(theirs) == len(documents)
    for ours, document in zip(theirs, documents, strict=True):
        assert np.array_equal(ours, document)
    assert np.array_equal(theirs.document_indices, np.arange(len(documents) + 1))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_we_read_what_megatron_writes(tmp_path, dtype):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = [[[1, 2, 3], [4]], [[5, 6]], [], [[7]]]  # documents of several sequences, and empty
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype)
    for document in documents:
        flat = [token for sequence in document for token in sequence]
        builder.add_document(torch.tensor(flat), [len(sequence) for sequence in document])
    builder.finalize(str(tmp_path / "x.idx"))
    ours = Indexed(tmp_path / "x")
    assert [ours[i].tolist() for i in range(len(ours))] == [[1, 2, 3], [4], [5, 6], [7]]
    assert ours.documents.tolist() == [0, 2, 3, 3, 4]
    assert (ours.num_tokens, ours.dtype) == (7, np.dtype(dtype))


def test_the_bytes_of_an_index_are_megatrons(make_dataset, tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, documents = make_dataset()
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"theirs{suffix}").read_bytes() == Path(prefix + suffix).read_bytes()


def test_vocabularies_get_megatrons_dtype():
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def _mutated(prefix, change):
    path = Path(f"{prefix}.idx")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.__setitem__(slice(0, 9), b"TNTIDX\0\0\1"), "fairseq's old format"),
        (lambda d: d.__setitem__(slice(0, 3), b"xyz"), "does not start with Megatron's header"),
        (lambda d: d.__setitem__(9, 2), "has version 2, not 1"),
        (lambda d: d.__setitem__(17, 6), "has dtype code 6: float64, which no token is"),
        (lambda d: d.__setitem__(17, 99), "has dtype code 99: no number that we know"),
        (lambda d: d.pop(), "is 841 bytes, and 40 sequences and 41 boundaries take 842"),
        (lambda d: d.extend(bytes(40)), "has a mode for every sequence: multimodal data"),
        (lambda d: d.__setitem__(slice(34, 38), struct.pack("<i", -5)), "a sequence of -5 tokens"),
        (lambda d: d.__setitem__(34, d[34] + 1), "pointers that are not the sum of the lengths"),
        (lambda d: d.__setitem__(-8, 39), "document boundaries that do not run from 0 to 40"),
        (lambda d: d.__setitem__(-16, 1), "document boundaries that go backwards"),
        (lambda d: d.__setitem__(slice(20, None), b""), "does not start with Megatron's header"),
    ],
)
def test_a_wrong_index_is_refused(make_dataset, change, message):
    prefix, _ = make_dataset()
    _mutated(prefix, change)
    with pytest.raises(MtcliError, match=message):
        Indexed(prefix)


def test_a_missing_file_is_named(tmp_path, make_dataset):
    with pytest.raises(MtcliError, match="no file .*absent.idx"):
        Indexed(tmp_path / "absent")
    prefix, _ = make_dataset()
    (tmp_path / "data.bin").unlink()
    with pytest.raises(MtcliError, match=r"no file .*data\.bin"):
        Indexed(prefix)


def test_a_relative_path_that_is_missing_is_said_to_begin_in_the_working_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MtcliError) as raised:
        Indexed(Path("elsewhere/data"))
    assert f"; a relative one begins at {tmp_path}" in str(raised.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_file_of_a_pair_is_answered_with_its_prefix(make_dataset, suffix):
    prefix, _ = make_dataset("data.v1")
    with pytest.raises(MtcliError, match=rf"hint: name the prefix of the pair: {prefix}$"):
        Indexed(prefix + suffix)


def test_another_tools_dtype_table_is_seen_by_the_size(make_dataset):
    prefix, _ = make_dataset(vocab=70000)  # int32
    _mutated(prefix, lambda d: d.__setitem__(17, 8))
    with pytest.raises(MtcliError, match="pointers that are not the sum"):
        Indexed(prefix)


def test_tokens_that_are_cut_short_are_refused(make_dataset):
    prefix, documents = make_dataset()
    total = sum(map(len, documents))
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(total)
    expected = f"is {total} bytes, and its index says {total} tokens of 2 bytes = {2 * total}"
    with pytest.raises(MtcliError, match=f"{expected}: 1 bytes each"):
        Indexed(prefix)


def test_a_folder_of_data_sets_is_answered_with_the_prefixes_in_it(tmp_path):
    (tmp_path / "pairs").mkdir()
    for name in ("a", "b"):
        write_dataset(tmp_path / "pairs" / name, [np.arange(3)], np.dtype(np.uint16))
    (tmp_path / "pairs" / "half.idx").write_bytes(b"")
    with pytest.raises(MtcliError) as caught:
        Indexed(tmp_path / "pairs")
    (problem,) = caught.value.problems
    assert "is a folder of data sets, and none itself" in problem.message
    prefixes = f"{tmp_path}/pairs/a, {tmp_path}/pairs/b"
    assert problem.hint == f"name the prefix of a pair: {prefixes}"
    assert not is_text(str(tmp_path / "pairs"))
    (tmp_path / "pairs" / "more.txt").write_text("text\n")
    assert is_text(str(tmp_path / "pairs")), "a folder may have text beside data sets"
