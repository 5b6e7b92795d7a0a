"""Masks of a language model: shares, lengths, whole words, and never a special token."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.bert.masking import choose, mask, words
from mtcli.core.data.bert.special_tokens import SpecialTokens, special_tokens
from mtcli.core.data.tokenize import Tokenizer, byte_tokenizer, train_word_pieces

V = 100
IS_PLAIN = np.arange(V) >= 5
BEGINS = np.arange(V) % 3 > 0  # a third of the ids go on with a word
SPECIAL = SpecialTokens(2, 3, 4, 0, IS_PLAIN, BEGINS)


def row(size, seed=0):
    """A row of two sequences, and a quarter of padding."""
    tokens, end = np.random.RandomState(seed).randint(5, V, size), 3 * size // 4
    tokens[[0, size // 2]], tokens[[size // 2 - 1, end - 1]] = 2, 3
    tokens[end:] = 0
    return tokens


def counted_words(tokens):
    """(first, end) of each word, by a loop."""
    found = []
    for at, token in enumerate(tokens):
        if not IS_PLAIN[token]:
            continue
        if BEGINS[token] or at == 0 or not IS_PLAIN[tokens[at - 1]]:
            found.append([at, at + 1])
        else:
            found[-1][1] = at + 1
    return found


@given(st.lists(st.integers(0, V - 1), min_size=1, max_size=40))
def test_words_are_those_that_a_loop_finds(tokens):
    first, end = words(np.array(tokens), SPECIAL)
    assert [list(pair) for pair in zip(first, end, strict=True)] == counted_words(tokens)


@given(st.lists(st.integers(0, V - 1), min_size=1, max_size=60), st.integers(0, 9))
def test_only_whole_words_are_chosen_and_no_special_token(tokens, seed):
    tokens = np.array(tokens)
    chosen = choose(tokens, SPECIAL, np.random.RandomState(seed))
    assert not chosen[~IS_PLAIN[tokens]].any()
    for first, end in counted_words(tokens):
        assert chosen[first:end].all() or not chosen[first:end].any()
    assert chosen.any() == IS_PLAIN[tokens].any()


def test_shares_are_fifteen_percent_and_eighty_ten_ten():
    fates, plain, chosen_count = Counter(), 0, 0
    for seed in range(400):
        tokens = row(256, seed)
        seen, chosen = mask(tokens, SPECIAL, np.random.RandomState([1, seed]))
        assert np.array_equal(seen[~chosen], tokens[~chosen])
        plain, chosen_count = plain + int(IS_PLAIN[tokens].sum()), chosen_count + int(chosen.sum())
        fates["mask"] += int((seen[chosen] == 4).sum())
        fates["kept"] += int((seen[chosen] == tokens[chosen]).sum())
        fates["other"] += int(((seen != tokens) & (seen != 4)).sum())
        assert IS_PLAIN[seen[chosen & (seen != 4)]].all()
    assert chosen_count / plain == pytest.approx(0.15, abs=0.003)
    assert fates["mask"] / chosen_count == pytest.approx(0.8, abs=0.01)
    assert fates["kept"] / chosen_count == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    assert fates["other"] / chosen_count == pytest.approx(0.1 - 0.1 / 95, abs=0.01)


def test_ngrams_of_one_two_and_three_words_have_chances_of_one_over_n():
    lengths = Counter()
    apart = SPECIAL._replace(is_plain=np.arange(V) >= 50, begins_word=np.ones(V, bool))
    # Runs of three words between special tokens, so far apart that no two n-grams touch. A draw at
    # a run's first word has its own length; those at others are told by where they begin.
    tokens = np.tile([60, 61, 62, 7], 3000)
    for seed in range(6):
        chosen = choose(tokens, apart, np.random.RandomState(seed))
        for run in chosen.reshape(-1, 4):
            if run[0]:
                lengths[int(run.sum()) if run[1] or not run[2] else 1] += 1
    total = sum(lengths.values())
    for n, share in ((1, 6 / 11), (2, 3 / 11), (3, 2 / 11)):
        assert lengths[n] / total == pytest.approx(share, abs=0.06), lengths


def test_special_tokens_are_a_tokenizers_own_and_its_words_begin_where_it_says():
    tokenizer = train_word_pieces(["unbelievable believers believe in belief"] * 9, 300)
    special = special_tokens(tokenizer)
    vocab = tokenizer.backend.get_vocab()
    assert [special.pad, special.cls, special.sep, special.mask] == [0, 2, 3, 4]
    assert not special.is_plain[:5].any() and special.is_plain[5:].all()
    assert all(special.begins_word[i] != token.startswith("##") for token, i in vocab.items())


def test_robertas_special_tokens_are_its_own_and_its_words_begin_with_a_space():
    names = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0 to 3 of the published ones; the mask is last
    backend = HfTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=names, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["unbelievable believers believe in belief"] * 9, trainer)
    backend.add_special_tokens(["<mask>"])
    tokenizer = Tokenizer(backend)
    special = special_tokens(tokenizer)
    size = tokenizer.vocab_size
    assert [special.cls, special.pad, special.sep, special.mask] == [0, 1, 2, size - 1]
    assert np.flatnonzero(~special.is_plain).tolist() == [0, 1, 2, 3, size - 1]
    text = np.array([0, *tokenizer.encode("believe in unbelievers"), 2, 1, 1])
    first, end = words(text, special)
    found = [tokenizer.decode(text[a:b].tolist()) for a, b in zip(first, end, strict=True)]
    assert found == ["believe", " in", " unbelievers"]
    assert (end - first).max() > 1, "a word of several tokens"


def test_a_tokenizer_without_special_tokens_is_refused_with_all_that_it_lacks():
    with pytest.raises(MtcliError) as caught:
        special_tokens(byte_tokenizer())
    text = str(caught.value)
    for role in ("cls_token", "sep_token", "mask_token", "pad_token"):
        assert f"the tokenizer has no {role}" in text
    assert "preprocess --sentences" in text
