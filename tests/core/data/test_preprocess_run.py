"""Preprocess as a whole: the same bytes however it is run, killed or disturbed."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from marks import slow, slow_cases

from mtcli.core.config.errors import Exit, MtcliError
from mtcli.core.data.indexed import Indexed
from mtcli.core.data.preprocess import PreprocessRequest, preprocess
from mtcli.core.data.tokenize import load_tokenizer

SUFFIXES = (".bin", ".idx", ".json")


def run(inputs, output, tokenizer="bytes", said=None, **options):
    inputs = tuple(map(str, inputs if isinstance(inputs, list) else [inputs]))
    say = (said if said is not None else []).append
    return preprocess(PreprocessRequest(inputs, Path(output), tokenizer, **options), say)


def written(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES]


def documents(prefix):
    data = Indexed(prefix)
    return [data[i].tolist() for i in range(len(data))]


@pytest.fixture
def corpus(tmp_path):
    """2 MB of JSON lines and some texts; their documents, in order of reading."""
    random = np.random.default_rng(0)
    words = ["the", "of", "and", "é", "to", "in", "日本", "def", "return", "self", "x", "y", "z"]
    texts = [" ".join(random.choice(words, n)) for n in random.integers(1, 400, 2000)]
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in texts[:1900]]
    (folder / "a.jsonl").write_text("".join(lines))
    for number, text in enumerate(texts[1900:]):
        (folder / f"t{number:03}.txt").write_text(text)
    return folder, texts


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("mtcli.core.data.sources.cut.__defaults__", (50_000,))


def test_the_tokens_are_those_of_each_document_and_its_end(corpus, tmp_path, small_blocks):
    folder, texts = corpus
    report = run(folder, tmp_path / "out", workers=2)
    assert documents(tmp_path / "out") == [[*text.encode(), 256] for text in texts]
    total = sum(len(text.encode()) for text in texts)
    assert (report["documents"], report["text_bytes"]) == (2000, total)
    assert (report["tokens"], report["max_token_id"]) == (total + 2000, 256)
    facts = json.loads(Path(f"{tmp_path}/out.json").read_text())
    for name in ("bin", "idx"):
        data = Path(f"{tmp_path}/out.{name}").read_bytes()
        assert facts["sha256"][name] == hashlib.sha256(data).hexdigest()
    assert load_tokenizer(tmp_path / facts["tokenizer"]["folder"]).vocab_size == 257
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("corpus", "out.bin", "out.idx", "out.json", "out.tokenizer")
    ]


def test_any_number_of_workers_writes_the_same_bytes_which_give_the_texts_back(
    corpus, tmp_path, small_blocks
):
    outputs = []
    for workers in (1, 2, 5):
        (tmp_path / str(workers)).mkdir()
        run(corpus[0], tmp_path / str(workers) / "out", "train:400", workers=workers)
        outputs.append(written(tmp_path / str(workers) / "out"))
    assert outputs[0] == outputs[1] == outputs[2]
    tokenizer, found = load_tokenizer(tmp_path / "2/out.tokenizer"), documents(tmp_path / "2/out")
    assert 257 < tokenizer.vocab_size <= 400
    assert [tokenizer.decode(ids[:-1]) for ids in found] == corpus[1]
    assert all(ids[-1] == tokenizer.eod_id for ids in found)


def test_gpt2_ids_are_those_of_tokenizers(real_data, tmp_path):
    lines = (real_data / "wikitext-103" / "wiki.test.tokens").read_text().splitlines()
    texts = [line for line in lines if line][:300]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"t": text}) + "\n" for text in texts))
    said = []
    run(tmp_path / "a.jsonl", tmp_path / "out", str(real_data / "gpt2-bpe"), said, text_key="t")
    tokenizer = load_tokenizer(real_data / "gpt2-bpe")
    assert documents(tmp_path / "out") == [[*tokenizer.encode(text), 50256] for text in texts]
    assert "50,257 ids" in said[0]


def test_the_end_of_a_document_is_left_out_where_asked(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    run(tmp_path / "a.txt", tmp_path / "out", append_eod=False, split_on_blank=True)
    assert documents(tmp_path / "out") == [[*b"one"], [*b"two"]]


def test_standard_input_is_read_as_a_file_would_be(corpus, tmp_path, monkeypatch, small_blocks):
    data = (corpus[0] / "a.jsonl").read_bytes()
    monkeypatch.setattr("mtcli.core.data.sources.BLOCK_BYTES", 30_000)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    run("-", tmp_path / "out", workers=2)
    assert documents(tmp_path / "out") == [[*text.encode(), 256] for text in corpus[1][:1900]]


@pytest.mark.parametrize(
    ("data", "blank", "expected"),
    [
        (b"one\n\ntwo\n", False, [b"one\n\ntwo\n"]),
        (b"one\n\ntwo\n", True, [b"one", b"two"]),
        (
            b"\xef\xbb\xbf one\n" * 9 + b"\n\n{two}",
            True,
            [(b" one\n\xef\xbb\xbf" * 9)[:-4], b"{two}"],
        ),
    ],
)
def test_text_on_standard_input_is_one_document_or_blocks(
    tmp_path, monkeypatch, data, blank, expected
):
    monkeypatch.setattr("mtcli.core.data.sources.BLOCK_BYTES", 7)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    run("-", tmp_path / "out", split_on_blank=blank, append_eod=False)
    assert [bytes(ids) for ids in documents(tmp_path / "out")] == expected


def test_a_bad_line_of_standard_input_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("mtcli.core.data.sources.BLOCK_BYTES", 20)
    data = b'{"text": "one"}\n' * 30 + b"{\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(MtcliError, match="error: -:31: not JSON"):
        run("-", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_line_far_into_a_file_is_named_and_left_out_where_asked(tmp_path, small_blocks):
    lines = [b'{"text": "a line that is good"}'] * 5000
    lines[4321] = b'{"text": "cut'
    lines[4900] = b'{"txt": "x"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(
        MtcliError, match=r"a\.jsonl:4322: not JSON.*\n\nhint: .*--skip-bad"
    ) as error:
        run(tmp_path / "a.jsonl", tmp_path / "out", workers=2)
    assert error.value.code == Exit.WRONG_INPUT
    assert not any(Path(f"{tmp_path}/out{suffix}").exists() for suffix in SUFFIXES)
    report = run(tmp_path / "a.jsonl", tmp_path / "out", skip_bad=True, resume=True)
    assert report["documents"] == 4998
    assert report["skipped"] == {"bad JSON": 1, "missing key": 1}
    run(tmp_path / "a.jsonl", tmp_path / "again", skip_bad=True)
    assert written(tmp_path / "out")[:2] == written(tmp_path / "again")[:2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no document in .*: 0 bad ones were left out and 0"),
        ('{"text": ""}\n' * 3, "and 3 hold no"),
    ],
)
def test_a_corpus_without_documents_is_refused(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(MtcliError, match=message):
        run(tmp_path / "a.jsonl", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_outputs_are_not_replaced_unless_forced(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    run(tmp_path / "a.txt", tmp_path / "out")
    (tmp_path / "a.txt").write_text("other")
    with pytest.raises(MtcliError, match="4 outputs exist: .*out.bin, .*\n\nhint: --force"):
        run(tmp_path / "a.txt", tmp_path / "out")
    with pytest.raises(MtcliError, match="out was made from other inputs or options"):
        run(tmp_path / "a.txt", tmp_path / "out", resume=True)
    assert documents(tmp_path / "out") == [[*b"one", 256]]
    run(tmp_path / "a.txt", tmp_path / "out", force=True)
    assert documents(tmp_path / "out") == [[*b"other", 256]]
    said = []
    report = run(tmp_path / "a.txt", tmp_path / "out", said=said, resume=True)
    assert (report["tokens"], said) == (6, [f"{tmp_path}/out is complete: nothing to do"])


def test_the_text_of_an_end_of_document_is_counted(tmp_path):
    tokenizer = json.loads(load_tokenizer("bytes").definition)
    added = {"id": 256, "content": "<|endoftext|>", "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"] = [{**added, **flags}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "a.txt").write_text("a<|endoftext|>b")
    report = run(tmp_path / "a.txt", tmp_path / "out", str(tmp_path / "tokenizer.json"))
    assert documents(tmp_path / "out") == [[97, 256, 98, 256]]  # as Hugging Face gives it
    assert report["eod_in_text"] == 1
    report = run(tmp_path / "a.txt", tmp_path / "plain")
    assert documents(tmp_path / "plain") == [[*b"a<|endoftext|>b", 256]]
    assert report["eod_in_text"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "--workers: 0 workers cannot do anything"),
        ({"inputs": []}, "no input"),
        ({"inputs": ["-", "a.txt"]}, "standard input and 1 more inputs cannot be mixed"),
        ({"inputs": ["-"], "resume": True}, "--resume reads the input twice"),
        ({"inputs": ["-"], "tokenizer": "train:300"}, "train:300 reads the input twice"),
        ({"tokenizer": "train:many"}, "tokenizer train:many is not train: and a number"),
        ({"tokenizer": "train:12"}, "train:12 is less than the 256 bytes"),
        ({"tokenizer": "train:6", "sentences": True}, "train:6 is less than the 5 special tokens"),
        ({"tokenizer": "train:99999999999"}, "train:99999999999 is more than the 16777216 ids"),
        ({"text_key": "body"}, "--text-key: no input has keys or columns"),
        ({"format": "jsonl", "split_on_blank": True}, "--split-on: no input is plain text"),
        ({"tokenizer": "./absent"}, "tokenizer ./absent: no such file or folder"),
        ({"output": Path("")}, "--output: '.' names no file"),
        ({"output": Path("a" * 300)}, "--output: it cannot be written: File name too long"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(tmp_path, options, message):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(MtcliError, match=message):
        run(**{"inputs": tmp_path / "a.txt", "output": tmp_path / "out", **options})
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_all_that_is_wrong_with_a_request_is_told_at_once(tmp_path):
    inputs = [str(tmp_path / name) for name in ("a.pdf", "absent.txt", "empty")]
    Path(inputs[0]).touch()
    Path(inputs[2]).mkdir()
    with pytest.raises(MtcliError) as error:
        run(inputs, tmp_path / "out", "train:9", workers=0)
    told = [problem.message for problem in error.value.problems]
    assert len(told) == 5
    assert told[:2] == [
        f"{inputs[0]} is of no kind that is known by its name",
        f"there is no file or folder {inputs[1]}",
    ]


def test_a_folder_that_has_the_tokenizer_s_name_is_not_replaced_unless_forced(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    mine = tmp_path / "out.tokenizer" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(MtcliError, match=r"1 outputs exist: .*out.tokenizer"):
        run(tmp_path / "a.txt", tmp_path / "out")
    assert mine.read_text() == "mine"
    run(tmp_path / "a.txt", tmp_path / "out", force=True)
    assert not mine.exists()


def test_an_end_of_document_that_the_tokenizer_lacks_is_refused(tmp_path):
    definition = json.loads(load_tokenizer("bytes").definition)
    del definition["model"]["vocab"]["<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "a.txt").write_text("one")
    spec = str(tmp_path / "tokenizer.json")
    with pytest.raises(MtcliError, match="has no end-of-document token to append"):
        run(tmp_path / "a.txt", tmp_path / "out", spec, append_eod=True)
    run(tmp_path / "a.txt", tmp_path / "out", spec)
    assert documents(tmp_path / "out") == [[*b"one"]]


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(MtcliError, match="a.txt/out cannot be written"):
        run(tmp_path / "a.txt", tmp_path / "a.txt" / "out")


COMMAND = """
import sys
from pathlib import Path
import mtcli.core.data.sources as corpus
corpus.cut.__defaults__ = (50_000,)
from mtcli.core.data.preprocess import PreprocessRequest, preprocess
from mtcli.core.config.errors import MtcliError
{before}
try:
    wanted = PreprocessRequest(({inputs!r},), Path({output!r}), "bytes", workers=2, {options})
    preprocess(wanted, print)
except MtcliError as error:
    print(error, file=sys.stderr)
    sys.exit(int(error.code))
"""


def start(inputs, output, options="", before=""):
    text = COMMAND.format(inputs=str(inputs), output=str(output), options=options, before=before)
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


STUCK = """
import time
from mtcli.core.data.workspace import Workspace
append, parts = Workspace.append, []
def stuck(self, *part):
    append(self, *part)
    self.commit()
    parts.append(part)
    time.sleep(120 if len(parts) == 7 else 0)
Workspace.append = stuck
"""


def wait_for_progress(prefix, blocks):
    journal = Path(f"{prefix}.partial/journal.jsonl")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if journal.is_file() and f'"blocks": {blocks},' in journal.read_text():
            return
        time.sleep(0.01)
    raise AssertionError("no progress in a minute")


def wait_for_end(processes):
    """Until each is gone, or a zombie that nobody has waited for."""
    deadline = time.monotonic() + 60
    stats = [Path(f"/proc/{process}/stat") for process in processes]
    while any(stat.exists() and stat.read_text().split()[2] != "Z" for stat in stats):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *slow_cases("two runs of 0.5 s", signal.SIGINT, signal.SIGTERM)]
)
def test_a_killed_run_goes_on_where_it_stopped(corpus, tmp_path, how):
    run(corpus[0], tmp_path / "whole", workers=1)
    facts = json.loads((tmp_path / "whole.json").read_text())
    facts["tokenizer"]["folder"] = "out.tokenizer"
    (tmp_path / "whole.json").write_text(json.dumps(facts, indent=2) + "\n")
    process = start(corpus[0], tmp_path / "out", before=STUCK)
    wait_for_progress(tmp_path / "out", 7)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(how)
    process.communicate()
    assert process.returncode != 0
    assert len(workers) == 2
    wait_for_end(workers)
    assert not any(Path(f"{tmp_path}/out{suffix}").exists() for suffix in SUFFIXES)
    with open(tmp_path / "out.partial" / "journal.jsonl", "a") as journal:
        journal.write('{"blocks": 99')  # a line that the kill cut
    for name in ("tokens.bin", "lengths.i32"):  # and blocks that no line vouches for
        with open(tmp_path / "out.partial" / name, "ab") as file:
            file.write(b"no such tokens")
    again = start(corpus[0], tmp_path / "out", "resume=True")
    out, errors = again.communicate()
    assert again.returncode == 0, errors
    assert "going on after" in out
    assert written(tmp_path / "out") == written(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_a_run_killed_between_its_last_renames_is_finished_by_resume(corpus, tmp_path, monkeypatch):
    run(corpus[0], tmp_path / "whole")
    replace, moved = Path.replace, []

    def fail_third(self, target):
        if "ready" in str(self.parent):
            moved.append(self.name)
            if len(moved) == 3:
                raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_third)
    with pytest.raises(KeyboardInterrupt):
        run(corpus[0], tmp_path / "out")
    monkeypatch.undo()
    assert Path(f"{tmp_path}/out.bin").exists()
    assert not Path(f"{tmp_path}/out.idx").exists()
    run(corpus[0], tmp_path / "out", resume=True)
    assert written(tmp_path / "out")[:2] == written(tmp_path / "whole")[:2]


def test_a_run_that_is_alive_or_was_begun_otherwise_or_lost_tokens_is_not_resumed(corpus, tmp_path):
    process = start(corpus[0], tmp_path / "out", before=STUCK)
    wait_for_progress(tmp_path / "out", 3)
    with pytest.raises(MtcliError, match="another run is writing .*out"):
        run(corpus[0], tmp_path / "out")
    process.kill()
    process.communicate()
    with pytest.raises(MtcliError, match="out.partial was begun with other inputs or options"):
        run(corpus[0], tmp_path / "out", resume=True, append_eod=False)
    os.truncate(tmp_path / "out.partial" / "tokens.bin", 5)
    with pytest.raises(MtcliError, match="tokens.bin is 5 bytes, and its journal says"):
        run(corpus[0], tmp_path / "out", resume=True)
    run(corpus[0], tmp_path / "out", append_eod=False)  # which replaces it
    assert documents(tmp_path / "out")[0] == [*corpus[1][0].encode()]


@pytest.mark.parametrize("limit", [60_000, 900_000])
def test_a_full_disk_is_said_and_nothing_has_the_final_name(corpus, tmp_path, limit):
    # A file-size limit fails writes as a full disk does: in a worker, or in the parent.
    before = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    process = start(corpus[0], tmp_path / "out", before=before)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "File too large" in errors
    assert "hint: free space, then --resume" in errors
    assert "Traceback" not in errors
    assert not any(Path(f"{tmp_path}/out{suffix}").exists() for suffix in SUFFIXES)


MEASURE = """
import atexit, re, resource
def peak():
    mine = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    print("PEAK", max(mine, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
atexit.register(peak)
"""


@slow("600,000 documents, 5 s")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    line = json.dumps({"text": "word " * 20}) + "\n"  # short documents: a large index
    peaks = []
    for thousands in (100, 500):
        with open(tmp_path / "a.jsonl", "w") as file:
            for _ in range(thousands):
                file.write(line * 1000)
        process = start(tmp_path / "a.jsonl", tmp_path / f"out{thousands}", before=MEASURE)
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        peaks.append(int(out.split("PEAK")[1]) / 1024)  # MiB, of the process or any worker
    assert peaks[1] < peaks[0] + 4, peaks  # the larger has 40 MB more of text
