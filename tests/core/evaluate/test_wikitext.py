"""wikitext103: the paper's counts on the real file, lm-eval's words, transformers' sums."""

import math

import pytest
from lm_eval.tasks.wikitext import preprocess_wikitext
from lm_eval.utils import get_rolling_token_windows
from marks import slow

from mtcli.core.config.errors import MtcliError
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import Score
from mtcli.core.evaluate.packing import plan, run
from mtcli.core.evaluate.tasks.task import TaskOptions
from mtcli.core.evaluate.tasks.wikitext import detokenise, prepare_wikitext, split_pages


def letters(text):
    return [ord(c) % 97 for c in text]


TOKENIZER = EvalTokenizer(letters, prefix_id=0)


@pytest.fixture(scope="module")
def real(data):
    return data / "wikitext-103" / "wiki.test.tokens"


def tokenizer(bpe):
    return EvalTokenizer(lambda text: bpe.encode(text).ids, 50256, "<|endoftext|>")


@slow("1.3 MB of text in windows, 2.5 s")
def test_the_real_test_file_has_the_counts_of_the_paper_and_of_lm_eval(real, bpe):
    prepared = prepare_wikitext(real.parent, tokenizer(bpe), TaskOptions(max_seq_len=1024))
    report = prepared.report([Score(-2.0, True)] * len(prepared.requests))
    assert (report["num_original_tokens"], report["num_tokens"]) == (245_566, 270_329)
    windows = prepared.requests[: 1 + math.ceil((270_328 - 1024) / 32)]
    assert sum(window.num_targets for window in windows) == 270_328
    assert len(windows[0].tokens) == 1025 and {w.num_targets for w in windows[1:-1]} == {32}
    rolled = prepared.requests[len(windows) :]
    assert report["num_pages"] == 62  # the documents of lm-eval's wikitext test split
    assert sum(request.tokens[0] == 50256 for request in rolled) == 62
    text = real.read_text(encoding="utf-8")
    pages = split_pages(text)
    assert "\n".join(pages).split() == text.split()
    for page in [text, *pages]:
        assert detokenise(page) == preprocess_wikitext.wikitext_detokenizer({"page": page})
    theirs = [preprocess_wikitext.process_results({"page": page}, [0.0]) for page in pages]
    assert report["num_words"] == sum(result["word_perplexity"][1] for result in theirs)
    assert report["num_bytes"] == sum(result["byte_perplexity"][1] for result in theirs)


def test_real_text_has_the_perplexities_of_transformers(real, bpe, real_scorer, alone):
    options = TaskOptions(max_seq_len=128, limit=500, overlap=60)
    prepared = prepare_wikitext(real, tokenizer(bpe), options)
    report = prepared.report(run(real_scorer, plan(real_scorer, prepared.requests, 1024)))
    text = " ".join(real.read_text(encoding="utf-8").strip().split(" ")[:500])
    whole = bpe.encode(preprocess_wikitext.wikitext_detokenizer({"page": text})).ids
    nll, done = 0.0, 0
    for start in range(0, len(whole), 60):
        ids = whole[start : start + 129]
        fresh = start + len(ids) - 1 - done
        if fresh <= 0:
            break
        nll -= alone(real_scorer.model, ids, fresh)[0]
        done += fresh
    assert done == len(whole) - 1 == report["num_tokens"] - 1
    assert report["num_original_tokens"] == prepared.num_items == 500
    assert report["nll_sum"] == pytest.approx(nll, rel=1e-6)
    assert report["perplexity"] == pytest.approx(math.exp(nll / 500), rel=1e-4)
    assert report["adjusted_perplexity"] == pytest.approx(math.exp(nll / 499), rel=1e-4)
    assert report["token_perplexity"] == pytest.approx(math.exp(nll / done), rel=1e-4)
    rolled = 0.0
    for context, targets in get_rolling_token_windows(whole, 50256, 128, 1):
        rolled -= alone(real_scorer.model, context + targets[-1:], len(targets))[0]
    words, size = len(text.split(" ")), len(text.encode())
    assert report["rolling_nll_sum"] == pytest.approx(rolled, rel=1e-6)
    assert report["bits_per_byte"] == pytest.approx(rolled / size / math.log(2), rel=1e-5)
    assert report["byte_perplexity"] == pytest.approx(math.exp(rolled / size), rel=1e-5)
    assert report["num_words"] <= words and report["num_pages"] == 1
    assert report["word_perplexity"] == pytest.approx(
        math.exp(rolled / report["num_words"]), rel=1e-4
    )


def test_pages_begin_at_titles_and_not_at_sections(tmp_path):
    text = (
        " \n = One = \n \n words \n = = Part = = \n more \n = = = Sub = = = \n x \n = Two = \n y \n"
    )
    assert [page.split()[1] for page in split_pages(text)] == ["One", "Two"]
    assert "\n".join(split_pages(text)).split() == text.split()


def test_a_short_text_is_one_window(tmp_path):
    file = tmp_path / "wiki.test.tokens"
    file.write_text(" = A = \n b @-@ c , d . \n")
    prepared = prepare_wikitext(tmp_path, TOKENIZER, TaskOptions(max_seq_len=1024))
    report = prepared.report([Score(-12.0, True), Score(-30.0, False)])
    assert report["num_original_tokens"] == 10
    assert report["num_tokens"] == len("= A =\nb-c, d .")
    assert report["perplexity"] == pytest.approx(math.exp(12 / report["num_original_tokens"]))
    assert (report["window"], report["overlap"]) == (1024, 32)
    assert report["token_perplexity"] == pytest.approx(math.exp(12 / 13))
    assert report["word_perplexity"] == pytest.approx(math.exp(30 / report["num_words"]))
    assert report["bits_per_byte"] == pytest.approx(30 / report["num_bytes"] / math.log(2))


def test_every_rule_of_the_detokeniser_is_lm_evals():
    text = (
        "boys ' a @-@ b 1 @,@ 2 @.@ 3 ; x : y . z ! q ? r , s ( t ) [ u ] { v } \" w \" ' k ' "
        "= = = = = = = = = 5 ° C \n d \n e N f it 's g"
    )
    assert detokenise(text) == preprocess_wikitext.wikitext_detokenizer({"page": text})


def test_a_model_that_reads_less_than_the_overlap_advances_by_what_it_reads(tmp_path):
    file = tmp_path / "a.tokens"
    file.write_text("abcd " * 20)
    prepared = prepare_wikitext(file, TOKENIZER, TaskOptions(max_seq_len=8))
    report = prepared.report([Score(0.0, True)] * len(prepared.requests))
    assert (report["window"], report["overlap"]) == (8, 8)


def test_a_broken_models_perplexity_is_infinite_not_a_crash(tmp_path):
    file = tmp_path / "a.tokens"
    file.write_text("a b c")
    prepared = prepare_wikitext(file, TOKENIZER, TaskOptions(max_seq_len=8, overlap=2))
    report = prepared.report([Score(-1e6, False)] * len(prepared.requests))
    assert report["perplexity"] == math.inf


@pytest.mark.parametrize("overlap", [0, 9, -1])
def test_an_overlap_outside_the_window_is_refused(tmp_path, overlap):
    with pytest.raises(MtcliError) as caught:
        prepare_wikitext(tmp_path, TOKENIZER, TaskOptions(max_seq_len=8, overlap=overlap))
    assert caught.value.problems[0].message == (
        f"overlap {overlap} is not between 1 and the window of 8 tokens"
    )


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "{file} is empty: 0 bytes, none of them text"),
        (b" \n \n", "{file} is empty: 4 bytes, none of them text"),
        (b"one\ntwo \xff\n", "{file}, line 2: byte 0xff is not UTF-8"),
        (b"a", "{file} gives 1 tokens, at least 2 are needed"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, content, message):
    file = tmp_path / "wiki.test.tokens"
    file.write_bytes(content)
    with pytest.raises(MtcliError) as caught:
        prepare_wikitext(tmp_path, TOKENIZER, TaskOptions(max_seq_len=64))
    assert caught.value.problems[0].message == message.format(file=file)


def test_a_folder_without_the_file_or_with_several_is_refused(tmp_path):
    with pytest.raises(MtcliError) as caught:
        prepare_wikitext(tmp_path, TOKENIZER, TaskOptions(max_seq_len=64))
    assert caught.value.problems[0].message == (
        f"{tmp_path} holds 0 files like *test*.tokens, 1 is needed"
    )
    for name in ("a.test.tokens", "b.test.tokens"):
        (tmp_path / name).write_text("a b")
    with pytest.raises(MtcliError) as caught:
        prepare_wikitext(tmp_path, TOKENIZER, TaskOptions(max_seq_len=64))
    assert "found: a.test.tokens, b.test.tokens" in caught.value.problems[0].hint


@pytest.mark.parametrize("text", ['{"text": "a b"}\n{"text": "c"}\n', '[\n{"text": "a b"}]'])
def test_json_is_no_text_of_words(text, tmp_path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(MtcliError, match=r"t\.json is JSON, and no text of words"):
        prepare_wikitext(tmp_path / "t.json", TOKENIZER, TaskOptions(max_seq_len=9))
