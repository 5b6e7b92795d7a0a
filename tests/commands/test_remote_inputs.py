"""Inputs of the network: preprocess, curate and train write what they write of local files."""

import gzip
import json
import random

import pytest
from chats import save_model, sums, write_lines
from command_line import mtcli
from hub_stub import Hub, serving
from web_stub import Web, served

from mtcli.core.curate.documents import find_files
from mtcli.core.runtime import remote

WORDS = ["a", "corpus", "of", "few", "words", "drawn", "again", "and", "again,", "é"]
TEXTS = [" ".join(random.Random(i).choices(WORDS, k=40 + i % 97)) for i in range(3000)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def at_once(_):
    """Waits for no network that is gone."""
    remote.FIRST_WAIT_S = 0.0


@pytest.fixture(scope="module")
def files():
    from io import BytesIO

    import pyarrow
    import pyarrow.parquet
    import zstandard

    table = BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), table, row_group_size=500)
    zst = zstandard.ZstdCompressor().compress(LINES)
    texts = {"a.jsonl": LINES, "b.jsonl.gz": gzip.compress(LINES), "c.parquet": table.getvalue()}
    return texts | {"d.jsonl.zst": zst, "e.txt": "\n\n".join(TEXTS).encode()}


def written(folder, files):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def outputs(prefix):
    return [prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


def shard_bytes(folder):
    """The shards of a corpus that `mtcli curate` wrote."""
    return [path.read_bytes() for path in sorted(folder.glob("[!r]*.zst"))]


def zstd(data):
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(data).read()


@pytest.mark.parametrize(("tokenizer", "workers"), [("bytes", 1), ("train:300", 3)])
def test_preprocess_writes_the_bytes_of_local_files(files, tmp_path, tokenizer, workers):
    written(tmp_path, files)
    words = ("--tokenizer", tokenizer, "--workers", workers)
    done = mtcli("preprocess", *files, "--output", "local", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    web = Web(files, most=100_000)
    with served(web) as address:
        names = [f"{address}/{name}" for name in files]
        words = (*names, "--output", "far", *words)
        done = mtcli("preprocess", *words, folder=tmp_path, fault=at_once)
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "far") == outputs(tmp_path / "local")
    assert len(web.ranges) > sum(len(data) for data in files.values()) / web.most


def test_a_run_that_lost_the_network_goes_on(tmp_path):
    data = b"".join(LINES.replace(b"few", b"f%dw" % i) for i in range(20))
    written(tmp_path, {"a.jsonl": data})
    words = ("--tokenizer", "bytes", "--workers", "2")
    done = mtcli("preprocess", "a.jsonl", "--output", "local", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    web = Web({"a.jsonl": data}, most=1 << 20)
    web.lost_after = 32  # of 41: one a MiB, one a block to find its end, and the first block twice
    with served(web) as address:
        words = ("preprocess", f"{address}/a.jsonl", "--output", "far", *words)
        done = mtcli(*words, folder=tmp_path, fault=at_once)
        assert done.returncode == 1 and "broke off at byte" in done.stderr, done.stderr
        assert "--resume goes on" in done.stderr
        web.lost_after, before = 0, len(web.ranges)
        done = mtcli(*words, "--resume", folder=tmp_path, fault=at_once)
        assert done.returncode == 0, done.stderr
    assert "going on after" in done.stderr and before < len(web.ranges)
    assert outputs(tmp_path / "far") == outputs(tmp_path / "local")


def test_refusals_name_every_address(tmp_path):
    with served(Web({"a.bin": b"."})) as address:
        words = (f"{address}/none.jsonl", f"{address}/a.bin", "s3://bucket/x.jsonl", "hub:x")
        done = mtcli("preprocess", *words, "--output", "x", "--tokenizer", "bytes", folder=tmp_path)
    assert done.returncode == 2
    for said in ("there is no http", "a.bin holds no file to read: 1 .bin", "'hub:x' is no"):
        assert said in done.stderr
    assert done.stderr.count("hint:") == 4 and not list(tmp_path.iterdir())


def test_curate_writes_the_bytes_of_local_files(files, tmp_path):
    local = written(tmp_path / "in", {name: files[name] for name in ("a.jsonl", "b.jsonl.gz")})
    words = ("--set", "stages=['normalise', 'exact']", "--workers", "2")
    done = mtcli("curate", local, "--output", "local", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    with served(Web(files, most=100_000)) as address:
        names = [f"{address}/{path.name}" for path in sorted(local.iterdir(), reverse=True)]
        words = ("curate", *names, "--output", "far", *words)
        done = mtcli(*words, folder=tmp_path, fault=at_once)
    assert done.returncode == 0, done.stderr
    shards = [shard_bytes(tmp_path / place) for place in ("local", "far")]
    assert shards[0] == shards[1] and len(zstd(shards[0][0]).splitlines()) == len(set(TEXTS))


def test_the_names_of_a_corpus_are_the_same_in_any_folder(tmp_path, monkeypatch):
    import fsspec

    fsspec.filesystem("memory").pipe_file("/corpus/b.jsonl", LINES)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    monkeypatch.chdir(tmp_path)
    names = find_files(["memory://corpus/b.jsonl", str(tmp_path / "a.jsonl")]).names
    local = str(tmp_path.resolve() / "a.jsonl")
    assert names == {"memory://corpus/b.jsonl": "memory:/corpus/b.jsonl", local: local[1:]}


def test_curate_reads_pages_of_the_network(tmp_path):
    page = b"WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://a/\r\n"
    page += b"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-00000000000%d>\r\n"
    page += b"WARC-Date: 2026-01-01T00:00:00Z\r\nContent-Type: text/plain\r\n"
    text = " ".join(WORDS * 3000).encode()
    records = (
        page % n + b"Content-Length: %d\r\n\r\n%s\r\n\r\n" % (len(text), text) for n in range(3)
    )
    data = gzip.compress(b"".join(records), 0)
    words = ("--set", "stages=['extract']", "--workers", "1")
    written(tmp_path, {"x.warc.wet.gz": data})
    web = Web({"x.warc.wet.gz": data}, most=100_000)
    with served(web) as address:
        for name, place in (("x.warc.wet.gz", "local"), (f"{address}/x.warc.wet.gz", "far")):
            done = mtcli("curate", name, "--output", place, *words, folder=tmp_path, fault=at_once)
            assert done.returncode == 0, done.stderr
        web.lost_after = len(web.ranges) + 3
        words = (f"{address}/x.warc.wet.gz", "--output", "lost", *words)
        done = mtcli("curate", *words, folder=tmp_path, fault=at_once)
    assert done.returncode == 1 and "broke off at byte" in done.stderr  # no bad record
    shards = [shard_bytes(tmp_path / place) for place in ("local", "far")]
    assert shards[0] == shards[1] and len(zstd(shards[0][0]).splitlines()) == 3


def test_train_reads_conversations_of_the_network_and_of_the_hub(tmp_path):
    save_model(tmp_path / "llama")
    data = write_lines(tmp_path / "my.jsonl", sums(40)).read_bytes()
    hub = Hub({"datasets/lab/sums": {"data/my.jsonl": data}})
    losses = []
    with served(Web({"my.jsonl": data}, most=1000)) as web, serving(hub) as host:
        names = ("my.jsonl", f"{web}/my.jsonl", "hub:lab/sums/data/my.jsonl")
        environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": host}
        environ |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        for number, name in enumerate(names):
            words = ["--set", f"data.train={name}", "--set", f"train.output=run{number}"]
            words += ["--set", "train.epochs=0", "--set", "train.steps=2"]
            done = mtcli("train", "llama", *words, folder=tmp_path, fault=at_once, **environ)
            assert done.returncode == 0, done.stderr
            lines = (tmp_path / f"run{number}" / "metrics.jsonl").read_text().splitlines()
            losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1] == losses[2] and losses[0][-1]
