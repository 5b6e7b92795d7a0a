"""Packed scores equal scores computed alone, and packing saves what it should."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers_scorer import TransformersScorer, gpt2

from mtcli.core.config.errors import MtcliError
from mtcli.core.evaluate.loglikelihood import Request, fit, request
from mtcli.core.evaluate.packing import batches, pack, plan, run

LENGTH = 24  # of the scorers


def ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 97, shape).tolist()


def check(scorer, alone, pairs, batch_tokens=64):
    requests = [request(context, continuation) for context, continuation in pairs]
    scores = run(scorer, plan(scorer, requests, batch_tokens))
    assert len(scores) == len(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        logprob, is_greedy = alone(
            scorer.model, (context + continuation)[-LENGTH - 1 :], len(continuation)
        )
        assert score.logprob == pytest.approx(logprob, rel=2e-5)
        assert score.is_greedy == is_greedy


def test_endings_of_shared_contexts_score_as_if_alone(scorer, alone):
    pairs = [(ids(8 + i % 5, seed=i // 4), ids(1 + i % 4, seed=100 + i)) for i in range(40)]
    before = scorer.masked
    check(scorer, alone, pairs)
    assert scorer.masked > before, "no context was shared"


def test_requests_too_long_for_the_model_lose_their_beginning(scorer, alone):
    check(scorer, alone, [(ids(n, seed=1), ids(3, seed=n)) for n in (20, 21, 22, 23, 30, 60)])


def test_one_token_contexts_and_repeated_requests_score_as_if_alone(scorer, alone):
    pair = (ids(1), ids(5, seed=3))
    check(scorer, alone, [pair, pair, (pair[0], pair[1][:2]), (pair[0], ids(1, seed=9))])


def test_a_whole_context_of_targets_is_scored(scorer, alone):
    check(scorer, alone, [(ids(1), ids(LENGTH, seed=3))])


def test_greedy_needs_the_argmax_at_every_target(scorer, alone):
    context, best = ids(4), []
    with torch.no_grad():
        for _ in range(3):
            logits = scorer.model(torch.tensor([context + best])).logits[0, -1]
            best.append(int(logits.argmax()))
    wrong_last = [*best[:2], (best[2] + 1) % 97]
    wrong_first = [(best[0] + 1) % 97, *best[1:]]
    requests = [request(context, c) for c in (best, wrong_last, wrong_first, best[:1])]
    scores = run(scorer, plan(scorer, requests, 64))
    assert [s.is_greedy for s in scores] == [True, False, False, True]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_mix_of_requests_keeps_positions_ancestors_and_order(data):
    token = st.integers(0, 2)  # three words: prefixes collide all the time
    sizes = st.tuples(st.integers(1, 12), st.integers(1, 4))
    requests = []
    for context, continuation in data.draw(st.lists(sizes, min_size=1, max_size=12)):
        total = context + continuation
        drawn = data.draw(st.lists(token, min_size=total, max_size=total))
        requests.append(request(drawn[:context], drawn[context:]))
    planned = pack(requests, max_seq_len=16, batch_tokens=data.draw(st.integers(1, 64)))
    seen = {index: [] for index in range(len(requests))}
    for (batch, owners), (_, prefix) in zip(batches(planned), planned.batches, strict=True):
        assert prefix is None, "a prefix has 16 tokens"
        tokens, positions = batch.tokens.flatten(), batch.positions.flatten()
        width = batch.tokens.shape[1]
        for row, target, owner in zip(
            batch.rows.tolist(), batch.targets.tolist(), owners, strict=True
        ):
            b, s = divmod(row, width)
            sees = (
                torch.arange(s + 1) if batch.mask is None else batch.mask[b, s].nonzero().flatten()
            )
            history = sorted(
                (int(positions[b * width + j]), int(tokens[b * width + j])) for j in sees
            )
            assert [p for p, _ in history] == list(range(len(history)))
            seen[owner].append([t for _, t in history] + [target])
    for index, (tokens, num_targets) in enumerate(requests):
        ends = range(len(tokens) - num_targets, len(tokens))
        assert seen[index] == [tokens[: end + 1].tolist() for end in ends]


def test_a_shared_context_is_computed_once():
    requests = [request(ids(100, seed=e % 2), ids(6, seed=9 + e)) for e in range(8)]
    planned = pack(requests, max_seq_len=1024, batch_tokens=2048)
    assert planned.num_unshared_tokens == 2 * 4 * 105
    assert planned.num_tokens == 2 * (100 + 4 * 5)


def test_unrelated_requests_of_one_length_need_no_mask_and_no_padding():
    requests = [request(ids(30, seed=i), ids(3, seed=i)) for i in range(8)]
    planned = pack(requests, max_seq_len=64, batch_tokens=128)
    assert planned.num_tokens == planned.num_unshared_tokens == 8 * 32
    assert [b.batch.mask for b in batches(planned)] == [None, None]


def shot_requests(counts, item=8, endings=2):
    """Requests of items of `item` tokens after some of 3 shots of 20 tokens, shared by all."""
    shots = [ids(20, seed=50 + number) for number in range(3)]
    return [
        request(
            [*(t for shot in shots[:count] for t in shot), *ids(item, seed=100 + n)], ids(3, seed=e)
        )
        for n, count in enumerate(counts)
        for e in range(endings)
    ]


def test_shots_are_read_once_and_score_as_if_alone(alone):
    model = gpt2(n_positions=96)
    scorer = TransformersScorer(model, 96)
    requests = shot_requests([3] * 20 + [2] * 20 + [1] * 9 + [0] * 3)
    planned = plan(scorer, requests, 64)
    assert [planned.new_tokens(index) for index in range(3)] == [20, 20, 20]
    assert {prefix for _, prefix in planned.batches} == {None, 0, 1, 2}
    for one, score in zip(requests, run(scorer, planned), strict=True):
        logprob, is_greedy = alone(model, one.tokens.tolist(), one.num_targets)
        assert score.logprob == pytest.approx(logprob, rel=2e-5)
        assert score.is_greedy == is_greedy


def test_shots_cost_their_tokens_once():
    requests = shot_requests([3] * 40)
    planned = pack(requests, max_seq_len=96, batch_tokens=256)
    assert planned.num_unshared_tokens == 80 * (60 + 8 + 2)
    assert planned.num_tokens == 60 + 40 * (8 + 2 * 2)


def test_a_row_that_has_room_for_all_needs_no_prefix():
    planned = pack(shot_requests([3] * 4), max_seq_len=96, batch_tokens=256)
    assert planned.prefixes == () and len(planned.batches) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mix_of_prefixes_keeps_every_requests_tokens_and_positions(data):
    words = [ids(18, seed=n) for n in range(3)]
    requests = []
    for _ in range(data.draw(st.integers(1, 14))):
        parts = data.draw(st.lists(st.integers(0, 2), max_size=4))
        context = [t for part in parts for t in words[part][: data.draw(st.integers(1, 18))]]
        targets = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
        requests.append(request([5, *context], targets))
    planned = pack(requests, max_seq_len=80, batch_tokens=data.draw(st.integers(1, 90)))
    done = set()
    for made, (_, prefix) in zip(batches(planned), planned.batches, strict=True):
        before, at = [], prefix
        while at is not None:
            one = planned.prefixes[at]
            start = planned.length(one.parent)
            before = [*requests[one.request].tokens[start : one.length], *before]
            at = one.parent
        assert len(before) == planned.length(prefix)
        batch, width = made.batch, made.batch.tokens.shape[1]
        for slot, target, owner in zip(
            batch.rows.tolist(), batch.targets.tolist(), made.owners.tolist(), strict=True
        ):
            b, s = divmod(slot, width)
            sees = range(s + 1) if batch.mask is None else batch.mask[b, s].nonzero().flatten()
            history = sorted((int(batch.positions[b, j]), int(batch.tokens[b, j])) for j in sees)
            assert [p for p, _ in history] == list(range(len(before), len(before) + len(history)))
            asked = [*before, *(token for _, token in history), target]
            assert asked == requests[owner].tokens[: len(asked)].tolist()
            done.add((owner, len(asked)))
    assert done == {
        (n, len(one.tokens) - i) for n, one in enumerate(requests) for i in range(one.num_targets)
    }


def test_a_row_does_not_grow_without_bound():
    requests = [request(ids(10), ids(11, seed=e)) for e in range(50)]
    planned = pack(requests, max_seq_len=20, batch_tokens=1000)
    assert max(row.size for rows, _ in planned.batches for row in rows) <= 40


def test_progress_counts_every_request_once(scorer):
    done = []
    requests = [request(ids(4, seed=i // 2), ids(2, seed=i)) for i in range(9)]
    run(scorer, plan(scorer, requests, 16), done.append)
    assert sum(done) == 9 and len(done) > 1


def test_no_requests_give_no_scores(scorer):
    assert run(scorer, plan(scorer, [], 64)) == []


@pytest.mark.parametrize(
    "bad, message",
    [
        (([1, 2], []), "request 1 scores 0 tokens"),
        (([], [1, 2]), "request 1 scores all of its 2 tokens"),
        (([1], [2] * 25), "request 1 scores 25 tokens, the model reads 24"),
        (([1], [97]), "request 1 holds token id 97, the model's vocab_size is 97"),
        (([-3], [9]), "request 1 holds token id -3, the model's vocab_size is 97"),
    ],
)
def test_impossible_requests_are_refused(bad, message):
    with pytest.raises(MtcliError) as caught:
        fit([request([1], [2]), request(*bad)], max_seq_len=24, vocab_size=97)
    assert caught.value.problems[0].message == message
    assert caught.value.problems[0].hint


class _Broken:
    max_seq_len, vocab_size = 24, 97

    def score(self, batch, after=None):
        logprobs = torch.zeros(len(batch.rows))
        logprobs[1] = float("nan")
        return logprobs, torch.ones(len(batch.rows), dtype=torch.bool)


def test_a_model_that_is_not_a_number_fails_and_says_where():
    requests = [Request(np.array([1, 2]), 1), Request(np.array([3, 4]), 1)]
    with pytest.raises(MtcliError) as caught:
        run(_Broken(), plan(_Broken(), requests, 64))
    assert caught.value.problems[0].message == (
        "the model gives a log-probability of nan in request 1 of 2"
    )
    assert caught.value.code == 1


def test_a_shared_context_gives_no_mask_to_requests_that_share_nothing():
    shared = [request(ids(30), ids(3, seed=e)) for e in (1, 2)]
    planned = pack([*shared, request(ids(34, seed=7), [1])], max_seq_len=64, batch_tokens=128)
    found = [(len(b.owners), b.batch.mask is None) for b in batches(planned)]
    assert sorted(found) == [(1, True), (6, False)]
