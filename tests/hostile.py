"""Bytes as an enemy would write them: strategies that start from valid files."""

import json

import xxhash
from hypothesis import strategies as st

# What a value of JSON may be instead; several are legal JSON that no reader expects.
VALUES = [
    "null", "true", "false", "0", "-1", "1.5", "-0.0", "1e400", "NaN", "Infinity", "-Infinity",
    "9223372036854775807", "9223372036854775808", "18446744073709551616", "1000000000000",
    "9" * 300, "9" * 5000, '""', '"a"', '"../x"', '"/etc/passwd"', '"a/../../x"', '"a\\u0000b"',
    '"\\ud800"', '"\\u001b[2J"', '"' + "x" * 5000 + '"', "[]", "{}", "[1]", "[[1]]", '["a"]',
    '{"a": 1}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a":' * 100_000,
]  # fmt: skip
DEPTHS = (100, 200, 500, 900, 950, 970, 980, 985, 990, 992, 994, 996, 998, 5000)
VALUES += ["[" * n + "]" * n for n in DEPTHS]
VALUES += ['{"a":' * n + "1" + "}" * n for n in (100, 500, 970, 985, 990, 995)]
KEYS = ["", "../x", "\ud800", "a\x00b", "__metadata__", "x" * 300, "/", "text", "step", "1"]
PIECES = [
    b"\x00", b"\xff" * 8, b"\x00" * 8, b"\xff\xfe", b"\xed\xa0\x80", b"\r\n", b"\n\n", b"{", b"}",
    b"]", b'"', b",", b"..", b"../", b"=", b"[" * 3000, b"a." * 3000, b"#", b"\xef\xbb\xbf",
    b"\x7f" * 8, b"\x80", (2**62).to_bytes(8, "little"), (2**31).to_bytes(4, "little"),
    b"\x80\x04\x95", b"PK\x03\x04", b"\x1f\x8b\x08", b"9" * 5000, b"1e400", b"nan", b"-1", b"'",
]  # fmt: skip


def hostile(seeds):
    """Bytes that are nothing, or one of `seeds` with damage, or with JSON of another kind in it."""
    tables = [table for seed in seeds if (table := _json_of(seed)) is not None]
    ways = [st.binary(max_size=120), damaged(seeds)]
    return st.one_of(*ways, *([edited(tables)] * 4 if tables else []))


def write_manifest(path, table):
    """Writes an edited manifest with a hash of its own, which an enemy can compute as well."""
    text = json.dumps({key: value for key, value in table.items() if key != "xxh3_128"})
    seal = xxhash.xxh3_128_hexdigest(text.encode())
    path.write_text(f'{text[:-1]},"xxh3_128":"{seal}"}}')


@st.composite
def damaged(draw, seeds):
    """A seed with bits flipped, and parts cut out, doubled, or put in."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at, count = draw(st.integers(0, len(data))), draw(st.integers(1, 16))
        way = draw(st.sampled_from(["flip", "cut", "end", "double", "insert", "replace"]))
        if way == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif way == "cut":
            del data[at : at + count]
        elif way == "end":
            del data[at:]
        elif way == "double":
            data[at:at] = data[at : at + count]
        else:
            piece = draw(st.sampled_from(PIECES))
            data[at : at + len(piece) * (way == "replace")] = piece
    return bytes(data)


@st.composite
def edited(draw, tables):
    """Valid JSON (mostly) with one or two values, keys or lines of it made hostile."""
    lines = [json.loads(line) for line in draw(st.sampled_from(tables))]
    raw = {}
    for _ in range(draw(st.integers(1, 2))):
        mark = f"@{len(raw)}@"
        raw[mark] = draw(st.sampled_from(VALUES))
        place = draw(st.integers(0, len(lines) - 1))
        lines[place] = _edited(draw, lines[place], mark)
    text = "\n".join(json.dumps(line) for line in lines)
    for mark, value in raw.items():
        text = text.replace(f'"{mark}"', value)
    return text.encode()


def _edited(draw, value, mark):
    """A copy of a value with a mark in the place of something inside it, or of all of it."""
    if not isinstance(value, dict | list) or not value or not draw(st.integers(0, 5)):
        return mark
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw(st.sampled_from(keys))
    if isinstance(value, list):
        return [_edited(draw, v, mark) if i == key else v for i, v in enumerate(value)]
    way = draw(st.sampled_from(["in", "in", "in", "in", "without", "renamed", "more"]))
    if way == "in":
        return value | {key: _edited(draw, value[key], mark)}
    if way == "without":
        return {k: v for k, v in value.items() if k != key}
    name = draw(st.sampled_from(KEYS))
    if way == "renamed":
        return {name if k == key else k: v for k, v in value.items()}
    return value | {name: mark}


def _json_of(seed):
    """The lines of a seed that is JSON or lines of it; None for any other."""
    try:
        json.loads(seed)
        return [seed]
    except ValueError:
        pass
    try:
        lines = [line for line in seed.split(b"\n") if line]
        return lines if lines and all(json.loads(line) is not None for line in lines) else None
    except ValueError:
        return None
