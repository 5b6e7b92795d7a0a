"""The safetensors header; the oracle is the safetensors library."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtcli.core.checkpoint import safetensors_file
from mtcli.core.checkpoint.safetensors_file import encode_header, read_header
from mtcli.core.config.errors import MtcliError

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [2], "data_offsets": [24, 28]},
}


def write(path, header, data=bytes(28)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_entries_are_where_the_library_puts_them(tmp_path):
    tensors = {"x": torch.randn(3, 5), "y": torch.arange(7).to(torch.bfloat16), "z": torch.ones(())}
    save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    raw = (tmp_path / "f").read_bytes()
    header = read_header(tmp_path / "f")
    assert set(header) == set(tensors)
    for name, entry in header.items():
        data = bytearray(raw[entry.offset : entry.offset + entry.bytes])
        found = torch.frombuffer(data, dtype=tensors[name].dtype).view(tensors[name].shape)
        assert torch.equal(found, tensors[name])
        assert entry.shape == tuple(tensors[name].shape)


def test_the_library_reads_an_encoded_header(tmp_path):
    plan = [("x", "F32", (2, 2)), ("é", "F16", (0, 3)), ("s", "F32", ())]
    values = torch.arange(5, dtype=torch.float32)
    (tmp_path / "f").write_bytes(encode_header(plan, {"format": "pt"}) + values.numpy().tobytes())
    found = load_file(tmp_path / "f")
    assert torch.equal(found["x"], values[:4].view(2, 2))
    assert found["é"].shape == (0, 3)
    assert found["s"].item() == 4.0


def test_a_header_of_more_tensors_than_are_read_is_refused_before_it_is_parsed(
    tmp_path, monkeypatch
):
    path, most = write(tmp_path / "f", GOOD), len(GOOD)
    monkeypatch.setattr(safetensors_file, "MAX_TENSORS", most)
    assert len(read_header(path)) == most
    monkeypatch.setattr(safetensors_file, "MAX_TENSORS", most - 1)
    monkeypatch.setattr(safetensors_file, "_json_object", None)
    with pytest.raises(MtcliError, match=f"its header has {most} tensors, and {most - 1} are"):
        read_header(path)


def test_tensors_start_at_a_multiple_of_eight():
    for name in ("a", "ab", "abc", "abcdefgh"):
        assert len(encode_header([(name, "F32", (1,))], {})) % 8 == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2, 3]}}, "not a dtype, shape and data_offsets"),
        ({"a": {**GOOD["a"], "dtype": "F33"}}, "unknown dtype 'F33'"),
        ({"a": {**GOOD["a"], "dtype": ["F32"]}}, "unknown dtype"),
        ({"a": {**GOOD["a"], "shape": [2, -3]}}, "has the shape [2, -3]"),
        ({"a": {**GOOD["a"], "shape": [2, True]}}, "has the shape [2, true]"),
        ({"a": {**GOOD["a"], "shape": [1] * 17}}, "has the shape"),
        ({"a": {**GOOD["a"], "data_offsets": [24]}}, "data_offsets [24]"),
        ({"a": {**GOOD["a"], "data_offsets": [0, 20]}}, "20 bytes and its shape takes 24"),
        ({"b": {**GOOD["b"], "data_offsets": [20, 24]}}, "b starts at byte"),
        ({"b": {**GOOD["b"], "data_offsets": [28, 32]}}, "b starts at byte"),
        ({"c": {"dtype": "U8", "shape": [1], "data_offsets": [28, 29]}}, "its tensors end at"),
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path, change, message):
    with pytest.raises(MtcliError) as error:
        read_header(write(tmp_path / "f", GOOD | change))
    assert message in str(error.value)
    assert str(tmp_path / "f") in str(error.value)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": 1, "a": 2}', "a name occurs twice"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_header_that_is_no_table_is_refused(tmp_path, header, message):
    with pytest.raises(MtcliError, match=message):
        read_header(write(tmp_path / "f", header))


def test_a_header_longer_than_its_file_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(MtcliError, match=f"header of {2**63} bytes is not in its 10 bytes"):
        read_header(tmp_path / "f")


def test_a_file_shorter_than_a_length_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(MtcliError, match="is damaged"):
        read_header(tmp_path / "f")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MtcliError, match="none cannot be read: No such file"):
        read_header(tmp_path / "none")
