"""Batches by global sample id: the same however they are asked for, and where they came from."""

import json
import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from indexed_dataset import write_dataset
from ranks import run_ranks

import mtcli.core.data.loader as batches_module
import mtcli.core.data.samples as cache
from mtcli.core.config.errors import MtcliError
from mtcli.core.data.indexed import Indexed, describe, max_token_id, tokenizer_folder
from mtcli.core.data.loader import Batches, require_ids, require_stated_ids
from mtcli.core.data.prefetch import Prefetcher
from mtcli.core.data.preprocess import PreprocessRequest, preprocess


def make(prefix, num_samples=300, seq_len=16, seed=1, split="1"):
    paths = [prefix] if isinstance(prefix, str) else prefix
    return Batches(paths, split, "train", num_samples, seq_len, seed)


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("blend"), np.random.default_rng(3)
    for name in "ab":
        texts = [random.integers(0, 500, n) for n in random.integers(1, 40, 30)]
        write_dataset(folder / name, texts, np.dtype("<u2"))
    words = ["0.6", str(folder / "a"), "0.4", str(folder / "b")]
    return words, make(words, num_samples=3000).batch(0, 3000)


@given(st.integers(0, 2999), st.integers(0, 400))
def test_any_way_of_asking_gives_the_same_samples(blend, start, count):
    words, whole = blend
    count = min(count, 3000 - start)
    found = make(words, num_samples=3000).batch(start, count)
    assert found.dtype == np.int64
    assert np.array_equal(found, whole[start : start + count])


@pytest.mark.parametrize("count", [10**12, 2**62])
def test_an_order_of_samples_that_no_memory_holds_is_refused_with_both_sizes(blend, count):
    words, _ = blend
    with pytest.raises(MtcliError, match=f"the order of {count:,} samples takes .* GiB, and this"):
        make(words, num_samples=count)
    with pytest.raises(MtcliError, match="GiB, and this machine has"):
        Batches(words, "1", "train", 300, 16, 1, planned=count)


def test_data_that_becomes_shorter_under_a_run_is_an_error_and_no_bus_error(tmp_path):
    """In a process of its own, which SIGBUS would end."""
    write_dataset(tmp_path / "a", [np.arange(50_000)], np.dtype("<u2"))
    ((said, code),) = run_ranks(1, shortened, tmp_path / "a")
    assert said == f"{tmp_path}/a.bin is 1000 bytes now, and was 100000 when it was opened"
    assert code == 1


def shortened(runtime, prefix):
    """What a loader says of data that lost its end after it was opened."""
    batches = make(str(prefix), num_samples=3000)
    os.truncate(f"{prefix}.bin", 1000)
    with pytest.raises(MtcliError) as error:
        batches.batch(0, 3000)
    return error.value.problems[0].message, int(error.value.code)


def test_ranks_and_micro_batches_together_make_the_global_batch(blend):
    words, whole = blend
    for dp, micro in ((1, 8), (2, 4), (4, 1)):
        ranks = [make(words, num_samples=3000) for _ in range(dp)]
        for step in range(3):
            parts = [
                ranks[rank].batch(step * 16 + m * micro * dp + rank * micro, micro)
                for m in range(16 // (dp * micro))
                for rank in range(dp)
            ]
            assert np.array_equal(np.concatenate(parts), whole[step * 16 : step * 16 + 16])


def test_the_ledger_names_the_tokens_of_each_sample(blend):
    words, whole = blend
    batches = make(words, num_samples=3000)
    data = {prefix: Indexed(prefix) for prefix in words[1::2]}
    for number, sample in enumerate(batches.sample_ids(1000, 60), 1000):
        spans = [data[sample.prefix][s][o : o + n] for s, o, n in sample.spans]
        assert np.array_equal(np.concatenate(spans), whole[number])


def test_the_ledger_names_no_empty_span(tmp_path):
    write_dataset(tmp_path / "x", [[1] * (n % 3) for n in range(60)], np.dtype("<u2"))
    samples = make(str(tmp_path / "x"), num_samples=50).sample_ids(0, 50)
    assert all(tokens > 0 for sample in samples for _, _, tokens in sample.spans)


def test_another_seed_is_another_order_of_the_same_tokens(make_dataset):
    prefix, documents = make_dataset(count=200)
    one, two = make(prefix, 100, seed=1), make(prefix, 100, seed=2)
    assert not np.array_equal(one.batch(0, 100), two.batch(0, 100))
    assert np.array_equal(one.batch(0, 100), make(prefix, 100, seed=1).batch(0, 100))


def test_splits_share_no_document(make_dataset):
    prefix, _ = make_dataset(count=100)
    seen = []
    for which in ("train", "valid", "test"):
        samples = Batches([prefix], "60,30,10", which, 400, 16, 1).sample_ids(0, 400)
        seen.append({span[0] for sample in samples for span in sample.spans})
    assert [min(s) for s in seen] == [0, 60, 90]
    assert [max(s) for s in seen] == [59, 89, 99]


def test_a_long_run_over_unweighted_datasets_takes_them_in_proportion(make_dataset):
    prefixes = [make_dataset(name, 50 * n, seed=n)[0] for name, n in (("a", 1), ("b", 3))]
    samples = make(prefixes, num_samples=2000).sample_ids(0, 2000)
    share = sum(sample.prefix == prefixes[0] for sample in samples) / 2000
    tokens = [Indexed(prefix).num_tokens for prefix in prefixes]
    assert abs(share - tokens[0] / sum(tokens)) < 0.01


def test_a_split_without_tokens_is_refused(make_dataset):
    prefix, _ = make_dataset(count=10)
    expected = 'split "99,1,0" of 10 sequences gives valid sequences 10 to 10, which hold no token'
    with pytest.raises(MtcliError, match=expected):
        Batches([prefix], "99,1,0", "valid", 10, 16, 1)


def test_a_sample_beyond_the_last_is_our_mistake(make_dataset):
    batches = make(make_dataset()[0], num_samples=10)
    assert len(batches) == 10
    with pytest.raises(AssertionError):
        batches.batch(8, 3)


def test_the_largest_token_and_the_tokenizer_come_from_preprocess(tmp_path, make_dataset):
    (tmp_path / "a.txt").write_text("some text to learn\n" * 50)
    request = PreprocessRequest(
        (str(tmp_path / "a.txt"),), tmp_path / "out", "bytes", append_eod=False
    )
    preprocess(request, print)
    prefix = str(tmp_path / "out")
    assert max_token_id(prefix) == ord("x")
    require_stated_ids([prefix], ord("x") + 1)
    with pytest.raises(MtcliError, match="out: the largest token id is 120, and vocab_size=120"):
        require_stated_ids([prefix], ord("x"))
    assert tokenizer_folder(prefix) == tmp_path / "out.tokenizer"
    foreign, _ = make_dataset("foreign")
    require_stated_ids([foreign], 1)  # which says nothing: its rows are checked as they are read
    with pytest.raises(MtcliError, match="out: the largest token id is 120"):
        require_stated_ids([foreign, prefix], 120)
    assert (describe(foreign), tokenizer_folder(foreign)) == (None, None)
    for text, message in (("{", "out.json is not JSON"), ("[]", "out.json holds no object")):
        (tmp_path / "out.json").write_text(text)
        with pytest.raises(MtcliError, match=message):
            describe(prefix)


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", "<i2", "<i4", "<i8"])
@pytest.mark.parametrize("bad", [100, -1])
def test_an_id_that_the_vocabulary_lacks_is_named_with_its_document(tmp_path, dtype, bad):
    bad = int(np.array(bad).astype(dtype))  # -1 is the largest id where there are none below 0
    documents = [np.arange(n, n + 7) for n in range(9)]
    documents[4][5] = bad
    write_dataset(tmp_path / "x", documents, np.dtype(dtype))
    write_dataset(tmp_path / "y", [np.arange(99)], np.dtype("<u2"))
    words = ["0.5", str(tmp_path / "y"), "0.5", str(tmp_path / "x")]
    batches = Batches(words, "1", "train", 40, 6, 1)
    told = set()
    for start in range(0, 40, 4):
        rows = batches.batch(start, 4)
        if bad >= 0:
            require_ids(batches, start, rows, bad + 1)
        if bad in rows:
            with pytest.raises(MtcliError) as error:
                require_ids(batches, start, rows, 100)
            told.add(error.value.problems[0].message)
        else:
            require_ids(batches, start, rows, 100)
    x = tmp_path / "x"
    assert told == {f"{x}: token 5 of document 4 is id {bad}, and vocab_size=100 takes 0 to 99"}


def test_large_indices_are_built_once_and_mapped(make_dataset, monkeypatch):
    prefix, _ = make_dataset()
    expected = make(prefix).batch(0, 300)
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    assert np.array_equal(make(prefix).batch(0, 300), expected)
    assert len(list(Path(f"{prefix}.cache").glob("*/*.npy"))) == 3
    monkeypatch.setattr(cache, "build_samples", None)  # it would fail
    assert np.array_equal(make(prefix).batch(0, 300), expected)


def test_a_large_blend_is_ordered_once(blend, monkeypatch):
    words, whole = blend
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    assert np.array_equal(make(words, num_samples=3000).batch(0, 3000), whole)
    monkeypatch.setattr(cache, "blend_indices", None)  # it would fail
    assert np.array_equal(make(words, num_samples=3000).batch(0, 3000), whole)
    monkeypatch.undo()
    words = ["0.4", *words[1:]]
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    assert not np.array_equal(make(words, num_samples=3000).batch(0, 3000), whole)


def test_ranks_that_start_together_agree(make_dataset, monkeypatch):
    prefix, _ = make_dataset()
    expected = make(prefix).batch(0, 300)
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    found = [None] * 6

    def rank(number):
        found[number] = make(prefix).batch(0, 300)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(batch, expected) for batch in found)
    assert sorted(path.name for path in Path(f"{prefix}.cache").iterdir())[-1] == "lock"


def test_a_damaged_or_forbidden_cache_is_done_without(make_dataset, monkeypatch):
    prefix, _ = make_dataset()
    expected = make(prefix).batch(0, 300)
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    make(prefix)
    next(Path(f"{prefix}.cache").glob("*/rows.npy")).write_bytes(b"damaged")
    assert np.array_equal(make(prefix).batch(0, 300), expected)
    other, _ = make_dataset("other", seed=0)
    Path(f"{other}.cache").write_text("a file where the folder would be")
    monkeypatch.setattr(cache, "private_folder", raises(PermissionError))
    assert np.array_equal(make(other).batch(0, 300), expected)


def test_data_that_lies_where_nothing_is_written_is_indexed_once_on_a_machine(
    make_dataset, monkeypatch, tmp_path
):
    prefix, _ = make_dataset()
    other, _ = make_dataset("other", seed=7)
    expected = [make(name).batch(0, 300) for name in (prefix, other)]
    for name in (prefix, other):
        Path(f"{name}.cache").write_text("a file where the folder would be")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    found = [make(name).batch(0, 300) for name in (prefix, other)]
    monkeypatch.setattr(cache, "build_samples", None)  # it would fail
    found += [make(name).batch(0, 300) for name in (prefix, other)]
    assert all(map(np.array_equal, found, expected * 2))
    kept = list((tmp_path / "scratch").glob("mtcli-*/indices/*/rows.npy"))
    assert len(kept) == 2


def raises(error):
    def fail():
        raise error

    return fail


def test_data_that_changed_is_not_read_with_the_old_indices(make_dataset, monkeypatch):
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    prefix, documents = make_dataset(seed=1)
    old = make(prefix).batch(0, 300)
    write_dataset(prefix, documents[::-1], np.dtype("<u2"))  # files of the same sizes
    monkeypatch.setattr(cache, "WORTH_KEEPING", 1 << 30)
    expected = make(prefix).batch(0, 300)
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    assert np.array_equal(make(prefix).batch(0, 300), expected)
    assert not np.array_equal(old, expected)


def test_the_prefetcher_gives_what_was_asked_for_in_order(blend):
    words, whole = blend
    wanted = [(start, 7) for start in range(0, 2100, 7)]
    with Prefetcher(make(words, num_samples=3000).batch, wanted, depth=3) as ready:
        found = list(ready)
    assert len(found) == 300
    assert np.array_equal(np.concatenate(found), whole[:2100])


def test_the_prefetcher_works_ahead_but_not_without_bound(blend):
    asked = []

    def slow(start, count):
        asked.append(start)
        return np.zeros((count, 2), np.int64)

    with Prefetcher(slow, ((n, 1) for n in range(10**9)), depth=2) as ready:
        next(iter(ready))
        assert len(asked) <= 5
    assert not ready._thread.is_alive()


def test_the_prefetcher_raises_what_went_wrong_in_its_place(blend):
    def broken(start, count):
        if start == 2:
            raise OSError("the disk is gone")
        return np.zeros((count, 2), np.int64)

    with Prefetcher(broken, [(0, 1), (1, 1), (2, 1), (3, 1)]) as ready:
        found = iter(ready)
        next(found), next(found)
        with pytest.raises(OSError, match="the disk is gone"):
            next(found)


def test_windows_do_not_show(make_dataset, monkeypatch):
    prefix, _ = make_dataset()
    expected = make(prefix).batch(0, 300)
    monkeypatch.setattr(batches_module, "WINDOW", 7)
    assert np.array_equal(make(prefix).batch(0, 300), expected)


def test_the_facts_of_a_dataset_are_what_the_command_reported(tmp_path):
    (tmp_path / "a.txt").write_text("text\n")
    request = PreprocessRequest((str(tmp_path / "a.txt"),), tmp_path / "out", "bytes")
    report = preprocess(request, print)
    facts = json.loads((tmp_path / "out.json").read_text())
    assert {name: report[name] for name in facts} == facts


def spans(batches):
    return Counter((sample.prefix, *sample.spans) for sample in batches.sample_ids(0, len(batches)))


@pytest.mark.parametrize("kind", ["alone", "weighted", "by tokens", "by tokens, several epochs"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_longer_run_begins_with_the_samples_of_the_one_it_was_planned_as(
    make_dataset, monkeypatch, kind, kept
):
    """Whatever the epochs; and before any sample comes again, all of its dataset have come."""
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0 if kept else 1 << 30)
    prefixes = [make_dataset(name, 40, 50, seed=i)[0] for i, name in enumerate("abc")]
    words = {"alone": prefixes[:1], "weighted": ["3", prefixes[0], "2", prefixes[1]]}
    words = words.get(kind, prefixes)
    one = sum(len(Indexed(p).tokens) // 16 for p in words if p in prefixes)
    planned = int(one * (2.5 if "several" in kind else 0.7))
    first = make(words, planned).batch(0, planned)
    for number in (planned + 1, one + 3, 2 * one + 5, 5 * one):
        number = max(number, planned)
        longer = Batches(words, "1", "train", number, 16, 1, planned)
        assert np.array_equal(longer.batch(0, planned), first)
        assert longer.planned == planned
        again = Batches(words, "1", "train", number + 100, 16, 1, planned)
        assert np.array_equal(longer.batch(0, number), again.batch(0, number))
    if kind == "alone":
        lengthened = Batches(words, "1", "train", 5 * one, 16, 1, planned)
        assert max(spans(lengthened).values()) <= 6
        seen = len(set(map(bytes, lengthened.batch(0, one))))
        assert seen == one, "the second epoch comes after the first"


def test_kept_indices_are_of_one_plan(make_dataset, monkeypatch):
    prefix, _ = make_dataset("a", 40, 50)
    plain = {n: Batches([prefix], "1", "train", 300, 16, 1, n).batch(0, 300) for n in (40, 300)}
    assert not np.array_equal(plain[40], plain[300])
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    for planned, expected in plain.items():
        kept = Batches([prefix], "1", "train", 300, 16, 1, planned)
        assert np.array_equal(kept.batch(0, 300), expected)
