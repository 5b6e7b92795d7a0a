"""Tokenizers against transformers, and round trips through their folders."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.encoders import make_encode
from mtcli.core.data.tokenize import (
    SPECIALS,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    train_tokenizer,
    train_word_pieces,
)

TEXTS = ["", " a  b\n\n", "I'll say: ½ naïve 日本 👩‍👩‍👧 <|endoftext|> \x00\r\n", "x" * 300]


@pytest.fixture(scope="module")
def trained():
    words = ["the cat sat on the mat", "def f(x):\n    return x + 1\n", "naïve café 日本"] * 30
    return train_tokenizer(words, 300)


def test_gpt2_ids_are_those_of_transformers_on_real_text(real_data):
    from transformers import GPT2Tokenizer

    folder = real_data / "gpt2-bpe"
    theirs = GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    ours = load_tokenizer(folder)
    text = (real_data / "wikitext-103" / "wiki.test.tokens").read_text(encoding="utf-8")
    for part in [text[:300_000], *TEXTS]:
        assert ours.encode(part) == theirs(part)["input_ids"]
    assert (ours.vocab_size, ours.eod_id) == (50257, 50256)
    assert ours.decode(ours.encode(text[:5000])) == text[:5000]


def test_the_fast_encoder_gives_the_ids_of_tokenizers_on_real_text(real_data):
    pytest.importorskip("gigatoken")
    tokenizer = load_tokenizer(real_data / "gpt2-bpe")
    text = (real_data / "wikitext-103" / "wiki.test.tokens").read_text(encoding="utf-8")
    name, encode = make_encode(tokenizer, text)
    lines = text.splitlines(keepends=True)[:800]
    assert name == "gigatoken"
    assert [ids.tolist() for ids in encode(lines)] == [*map(tokenizer.encode, lines)]


@given(st.text())
def test_bytes_are_the_bytes_of_utf8_and_their_definition_agrees(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert ids == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_bytes_have_257_ids_of_which_the_last_ends_a_document():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert 256 not in tokenizer.encode("<|endoftext|>")


@given(st.text())
def test_a_trained_tokenizer_gives_back_every_text(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_a_trained_tokenizer_has_its_end_outside_of_text(trained):
    assert trained.eod_id == trained.vocab_size - 1 == 299
    assert trained.eod_id not in trained.encode("a<|endoftext|>b")
    assert len(trained.encode("the cat sat")) < 6


def test_a_small_corpus_gives_a_smaller_vocabulary():
    tokenizer = train_tokenizer(["ab"], 4000)
    assert tokenizer.vocab_size < 300
    assert tokenizer.eod_id == tokenizer.vocab_size - 1


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_tokenizer(["a b a b"] * 9, 260)])
def test_a_saved_tokenizer_is_the_same_when_loaded(tmp_path, make):
    tokenizer = make()
    again = load_tokenizer(tokenizer.save(tmp_path / "t"))
    assert again.sha256 == tokenizer.sha256
    assert (again.vocab_size, again.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert load_tokenizer(tmp_path / "t" / "tokenizer.json").sha256 == tokenizer.sha256


def test_transformers_loads_what_is_saved(tmp_path, trained):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(trained.save(tmp_path))
    assert theirs("the cat\n sat")["input_ids"] == trained.encode("the cat\n sat")
    assert theirs.eos_token_id == trained.eod_id


def test_the_configured_end_of_document_is_taken(tmp_path, trained):
    folder = trained.save(tmp_path)
    token = trained.backend.id_to_token(65)
    for value in (token, {"content": token}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        assert load_tokenizer(folder).eod_id == 65


def test_a_tokenizer_without_an_end_of_document_has_none(tmp_path):
    definition = json.loads(byte_tokenizer().definition)
    del definition["model"]["vocab"]["<|endoftext|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (None, 256)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./absent", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("absent.json", "no such file or folder"),
        ("nobody/no-such-model", "is no file or folder here, and Hugging Face does not give it"),
        ("train:8192", "is trained on a corpus, and there is none here"),
    ],
)
def test_what_names_no_tokenizer_is_refused(spec, message):
    with pytest.raises(MtcliError, match=message):
        load_tokenizer(spec)


def test_damaged_files_are_refused_by_name(tmp_path):
    with pytest.raises(MtcliError, match="holds neither tokenizer.json nor vocab.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(MtcliError, match="notes.txt is not a tokenizer.json"):
        load_tokenizer(tmp_path / "notes.txt")
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(MtcliError, match="are not a BPE vocabulary"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MtcliError, match="tokenizer.json: not a tokenizer definition"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(MtcliError, match="tokenizer.json cannot be read"):
        load_tokenizer(tmp_path)
    byte_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(MtcliError, match="tokenizer_config.json is not JSON"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(MtcliError, match="train:100 is less than the 256 bytes .* = 257"):
        train_tokenizer(["a"], 100)


@pytest.mark.parametrize("size", [7, 40, 300])
def test_word_pieces_fill_a_small_vocabulary_and_no_larger_one(size):
    letters = "".join(map(chr, range(ord("a"), ord("z") + 1)))
    tokenizer = train_word_pieces([f"{letters} {letters[::-1]} aa a aa ba"] * 3, size)
    assert len(SPECIALS) < tokenizer.vocab_size <= size
    assert set(tokenizer.encode("a aa")) - set(range(len(SPECIALS)))  # not all of it is [UNK]


TRAIN_THRICE = """
from mtcli.core.data.tokenize import train_word_pieces
alphabet = "abcdefghijklmnopqrstuvwxyz"
words = [alphabet[i % 26] + alphabet[i * 7 % 26] + alphabet[i * 3 % 25] for i in range(200)]
for size in (30, 90, 200):
    print([train_word_pieces([" ".join(words)], size).sha256 for _ in range(3)])
"""


def test_word_pieces_of_the_same_text_are_the_same_in_each_process():
    """Each process hashes by a seed of its own; words, pairs and letters are often as frequent."""
    command = [sys.executable, "-c", TRAIN_THRICE]
    told = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    assert told[0] == told[1]
    for line in told[0].decode().splitlines():
        assert len(set(json.loads(line.replace("'", '"')))) == 1


def test_word_pieces_go_on_with_each_letter_that_can_be_inside_a_word():
    tokenizer = train_word_pieces(["un1 日本, abc"] * 3, 60)
    pieces = set(tokenizer.backend.get_vocab())
    letters = set("un1日本,abc")
    assert letters <= pieces
    assert {f"##{letter}" for letter in letters} & pieces == {f"##{x}" for x in "un1abc"}
    tokens = tokenizer.backend.encode("CAB, 日本", add_special_tokens=False).tokens
    assert tokens == ["c", "##a", "##b", ",", "日", "本"]
    assert sorted(tokenizer.backend.get_added_tokens_decoder()) == [*range(len(SPECIALS))]


def test_truncation_and_padding_that_a_file_was_saved_with_change_no_ids(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    tokenizer.backend.enable_truncation(4)
    tokenizer.backend.enable_padding(length=6, pad_id=0)
    Tokenizer(tokenizer.backend).save(tmp_path)
    found = load_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a", "more than four"):
        assert found.encode(text) == found.encode_prompt(text) == list(text.encode())
        assert theirs(text).input_ids == list(text.encode())
