"""Opens a checkpoint and generates the texts of a command line, in a file as they end."""

from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from mtcli.core.inference.chat import ChatPrompts, conversation
from mtcli.core.inference.generate import Ends, Generator, TextRequest, TextState
from mtcli.core.inference.model import OpenModel
from mtcli.core.inference.prompts import Finished, Prompt, TextsFile
from mtcli.core.inference.token_choice import Sampling
from mtcli.core.parallel.together import together
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.progress import progress_bar


class GenerateRequest(NamedTuple):
    """The texts to generate: `samples` of each prompt, but for those that are `finished`."""

    prompts: list[Prompt]
    samples: int
    sampling: Sampling
    max_tokens: int
    stops: list[str]
    logprobs: int | None
    chat: bool
    system: str | None
    output: str | None
    finished: Finished
    cache_bytes: int


def generate_all(
    request: GenerateRequest, model: OpenModel, runtime: Runtime
) -> list[Mapping[str, Any]]:
    """Generates texts and returns their records in the order of prompts and samples. Collective.

    The first rank writes records to the output file, if there is one, as texts end.
    """
    requests = text_requests(request, model)
    first = runtime.rank == 0
    world = model.scorer.groups.world
    writes = first and request.output is not None
    file = together(world, lambda: TextsFile(str(request.output)) if writes else None)
    generator, count, start = Generator(model.scorer, request.cache_bytes), 0, perf_counter()
    records: dict[tuple[int, int], Mapping[str, Any]] = {}
    total = len(request.prompts) * request.samples
    quiet = not first or total == 1
    bar = progress_bar("generate", total, " texts", len(request.finished), quiet=quiet)

    def watch(text: TextState) -> None:
        nonlocal count
        count += 1
        bar.set_postfix_str(f"{count / (perf_counter() - start):.1f} tokens/s", refresh=False)

    with bar:
        for text in generator.run(requests, watch):
            number, sample = text.request.number, text.request.sample
            record = record_of(text, request.prompts[number].fields, model)
            if request.samples > 1:
                record["sample"] = sample
            records[number, sample] = record
            if file is not None:
                file.add(record | {"index": number})
            bar.update(1)
    if file is not None:
        file.close()
    return [record for _, record in sorted(records.items())]


def text_requests(request: GenerateRequest, model: OpenModel) -> list[TextRequest]:
    """Encodes the prompts, as turns of a conversation with `chat`, and requests their samples."""
    tokenizer = model.require_tokenizer()
    ends = Ends(request.max_tokens, model.end_ids(), request.stops)
    chat = ChatPrompts(tokenizer, model.checkpoint.tokenizer_folder) if request.chat else None
    requests = []
    for number, (text, _) in enumerate(request.prompts):
        left = [k for k in range(request.samples) if (number, k) not in request.finished]
        if not left:
            continue
        if chat is None:
            ids = tokenizer.encode_prompt(text)
        else:
            ids = chat.encode(chat.text(conversation(text, request.system)))
        decode = partial(tokenizer.decode_after, ids)
        more = request.sampling, decode, number
        requests += [TextRequest(ids, ends, *more, sample, request.logprobs) for sample in left]
    return requests


def record_of(text: TextState, fields: Mapping[str, Any], model: OpenModel) -> dict[str, Any]:
    """The record of a text: its prompt's fields, the text and its end, log-probabilities if any."""
    assert text.result is not None, "a text that was yielded has ended"
    record = {**fields, **text.result._asdict()}
    if text.request.logprobs is not None:
        decode = model.require_tokenizer().decode

        def shown(token: int, logprob: float) -> dict[str, Any]:
            return {"id": token, "token": decode([token]), "logprob": logprob}

        record["logprobs"] = [
            shown(token, logprob) | {"top": [shown(*one) for one in top]}
            for token, logprob, top in text.logprobs
        ]
    return record
