"""Draws and renders the solved examples before each item (few-shot, arXiv:2005.14165, section 2).

As in GPT-3 and MT-NLG, shots are drawn for each item. They depend on the seed, the item's texts and
the set of examples, and not on limit, order or number of ranks.
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
    """The pool, number and seed of an item's shots."""

    pool: Pool
    number: int
    seed: int


def draw_shots(per: ShotsPer, draw: Draw, items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yields each item's shots, in the order in which they precede it.

    There are fewer than `draw.number` where the pool has no more examples that are allowed before
    the item.
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
    """Draws anew for each item, keyed by seed and texts."""
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

    lm-eval draws one more than needed and leaves the item out where its fewshot_split is its
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
    """Removes the shots that are the item itself or share its passage."""
    return [
        shot
        for shot in shots
        if shot.prompts != item.prompts and not (shot.cluster and shot.cluster == item.cluster)
    ]


def _unequal(shots: Sequence[Item], item: Item) -> list[Item]:
    """Removes the shots whose row equals the item's."""
    return [shot for shot in shots if (*_texts(shot), shot.answer) != (*_texts(item), item.answer)]
