"""New tokens have the ids, and texts the tokens, of transformers' `add_tokens`."""

import json

import pytest
from family_tokenizers import KINDS, TEXT, make
from tokenizers import AddedToken

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.new_tokens import extended_size, with_new_tokens
from mtcli.core.data.tokenize import Tokenizer, byte_tokenizer, load_tokenizer

NEW = ["<|call|>", "of France", "日本"]
SPOKEN = TEXT + "a<|call|>b <|call|> The capital of France 日本日本"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_encoded_texts_are_transformers(tmp_path, kind):
    from transformers import AutoTokenizer

    make(tmp_path, kind)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    before, texts = load_tokenizer(tmp_path), [*NEW, "a b"]
    theirs.add_tokens([AddedToken(text, normalized=False) for text in texts])
    ours = with_new_tokens(before, texts)
    ids = [before.vocab_size + i for i in range(4)]
    assert theirs.convert_tokens_to_ids(texts) == ids
    assert [ours.backend.token_to_id(text) for text in texts] == ids
    assert ours.encode(SPOKEN) == theirs.encode(SPOKEN, add_special_tokens=False)
    assert {*ids[:3]} <= {*ours.encode(SPOKEN)} and ours.sha256 != before.sha256
    assert extended_size(tmp_path, texts) == ours.vocab_size == before.vocab_size + 4
    assert ours.eod_id == before.eod_id


def test_the_bytes_of_a_text_that_is_no_new_token_stay():
    ours = with_new_tokens(byte_tokenizer(), NEW)
    assert ours.encode("é<|call|>") == [*"é".encode(), 257] and not ours.is_bytes
    assert ours.decode(ours.encode("日<|call|>x")) == "日<|call|>x"


def test_all_texts_that_are_tokens_already_are_named():
    with pytest.raises(MtcliError) as raised:
        with_new_tokens(byte_tokenizer(), ["a", "<|call|>", "<|endoftext|>"])
    (problem,) = raised.value.problems
    assert problem.field == "train.new_tokens"
    assert problem.message == (
        "the tokenizer of 257 ids has 'a' (id 97), '<|endoftext|>' (id 256) already"
    )


def test_a_tokenizer_with_gaps_in_its_ids_is_refused():
    table = json.loads(byte_tokenizer().definition)
    table["model"]["vocab"]["zz"] = 300
    with pytest.raises(MtcliError, match=r"ids up to 300 with gaps.* the ids \[258\]"):
        with_new_tokens(Tokenizer(json.dumps(table)), ["<|call|>"])


def test_a_config_that_lists_added_tokens_lists_the_new_ones():
    listed = {"added_tokens_decoder": {"256": {"content": "<|endoftext|>", "special": True}}}
    before = Tokenizer(byte_tokenizer().definition, listed)
    after = with_new_tokens(before, NEW).config["added_tokens_decoder"]
    assert [after[str(i)]["content"] for i in range(256, 260)] == ["<|endoftext|>", *NEW]
    assert not after["257"]["special"] and len(before.config["added_tokens_decoder"]) == 1
