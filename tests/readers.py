"""Every reader of files that strangers supply, as a function of bytes, beside its oracle.

`READERS[name](folder)` puts whatever else the reader needs into a folder, and gives the function to
try bytes with and the valid files to start from. `attempt` lets an MtcliError pass, and nothing
else. What is read must be what another reader of the same format gives. Shared by the property
tests (test_readers.py) and by `fuzz/fuzz.py`.
"""

import bz2
import gzip
import io
import json
import lzma
import struct
import tomllib
from collections import deque
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
from indexed_dataset import write_dataset

from mtcli.core.checkpoint.huggingface.config_json import model_of
from mtcli.core.checkpoint.manifest import Manifest, read_manifest
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.safetensors_file import encode_header, read_header
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.loading import load_config
from mtcli.core.data.compressed import MAX_XZ_BYTES
from mtcli.core.data.documents import DAMAGED, Bad, Reading, read_documents
from mtcli.core.data.indexed import Indexed, describe, max_token_id
from mtcli.core.data.samples import Samples, build_samples, load_kept
from mtcli.core.data.sources import FileRange, find_sources
from mtcli.core.data.tokenize import byte_tokenizer, load_tokenizer
from mtcli.core.data.workspace import Workspace
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer, eval_tokenizer
from mtcli.core.evaluate.tasks import items
from mtcli.core.evaluate.tasks.choice import prepare_task
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.evaluate.tasks.task_file import load_task
from mtcli.core.evaluate.tasks.wikitext import prepare_wikitext
from mtcli.core.inference.model import end_ids
from mtcli.core.profile.finished_run import read_run, summary_of
from mtcli.core.runs.loss_curves import read_curves
from mtcli.core.runs.run_search import find_runs
from mtcli.core.runs.run_summary import varied_fields
from mtcli.core.runs.run_tables import listed_table
from mtcli.core.runs.run_watch import RunWatcher, panel
from mtcli.core.runtime import sandbox
from mtcli.core.runtime.json_text import json_text
from mtcli.core.runtime.work_folder import WorkFolder
from mtcli.core.sweep.sampling import Proposals, SamplingPlan
from mtcli.core.sweep.trials import Range, Varied

TOKENS = b"\x01\x00\x02\x00\x03\x00\x04\x00"
MODEL_TOML = b"""seed = 3
[model]
num_layers = 2
hidden_size = 8
num_heads = 2
vocab_size = 257
max_seq_len = 16
[batch]
seq_len = 8
[data]
train = ["0.5", "a", "0.5", "b"]
"""
HF_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 6,
    "vocab_size": 11,
    "max_position_embeddings": 16,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
STEP = {"step": 1, "loss": 2.5, "grad_norm": 1.0, "lr": 0.1, "step_seconds": 0.5}
STEP |= {"tokens_per_second": 64.0, "mfu": 0.01, "consumed_samples": 4, "skipped": False}
RACE = {"article": "a b", "questions": ["q  _  .", "r"], "answers": ["A", "D"]}
RACE |= {"options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]]}
# Padding, and an lzma stream behind an empty one: of zeros, and of too large a dictionary.
XZ_SEEDS = [lzma.compress(b"x") + bytes(4), bytes(41), bytes(18) + b"]\0\0\0@" + bytes(8)]
BYTES = EvalTokenizer(lambda text: list(text.encode()), 256)


def attempt(check, data):
    """check(data), where an MtcliError with a message is an answer too."""
    try:
        check(data)
    except MtcliError as error:
        assert str(error).startswith("error: ")


class InProcess:
    """A sandbox's program, run in this process by the same JSON: a process takes 65 ms to start.

    Without limits, so only for the templates of our own tasks.
    """

    def __init__(self, name, build, *arguments):
        self._work, self._queue = _program(build, json.dumps(arguments)), deque()

    def ask(self, request):
        self._queue.append(sandbox._encoded(request))
        return len(self._queue[-1])

    def answer(self):
        answer = self._work(sandbox._decoded(self._queue.popleft()))
        return sandbox._decoded(sandbox._encoded(answer))


@lru_cache
def _program(build, arguments):
    return build(*json.loads(arguments))


def _prepared(task, path):
    with patch.object(items, "Sandbox", InProcess):
        return prepare_task(task, path, BYTES, TaskOptions(32))


def idx(folder):
    """An `.idx` beside 8 bytes of tokens, against its layout as Megatron documents it."""

    def check(data):
        (folder / "x.idx").write_bytes(data)
        found = Indexed(folder / "x")
        code, count, bounds = struct.unpack_from("<BQQ", data, 17)
        size = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}[code]
        lengths = struct.unpack_from(f"<{count}i", data, 34)
        assert struct.unpack_from(f"<{count}q", data, 34 + 4 * count) == tuple(
            size * sum(lengths[:i]) for i in range(count)
        )
        ends = struct.unpack_from(f"<{bounds}q", data, 34 + 12 * count)
        assert (ends[0], ends[-1], list(ends)) == (0, count, sorted(ends))
        assert b"".join(found[i].tobytes() for i in range(count)) == TOKENS

    write_dataset(folder / "x", [[1, 2], [3], [4]], np.dtype("<u2"))
    seeds = [(folder / "x.idx").read_bytes()]
    write_dataset(folder / "x", [[513, 1]], np.dtype("<i4"))
    seeds.append((folder / "x.idx").read_bytes())
    (folder / "x.bin").write_bytes(TOKENS)
    return check, seeds


def safetensors(folder):
    """A header against the safetensors library: what we take it takes, with the same bytes."""
    from safetensors import deserialize

    def check(data):
        (folder / "x").write_bytes(data)
        found = read_header(folder / "x")
        theirs = dict(deserialize(data))
        assert found.keys() == theirs.keys()
        for name, entry in found.items():
            assert entry.code == theirs[name]["dtype"]
            assert list(entry.shape) == theirs[name]["shape"]
            assert data[entry.offset : entry.offset + entry.bytes] == theirs[name]["data"]

    plan = [("a", "F32", (2, 3)), ("b", "BF16", (2,)), ("c", "U8", ())]
    empty = [("none", "F64", (0, 2))]
    return check, [
        encode_header(plan, {"format": "pt"}) + bytes(range(29)),
        encode_header(empty, {}),
    ]


def gguf(folder):
    """A header against the package gguf: what we take it takes, with the same tensors."""
    import gguf as package

    from mtcli.core.convert.gguf.header import read_gguf

    def check(data):
        (folder / "x.gguf").write_bytes(data)
        found = read_gguf(folder / "x.gguf")
        theirs = package.GGUFReader(folder / "x.gguf")
        assert found.tensors.keys() == {tensor.name for tensor in theirs.tensors}
        for tensor in theirs.tensors:
            entry = found.tensors[tensor.name]
            assert entry.kind == tensor.tensor_type.name
            assert entry.shape == tuple(int(size) for size in reversed(tensor.shape))
            assert (entry.offset, entry.bytes) == (tensor.data_offset, tensor.n_bytes)

    writer = package.GGUFWriter(folder / "seed.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_token_list([b"a", b"bc"])
    writer.add_array("llama.some", [1, 2, 3])
    writer.add_tensor("a.weight", np.ones((2, 32), np.float32))
    packed = package.quantize(np.ones((3, 64), np.float32), package.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b.weight", packed, raw_dtype=package.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return check, [(folder / "seed.gguf").read_bytes()]


def _hf_folder(folder):
    from mtcli.core.checkpoint.huggingface.config_json import BY_TYPE
    from mtcli.core.mesh.parameters import parameters

    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    model, family = model_of(HF_CONFIG, folder / "config.json"), BY_TYPE["llama"]
    boxes = [box for p in parameters(model).values() for box in family.boxes(p, model)]
    header = encode_header([(box.key, "F32", box.shape) for box in boxes], {})
    size = 4 * sum(int(np.prod(box.shape)) for box in boxes)
    (folder / "w.safetensors").write_bytes(header + bytes(size))
    index = {"weight_map": dict.fromkeys((box.key for box in boxes), "w.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return json.dumps(index).encode()


def hf_index(folder):
    """model.safetensors.index.json: all files lie in the folder, and every tensor is found."""
    seed = _hf_folder(folder)

    def check(data):
        (folder / "model.safetensors.index.json").write_bytes(data)
        found = open_checkpoint(folder)
        named = set(json.loads(data)["weight_map"].values())
        boxes = (box for stored in found.tensors.values() for box in stored.boxes)
        assert {box.file for box in boxes} <= named == {"w.safetensors"}

    return check, [seed]


def hf_config(folder):
    """config.json of a Hugging Face folder, whose sizes are those of the JSON."""
    _hf_folder(folder)

    def check(data):
        (folder / "config.json").write_bytes(data)
        model, table = open_checkpoint(folder).model, json.loads(data)
        assert (model.num_layers, model.vocab_size) == (1, table["vocab_size"])
        assert model.tie_embeddings is bool(table.get("tie_word_embeddings"))

    return check, [json.dumps(HF_CONFIG).encode()]


def generation_config(folder):
    """generation_config.json, of which the ids that end a text are read."""
    _hf_folder(folder)

    def check(data):
        (folder / "generation_config.json").write_bytes(data)
        found, said = end_ids(open_checkpoint(folder)), json.loads(data).get("eos_token_id")
        assert found == set(said if isinstance(said, list) else [] if said is None else [said])

    return check, [b'{"eos_token_id": [2, 7], "bos_token_id": 1}', b'{"eos_token_id": 2}']


def manifest(folder):
    """manifest.json, which is the same JSON when it is written again."""
    (folder / "f").write_bytes(bytes(48))
    piece = {"file": "f", "key": "a", "start": [0, 0], "size": [2, 3]}
    other = piece | {"key": "b", "start": [2, 0]}
    table = {
        "format": "mtcli-checkpoint", "version": 2, "step": 3, "world": 2, "extra": {"x": [1]},
        "tensors": {"w": {"dtype": "float32", "shape": [4, 3], "pieces": [piece, other]}},
        "files": {"f": {"bytes": 48, "xxh3_128": ["0" * 32]}},
    }  # fmt: skip

    tables = Manifest.model_validate(table).as_tables().to_bytes()

    def check(data):
        (folder / "manifest.json").write_bytes(data)
        found = read_manifest(folder)
        assert found.to_bytes() == type(found).model_validate(json.loads(data)).to_bytes()
        index = found.index
        shards = [shard for one in index.tensors.values() for shard in index.records(one)]
        cells = [(shard["file"], shard["key"]) for shard in shards]
        assert len(set(cells)) == len(cells)
        assert {(folder / name).resolve().parent for name in found.files} <= {folder.resolve()}

    return check, [json.dumps(table).encode(), tables]


def toml(folder):
    """A run config, against tomllib."""

    def check(data):
        (folder / "x.toml").write_bytes(data)
        config, table = load_config(str(folder / "x.toml")), tomllib.loads(data.decode("utf-8-sig"))
        dumped = config.model_dump()
        for name in ("num_layers", "hidden_size", "vocab_size"):
            assert dumped["model"][name] == int(table["model"][name])
        assert config.seed == table.get("seed", config.seed)

    return check, [MODEL_TOML]


def _texts(folder, name, data, blank=False):
    (folder / name).write_bytes(data)
    (source,) = find_sources([str(folder / name)]).sources
    piece, reading = FileRange(source, 0, source.size), Reading("text", blank, False)
    found = list(read_documents(piece, reading))
    for one in found:  # others' readers have nothing of such a file
        if isinstance(one, Bad) and one.kind in (DAMAGED, "bad values"):
            raise wrong(one.reason)
    return found


def jsonl(folder):
    """Lines of JSON, against the json module line by line."""

    def check(data):
        found = _texts(folder, "x.jsonl", data)
        lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        for one in found:
            assert isinstance(one, Bad) or one.text == one.text.encode().decode()
        texts = [one.text for one in found if not isinstance(one, Bad)]
        assert texts == [text for line in lines if (text := _text_of(line)) is not None]

    return check, [b'{"text": "a"}\n{"id": 1, "text": "\\u00e9 b"}\n\n{"text": "c"}']


def _text_of(line):
    try:
        text = json.loads(line.decode())["text"]
        return text if isinstance(text, str) and text.encode() is not None else None
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def text(folder):
    """Plain text: whole, and split on blank lines, where no letter is lost but line breaks."""

    def check(data):
        (one,) = _texts(folder, "x.txt", data) or [None]
        if not isinstance(one, Bad) and one is not None:
            assert one.text.encode() == data.removeprefix(b"\xef\xbb\xbf")
            parts = _texts(folder, "x.txt", data, blank=True)
            joined = "".join("".join(part.text.split()) for part in parts)
            assert joined == "".join(one.text.split())

    return check, [b"a\nb\n\nc \xc3\xa9\r\n\r\nd", b"\xef\xbb\xbfx"]


def compressed(suffix, compress, decompress, *seeds):
    """Lines of JSON under a compression, against the package's own decompressor."""

    def reader(folder):
        def check(data):
            found = _texts(folder, f"x.jsonl{suffix}", data)
            assert found == _texts(folder, "x.jsonl", decompress(data))

        return check, [compress(b'{"text": "a"}\n' * 3), compress(b""), *seeds]

    return reader


def _xz(data):
    """Streams with zeros between them, as xz pads them; Python takes these for an lzma stream."""
    contents = b""
    while data:
        decoder = lzma.LZMADecompressor(memlimit=MAX_XZ_BYTES)
        try:
            contents += decoder.decompress(data)
        except lzma.LZMAError:
            break  # no stream
        assert decoder.eof
        data = decoder.unused_data.lstrip(b"\0")
    return contents


def _zst(data, compress=True):
    import zstandard

    if compress:
        return zstandard.ZstdCompressor().compress(data)
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True) as f:
        return f.read()


def parquet(folder):
    """A table with a column of text; pyarrow's own reader gives the oracle."""
    import pyarrow
    import pyarrow.parquet

    def check(data):
        found = [one for one in _texts(folder, "x.parquet", data) if not isinstance(one, Bad)]
        with pyarrow.parquet.ParquetFile(folder / "x.parquet") as file:  # read_table reserves rows
            batches = list(file.iter_batches(columns=["text"]))
        column = [text for batch in batches for text in batch.column("text").to_pylist()]
        assert [one.text for one in found] == [t for t in column if isinstance(t, str)]

    seeds = []
    for values in (["a", None, "é"], [1, 2, 3], [[b"x"], [], None]):
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": values, "n": [1, 2, 3]}), sink)
        seeds.append(sink.getvalue())
    return check, seeds


def facts(folder):
    """`PREFIX.json`, which preprocess writes."""

    def check(data):
        (folder / "x.json").write_bytes(data)
        table, largest = describe(folder / "x"), max_token_id(folder / "x")
        assert repr(table) == repr(json.loads(data.decode()))  # repr: NaN is not equal to itself
        assert largest is None or largest == table["max_token_id"]

    return check, [b'{"max_token_id": 300, "sha256": {"bin": "0", "idx": "1"}}']


def metrics(folder):
    """metrics.jsonl of a run, and the figures that profile makes of it."""
    (folder / "config.toml").write_bytes(MODEL_TOML)
    (folder / "run.json").write_text('{"world": 2}')

    def check(data):
        (folder / "metrics.jsonl").write_bytes(data)
        run = read_run(str(folder))
        written = [json.loads(line) for line in data.splitlines()[: len(run.rows)]]
        assert {row["step"] for row in run.rows} >= {row["step"] for row in written}
        assert summary_of(run)["steps"] == len(run.rows)

    return check, [b"".join(json.dumps(STEP | {"step": i}).encode() + b"\n" for i in (1, 2))]


def events(folder):
    """events.jsonl of a run; lines that are no event are left out."""
    (folder / "config.toml").write_bytes(MODEL_TOML)
    (folder / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")

    def check(data):
        (folder / "events.jsonl").write_bytes(data)
        found = summary_of(read_run(str(folder)))
        assert all(save["stall_seconds"] is not None for save in found["saves"])
        assert all(type(step) is int for step in found["resumed_at"])
        assert len(found["saves"]) <= data.count(b"\n") + 1

    saved = {"event": "saved", "step": 2, "stall_seconds": 0.1, "write_seconds": 1.0, "bytes": 8}
    resumed = {"event": "resumed", "step": 4}
    return check, ["".join(json.dumps(line) + "\n" for line in (saved, resumed)).encode()]


def run_listing(name):
    """A file of a run as `mtcli runs` reads it: whatever is in it, the run is listed."""

    def reader(folder):
        write_listed(folder)
        if name != "config.toml":  # as short as it can be, since each case reads it
            (folder / "config.toml").write_text("train.steps = 2")

        def check(data):
            (folder / name).write_bytes(data)
            (found,) = find_runs(folder)
            glance = RunWatcher(found).look()
            run = glance.run
            assert isinstance(run.step, int) and json_text(run.as_json())
            assert panel(glance, 80).count("\n") < 30
            listed_table([run], varied_fields([run, run._replace(fields={"seed": 1})]))

        return check, [(folder / name).read_bytes()]

    return reader


def write_listed(folder):
    """Writes a run that has trained a step, on a machine that is another."""
    (folder / "config.toml").write_bytes(MODEL_TOML)
    rows = [STEP | {"total_tokens": 8, "total_seconds": 0.5, "memory_bytes": 9, "valid_loss": 2.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved = {"event": "saved", "step": 1, "bytes": 8}
    failed = {"event": "failed", "step": 1, "reason": "loss nan"}
    lines = [json.dumps(event) + "\n" for event in (saved, failed)]
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "run.json").write_text('{"world": 2, "host": "node7"}')
    holder = {"host": "a", "boot": "b", "namespace": "c", "pid": 7, "started": 1}
    (folder / "run.lock").write_text(json.dumps(holder | {"since": "", "launcher": 0}))


def loss_curves(folder):
    """metrics.jsonl of a run as `mtcli runs plot` reads it: each step once, in order."""
    write_listed(folder)

    def check(data):
        (folder / "metrics.jsonl").write_bytes(data)
        (run,) = read_curves([folder])
        assert run.steps == sorted(set(run.steps)) and len(run.losses) == len(run.tokens)
        assert run.as_json()["steps"][-1] == run.steps[-1]

    return check, [(folder / "metrics.jsonl").read_bytes() * 2]


def run_facts(folder):
    """run.json of a run."""
    (folder / "config.toml").write_bytes(MODEL_TOML)
    (folder / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")

    def check(data):
        (folder / "run.json").write_bytes(data)
        assert read_run(str(folder)).world == json.loads(data)["world"]

    return check, [b'{"world": 2}']


def tokenizer(folder):
    """tokenizer.json, against the tokenizers library."""
    from tokenizers import Tokenizer

    def check(data):
        (folder / "tokenizer.json").write_bytes(data)
        found = load_tokenizer(folder).encode("a b")
        table = json.loads(data.decode())  # settings of batches and of training are not read
        table |= {"padding": None, "truncation": None}
        table["model"] = table["model"] | {"dropout": None}
        theirs = Tokenizer.from_str(json.dumps(table))
        assert found == theirs.encode("a b", add_special_tokens=False).ids

    small = json.loads(byte_tokenizer().definition)
    kept = sorted(small["model"]["vocab"], key=small["model"]["vocab"].get)[:4]
    small["model"]["vocab"] = {letter: i for i, letter in enumerate([*kept, "a", "b", "Ġ"])}
    return check, [json.dumps(small).encode()]


def tokenizer_config(folder):
    """tokenizer_config.json, which names the tokens at the ends."""
    byte_tokenizer().save(folder)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]

    def check(data):
        (folder / "tokenizer_config.json").write_bytes(data)
        found, table = load_tokenizer(folder), json.loads(data.decode())
        expected = 256  # the end of a document where no end is named, and the end where no begin is
        for key, read in (
            ("eos_token", found.eod_id),
            ("bos_token", eval_tokenizer(found).prefix_id),
        ):
            named = table.get(key) if isinstance(table, dict) else None
            named = named.get("content") if isinstance(named, dict) else named
            expected = vocab.get(named, expected) if isinstance(named, str) else expected
            assert read == expected

    return check, [b'{"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}}']


def lambada(folder):
    """LAMBADA's passages, one to a line."""
    task = load_task("lambada")

    def check(data):
        (folder / "x.jsonl").write_bytes(data)
        found = _prepared(task, folder / "x.jsonl")
        decoded = data.decode("utf-8-sig").replace("\r\n", "\n")
        lines = [line for line in decoded.split("\n") if line.strip()]
        assert found.num_items == len(lines) == len(found.requests)

    lines = b'{"text": "one two"}\n{"text": "three four five"}\n'
    return check, [lines, b"\xef\xbb\xbf\n" + lines]


def race(folder):
    """An article of RACE."""
    task = load_task("race")
    (folder / "high").mkdir()

    def check(data):
        (folder / "high" / "1.txt").write_bytes(data)
        found = _prepared(task, folder)
        assert (found.num_items, len(found.requests)) == (1, 4)
        assert {type(json.loads(data)[key]) for key in ("questions", "options")} == {list}

    return check, [json.dumps(RACE).encode()]


def wikitext(folder):
    """WikiText's words."""

    def check(data):
        (folder / "x.test.tokens").write_bytes(data)
        found = prepare_wikitext(folder, BYTES, TaskOptions(32))
        decoded = data.decode("utf-8-sig").replace("\r\n", "\n").strip()
        assert found.num_items == len(decoded.split(" "))

    return check, [b" = A = \n\n b c @-@ d , e\n", b"\xef\xbb\xbf \x00\x00"]


def cache(folder):
    """The kept order of samples: only an order of these sequences and rows is taken."""
    made = build_samples(np.array([5, 7, 3], np.int32), range(3), 4, 3, 1)
    for name, array in zip(Samples._fields, made, strict=True):
        np.save(folder / f"{name}.npy", array)
    seeds = [(folder / f"{name}.npy").read_bytes() for name in Samples._fields]

    def check(data):
        for name, seed in zip(Samples._fields, seeds, strict=True):
            (folder / f"{name}.npy").write_bytes(data if name == "rows" else seed)
        found = load_kept(folder, Samples)
        assert found is None or found.rows.shape[1] == 2

    # NumPy parses such a type as Python, and multiplies such a shape in 64 bits.
    parsed = seeds[1].replace(b"'<i4'", b"'01,'").replace(b"'<i8'", b"'01,'")
    many = b"9" * 30
    large = seeds[1].replace(b", 2), }" + b" " * len(many), b", 2" + many + b"), }")
    assert many in large
    mixed = seeds[1].replace(b"'fortran", b"b'fortran").replace(b" \n", b"\n")  # keys: no order
    assert len(mixed) == len(seeds[1])
    return check, [seeds[1], parsed, large, mixed]


def journal(folder):
    """The journal that `preprocess --resume` goes on from."""
    lines = [{"fingerprint": "f"}, {"blocks": 1, "token_bytes": 0, "length_bytes": 0, "counts": {}}]

    def check(data):
        WorkFolder(folder / "x.partial", folder / "x").close()
        for name in ("tokens.bin", "lengths.i32"):
            (folder / "x.partial" / name).write_bytes(b"")
        (folder / "x.partial" / "journal.jsonl").write_bytes(data)
        space = Workspace(Path(folder / "x"), "f", True)
        space.close()
        assert space.blocks == space.resumed_at >= 0

    return check, ["".join(json.dumps(line) + "\n" for line in lines).encode()]


def study(folder):
    """Optuna's log of a sweep; of its trials each was created by a line, and none twice."""
    options = [Varied("optimizer.lr", (), Range(1e-4, 0.1, False)), Varied("seed", (3, 4))]
    sampling = SamplingPlan("random", options, 5, seed=1)

    def check(data):
        (folder / "optuna.log").write_bytes(data)
        proposals = Proposals(sampling, folder)
        assert len(proposals.study.trials) <= data.count(b"op_code")
        numbers, values = zip(*proposals.ask(5) or [(0, {"seed": 3})], strict=True)
        assert len({*numbers}) == len(numbers) <= 5
        assert {one["seed"] for one in [*values, *proposals.done()]} <= {3, 4}

    proposals = Proposals(sampling, folder)
    (first, _), (second, _), _ = proposals.ask(3)
    proposals.tell(first, 2.5)
    proposals.tell(second, None)
    return check, [(folder / "optuna.log").read_bytes()]


READERS = {
    "idx": idx,
    "safetensors": safetensors,
    "gguf": gguf,
    "hf_index": hf_index,
    "hf_config": hf_config,
    "generation_config": generation_config,
    "manifest": manifest,
    "toml": toml,
    "jsonl": jsonl,
    "text": text,
    "gz": compressed(".gz", gzip.compress, gzip.decompress),
    "xz": compressed(".xz", lzma.compress, _xz, *XZ_SEEDS),
    "bz2": compressed(".bz2", bz2.compress, bz2.decompress),
    "zst": compressed(".zst", _zst, lambda data: _zst(data, compress=False)),
    "parquet": parquet,
    "facts": facts,
    "metrics": metrics,
    "run_facts": run_facts,
    "events": events,
    "listed_config": run_listing("config.toml"),
    "listed_metrics": run_listing("metrics.jsonl"),
    "listed_events": run_listing("events.jsonl"),
    "listed_facts": run_listing("run.json"),
    "listed_lock": run_listing("run.lock"),
    "loss_curves": loss_curves,
    "tokenizer": tokenizer,
    "tokenizer_config": tokenizer_config,
    "lambada": lambada,
    "race": race,
    "wikitext": wikitext,
    "cache": cache,
    "journal": journal,
    "study": study,
}
