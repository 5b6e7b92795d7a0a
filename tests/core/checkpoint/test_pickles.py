"""Pickles as data. The oracle for what is safe is the standard library; hostile ones do nothing."""

import collections
import copyreg
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtcli.core.checkpoint.megatron import torch_save
from mtcli.core.checkpoint.megatron.torch_save import (
    ByteRange,
    NamedClass,
    Pair,
    PickledObject,
    find_tensor,
    pairs_of,
    read_pickle,
)
from mtcli.core.checkpoint.safetensors_file import MAX_DIMS
from mtcli.core.config.errors import MtcliError

PATH = Path("checkpoint/.metadata")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(-(2**32) + 1, 2**32 - 1), inner)
        | st.tuples(inner, inner, inner, inner)
    ),
)


def read(data, allowed=()):
    return read_pickle(data, PATH, set(allowed).__contains__)


@settings(max_examples=30)
@given(value=VALUES, protocol=st.integers(3, 5))
def test_plain_data_is_what_the_library_reads(value, protocol):
    assert read(pickle.dumps(value, protocol)) == value


def test_bytes_of_protocol_2_are_a_record_of_their_text():
    found = read(pickle.dumps([b"a", 2**70, -3, "x", 1.5], 2), {"_codecs.encode"})
    assert (found[0].name, found[0].arguments) == ("_codecs.encode", ("a", "latin1"))
    assert found[1:] == [2**70, -3, "x", 1.5]


class Point:
    def __init__(self):
        self.x = 3


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_class_is_recorded_and_not_made(protocol):
    data = pickle.dumps({"p": Point(), "t": collections.OrderedDict(a=1)}, protocol)
    name = f"{Point.__module__}.Point"
    found = read(data, {name, "collections.OrderedDict"})
    assert type(found["p"]) is PickledObject
    assert (found["p"].name, found["p"].state, found["p"].get("x")) == (name, {"x": 3}, 3)
    assert found["t"].items == [Pair("a", 1)]
    assert read(pickle.dumps(Point), {name}) == NamedClass(name)


def test_keys_that_are_no_plain_values_are_pairs():
    ((key, value),) = pairs_of(read(pickle.dumps({(1, "a"): 2})))
    assert (key, value) == ((1, "a"), 2)


class Calls:
    def __init__(self, function, *arguments):
        self.what = function, arguments

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path, protocol):
    mark = tmp_path / "ran"
    hostile = {
        "posix.system": Calls(os.system, f"touch {mark}"),
        "builtins.eval": Calls(eval, f"open({str(mark)!r}, 'w')"),
        "builtins.exec": Calls(exec, f"open({str(mark)!r}, 'w')"),
        "builtins.getattr": Calls(getattr, str(mark), "system"),
        f"{open.__module__}.open": Calls(open, str(mark), "w"),
    }
    for name, value in hostile.items():
        with pytest.raises(MtcliError) as error:
            read(pickle.dumps(["before", value], protocol), {"torch.Size"})
        if protocol > 1:
            assert f"{name!r}, which no data needs" in str(error.value).replace(
                "__builtin__", "builtins"
            )
    assert not mark.exists()


def test_allowed_names_are_not_called_either(tmp_path):
    mark = tmp_path / "ran"
    found = read(pickle.dumps(Calls(os.system, f"touch {mark}")), {"posix.system"})
    assert (found.name, found.arguments) == ("posix.system", (f"touch {mark}",))
    assert not mark.exists()


DEEP = 50_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"garbage",
        b"\x80\x04N",
        b"\x80\x04NN.",
        b"(cos\nsystem\nI1\no.",
        b"(I1\nios\nsystem\n.",
        b"\x80\x04\x82\x01.",
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
        b"\x80\x04N0.",
        b"\x80\x04h\x07.",
        b"\x80\x04(e.",
        b"\x80\x04NNb.",
        b"\x80\x04]NNs.",
        b"L" + b"9" * 5000 + b"L\n.",
    ],
    ids=lambda data: data[:8].hex() or "empty",
)
def test_a_damaged_pickle_is_an_error(data):
    with pytest.raises(MtcliError, match="checkpoint/.metadata"):
        read(data)


def test_depth_and_large_numbers_take_no_stack_and_no_memory():
    assert type(read(b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".")) is list
    assert type(read(b"\x80\x04)" + b"\x85" * DEEP + b".")) is tuple
    nested_key = read(b"\x80\x04})" + b"\x85" * DEEP + b"Ns.")
    assert len(nested_key) == 1
    assert read(b"\x80\x04Nr" + struct.pack("<I", 2**31) + b".") is None  # a place in the memo


@pytest.mark.parametrize(
    "data",
    [
        pickle.INST + b"posix\nsystem\n",
        pickle.OBJ,
        pickle.NEWOBJ_EX,
        pickle.EXT1 + b"\x01",
        pickle.EXT2 + b"\x01\x00",
        pickle.EXT4 + b"\x01\x00\x00\x00",
        pickle.BYTEARRAY8 + struct.pack("<Q", 2**40),
        pickle.NEXT_BUFFER,
        pickle.READONLY_BUFFER,
        pickle.PERSID + b"x\n",
        pickle.PUT + b"2305843009213693951\n",
        pickle.INT + b"1\n",
        pickle.DICT,
        pickle.FROZENSET,
    ],
    ids=bytes.hex,
)
def test_an_opcode_that_no_data_needs_is_refused(data, monkeypatch):
    monkeypatch.setitem(copyreg._extension_cache, 1, os.system)  # as a library could have
    with pytest.raises(MtcliError, match=f"has the opcode 0x{data[0]:02x}, which no data needs"):
        read(b"\x80\x05((}N" + data + b".", {"posix.system"})


def test_a_state_is_set_on_a_record_alone():
    for value in (b"]", b"}", b")", b"cposix\nsystem\n", b"N"):
        for state in (b"}", b"N}\x86", b"}X\x01\x00\x00\x00xNs"):
            with pytest.raises(MtcliError, match=r"cannot be read \(TypeError\)"):
                read(b"\x80\x02" + value + state + b"b.", {"posix.system"})


def test_keys_whose_hashes_collide_take_no_quadratic_time():
    same = [2**61 - 1, -(2**61 - 1), 3 * (2**61 - 1), 2.0**61 - 2.0**8]
    found = read(pickle.dumps(dict.fromkeys(same)))
    assert sorted(pair.key for pair in pairs_of(found)) == sorted(same)
    assert len({hash(key) for key in found}) == len(same)


def test_the_dimensions_of_a_tensor_are_counted_before_its_strides(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    torch.save(torch.ones((1,) * (MAX_DIMS + 1)), path)
    monkeypatch.setattr(torch_save, "_c_strides", None)
    with path.open("rb") as file, pytest.raises(MtcliError, match="is not in C order"):
        find_tensor(file, ByteRange(path, 0, path.stat().st_size))


def test_a_tensor_that_begins_within_its_storage_is_found(tmp_path):
    path = tmp_path / "part.pt"
    torch.save(torch.arange(6.0)[2:], path)
    with path.open("rb") as file:
        entry = find_tensor(file, ByteRange(path, 0, path.stat().st_size))
        file.seek(entry.offset)
        assert struct.unpack("<4f", file.read(entry.bytes)) == (2.0, 3.0, 4.0, 5.0)
