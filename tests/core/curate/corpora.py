"""Corpora that tests make: WARC files, JSON lines, and outputs read back."""

import gzip
import io
import json

import zstandard

from mtcli.core.config.errors import MtcliError


def warc_bytes(pages):
    """A WARC file, each record under gzip by itself, as Common Crawl's are."""
    out = io.BytesIO()
    out.write(
        gzip.compress(
            warc_record("warcinfo", None, b"software: test\r\n", "application/warc-fields")
        )
    )
    for url, kind, status, body in pages:
        head = (
            f"HTTP/1.1 {status} OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        payload = head.encode() + body
        out.write(
            gzip.compress(
                warc_record("response", url, payload, "application/http; msgtype=response")
            )
        )
    return out.getvalue()


def warc_record(kind, url, payload, content_type):
    lines = ["WARC/1.0", f"WARC-Type: {kind}", "WARC-Date: 2026-11-01T00:00:00Z"]
    if url:
        lines += [f"WARC-Target-URI: {url}", f"WARC-Record-ID: <urn:test:{url}>"]
    lines += [f"Content-Type: {content_type}", f"Content-Length: {len(payload)}", "", ""]
    return "\r\n".join(lines).encode() + payload + b"\r\n\r\n"


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_zst(path):
    with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        return [json.loads(line) for line in io.TextIOWrapper(stream, encoding="utf-8")]


def shards(folder):
    """All documents that are left, shard by shard."""
    paths = sorted(path for path in folder.glob("*.jsonl.zst") if path.name != "removed.jsonl.zst")
    return [record for path in paths for record in read_zst(path)]


def removed(folder):
    return read_zst(folder / "removed.jsonl.zst")


def tree(folder):
    """Every file below a folder, by name."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def refusal(call, *arguments):
    try:
        call(*arguments)
    except MtcliError as error:
        return str(error)
    raise AssertionError("it was not refused")
