"""Files of lines: compressed ones, JSON arrays and Parquet give the lines of a plain file."""

import bz2
import gzip
import json
import lzma
from functools import partial

import pytest
from chats import talks, write_lines

from mtcli.core.config.errors import MtcliError
from mtcli.core.data import compressed, line_files
from mtcli.core.data.bad_lines import json_object
from mtcli.core.data.line_files import read_lines

LINES = [line | {"id": i, "tags": ["é", None]} for i, line in enumerate(talks(300))]


def records(path):
    read, faults = read_lines(path, lambda line: partial(json_object, line), "data.train")
    return read, [(number, fault.reason) for number, fault in faults]


def zstd(data):
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor().compress(data)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_has_the_lines_of_the_plain_one(tmp_path, suffix):
    plain = write_lines(tmp_path / "a.jsonl", LINES)
    plain.write_bytes(b"\n" + plain.read_bytes() + b"[1]")
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](plain.read_bytes()))
    read, faults = records(path)
    assert (read, faults) == records(plain)
    assert read == [(i + 2, line) for i, line in enumerate(LINES)]
    assert faults == [(302, "it is no JSON object")]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(MtcliError, match=rf"a.jsonl{suffix} cannot be read: .*end"):
        records(path)


def test_an_array_has_its_items_and_json_may_be_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*LINES, 7], indent=1))
    read, faults = records(path)
    assert read == [(i + 1, line) for i, line in enumerate(LINES)]
    assert faults == [(301, "it is no JSON object")]
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf\n " + path.read_bytes()))
    assert records(tmp_path / "b.json.gz") == (read, faults)
    assert records(write_lines(path, LINES)) == (read, [])
    path.write_text('[{"a": 1}, ')
    with pytest.raises(MtcliError, match="a.json begins as a JSON array, and is none"):
        records(path)


def test_rows_of_parquet_have_no_fields_that_are_null(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    lines = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "é"}]},
        {"messages": [{"role": "assistant", "content": "b", "weight": 0.5}], "n": 3},
    ]
    pq.write_table(pa.Table.from_pylist(lines, pa.schema([
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()),
                                         ("weight", pa.float64())]))),
        ("n", pa.int64()),
    ])), tmp_path / "a.parquet")  # fmt: skip
    assert records(tmp_path / "a.parquet") == ([*enumerate(lines, start=1)], [])
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(MtcliError, match="b.parquet: the file is damaged"):
        records(tmp_path / "b.parquet")


def test_what_a_file_may_become_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "FREE_BYTES", 1000)
    monkeypatch.setattr(compressed, "MAX_RATIO", 10)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 9000))
    with pytest.raises(MtcliError, match=r"a.jsonl.gz holds .* over 10 times as many"):
        records(path)
    monkeypatch.setattr(line_files, "MAX_BYTES", 100)
    (tmp_path / "a.json").write_text(json.dumps(LINES))
    with pytest.raises(MtcliError, match="a JSON array of more than 100 bytes"):
        records(tmp_path / "a.json")


def test_the_report_of_a_pair_is_no_file_of_lines(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.idx").write_bytes(b"")
    with pytest.raises(MtcliError, match=r"a.json describes a pair of .bin and .idx"):
        records(tmp_path / "a.json")
