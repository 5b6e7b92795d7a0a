"""What is held of a document, and what may come out of a file, is bounded before it is read."""

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import slow_cases

import mtcli.core.data.compressed as compressed
import mtcli.core.data.documents as documents
from mtcli.core.config.errors import MtcliError
from mtcli.core.data.compressed import pieces
from mtcli.core.data.documents import Bad, Reading, Text, read_documents
from mtcli.core.data.sources import FileRange, cut, find_sources, spool

MB = 1 << 20


def read(path, kind=None, blank=False, most=None, key="text", cuttable=False, tell=lambda _: None):
    (source,) = find_sources([str(path)], kind).sources
    reading = Reading(key, blank, cuttable, most)
    return list(read_documents(FileRange(source, 0, source.size), reading, tell))


def whole(items):
    """Texts with parts joined; a Bad as (line, kind)."""
    found, parts = [], []
    for item in items:
        if isinstance(item, Bad):
            found.append((item.line, item.kind))
        else:
            parts.append(item.text)
            if item.ends:
                found.append("".join(parts))
                parts = []
    assert not parts
    return found


def zst(data):
    return pytest.importorskip("zstandard").compress(data)


COMPRESS = {
    ".gz": gzip.compress,
    ".xz": partial(lzma.compress, preset=0),
    ".bz2": partial(bz2.compress, compresslevel=1),
    ".zst": zst,
}


@given(st.lists(st.integers(0, 60)), st.integers(1, 70), st.sampled_from([1, 2, 3, 7, 64, 1000]))
def test_lines_that_are_too_long_are_named_and_the_others_are_read(
    tmp_path_factory, lengths, most, window
):
    folder = tmp_path_factory.mktemp("x")
    lines = [json.dumps({"text": "x" * n}) for n in lengths]
    (folder / "a.jsonl").write_text("\n".join(lines))
    expected = [
        "x" * n if n <= most and len(line) <= max(most, 40) else (number, "too large")
        for number, (n, line) in enumerate(zip(lengths, lines, strict=True), 1)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "WINDOW", window)
        patch.setattr(documents, "HELD_BYTES", 40)
        # What is read together with a line that fits is known to fit, or not, by itself.
        found = whole(read(folder / "a.jsonl", most=most))
    assert len(found) == len(expected)
    for one, other, n, line in zip(found, expected, lengths, lines, strict=True):
        assert one == other or (n <= most < len(line) and one == "x" * n)


@given(
    st.lists(st.sampled_from(["ab", "cdefgh\nijk", "l" * 30, "m\nn\no" * 5])),
    st.sampled_from(["\n\n", "\n\n\n", "\n \n", "\n\r\n"]),
    st.integers(1, 40),
    st.sampled_from([16, 19, 64, 1000]),
)
def test_blocks_that_are_too_long_are_named_and_the_others_are_read(
    tmp_path_factory, blocks, gap, most, window
):
    path = tmp_path_factory.mktemp("x") / "a.txt"
    path.write_bytes(gap.join(blocks).encode())
    expected, line = [], 1
    for block in blocks:
        expected.append(block if len(block) <= most else (line, "too large"))
        line += (block + gap).count("\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "WINDOW", window)
        found = whole(read(path, blank=True, most=most))
    texts = [one for one in expected if isinstance(one, str)]
    assert [one for one in found if isinstance(one, str)] == texts, found
    bad = [one for one in found if not isinstance(one, str)]
    assert bad == [one for one in expected if not isinstance(one, str)]


@pytest.mark.parametrize("cuttable", [True, False])
def test_a_text_file_has_the_limit_too(tmp_path, monkeypatch, cuttable):
    monkeypatch.setattr(documents, "WINDOW", 64)
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    size = 1100
    too_large = [(1, "too large")]
    assert whole(read(tmp_path / "a.txt", most=size - 1, cuttable=cuttable)) == too_large
    assert whole(read(tmp_path / "a.txt", most=size, cuttable=cuttable)) == ["some words\n" * 100]
    monkeypatch.setattr(
        documents, "HELD_BYTES", 1000
    )  # where it is held, it has one without asking
    found = whole(read(tmp_path / "a.txt", cuttable=cuttable))
    assert found == (["some words\n" * 100] if cuttable else too_large)
    (tmp_path / "b.txt").write_text("a\n" + "b" * 2000)
    assert whole(read(tmp_path / "b.txt", cuttable=cuttable))[0][1] == "too large"


def test_a_long_text_of_json_is_encoded_in_parts_where_it_may_be_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "WINDOW", 50)
    text = "one two\nthree\n\n four" * 30 + "x" * 200 + "\nend"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    items = read(tmp_path / "a.jsonl", cuttable=True)
    assert len(items) > 5 and whole(items) == [text]
    assert sum(item.size for item in items) == len(text.encode())
    assert len(read(tmp_path / "a.jsonl", cuttable=False)) == 1


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_grows_a_thousandfold_is_refused_with_both_sizes(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(compressed, "FREE_BYTES", MB // 4)
    monkeypatch.setattr(compressed, "MAX_RATIO", 100)
    path = tmp_path / f"a.jsonl{suffix}"
    bomb = COMPRESS[suffix](b'{"text": "a"}\n' * 22_500)
    path.write_bytes(bomb)
    with pytest.raises(
        MtcliError, match=rf"bytes or more, and is itself of {len(bomb):,}: over 100"
    ):
        read(path)
    monkeypatch.setattr(compressed, "FREE_BYTES", MB // 2)  # so much may come out of any file
    assert len(read(path)) == 22_500


def test_what_the_rows_of_parquet_repeat_is_counted(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    monkeypatch.setattr(compressed, "FREE_BYTES", MB)
    same = pa.DictionaryArray.from_arrays(pa.array([0] * 9000, pa.int32()), pa.array(["ab" * 5000]))
    pq.write_table(pa.table({"text": same}), tmp_path / "dictionary.parquet", compression="zstd")
    one = pa.table({"text": ["a" * 20 * MB]})
    pq.write_table(one, tmp_path / "one.parquet", compression="zstd", use_dictionary=False)
    for name in ("dictionary", "one"):
        with pytest.raises(MtcliError, match=f"{name}.parquet holds .* over 1000 times as many"):
            read(tmp_path / f"{name}.parquet")
    pq.write_table(pa.table({"text": ["a" * 99, "b"]}), tmp_path / "a.parquet")
    assert whole(read(tmp_path / "a.parquet", most=50)) == [(1, "too large"), "b"]


def test_a_block_of_zstandard_gives_no_more_than_its_size():
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(256 * MB))
    assert len(bomb) < 1 << 14  # what one read of the file holds
    sizes = [len(piece) for piece in pieces(io.BytesIO(bomb), ".zst", "x")]
    assert (sum(sizes), max(sizes)) == (256 * MB, 1 << 17)


@given(st.lists(st.binary(max_size=3000)), st.booleans(), st.booleans(), st.integers(1, 19))
def test_frames_of_every_kind_are_read_as_by_their_own_package(parts, check, size, level):
    zstandard = pytest.importorskip("zstandard")
    options = {"write_checksum": check, "write_content_size": size, "level": level}
    frames = [zstandard.ZstdCompressor(**options).compress(part * 50) for part in parts]
    skipped = b"\x53\x2a\x4d\x18\x03\0\0\0abc"
    data = skipped + skipped.join(frames)
    assert b"".join(pieces(io.BytesIO(data), ".zst", "x")) == b"".join(p * 50 for p in parts)
    for end in {len(data) - 1, len(data) // 2} if frames else ():
        with pytest.raises((EOFError, OSError)):
            whole_frames = b"".join(pieces(io.BytesIO(data[:end]), ".zst", "x"))
            assert data[:end].endswith(skipped) or data[:end] in cuts(skipped, frames), whole_frames
            raise EOFError  # it was cut between two frames


def cuts(skipped, frames):
    return {skipped + skipped.join(frames[:n]) for n in range(len(frames) + 1)}


def test_streams_of_xz_may_be_padded_and_may_not_ask_for_any_memory():
    one = lzma.compress(b"text" * 9)
    read_xz = lambda data: b"".join(pieces(io.BytesIO(data), ".xz", "x"))  # noqa: E731
    assert read_xz(one + bytes(8) + one) == b"text" * 18
    assert read_xz(one + b"behind") == b"text" * 9
    large = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    greedy = lzma.compress(b"text", filters=large)
    for data in (greedy, one + greedy):
        with pytest.raises(lzma.LZMAError, match="Memory usage limit"):
            read_xz(data)
    for data in (one[:-9], one + one[:-9]):
        with pytest.raises(EOFError, match="it ends inside a stream"):
            read_xz(data)


CELLS = st.text(st.sampled_from('ab",\n\r\té½;'), max_size=9)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1), st.booleans(), st.sampled_from([3, 64]))
def test_a_table_is_read_as_the_csv_module_writes_it(tmp_path_factory, rows, tabs, window):
    path = tmp_path_factory.mktemp("x") / ("a.tsv" if tabs else "a.csv")
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, "excel-tab" if tabs else "excel", quoting=csv.QUOTE_ALL)
        writer.writerows([("id", "text"), *rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "WINDOW", window)
        assert whole(read(path)) == [text for _, text in rows]


def test_rows_that_are_wrong_are_named_by_the_line_that_they_begin_in(tmp_path):
    rows = b'\xef\xbb\xbfid,text\n1,"a\n""b"""\n\n2,c,d\n3,\xff\n4,"last"'
    (tmp_path / "a.csv").write_bytes(rows)
    assert read(tmp_path / "a.csv") == [
        Text('a\n"b"', 5, line=2),
        Bad(5, "bad CSV", "3 fields, and the header has 2"),
        Bad(6, "bad UTF-8", '"text" is not UTF-8'),
        Text("last", 4, line=7),
    ]
    with pytest.raises(MtcliError, match="no column \"x\"\n\nhint: --text-key of: 'id', 'text'"):
        read(tmp_path / "a.csv", key="x")
    (tmp_path / "a.csv").write_bytes(b'text\n"a"b\n')
    with pytest.raises(MtcliError, match=r"a\.csv:2: not CSV: ',' expected after '\"'"):
        read(tmp_path / "a.csv")


def test_a_quote_that_is_left_open_holds_a_bounded_row(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "HELD_BYTES", 1000)
    monkeypatch.setattr(documents, "WINDOW", 64)
    (tmp_path / "a.csv").write_text('text\nx\n"' + "and so on\n" * 1000)
    with pytest.raises(MtcliError, match=r"a\.csv:\d+: (a row|not CSV: field larger)"):
        read(tmp_path / "a.csv")


@given(st.binary(max_size=400), st.sampled_from(["jsonl", "text"]), st.integers(1, 9))
def test_standard_input_is_written_aside_byte_for_byte(tmp_path_factory, data, kind, block):
    folder = tmp_path_factory.mktemp("x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtcli.core.data.sources.BLOCK_BYTES", block)
        made = list(spool(io.BytesIO(data), kind, True, folder))
    parts = [Path(source.path).read_bytes() for source in made]
    assert b"".join(parts) == data
    assert [source.first_line for source in made] == [
        b"".join(parts[:n]).count(b"\n") for n in range(len(parts))
    ]
    assert all(part.endswith(b"\n") for part in parts[:-1])
    if kind == "text":
        assert all(not part[:-1].rpartition(b"\n")[2].strip() for part in parts[:-1])


def test_no_block_is_cut_by_holding_a_line_of_any_length(tmp_path, monkeypatch):
    monkeypatch.setattr("mtcli.core.data.sources.BLOCK_BYTES", 5)
    (tmp_path / "a.jsonl").write_text("x" * 99 + "\n" + "y\n" * 10)
    source = find_sources([str(tmp_path / "a.jsonl")]).sources
    stops = [piece.stop for block in cut(source, False, 8) for piece in block.pieces]
    assert stops == [100, 110, 120]


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_what_is_told_of_reading_is_the_size_of_the_file_in_steps(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(documents, "WINDOW", 1 << 12)
    path = tmp_path / f"a.txt{suffix}"
    text = "".join(f"{n * 7919 % 100_003:x} words\n" for n in range(60_000)).encode()
    path.write_bytes(COMPRESS.get(suffix, bytes)(text))
    for cuttable in (True, False):
        told = []
        read(path, cuttable=cuttable, tell=told.append)
        assert sum(told) == pytest.approx(path.stat().st_size)
        assert max(told) < 0.9 * sum(told)


PEAK = """
import re, resource, sys
from pathlib import Path
from mtcli.__main__ import run
code = run(sys.argv[1:])
mine = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
peak = max(mine, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print("PEAK", code, peak // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "name", ["a.jsonl.zst", *slow_cases("400 MB are read", "a.jsonl.xz", "a.jsonl", "-")]
)
def test_a_line_of_400_mb_takes_less_than_300(tmp_path, name):
    path = tmp_path / ("stdin" if name == "-" else name)
    parts = b'{"text": "', b"a" * MB, b'"}\n{"text": "b"}\n'
    start, middle, end = map(COMPRESS.get(path.suffix, bytes), parts)
    with open(path, "wb") as file:
        file.writelines([start, *[middle] * 400, end])  # streams and frames follow one another
    words = ["preprocess", "-" if name == "-" else str(path), "--output", str(tmp_path / "x")]
    words += ["--tokenizer", "bytes", "--workers", "1", "--skip-bad"]
    with open(path, "rb") as stdin:
        command = [sys.executable, "-c", PEAK, *words]
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True)
    code, peak = map(int, done.stdout.split("PEAK")[1].split())
    assert peak < 300, done.stderr
    assert "Traceback" not in done.stderr
    if path.suffix == ".jsonl" or name == "-":
        assert code == 0 and ":1: a document of more than 67,108,864 bytes" in done.stderr
    else:
        assert code == 2 and "over 1000 times as many" in done.stderr
