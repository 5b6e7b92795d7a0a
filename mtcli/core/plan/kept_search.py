"""Searches once: the user's cache keeps which layouts a search has found."""

from contextlib import suppress

from mtcli.core.config.schema import RunConfig
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.predict import predict_workload
from mtcli.core.plan.search import (
    Candidate,
    Rehearse,
    SearchResult,
    apply,
    as_estimated,
    search,
    works_of,
)
from mtcli.core.runtime.kept_answers import answer_key, keep_answer, kept_answer

FOLDER = "searches"


def kept_search(
    config: RunConfig,
    world: int,
    device: Device,
    top: int,
    pinned: frozenset[str] = frozenset(),
    rehearse: Rehearse = as_estimated,
) -> SearchResult:
    """`search`, or what it found before. What finds nothing is not kept."""
    facts = [config.model_dump(mode="json"), world, repr(device), top, sorted(pinned)]
    key = answer_key([*facts, rehearse.__name__])
    with suppress(TypeError, ValueError, IndexError):
        numbers, too_large = kept_answer(FOLDER, key)
        works = tuple(works_of(config, world, device, pinned))
        plans = [(apply(config, works[n]), predict_workload(works[n], device)) for n in numbers]
        best = zip((chosen for chosen, _ in plans), rehearse(plans), strict=True)
        return SearchResult(
            tuple(Candidate(*one) for one in best), len(works), int(too_large), None, works
        )
    rehearse([])  # starts to import torch
    result = search(config, world, device, top, pinned, rehearse)
    if result.best:
        numbers = [result.works.index(one.prediction.work) for one in result.best]
        keep_answer(FOLDER, key, [numbers, result.too_large])
    return result
