"""The stages of one document at a time, each beside the library or the paper that it follows."""

import bz2
import gzip
import importlib
import io
import json
import lzma
import pydoc
import random
import re
import tracemalloc
import zlib
from time import process_time

import ftfy
import numpy as np
import pytest
import zstandard
from corpora import refusal, removed, shards, warc_bytes, warc_record, write_jsonl
from fastwarc import stream_io

from mtcli.core.curate import page_file, page_limits
from mtcli.core.curate import warc as warc_module
from mtcli.core.curate.batch import Batch, lower
from mtcli.core.curate.config import LanguageConfig, QualityConfig
from mtcli.core.curate.documents import Document
from mtcli.core.curate.gopher_rules import FAR, KINDS, PACKED_STOP_WORDS, STOP_WORDS
from mtcli.core.curate.hashing import jaccard, unaligned
from mtcli.core.curate.language import make_identify
from mtcli.core.curate.normalise import make_fix
from mtcli.core.curate.page_limits import depth_of, has_many_attributes
from mtcli.core.curate.quality import load_classifier, pareto_draw, train_quality
from mtcli.core.curate.shingles import shingle_set
from mtcli.core.curate.word_loops import count_words

ODD = "abcZ .,&;<é“”‘’—ÃÂ©€œ\x85\u2028ﬁＡ\x1b\r\n\t\xa0Ø°µ»²×√à日本é̀ß"
ODD += "…•™ŸŠ\u00ad&amp;&lt;ïЂвГ\u200b\ufeff"
SPOKEN = {
    "en": "The old house stood at the end of the street, and nobody had lived in it for years.",
    "de": "Das alte Haus stand am Ende der Straße, und seit Jahren hatte niemand darin gewohnt.",
    "fr": "La vieille maison se trouvait au bout de la rue et personne n'y vivait plus depuis.",
    "es": "La vieja casa estaba al final de la calle y nadie había vivido en ella durante años.",
    "ru": "Старый дом стоял в конце улицы, и никто не жил в нём уже много лет.",
    "ja": "古い家は通りの突き当たりに建っていて、何年も誰も住んでいなかった。",
}


def batch(*texts):
    return Batch([Document(b"", "", text, len(text.encode())) for text in texts])


def test_normalise_is_ftfy_on_hostile_texts():
    source, fix, straight = random.Random(3), make_fix(uncurl=True), make_fix(uncurl=False)
    texts = ["".join(source.choices(ODD, k=source.randrange(1, 40))) for _ in range(1500)]
    texts += [text.encode().decode("latin-1") for text in SPOKEN.values()]
    for text in [*texts, *SPOKEN.values()]:
        assert fix(text) == ftfy.fix_text(text)
        assert straight(text) == ftfy.fix_text(text, uncurl_quotes=False)


@pytest.mark.parametrize("code", SPOKEN)
def test_languages_are_told_apart_and_a_text_of_no_language_is_none(code):
    identify = make_identify(LanguageConfig())
    assert identify(SPOKEN[code] * 3) == code
    assert identify("\x01\n 0101 ### \x02" * 5) != "en"


def test_language_keeps_what_it_is_told_to(run, tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"id": k, "text": t * 3} for k, t in SPOKEN.items()])
    out = run(path, stages=["language"], settings=["language.keep=['en', 'ru']"])
    assert [record["id"] for record in shards(out)] == ["en", "ru"]
    assert {line["id"]: line["reason"] for line in removed(out)} == {
        c: c for c in ("de", "fr", "es", "ja")
    }


def prose_like(words, *more):
    return " ".join(["the", "of", *more, *(f"word{i}ed" for i in range(words - 2 - len(more)))])


BROKEN = {
    "too few words": prose_like(49),
    "too many words": prose_like(301),
    "short words": "the of " + "a b " * 40,
    "long words": prose_like(60, "x" * 400),
    "too many hash signs": prose_like(60, "#" * 7),
    "too many ellipses": prose_like(60) + "\u2026" * 7,
    "bullet lines": "\n".join(["- " + prose_like(10)] * 10),
    "lines that end in an ellipsis": "\n".join([prose_like(12) + "...", *[prose_like(12)] * 2] * 2),
    "too few words with letters": prose_like(63) + " 1234" * 16,
    "too few stop words": prose_like(60).replace("of", "off"),
}
KEPT = {
    "words": prose_like(50), "most": prose_like(300), "hash": prose_like(60, "#" * 6),
    "bullets": "\n".join(["- " + prose_like(10)] * 9 + [prose_like(10)]),
    "ellipses": "\n".join(["Été " + prose_like(12) + "...", *[prose_like(12)] * 3] * 2),
    "letters": prose_like(64) + " 1234" * 16,
    "characters": "привычка " * 60 + "the of",
}  # fmt: skip


def test_each_rule_of_gopher_drops_what_breaks_it_and_nothing_else(run, tmp_path):
    records = [{"id": k, "text": t} for k, t in (BROKEN | KEPT).items()]
    path = write_jsonl(tmp_path / "in.jsonl", records)
    out = run(path, stages=["rules"], settings=["rules.max_words=300"])
    assert sorted(record["id"] for record in shards(out)) == sorted(KEPT)
    assert {line["id"]: line["reason"] for line in removed(out)} == {
        reason: reason for reason in BROKEN
    }


def test_words_are_those_of_the_regular_expression():
    texts = ["", " ", "İstanbul a—b “q” éa_b 9x", *SPOKEN.values(), "\x00a\x00 b\t", "日本 x-y"]
    found, (data, _) = batch(*texts).words, batch(*texts).lowered
    for number, text in enumerate(texts):
        mine = slice(found.bounds[number], found.bounds[number + 1])
        spans = zip(found.starts[mine], found.stops[mine], strict=True)
        want = re.findall(r"\w+", text.replace("İ", "i").lower())
        assert [data[a:b].decode().replace("İ", "i") for a, b in spans] == want


def test_rules_count_the_words_that_blanks_divide():
    texts = ["", " \t", "The then\x1fthe\nHAVE", "3.5 -- 1234567890123456x " + "9" * 16 + "x"]
    texts += ["to be or not to be " * 3, "bathe of\x00and and", *SPOKEN.values()]
    data, offsets = batch(*texts).lowered
    codes, eights = np.frombuffer(data, np.uint8), unaligned(data, len(data) - 8)
    found = count_words(codes, eights, offsets, KINDS, FAR, PACKED_STOP_WORDS)
    for text, counts in zip(texts, found.tolist(), strict=True):
        words = [word for word in re.split(b"[ \t\n\x1f\x00]+", lower(text)) if word]
        lettered = [word for word in words if re.search(b"[a-z\x80-\xff]", word[:FAR])]
        heard = sum(1 << i for i, word in enumerate(STOP_WORDS) if word.encode() in words)
        assert counts == [len(words), sum(map(len, words)), len(lettered), heard]


@pytest.mark.parametrize("size", [1, 5, 8, 9, 20])
def test_jaccard_of_hashed_shingles_is_that_of_strings(size):
    def strings(text):
        return {text[i : i + size] for i in range(max(1, len(text) - size + 1))} if text else set()

    texts = ["", "x", "abcde", "abcdef " * 4, *SPOKEN.values(), SPOKEN["fr"][5:], SPOKEN["en"] * 2]
    for text in texts:
        for other in texts:
            one, two = strings(text), strings(other)
            want = len(one & two) / len(one | two) if one | two else 1.0
            assert jaccard(shingle_set(text, size), shingle_set(other, size)) == pytest.approx(want)


def test_quality_learns_to_tell_two_corpora_and_draws_by_id(run, tmp_path, prose):
    source = random.Random(0)
    good = [" ".join(source.choices(["alpha", "beta", "gamma", "delta"], k=30)) for _ in range(60)]
    bad = [" ".join(source.choices(["spam", "eggs", "ham", "delta"], k=30)) for _ in range(40)]
    files = [
        str(write_jsonl(tmp_path / f"{name}.jsonl", [{"text": t} for t in texts]))
        for name, texts in (("good", good), ("bad", bad))
    ]
    model = tmp_path / "q.bin"
    facts = train_quality(files[:1], files[1:], model)
    assert facts["accuracy"] == 1.0
    before = model.read_bytes()
    train_quality(files[:1], files[1:], model)
    assert model.read_bytes() == before
    settings = [f"quality.model='{model}'", "quality.keep='threshold'"]
    out = run(*files, stages=["quality"], settings=settings)
    assert sorted(r["text"] for r in shards(out)) == sorted(good)
    assert len({r["id"] for r in removed(out)}) == 40
    (tmp_path / "no.bin").write_text("nothing")
    assert "is no model" in refusal(
        lambda: run(
            *files, name="x", stages=["quality"], settings=[f"quality.model='{tmp_path}/no.bin'"]
        )
    )
    assert load_classifier(model).weights.shape == (1 << 20,)


def test_the_pareto_rule_keeps_the_share_that_its_distribution_says():
    """P(draw > 1 - s) is (2 - s)^-alpha, of numpy's Pareto (Lomax) distribution."""
    config = QualityConfig()
    draws = np.array([pareto_draw(b"%d" % i, config.alpha, 0) for i in range(40_000)])
    for score in (0.0, 0.5, 0.9, 1.0):
        assert np.mean(draws > 1 - score) == pytest.approx((2 - score) ** -9.0, abs=0.006)
    assert np.array_equal(draws[:9], [pareto_draw(b"%d" % i, config.alpha, 0) for i in range(9)])
    assert not np.array_equal(
        draws[:9], [pareto_draw(b"%d" % i, config.alpha, 1) for i in range(9)]
    )


@pytest.fixture
def pages():
    """Real pages: what pydoc writes of modules of the standard library."""
    made = []
    for name in ("textwrap", "csv", "heapq"):
        body = pydoc.HTMLDoc().document(importlib.import_module(name))
        html = pydoc.HTMLDoc().page(name, body).encode()
        made.append((f"http://x/{name}", "text/html; charset=utf-8", 200, html))
    return made


@pytest.mark.parametrize("engine", ["resiliparse", "justext"])
def test_pages_of_a_warc_file_become_text(engine, pages, run, tmp_path):
    others = [
        ("http://x/no", "text/html", 404, b"<p>no"),
        ("http://x/i", "image/png", 200, b"\x89"),
    ]
    empty = [("http://x/empty", "text/html", 200, b"<html></html>")]
    path = tmp_path / "a.warc.gz"
    path.write_bytes(warc_bytes(pages + others + empty))
    out = run(path, stages=["extract"], settings=[f"extract.engine='{engine}'"])
    found = {record["url"]: record for record in shards(out)}
    assert "http://x/no" not in found and "http://x/i" not in found
    text = found["http://x/csv"]["text"]
    assert "reading\nand writing" in text or "reading and writing" in re.sub(r"\s+", " ", text)
    assert "<" not in text.split("\n")[0] and found["http://x/csv"]["id"] == "urn:test:http://x/csv"
    assert "http://x/empty" in {line["id"].removeprefix("urn:test:") for line in removed(out)}


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_a_warc_file_may_be_compressed_as_a_whole(ending, pages, run, tmp_path):
    plain = gzip.decompress(warc_bytes(pages))
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    pack[".zst"] = zstandard.ZstdCompressor().compress
    path = tmp_path / f"a.warc{ending}"
    path.write_bytes(pack[ending](plain))
    out = run(path, stages=["extract"])
    assert {record["url"] for record in shards(out)} == {url for url, *_ in pages}
    path.write_bytes(pack[ending](plain)[:-40])
    assert "WARC record" in refusal(lambda: run(path, stages=["extract"], force=True))


def test_a_warc_file_that_ends_early_is_a_bad_record_and_none_without_extract(pages, run, tmp_path):
    data = warc_bytes(pages)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(data[:-300])
    assert "a.warc.gz:4: a damaged WARC record" in refusal(lambda: run(path, stages=["extract"]))
    assert len(shards(run(path, stages=["extract"], skip_bad=True))) == 2
    path.write_bytes(data[:-3])
    assert "ends inside a WARC record" in refusal(lambda: run(path, stages=["extract"], force=True))
    assert "the stages have no extract" in refusal(lambda: run(path, stages=["exact"]))


def warc_of(body, encoding=None):
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n"
    name = "Transfer" if encoding == "chunked" else "Content"
    head += f"{name}-Encoding: {encoding}\r\n" if encoding else ""
    payload = head.encode() + b"\r\n" + body
    return warc_record("response", "http://x", payload, "application/http; msgtype=response")


NESTED = {
    "div": b"<div>x" * 20_000,
    "closed": b"<DIV>x" * 20_000 + b"</DIV>" * 20_000,
    "misnested": b"<a><div>x</a>" * 20_000,
    "tables": b"<div><table><tr><td></div></table>x" * 20_000,
    "utf-16": ("<div>x" * 20_000).encode("utf-16"),
    "raw": b"<script>var a = '<div>'</script><!-- <b> --><div>" * 20_000,
}


@pytest.mark.parametrize("shape", NESTED)
def test_a_page_of_nested_tags_is_a_bad_record(shape, pages, run, tmp_path):
    path = tmp_path / "a.warc"
    path.write_bytes(warc_of(NESTED[shape]) + gzip.decompress(warc_bytes(pages)))
    said = "a.warc:1: a page of more than 4,000 nested elements"
    assert said in refusal(lambda: run(path, stages=["extract"]))
    out = run(path, stages=["extract"], skip_bad=True)
    assert len(shards(out)) == len(pages)
    bad = json.loads((out / "report.json").read_text())["bad_lines"]
    assert bad == {"count": 1, "examples": [said]}


def test_long_pages_that_are_flat_are_not_deep():
    row = b"<tr><td><p>a<br><img src=x><td><b>x</b><li>one<span class='a'>x</span></tr>"
    raw = b"<script>'<div>'</script><!-- <div> --><style><b></style>"
    table = b"<p>x<table>" + row * 5000 + b"</table>"
    for page in (row * 9000, raw * 9000, table, b"<div><span>x</span></div>" * 9000):
        assert depth_of(page) < 10
    assert depth_of(b"<div>" * 300) == 0
    assert depth_of(b"<i>" * 100 + b"<br>" * 4000) == 100


def test_html_files_become_the_text_of_the_same_pages_in_a_warc_file(pages, run, tmp_path):
    (tmp_path / "a.warc.gz").write_bytes(warc_bytes(pages))
    wanted = {one["text"] for one in shards(run(tmp_path / "a.warc.gz", stages=["extract"]))}
    for folder, (url, _, _, html) in zip(("one", "two/three", "two/three"), pages, strict=True):
        (tmp_path / "site" / folder).mkdir(parents=True, exist_ok=True)
        name = url.rpartition("/")[2]
        (tmp_path / "site" / folder / f"{name}.html").write_bytes(html)
    page = tmp_path / "site" / "two" / "three" / "heapq.html"
    page.with_name("heapq.htm.gz").write_bytes(gzip.compress(page.read_bytes()))
    page.unlink()
    found = shards(run(tmp_path / "site", stages=["extract"], force=True))
    assert {record["text"] for record in found} == wanted
    assert sorted((record["id"], record["source"]) for record in found) == [
        ("one/textwrap.html:1", "one"),
        ("two/three/csv.html:1", "three"),
        ("two/three/heapq.htm.gz:1", "three"),
    ]


def test_a_html_file_is_read_in_its_own_encoding(run, tmp_path):
    words = "Ein längerer Absatz über Bäume und Straßen, der genug Wörter hat. " * 9
    page = "<html><head><meta charset='iso-8859-1'></head><body><p>{}</p></body></html>"
    (tmp_path / "a.html").write_bytes(page.format(words).encode("iso-8859-1"))
    (tmp_path / "b.html").write_bytes(page.format(words).encode("utf-16"))
    texts = [record["text"] for record in shards(run(tmp_path, stages=["extract"]))]
    assert texts == [words.strip()] * 2


def test_html_files_that_cannot_be_read_are_bad_records(pages, run, tmp_path, monkeypatch):
    monkeypatch.setattr(page_file, "MAX_BYTES", 1 << 20)
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "good.html").write_bytes(pages[0][3])
    (folder / "deep.html").write_bytes(NESTED["div"])
    (folder / "bomb.html.gz").write_bytes(gzip.compress(b"<p>" + b"x" * (64 << 20)))
    (folder / "cut.html.gz").write_bytes(gzip.compress(pages[0][3])[:-9])
    (folder / "none.html").touch()
    out = run(folder, stages=["extract"], skip_bad=True)
    assert len(shards(out)) == 1
    ended = "Compressed file ended before the end-of-stream marker was reached"
    assert json.loads((out / "report.json").read_text())["bad_lines"]["examples"] == [
        "bomb.html.gz:1: a page of more than 1,048,576 bytes",
        f"cut.html.gz: the file is damaged: {ended}",
        "deep.html:1: a page of more than 4,000 nested elements",
        "none.html: the file is damaged: it has 0 bytes",
    ]
    said = refusal(lambda: run(folder, stages=["rules"]))
    assert "HTML is given, and the stages have no extract" in said


ATTRIBUTES = "a{}=x ", 'a{}="x>"', "a{}\n", "a{} = '>' ", "/A{}", "a'{} "


@pytest.mark.parametrize("form", ATTRIBUTES)
def test_a_tag_of_many_attributes_is_a_bad_record(form, pages, run, tmp_path):
    for count in (1000, 1001):
        page = f"<p>x<p {''.join(map(form.format, range(count)))}>x</p>"
        assert has_many_attributes(page.encode()) == (count > 1000)
        assert has_many_attributes(page.encode("utf-16")) == (count > 1000)
    path = tmp_path / "a.warc"
    path.write_bytes(warc_of(page.encode()) + gzip.decompress(warc_bytes(pages)))
    said = "a.warc:1: a page with a tag of more than 1,000 attributes"
    assert said in refusal(lambda: run(path, stages=["extract"]))
    assert len(shards(run(path, stages=["extract"], skip_bad=True))) == len(pages)


def test_long_texts_scripts_and_comments_are_no_attributes():
    words = b"if i<n then a b " * 2000
    for page in (b"<p>" + b"a b " * 2000, b"<ScRipt a=1>%b</sCript>" % words, b"<!-- %b" % words):
        assert not has_many_attributes(page + b"<p a>")
    assert has_many_attributes(b"<script>%b</script><p %b>" % (words, words))


def test_a_page_that_inflates_is_read_up_to_a_bound(pages, run, tmp_path, monkeypatch):
    monkeypatch.setattr(warc_module, "MAX_BYTES", 1 << 20)
    page = b"<p>" + b"x" * (64 << 20)
    path = tmp_path / "a.warc"
    path.write_bytes(warc_of(gzip.compress(page), "gzip") + gzip.decompress(warc_bytes(pages)))
    tracemalloc.start()
    out = run(path, stages=["extract"], skip_bad=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(shards(out)) == len(pages) and peak < 20 << 20
    (told,) = json.loads((out / "report.json").read_text())["bad_lines"]["examples"]
    assert told == "a.warc:1: a page of more than 1,048,576 bytes once inflated"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "bare deflate", "chunked", "br"])
def test_pages_are_read_in_every_encoding_and_damage_is_of_one_record(encoding, run, tmp_path):
    page, chunks = b"<p>" + b"a long paragraph of text. " * 40, io.BytesIO()
    writer = stream_io.BrotliWriter(chunks)
    writer.write(page)
    writer.close()
    bare = zlib.compressobj(wbits=-15)
    packed = {"gzip": gzip.compress(page), "deflate": zlib.compress(page), "br": chunks.getvalue(),
              "bare deflate": bare.compress(page) + bare.flush(),
              "chunked": b"%x\r\n%s\r\n0\r\n\r\n" % (len(page), page)}[encoding]  # fmt: skip
    path, name = tmp_path / "a.warc", encoding.removeprefix("bare ")
    damaged = warc_of(b"\xff" + packed[1:], name)
    path.write_bytes(damaged + warc_of(packed, name) + warc_of(page))
    out = run(path, stages=["extract"], skip_bad=True)
    assert [record["text"].count("a long paragraph") for record in shards(out)] == [40, 40]
    (told,) = json.loads((out / "report.json").read_text())["bad_lines"]["examples"]
    assert told.startswith("a.warc:1: ")


def test_a_page_that_takes_too_long_or_is_no_html_is_dropped(pages, run, tmp_path, monkeypatch):
    monkeypatch.setattr(warc_module, "time_limit", lambda: page_limits.time_limit(0.05))
    path = tmp_path / "a.warc"
    path.write_bytes(warc_of(b"<p>x" * 4000) + warc_of(b"<!--" * 50))
    said = refusal(lambda: run(path, stages=["extract"], settings=["extract.engine='justext'"]))
    assert "1 more than 20 s of a processor" in said and "1 not HTML: ParserError" in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_holds_after_a_callback_took_its_exception():
    class Slow:
        def __del__(self):
            while True:
                pass

    begun = process_time()
    with pytest.raises(page_limits.TooSlow), page_limits.time_limit(0.05):
        Slow()  # ends by the first exception, which Python ignores
        while process_time() - begun < 20:
            pass


def wet_bytes(texts, kind="text/plain"):
    """A WET file as Common Crawl's: texts of pages, as conversions."""
    records = [warc_record("warcinfo", None, b"software: x\r\n", "application/warc-fields")]
    records += [warc_record("conversion", url, text, kind) for url, text in texts.items()]
    return b"".join(map(gzip.compress, records))


@pytest.mark.parametrize("name", ["x.warc.wet.gz", "x.wet.gz", "x.warc.gz"])
def test_texts_of_a_wet_file_are_documents_as_they_are(name, run, tmp_path):
    texts = {"http://x/a": "Ein <b>Text</b>\nüber &amp; Häuser.".encode(), "http://x/b": b"two\n"}
    (tmp_path / name).write_bytes(wet_bytes(texts))
    stages = ["exact"] if ".wet" in name else ["extract", "exact"]
    found = shards(out := run(tmp_path / name, stages=stages))
    assert {record["url"]: record["text"] for record in found} == {
        url: text.decode().strip() for url, text in texts.items()
    }
    assert {record["source"] for record in found} == {"x"}
    assert json.loads((out / "report.json").read_text())["passed_over"] == {
        "WARC records: 'warcinfo'": 1
    }
    (tmp_path / name).write_bytes(wet_bytes({"http://x/a": b"a \xff"}))
    assert ":2: byte 0xff of a text is not UTF-8" in refusal(
        lambda: run(tmp_path / name, stages=stages, force=True)
    )


def test_a_warc_file_of_no_pages_is_refused_with_what_was_passed_over(pages, run, tmp_path):
    path = tmp_path / "a.warc.gz"
    page, kinds = b"<p>no", ("text/html", "image/png", "image/png")
    path.write_bytes(warc_bytes([("http://x", k, 200 + 204 * (k[0] == "t"), page) for k in kinds]))
    said = refusal(lambda: run(path, stages=["extract"]))
    for words in ("0 documents are left of 0", "2 content of type 'image/png'",
                  "1 answers with status 404", "1 WARC records: 'warcinfo'"):  # fmt: skip
        assert words in said, said
    assert not list((tmp_path / "out").iterdir())
    wet = tmp_path / "b.wet.gz"
    wet.write_bytes(warc_bytes(pages))
    assert "3 HTML, and the stages have no extract" in refusal(lambda: run(wet, stages=["exact"]))
    old = [str(path)]
    assert "--against: HTML is given" in refusal(lambda: run(wet, stages=["exact"], against=old))


@pytest.mark.parametrize("too_long", [100, 10**9])
def test_a_record_whose_length_takes_those_after_it_is_named(too_long, pages, run, tmp_path):
    plain = gzip.decompress(warc_bytes(pages))
    said = f"WARC/1.0\r\nWARC-Type: metadata\r\nContent-Length: {len(plain) + too_long}\r\n\r\n"
    path = tmp_path / "a.warc"
    path.write_bytes(plain + said.encode() + plain)
    found = refusal(lambda: run(path, stages=["extract"]))
    damaged = plain.count(b"WARC/1.0") + 1
    assert f"a.warc:{damaged}: the file ends inside a WARC record" in found
    assert len(shards(run(path, stages=["extract"], skip_bad=True))) == len(pages)


def test_a_missing_extra_is_told_with_what_installs_it(run, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "x"}])
    for stage, module in (("normalise", "ftfy"), ("language", "pycld2")):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, module, None)
            said = refusal(lambda s=stage: run(path, stages=[s], name=s))
        assert (
            f"{stage} needs the package {module}" in said and "pip install 'mtcli[curate]'" in said
        )
