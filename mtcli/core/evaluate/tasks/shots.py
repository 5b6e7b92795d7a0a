"""Draws the solved examples before each item, and renders them (few-shot, arXiv:2005.14165,
section 2).

Drawn anew for each item, as GPT-3 and MT-NLG do, shots follow from the seed, the item's texts and
the set of examples alone: no limit, order or number of ranks changes them.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.tasks.items import Item, Pool, Shot
from mtcli.core.evaluate.tasks.task import ShotsPer
from mtcli.core.evaluate.tasks.task_file import TaskFile

SPARE = 8  # extra draws: some shots may not stand before an item


class Draw(NamedTuple):
    """How many shots are drawn before each item, and from what."""

    pool: Pool
    number: int
    seed: int


def draw_shots(per: ShotsPer, draw: Draw, items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yields each item's shots, in the order in which they stand before it.

    Fewer than `draw.number` where the pool has no more that may stand before the item.
    """
    return DRAWS[per](draw, items) if draw.number else ([] for _ in items)


def render_shot(task: TaskFile, tokenizer: EvalTokenizer, item: Item) -> Shot:
    """Renders a shot: prompt, answer and separator."""
    answer = item.answer or 0
    prompt, choice = (
        texts[answer if len(texts) > 1 else 0] for texts in (item.prompts, item.choices)
    )
    text = f"{prompt}{task.delimiter}{choice}{task.separator}"
    return Shot(text, len(tokenizer.encode(text)))


def _per_item(draw: Draw, items: Sequence[Item]) -> Iterator[list[Item]]:
    """Draws for each item anew, keyed by seed and texts."""
    examples = sorted(draw.pool.examples, key=lambda shot: (*_texts(shot), shot.answer))
    for item in items:
        random = Random("\0".join((str(draw.seed), *_texts(item))))
        drawn: list[Item] = []
        # Nearly always the first turn suffices, which costs no pass over the examples.
        for count in (draw.number + SPARE, len(examples)):
            if len(drawn) < draw.number:
                drawn = _others(random.sample(examples, min(count, len(examples))), item)
        yield drawn[: draw.number]


def _per_task(draw: Draw, items: Sequence[Item]) -> Iterator[list[Item]]:
    """Draws once for all items, so that a model reads the shots once."""
    count = min(len(draw.pool.examples), draw.number + SPARE)
    drawn = Random(draw.seed).sample(draw.pool.examples, count)
    for item in items:
        yield _others(drawn, item)[: draw.number]


def _as_lm_eval(draw: Draw, items: Sequence[Item]) -> Iterator[list[Item]]:
    """Draws from one generator for item after item, as lm-eval's ContextSampler (0.4.13).

    It draws one more than it needs and leaves the item out where its fewshot_split is its
    test_split, also where a task names neither.
    """
    random, spare = Random(draw.seed), draw.pool.lm_eval_spare
    for item in items:
        examples = draw.pool.examples
        drawn = random.sample(examples, min(len(examples), draw.number + spare))
        if spare:
            drawn = _unequal(drawn, item)
            if len(drawn) < draw.number:
                examples = _unequal(examples, item)
                drawn = random.sample(examples, min(len(examples), draw.number))
        yield drawn[: draw.number]


DRAWS: dict[ShotsPer, Callable[[Draw, Sequence[Item]], Iterator[list[Item]]]] = {
    "item": _per_item,
    "task": _per_task,
    "lm-eval": _as_lm_eval,
}
# What an accuracy's interval is an interval over: shots of the whole task are as if given.
INTERVAL_COVERS = {
    "item": "items and shots",
    "task": "items, given these shots",
    "lm-eval": "items and shots",
}


def _texts(item: Item) -> tuple[str, ...]:
    return (*item.prompts, *item.choices)


def _others(shots: Sequence[Item], item: Item) -> list[Item]:
    """The shots that are neither the item itself nor of its passage."""
    return [
        shot
        for shot in shots
        if shot.prompts != item.prompts and not (shot.cluster and shot.cluster == item.cluster)
    ]


def _unequal(shots: Sequence[Item], item: Item) -> list[Item]:
    """The shots whose row is another than the item's."""
    return [shot for shot in shots if (*_texts(shot), shot.answer) != (*_texts(item), item.answer)]
