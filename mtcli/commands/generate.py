"""`mtcli generate`: sample text from a checkpoint."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mtcli.commands.options import (
    CheckpointPath,
    ComputeDevice,
    JsonOut,
    MovedBase,
    Nproc,
    Overrides,
    given_flags,
)
from mtcli.commands.output import answer, answering, echo
from mtcli.commands.ranks import num_ranks, require_model, run_ranks
from mtcli.core.config.errors import MtcliError, Problem, wrong

if TYPE_CHECKING:
    from mtcli.core.runtime.launch import Runtime

Prompt = Annotated[
    list[str], typer.Option("--prompt", help="text to continue; may be given several times")
]
MaxTokens = Annotated[int, typer.Option(min=1, max=10**9, help="tokens to generate")]
Stop = Annotated[
    list[str],
    typer.Option(
        "--stop",
        metavar="TEXT",
        default_factory=list,
        show_default=False,
        help="end a text before this string; may be given several times",
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, max=1000.0, help="0 is greedy")]
TopK = Annotated[
    int, typer.Option(min=0, max=10**9, help="keep the k likeliest tokens; 0 keeps all")
]
TopP = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="keep the likeliest tokens that reach p together; 1 keeps all"
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of the sampling")]


@answering
def generate(
    context: typer.Context,
    checkpoint: CheckpointPath,
    overrides: Overrides,
    prompt: Prompt,
    stop: Stop,
    max_tokens: MaxTokens = 100,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    base: MovedBase = None,
    nproc: Nproc = 1,
    device: ComputeDevice = "auto",
    json_out: JsonOut = None,
) -> None:
    """Sample text from a checkpoint, on any layout."""
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.config.loading import train_settings

    *_, train, _ = collect_errors(
        lambda: _require_text(prompt, "--prompt"),
        lambda: _require_text(stop, "--stop"),
        lambda: _require_top_p(top_p),
        lambda: _require_draws(context, temperature),
        lambda: train_settings(overrides, device=device),
        lambda: require_model(checkpoint, overrides, num_ranks(nproc), base=base),
    )

    def work(runtime: "Runtime") -> None:
        from mtcli.core.inference.generate import Ends, Sampling, generate_text
        from mtcli.core.inference.model import open_model

        model = open_model(checkpoint, overrides, runtime, base=base)
        tokenizer = model.require_tokenizer()
        ends = Ends(max_tokens, model.end_ids(), stop)
        sampling = Sampling(temperature, top_k, top_p, seed)
        generated = []
        for text in prompt:
            ids = tokenizer.encode_prompt(text)
            decode = partial(tokenizer.decode_after, ids)
            new = generate_text(model.scorer, decode, ids, sampling, ends)
            generated.append({"prompt": text, **new._asdict()})
        if runtime.rank > 0:
            return
        answer({"checkpoint": checkpoint, "generated": generated}, json_out)
        for sample in generated if not json_out else ():
            echo(f"{sample['prompt']}{sample['text']}")

    run_ranks(nproc, train, work)


def _require_text(texts: list[str], flag: str) -> None:
    """Raises MtcliError for command-line bytes that are no text (lone surrogates)."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            hint = "UTF-8, and a locale that has it, such as C.UTF-8"
            raise wrong(f"{text!r} is not text in this locale", hint, flag) from None


def _require_draws(context: typer.Context, temperature: float) -> None:
    """Raises MtcliError for sampling flags where the temperature is 0, which is greedy."""
    given = given_flags(context, ("top_k", "top_p", "seed")) if temperature == 0.0 else []
    if given:
        what = "temperature=0 takes the likeliest token and draws none"
        hint = "leave it out, or --temperature 1"
        raise MtcliError(*(Problem(what, hint, flag) for flag in given))


def _require_top_p(top_p: float) -> None:
    if top_p == 0.0:
        raise wrong("top_p=0 keeps no token", "above 0 and at most 1; 1 cuts nothing", "--top-p")
