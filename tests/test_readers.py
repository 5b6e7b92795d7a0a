"""Whatever the bytes of a file, a reader gives what is in it or an MtcliError, and nothing else.

`readers.py` has the readers and their oracles, `hostile.py` the bytes. MTCLI_EXAMPLES sets how many
are tried for each reader.
"""

import json
import os
import time

import numpy as np
import pytest
from hostile import VALUES, hostile, write_manifest
from hypothesis import given, settings
from indexed_dataset import write_dataset
from marks import slow
from readers import READERS, attempt

from mtcli.core.checkpoint.manifest import read_manifest
from mtcli.core.checkpoint.safetensors_file import encode_header, read_header
from mtcli.core.config.counts import duration
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config
from mtcli.core.config.untrusted import parse_json, parse_toml, shown
from mtcli.core.data.indexed import Indexed
from mtcli.core.evaluate.tasks.wikitext import detokenise

EXAMPLES = int(os.environ.get("MTCLI_EXAMPLES", "40"))


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_read_as_they_are_or_refused(name, tmp_path_factory):
    check, seeds = READERS[name](tmp_path_factory.mktemp(name))
    for seed in seeds:
        check(seed)

    @settings(max_examples=EXAMPLES)
    @given(hostile(seeds))
    def check_bytes(data):
        attempt(check, data)

    check_bytes()


def test_a_value_of_json_is_parsed_or_a_value_error():
    for text in VALUES:
        try:
            value = parse_json(text)
        except ValueError:
            continue
        assert len(shown(value)) < 2000, f"{text[:20]}, {len(text)} characters"


def test_toml_that_the_parser_breaks_on_is_a_value_error():
    long = "0x" + "f" * 5000
    for text in (
        "a = " + "[" * 5000,
        "a = " + "9" * 5000,
        f"a = [{{b = {long}}}]",
        "a = {b = " * 3000,
    ):
        with pytest.raises(ValueError):
            parse_toml(text)
            pytest.fail(f"{text[:12]} is read")


def test_a_key_of_very_many_parts_is_refused_at_once():
    for part in ("a.", "a . ", '"a b".', "'x'\t."):
        assert parse_toml(part * 20 + "a = 1")
        with pytest.raises(ValueError, match="a key has more than 64 parts"):
            parse_toml("x = 1\n" + part * 50_000 + "a = 1")
    names = ", ".join('"data/a.b.c"' for _ in range(1000))
    assert len(parse_toml(f"x = [{names}]\ny = [{'0.5, ' * 1000}]")["y"]) == 1000


def test_a_config_of_more_than_a_mebibyte_is_refused(tmp_path):
    (tmp_path / "x.toml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(MtcliError, match="it has 1048577 characters, and 1048576 are read at most"):
        load_config(str(tmp_path / "x.toml"))


def test_of_very_many_wrong_fields_a_hundred_are_shown(tmp_path):
    (tmp_path / "x.toml").write_text("".join(f"x{i} = 1\n" for i in range(3000)))
    with pytest.raises(MtcliError, match="2901 more fields are wrong") as error:  # and no model
        load_config(str(tmp_path / "x.toml"))
    assert len(error.value.problems) == 101


def test_boundaries_whose_differences_pass_64_bits_are_refused(tmp_path):
    write_dataset(tmp_path / "x", [[1], [2], [3]], np.dtype("<u2"))
    path = tmp_path / "x.idx"
    backwards = np.array([0, 2**63 - 1, -(2**63), -1, 3], "<i8")
    data = bytearray(path.read_bytes()[:-32])
    data[26:34] = (5).to_bytes(8, "little")
    path.write_bytes(bytes(data) + backwards.tobytes())
    with pytest.raises(MtcliError, match="document boundaries that go backwards"):
        Indexed(tmp_path / "x")


def test_a_header_that_the_library_refuses_is_refused(tmp_path):
    for header, message in (
        ({"__metadata__": {"a": 1}}, "its __metadata__ is not a table of text"),
        ({"\ud800": {}}, "is no text"),
        ({"a": {"dtype": "U8", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}, "the shape"),
        ({"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}, "end at"),
    ):
        text = json.dumps(header).encode()
        (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(MtcliError, match=message):
            read_header(tmp_path / "x")


def test_a_tokenizer_that_fails_on_a_text_is_refused(tmp_path):
    """One of no tokens, and none for what is unknown: the library refuses any text, too."""
    check, _ = READERS["tokenizer"](tmp_path)
    with pytest.raises(MtcliError, match="unknown token but `unk_id` is missing"):
        check(b'{"model": {"type": "Unigram", "vocab": []}}')


def test_a_tensor_of_a_file_has_one_place_in_a_manifest(tmp_path):
    check, (seed, _) = READERS["manifest"](tmp_path)
    twice = json.loads(seed)
    twice["tensors"]["v"] = twice["tensors"]["w"]
    with pytest.raises(MtcliError, match="manifest.json is damaged: a of f is in it twice"):
        check(json.dumps(twice).encode())


@slow("10 MB of names, 1.6 s")
def test_ten_megabytes_of_manifest_and_of_header_are_read_in_seconds(tmp_path):
    count = 20_000
    names = [f"blocks.{i}.attention.{'x' * 200}.weight" for i in range(count)]
    header = encode_header([(name, "F32", (2, 1)) for name in names], {})
    (tmp_path / "f").write_bytes(header + bytes(8 * count))
    pieces = [{"file": "f", "key": name, "start": [0, 0], "size": [2, 1]} for name in names]
    tensors = {p["key"]: {"dtype": "float32", "shape": [2, 1], "pieces": [p]} for p in pieces}
    size = (tmp_path / "f").stat().st_size
    table = {"step": 1, "world": 1, "extra": {}, "tensors": tensors}
    table["files"] = {"f": {"bytes": size, "xxh3_128": []}}
    write_manifest(tmp_path / "manifest.json", table)
    assert (tmp_path / "manifest.json").stat().st_size > 10_000_000
    start = time.process_time()
    assert len(read_manifest(tmp_path).tensors) == len(read_header(tmp_path / "f")) == count
    assert time.process_time() - start < 10  # 0.6 s; the square of their number would take hours


def test_brackets_that_are_never_closed_take_no_square_of_time():
    for text in ("(" * 20_000, "[ " * 10_000, "( a" + " " * 20_000 + "b )", '"'):
        start = time.process_time()
        assert detokenise(text).strip("( [)ab") == text.strip("( [)ab")
        assert time.process_time() - start < 2, f"{text[:4]} of {len(text)} characters"


def test_a_run_of_more_seconds_than_a_calendar_has_is_listed(tmp_path):
    check, _ = READERS["listed_metrics"](tmp_path)
    for seconds in ("1e20", "1e308", "3e13"):
        check(f'{{"step": 1, "total_seconds": {seconds}, "step_seconds": {seconds}}}\n'.encode())
    assert duration(1e20) == "3.17e+12 years" and duration(3723.4) == "1:02:03"
