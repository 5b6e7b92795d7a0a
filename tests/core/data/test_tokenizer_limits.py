"""A tokenizer.json costs no more than its text: growth is refused, and panics are errors."""

import base64
import json
import os
import re
import resource
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest
from command_line import mtcli
from tokenizers import Tokenizer as Library

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.encoders import make_encode
from mtcli.core.data.tokenize import Tokenizer, byte_tokenizer, load_tokenizer, train_tokenizer
from mtcli.core.data.tokenizer_limits import bounded

GB = 1 << 30
BASE = json.loads(train_tokenizer(["abc def aaa "] * 20, 300).definition)
BYTES = BASE["pre_tokenizer"]
MUCH = "a" * 10_000_000  # of every letter of a text of a million: more than memory holds
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def replace(content, pattern=None):
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def sequence(*steps, name="normalizers"):
    return {"type": "Sequence", name: list(steps)}


def template(count, ids=1):
    special = {"<s>": {"id": "<s>", "ids": [0] * ids, "tokens": ["a"] * ids}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 0}}]
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] + [text] * count
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def charsmap(longest):
    data = (4).to_bytes(4, "little") + bytes(4) + b"x" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def added(**change):
    token = {"id": 300, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
    return [token | {"normalized": False, "special": True} | change]


def model(**change):
    return BASE["model"] | change


UNBOUNDED = {
    "replace": ({"normalizer": replace(MUCH)}, "normalizer may make 1e[+]07 bytes out of one"),
    "regex": ({"normalizer": replace(MUCH, {"Regex": "$"})}, "normalizer may make 1e[+]07"),
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": MUCH}}, "may make 1e[+]07"),
    "chain": ({"normalizer": sequence(*[replace("a" * 100)] * 5)}, "may make 1e[+]10"),
    "nested": ({"normalizer": sequence(*[sequence(*[replace("a" * 99)] * 2)] * 3)}, "9.41e[+]11"),
    "charsmap": ({"normalizer": charsmap(1 << 21)}, "normalizer may make 2.1e[+]06"),
    "bytes": (
        {"pre_tokenizer": sequence(*[BYTES] * 40, name="pretokenizers")},
        "pre_tokenizer may make 1.22e[+]19 bytes out of one, and 16 is the most",
    ),
    "decoder": ({"decoder": replace(MUCH)}, "decoder may make 1e[+]07"),
    "decoders": ({"decoder": sequence(*[replace("aaa")] * 9, name="decoders")}, "may make 1.97e"),
    "steps": ({"normalizer": sequence(*[{"type": "Strip"}] * 2000)}, "2000 steps"),
    "template": ({"post_processor": template(20_000)}, "20000 of them the text"),
    "special": ({"post_processor": template(1, 10**5)}, "special tokens of 100000 ids"),
    "id": ({"model": model(vocab=BASE["model"]["vocab"] | {"zz": 2**32 - 6})}, "id 4294967290"),
    "added id": ({"added_tokens": added(id=2**31)}, "the id 2147483648"),
    "added": ({"added_tokens": added(content=MUCH)}, "has a token of 10,000,000 letters"),
    "normalized": (
        {
            "normalizer": replace("a" * 10**5),
            "added_tokens": added(content="a" * 999, normalized=True),
        },
        "1e[+]05 bytes out of each of 999 letters",
    ),
    "token": (
        {"model": model(vocab=BASE["model"]["vocab"] | {MUCH: 301})},
        "a token of 10,000,000",
    ),
    "prefix": ({"model": model(continuing_subword_prefix=MUCH)}, "a token of 10,000,000"),
    "word": ({"model": model(max_input_chars_per_word=10**9)}, "1000000000 letters, over 10000"),
}
FAILING = {  # of which only a text shows it
    "pattern": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
                           "invert": False}},
        "the tokenizer fails on a text: .*retry-limit",
    ),
    "fixed": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "fails on a text"),
    "growth": ({"normalizer": replace("a" * 4000)}, "normalizer makes [0-9,]+ bytes of the first"),
    "all growth": ({"normalizer": replace("a" * 4000, {"Regex": "."})}, "normalizer makes"),
}  # fmt: skip


def attempts(folder, changes, end):
    """In a process of its own: what loading, encoding and decoding say; memory is bounded."""
    log = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 3 * GB,) * 2)
    for change in changes:
        (folder / "tokenizer.json").write_text(json.dumps(BASE | change))
        try:
            tokenizer = load_tokenizer(folder)
            tokenizer.decode(tokenizer.encode("a" * 60 + "b " + "aaa\n" * 250_000)[:1000])
            end.send("it was done")
        except MtcliError as error:
            end.send(str(error))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_definition_that_grows_or_panics_is_an_error(tmp_path, subtests):
    cases = UNBOUNDED | FAILING
    context = get_context("fork")
    ours, theirs = context.Pipe()
    changes = [change for change, _ in cases.values()]
    process = context.Process(target=attempts, args=(tmp_path, changes, theirs))
    process.start()
    theirs.close()
    for name, (_, message) in cases.items():
        assert ours.poll(100), name
        said = ours.recv()  # raises EOFError where the process has died
        with subtests.test(name):
            assert said.startswith("error: ") and "\n\nhint: " in said and len(said) < 1000
            assert re.search(message, said), said
            assert (tmp_path / "stderr").read_text() == ""
    process.join(100)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "change",
    [
        {"padding": {"strategy": {"Fixed": 1_000_000_000}, "direction": "Right", "pad_id": 0,
                     "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "x"}},
        {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst",
                        "stride": 0}},
        {"model": model(dropout=0.9)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_settings_of_batches_and_of_training_change_no_ids(tmp_path, change):
    (tmp_path / "tokenizer.json").write_text(json.dumps(BASE | change))
    text = "abc def aaa abc def\n" * 9
    found = load_tokenizer(tmp_path)
    expected = Library.from_str(json.dumps(BASE)).encode(text, add_special_tokens=False).ids
    assert found.encode(text) == expected
    assert json.loads(found.definition) == BASE | {"padding": None, "truncation": None}
    for encode in (make_encode(found, text)[1], found.encode_all):
        assert list(encode([text])[0]) == expected


REAL = {  # as families write them
    "llama": {"normalizer": sequence({"type": "Prepend", "prepend": "▁"}, SPACES)},
    "t5": {
        "normalizer": sequence({"type": "NFKC"}, replace("▁", {"Regex": " {2,}"})),
        "pre_tokenizer": sequence({"type": "WhitespaceSplit"}, METASPACE, name="pretokenizers"),
    },
    "xlnet": {
        "normalizer": sequence(
            replace('"', {"String": "``"}), replace('"', {"String": "''"}), {"type": "NFKD"},
            {"type": "StripAccents"}, {"type": "Lowercase"}, replace(" ", {"Regex": " {2,}"}),
        )
    },
    "bert": {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template(1),
    },
    "llama3": {
        "pre_tokenizer": sequence(
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}| ?[^ ]+| "}, "behavior": "Isolated",
             "invert": False}, BYTES | {"use_regex": False}, name="pretokenizers",
        ),
        "post_processor": sequence(BYTES, template(1), name="processors"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_definitions_as_families_write_them_give_the_library_s_ids(tmp_path, name):
    definition = json.dumps(BASE | REAL[name])
    (tmp_path / "tokenizer.json").write_text(definition)
    text = "  abc def ``aaa'' ABC\u00e9 \ufdfa 12345   \n" * 4
    expected = Library.from_str(definition).encode(text, add_special_tokens=False).ids
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(text) == expected
    assert tokenizer.definition == definition
    name, encode = make_encode(tokenizer, text)
    assert encode([text])[0].tolist() == expected, name


def test_a_map_of_characters_is_bounded_by_its_longest_text():
    assert bounded(json.dumps(BASE | {"normalizer": charsmap(33)}))[1] == 33
    for text in ("no base64!", "", base64.b64encode(b"\xff\xff\xff\xff").decode()):
        broken = {"type": "Precompiled", "precompiled_charsmap": text}
        try:
            assert bounded(json.dumps(BASE | {"normalizer": broken}))[1] == 1
        except MtcliError as error:
            assert "precompiled_charsmap is not base64" in str(error)


def test_a_definition_whose_parts_are_of_another_shape_is_refused():
    unnamed = {"id": 300, "normalized": True}
    for change in (
        {"model": {"vocab": [{"a": 1}]}},
        {"model": {"vocab": [[[]]]}},
        {"added_tokens": [unnamed]},
        {"added_tokens": [unnamed | {"content": 3}]},
        {"normalizer": sequence(*[{"type": "NFKC"}] * 1024)},
        {"normalizer": sequence(*[replace("aaa")] * 1024)},
    ):
        with pytest.raises(MtcliError, match=r"not a tokenizer definition|bytes out of one"):
            Tokenizer(json.dumps(BASE | change))
            pytest.fail(f"loaded: {str(change)[:80]}")


def test_what_is_said_meanwhile_is_dropped_and_later_is_not(capfd):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("a") == [97]
    os.write(2, b"here")
    assert capfd.readouterr().err == "here"


@pytest.mark.parametrize("command", ["preprocess", "generate", "eval"])
def test_no_command_shows_a_panic(tmp_path, command):
    hf = tmp_path / "hf"
    write_hf(hf)
    (hf / "tokenizer.json").write_text(json.dumps(BASE | FAILING["pattern"][0]))
    text = "a" * 60 + "b"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"{text} c"}) + "\n")
    words = {
        "preprocess": ["preprocess", "a.txt", "--output", "x", "--tokenizer", hf, "--workers", 1],
        "generate": ["generate", hf, "--prompt", text, "--device", "cpu"],
        "eval": ["eval", hf, "--task", "lambada=a.jsonl", "--device", "cpu"],
    }[command]
    done = mtcli(*words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "error: the tokenizer fails on a text: " in done.stderr
    assert not {"panicked", "Traceback", "backtrace"} & set(done.stderr.replace(":", " ").split())


def write_hf(folder):
    """A model of the vocabulary of BASE, as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(BASE["model"]["vocab"]), hidden_size=8, intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
