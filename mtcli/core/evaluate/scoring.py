"""The scores of many requests, in their own order, whatever order they were computed in."""

from collections.abc import Sequence

import numpy as np

from mtcli.core.evaluate.packing import Plan, batches, pack
from mtcli.core.evaluate.prepared import Progress
from mtcli.core.evaluate.requests import Request, Score, fit
from mtcli.core.scorer import Scorer
from mtcli.core.spec.errors import failed

# Tokens of a forward pass, by device. On one core of a CPU 1024, 2048 and 4096 took the same time
# (2.6 to 2.9 s for 100 questions, width 256). A GPU is full well before 16384 of any model.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


def score_requests(scorer: Scorer, requests: Sequence[Request], batch_tokens: int) -> list[Score]:
    """One score per request, in request order. Raises as `fit` and `run` do."""
    return run(scorer, plan(scorer, requests, batch_tokens))


def plan(scorer: Scorer, requests: Sequence[Request], batch_tokens: int) -> Plan:
    """The requests cut to the scorer's context and packed. Raises as `fit` does."""
    return pack(
        fit(requests, scorer.max_seq_len, scorer.vocab_size), scorer.max_seq_len, batch_tokens
    )


def run(scorer: Scorer, planned: Plan, progress: Progress = lambda done: None) -> list[Score]:
    """One score per planned request; log-probabilities are summed in float64.

    `progress` is told how many requests each forward pass finished. Raises MtcliError (exit 1) when
    the model gives a log-probability that is not a number.
    """
    num_requests = len(planned.requests)
    sums, greedy = np.zeros(num_requests), np.ones(num_requests, bool)
    for batch, owners in batches(planned):
        logprobs, is_argmax = scorer.score(batch)
        np.add.at(sums, owners, logprobs.double().cpu().numpy())
        np.logical_and.at(greedy, owners, is_argmax.cpu().numpy())
        _refuse_nan(sums, owners)
        progress(len(np.unique(owners)))
    return [Score(float(sums[i]), bool(greedy[i])) for i in range(num_requests)]


def _refuse_nan(sums: np.ndarray, owners: np.ndarray) -> None:
    broken = owners[np.isnan(sums[owners])]
    if len(broken):
        raise failed(
            f"the model gives a log-probability of nan in request {broken[0]} of {len(sums)}",
            "its weights or activations are not finite: check the checkpoint, or evaluate in fp32",
        )
