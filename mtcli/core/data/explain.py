"""Names the documents that a training step consumed: source, id and token spans.

A token file identifies documents by number alone, so their ids are read from the inputs of `mtcli
preprocess`, where these still exist. In conversations, a line is a document.
"""

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.phases import phase_after, phases_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.best_fit import PackedConversations, open_conversations
from mtcli.core.data.documents import Reading, Text, read_documents
from mtcli.core.data.epochs import with_steps
from mtcli.core.data.indexed import describe
from mtcli.core.data.loader import SampleOrder, require_named
from mtcli.core.data.sources import FileRange, find_sources
from mtcli.core.data.subset import require_subset, token_batches


class Named(NamedTuple):
    """A record's id, or FILE:LINE where it has none, and its source."""

    id: Any
    source: Any


def explain_step(
    config: RunConfig, step: int, planned: int | None = None, tokenizer: Path | None = None
) -> list[dict[str, Any]]:
    """Lists the spans of documents that step 1, 2, ... of a run consists of, in order.

    `planned` is the number of samples when the run began; `tokenizer` is that of the initial
    weights. Raises MtcliError for a step beyond the run, and for data that is missing or of another
    format than tokens and conversations.
    """
    require_named(config.data)
    is_chat = config.data.format == "conversations"
    if is_chat:
        config = with_steps(config, tokenizer)
    steps, phase = config.train.steps, phase_after(phases_of(config), step)
    if not 1 <= step <= steps:
        raise wrong(f"step {step} of a run of {steps} steps", f"1 to {steps}", "--step")
    if config.model.head != "lm" or config.data.format not in ("tokens", "conversations"):
        said = f"head {config.model.head!r} on data of format {config.data.format!r}"
        raise wrong(
            said, "documents of steps are known of a head 'lm' on 'tokens' or 'conversations'"
        )
    if config.data.reselect_every:
        said = f"reselect_every={config.data.reselect_every} chooses by weights that have gone"
        raise wrong(said, "documents of steps are known of one data.subset", "data.reselect_every")
    if phase.samples[0]:
        said = f"step {step} is of phase {phase.number}, whose sources go on where others left them"
        raise wrong(said, f"a step up to {phase_after(phases_of(config), 1).last_step}", "--step")
    samples_of_step = range(phase.samples_before(step - 1), phase.samples_before(step))
    if is_chat:
        return _examples(open_conversations(config, tokenizer), samples_of_step)
    subset = require_subset(config)
    batches = token_batches(config, "train", subset, SampleOrder(0, phase.samples[1], planned))
    samples = batches.sample_ids(samples_of_step.start, len(samples_of_step))
    sequences_of: dict[str, set[int]] = defaultdict(set)
    for sample in samples:
        sequences_of[sample.prefix].update(sequence for sequence, _, _ in sample.spans)
    names = {prefix: _named(prefix, numbers) for prefix, numbers in sequences_of.items()}
    spans = []
    for number, sample in zip(samples_of_step, samples, strict=True):
        for sequence, offset, tokens in sample.spans:
            name = names[sample.prefix].get(sequence, Named(None, None))
            origin = {
                "sample": number,
                "source": name.source or Path(sample.prefix).name,
            }
            span = {"offset": offset, "tokens": tokens}
            spans.append(
                origin | {"data": sample.prefix, "document": sequence, "id": name.id} | span
            )
    return spans


def _examples(conversations: PackedConversations, samples: range) -> list[dict[str, Any]]:
    """Lists the examples of samples. An example has a loss on one `turn`, the number of a message,
    or (None) on all of the assistant's. Padding has none."""
    examples = []
    for sample in samples:
        for item in conversations.epochs.items(sample).tolist():
            prefix = conversations.prefixes[conversations.source[item]]
            line, turn = int(conversations.lines[item]), int(conversations.turns[item])
            name = Path(prefix).name
            row = {"sample": sample, "source": name, "data": prefix, "document": line}
            span = {"offset": 0, "tokens": int(conversations.lengths[item])}
            row |= {"id": f"{name}:{line}", "turn": None if turn < 0 else turn}
            examples.append(row | span)
    return examples


def _named(prefix: str, numbers: Collection[int]) -> dict[int, Named]:
    """Reads the names of documents of a token file; empty where its inputs are gone."""
    facts = describe(prefix) or {}
    inputs = facts.get("inputs")
    if not isinstance(inputs, list) or facts.get("sentences") is not None:
        return {}
    reading = Reading(
        str(facts.get("text_key") or "text"), facts.get("split_on") == "blank", False, None, True
    )
    try:
        sources = find_sources(inputs).sources
    except MtcliError:
        return {}
    named: dict[int, Named] = {}
    last = max(numbers)
    documents = (
        (source.path, text)
        for source in sources
        for text in read_documents(FileRange(source, 0, source.size), reading)
        if isinstance(text, Text) and text.text  # empty ones became no sequence
    )
    for number, (path, text) in enumerate(documents):
        if number in numbers:
            fields = text.fields or {}
            position = f"{Path(path).name}:{text.line}"
            named[number] = Named(fields.get("id", position), fields.get("source"))
        if number >= last:
            break
    return named
