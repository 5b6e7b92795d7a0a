"""Documents out of every kind of file, however it is cut into pieces and windows."""

import bz2
import gzip
import json
import lzma
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mtcli.core.data.documents as documents
from mtcli.core.config.errors import MtcliError
from mtcli.core.data.documents import Bad, Reading, Text, read_documents
from mtcli.core.data.encoders import is_cuttable
from mtcli.core.data.sources import FileRange, cut, find_sources
from mtcli.core.data.tokenize import load_tokenizer, train_tokenizer

JSONL = "".join(json.dumps({"text": f"number {n} ½", "id": n}) + "\n" for n in range(50)).encode()


def read(path, blank=False, key="text", cuttable=True, size=1 << 22):
    reading = Reading(key, blank, cuttable)
    sources = find_sources([str(path)]).sources
    return [
        item
        for block in cut(sources, blank, size)
        for piece in block.pieces
        for item in read_documents(piece, reading)
    ]


def texts(items):
    assert all(isinstance(item, Text) for item in items), items
    return [item.text for item in items]


def zst(data):
    import zstandard

    return zstandard.compress(data[:700]) + zstandard.compress(data[700:])  # two frames


COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zst,
}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_are_read_plain_and_compressed(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](JSONL))
    assert texts(read(path)) == [f"number {n} ½" for n in range(50)]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2", ".zst"])
@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: b"no" + d, lambda d: b""])
def test_of_a_damaged_archive_what_ends_before_the_damage_is_read(tmp_path, suffix, damage):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(damage(COMPRESS[suffix](JSONL)))
    *before, bad = read(path)
    assert (bad.line, bad.kind) == (0, documents.DAMAGED) and bad.reason.startswith("the file is")
    assert texts(before) == [f"number {n} ½" for n in range(len(before))]
    whole = tmp_path / f"a.txt{suffix}"  # no part of a document that the damage is in
    whole.write_bytes(path.read_bytes())
    assert read(whole) == read(whole, cuttable=False) == [bad]


@pytest.mark.parametrize(("size", "blocks"), [(1, b""), (4, b"\x18\0\0abc")])
def test_a_frame_of_zstandard_holds_as_much_as_its_header_says(tmp_path, size, blocks):
    """Fed a block at a time, the library compares them only where the last block is not empty."""
    path, empty = tmp_path / "a.txt.zst", b"\x01\0\0"
    for number, kind in ((size, Bad), (len(blocks[3:]), Text)):
        path.write_bytes(b"(\xb5/\xfd\x20" + bytes([number]) + blocks + empty)
        (found,) = read(path)
        assert isinstance(found, kind), found


@pytest.mark.parametrize("head", [b"\x20\1", b"\0X"])
def test_a_compressed_block_of_zstandard_without_bytes_is_damage(tmp_path, head):
    """Such a block has no header. Fed a block at a time, the library takes it for an empty one."""
    path = tmp_path / "a.txt.zst"
    for first, kind in ((b"\4\0\0", Bad), (b"\0\0\0", Text)):
        path.write_bytes(b"(\xb5/\xfd" + head + first + b"\x09\0\0a")
        (found,) = read(path)
        assert isinstance(found, kind), found


def test_of_a_truncated_gzip_file_no_line_before_the_damage_is_lost(tmp_path):
    lines = b"".join(json.dumps({"text": os.urandom(99).hex()}).encode() + b"\n" for _ in range(99))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines)[:-99])
    *before, bad = read(path)
    assert bad.line == 0 and len(before) > 95


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 10**6])
def test_where_files_are_cut_does_not_show(tmp_path, monkeypatch, size):
    monkeypatch.setattr(documents, "WINDOW", 64)
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    assert texts(read(tmp_path / "a.jsonl", size=size)) == [f"number {n} ½" for n in range(50)]
    blocks = "\n\n".join(f"first {n}\nsecond" + "\n  " * (n % 3) for n in range(50))
    (tmp_path / "a.txt").write_text(blocks)
    found = texts(read(tmp_path / "a.txt", blank=True, size=size))
    assert found == [f"first {n}\nsecond" for n in range(50)]


@given(
    st.lists(st.sampled_from(["a", " b", "é\n", "\n", "\n\n", " \n", "\r\n", "\t"])),
    st.integers(1, 9),
)
def test_blank_lines_divide_texts_as_line_by_line_reading_does(tmp_path_factory, parts, size):
    path = tmp_path_factory.mktemp("blank") / "a.txt"
    path.write_bytes("".join(parts).encode())
    expected, block = [], []
    for line in [*"".join(parts).split("\n"), ""]:
        if line.strip():
            block.append(line)
        elif block:
            expected.append("\n".join(block).removesuffix("\r"))
            block = []
    assert texts(read(path, blank=True, size=size)) == expected


def test_a_text_file_is_one_document_whatever_is_in_it(tmp_path):
    text = "\n\n  a\r\n\n½ <|endoftext|>\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path / "a.txt") == [Text(text, len(text.encode()))]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffhello".encode())
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}')
    assert texts(read(tmp_path)) == ["hello", "hello"]


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        (b"{broken", ("bad JSON", "not JSON: ")),
        (b"[" * 100_000, ("bad JSON", "not JSON: ")),
        (b'"text"', ("bad JSON", "a string, not an object")),
        (b'{"body": "x", "id": 1}', ("missing key", "no key \"text\": keys are 'body', 'id'")),
        (b'{"text": null}', ("not text", '"text" is null, not a string')),
        (b'{"text": 3.5}', ("not text", '"text" is a number, not a string')),
        (b'{"text": "\xff"}', ("bad UTF-8", "byte 0xff is not UTF-8")),
        (b'{"text": "\\ud800"}', ("bad UTF-8", "half of a surrogate pair")),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path, line, bad):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}')
    one, found, two = read(tmp_path / "a.jsonl")
    assert (one.text, two.text) == ("one", "two")
    assert isinstance(found, Bad)
    assert (found.line, found.kind) == (3, bad[0])
    assert bad[1] in found.reason


@pytest.mark.parametrize(("blank", "line"), [(False, 5), (True, 5)])
def test_a_byte_that_is_not_utf8_is_named_by_its_line(tmp_path, blank, line):
    (tmp_path / "a.txt").write_bytes(b"one\n\n\ntwo\nt\xffo\n\nthree")
    found = read(tmp_path / "a.txt", blank=blank)
    assert [item for item in found if isinstance(item, Bad)] == [
        Bad(line, "bad UTF-8", "byte 0xff is not UTF-8")
    ]
    assert [t.text for t in found if isinstance(t, Text)] == (["one", "three"] if blank else [])


def test_a_long_document_is_read_in_parts_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "WINDOW", 50)
    good = "½ line of text\nanother one\n\n  and more\n" * 20
    (tmp_path / "a.txt").write_text(good)
    parts = read(tmp_path / "a.txt")
    assert len(parts) > 5
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(texts(parts)) == good
    assert texts(read(tmp_path / "a.txt", cuttable=False)) == [good]
    (tmp_path / "a.txt").write_bytes(good.encode() + b"\xe2\x82")  # cut inside a letter
    assert read(tmp_path / "a.txt") == [Bad(81, "bad UTF-8", "byte 0xe2 is not UTF-8")]


@given(st.text(alphabet=" \n\tab1.é\u00a0\u2028\x1c'", max_size=200))
def test_parts_of_a_long_document_have_the_ids_of_the_whole(text):
    ends = ["a \n", "b\n\n", "1\t\n", ".\n ", "é\u00a0\n", "a\n\t", "'\u2028\n"]
    tokenizer = train_tokenizer([*ends, "a b\n ab\n\n 1.é"] * 5, 320)
    at = documents._safe_cut(text)
    assert tokenizer.encode(text[:at]) + tokenizer.encode(text[at:]) == tokenizer.encode(text)


def test_only_tokenizers_that_cut_words_as_gpt2_take_long_documents_in_parts(tmp_path):
    trained = train_tokenizer(["a b"], 260)
    assert is_cuttable(trained)
    assert is_cuttable(load_tokenizer("bytes"))
    definition = json.loads(trained.definition)
    for change in (
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**definition["pre_tokenizer"], "use_regex": False}},
        {"pre_tokenizer": {**definition["pre_tokenizer"], "add_prefix_space": True}},
        {"normalizer": {"type": "NFC"}},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**definition, **change}))
        assert not is_cuttable(load_tokenizer(tmp_path)), change


def test_parquet_rows_are_documents(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["one", None, "½"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    one, bad, half = read(tmp_path / "a.parquet", key="body")
    assert (one.text, half) == ("one", Text("½", 2))
    assert bad == Bad(2, "not text", '"body" is null, not a string')
    with pytest.raises(
        MtcliError, match='has no column "text"\n\nhint: --text-key of: .body., .n.'
    ):
        read(tmp_path / "a.parquet")
    for data in (b"PAR1", b""):
        (tmp_path / "a.parquet").write_bytes(data)
        (bad,) = read(tmp_path / "a.parquet")
        assert (bad.line, bad.kind) == (0, documents.DAMAGED)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"\x18\x04text", b"\x18\x04t\xff\xfet", "utf-8"),
        # Of no missing values, so of other sizes: pyarrow's facts of such a column end the process.
        (b"%\x02\x18\x04text", b"%\x00\x18\x04text", "size mismatch"),
    ],
)
def test_damaged_facts_of_a_column_are_damage(tmp_path, old, new, reason):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path, store_schema=False)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    (bad,) = read(path)
    assert (bad.line, bad.kind) == (0, documents.DAMAGED) and reason in bad.reason


def test_rows_of_parquet_that_python_cannot_hold_are_bad(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    binary = pa.py_buffer(b"\xffb"), pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]))
    latin = pa.Array.from_buffers(pa.string(), 2, [None, binary[1], binary[0]])
    pq.write_table(pa.table({"text": latin}), tmp_path / "a.parquet")
    bad, good = read(tmp_path / "a.parquet")
    assert (bad.line, bad.kind, good.text) == (1, "bad values", "b") and "utf-8" in bad.reason


def test_folders_and_globs_are_read_in_order_and_only_what_is_ours(tmp_path):
    names = ("b/2.txt", "b/10.txt", "a.jsonl.gz", "notes.md", ".hidden.txt", "x.parquet.gz")
    for name in (*names, "b/3.md.zst"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    os.mkfifo(tmp_path / "b" / "pipe.txt")
    found = find_sources([str(tmp_path)])
    names = [source.path for source in found.sources]
    others = {".md": 1, ".md.zst": 1, ".parquet.gz": 1, "pipes, devices and broken links": 1}
    assert found.left_out == others
    named = find_sources([str(tmp_path / "notes.md"), str(tmp_path / "b" / "*.zst")])
    assert [source.kind for source in named.sources] == ["text", "text"] and not named.left_out
    assert names == [str(tmp_path / name) for name in ("a.jsonl.gz", "b/10.txt", "b/2.txt")]
    names = [source.path for source in find_sources([str(tmp_path / "b" / "*0.txt")]).sources]
    assert names == [str(tmp_path / "b" / "10.txt")]


def test_stdlib_is_source_without_tests():
    paths = [source.path for source in find_sources(["stdlib"]).sources]
    assert paths == sorted(paths)
    assert any(path.endswith("/json/decoder.py") for path in paths)
    assert not any("/test/" in path or "site-packages" in path for path in paths)


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (
            lambda p: (p / "a.pdf").touch(),
            "a.pdf",
            "is of no kind that is known by its name\n\nhint: files end in .parquet, or .txt",
        ),
        (lambda p: (p / "e").mkdir(), "e", "holds no file to read\n"),
        (
            lambda p: [(p / name).touch() for name in ("a.md", "b.csv", "c.csv", "d.csv.gz", "e")],
            "",
            r"no file to read, but others: 2 .csv, 1 .csv.gz, 1 .md, 1 without an ending\n"
            r"\nhint: files end in .* or --format text\|jsonl\|csv\|tsv\|parquet; "
            r"a folder's .csv, .md, .tsv files are read where they or a --format are named",
        ),
        (lambda p: os.mkfifo(p / "a.txt"), "a.txt", "a.txt cannot be read: it is a named pipe"),
        (lambda p: None, "absent.txt", "there is no file or folder .*absent.txt"),
        (lambda p: None, "*.txt", "no file matches "),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, make, name, message):
    make(tmp_path)
    with pytest.raises(MtcliError, match=message):
        find_sources([str(tmp_path / name)])


def test_a_file_that_went_away_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (source,) = find_sources([str(tmp_path / "a.txt")]).sources
    (tmp_path / "a.txt").unlink()
    with pytest.raises(MtcliError, match="a.txt cannot be read"):
        list(read_documents(FileRange(source, 0, 1), Reading("text", False, True)))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    import sys

    for name, package in (("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")):
        (tmp_path / name).write_bytes(b"x")
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MtcliError, match=f"{name} needs the package {package}"):
            read(tmp_path / name)
