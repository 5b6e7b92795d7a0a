"""`mtcli generate`: text from a checkpoint, for many prompts at once or in a talk."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtcli.commands.options import (
    CheckpointPath,
    ComputeDevice,
    JsonOut,
    MovedBase,
    Nproc,
    Overrides,
    Resume,
    Weights,
    given_flags,
)
from mtcli.commands.output import answer, answering, echo, say_wrote
from mtcli.commands.ranks import num_ranks, require_model, run_ranks
from mtcli.core.config.errors import MtcliError, Problem, wrong

if TYPE_CHECKING:
    from mtcli.core.inference.prompts import Finished, Prompt
    from mtcli.core.runtime.launch import Runtime

PromptText = Annotated[
    list[str],
    typer.Option(
        "--prompt",
        default_factory=list,
        show_default=False,
        help="text to continue; may be given several times",
    ),
]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="a file of prompts: .txt, one a line, or .jsonl with a field prompt",
    ),
]
Samples = Annotated[int, typer.Option("--n", min=1, max=10**6, help="texts for each prompt")]
TextsOut = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="FILE.jsonl",
        help="write each text as it ends: its prompt's fields, text, finish_reason, index",
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="prompts are a user's turns, by the folder's chat template; without prompts, on a "
        "terminal, a talk",
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="the system's message, with --chat")
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
MinP = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="keep tokens at least p times as likely as the likeliest; 0 keeps all",
    ),
]
Penalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        min=0.01,
        max=100.0,
        help="divide logits of tokens that were there before; 1 leaves them",
    ),
]
Bias = Annotated[
    list[str],
    typer.Option(
        "--logit-bias",
        metavar="ID=VALUE",
        default_factory=list,
        show_default=False,
        help="add a number to a token's logit; may be given several times",
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=1000,
        metavar="K",
        help="each token's log-probability, and the k likeliest ones, in JSON",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of the sampling")]
CacheGib = Annotated[
    float,
    typer.Option(
        min=0.0, max=1e6, help="memory of a rank's keys and values; prompts wait for room in it"
    ),
]
DRAWS = ("top_k", "top_p", "min_p", "seed")
OF_TEXTS = ("n", "output", "resume", "json_out", "logprobs")  # not of a talk


@answering
def generate(
    context: typer.Context,
    checkpoint: CheckpointPath,
    overrides: Overrides,
    prompt: PromptText,
    stop: Stop,
    logit_bias: Bias,
    prompts: PromptsFile = None,
    n: Samples = 1,
    output: TextsOut = None,
    resume: Resume = False,
    chat: Chat = False,
    system: System = None,
    max_tokens: MaxTokens = 100,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    logprobs: Logprobs = None,
    seed: Seed = 0,
    cache_gib: CacheGib = 2.0,
    weights: Weights = "fp32",
    base: MovedBase = None,
    nproc: Nproc = 1,
    device: ComputeDevice = "auto",
    json_out: JsonOut = None,
) -> None:
    """Sample text from a checkpoint, on any layout."""
    from mtcli.core.config.arguments import require_ids
    from mtcli.core.config.errors import collect_errors
    from mtcli.core.config.loading import train_settings

    talks = chat and not prompt and prompts is None and sys.stdin.isatty()
    (texts, done), _, _, _, _, biases, train, model = collect_errors(
        lambda: ([], ()) if talks else _prompts(prompt, prompts, output, n, resume),
        lambda: _require_stops(stop),
        lambda: _require_top_p(top_p),
        lambda: _require_draws(context, temperature),
        lambda: _require_chat(context, chat, system, talks, num_ranks(nproc)),
        lambda: _biases(logit_bias),
        lambda: train_settings(overrides, device=device),
        lambda: require_model(checkpoint, overrides, num_ranks(nproc), base=base, weights=weights),
    )
    if model is not None:
        require_ids(biases, model.vocab_size, "--logit-bias")

    def work(runtime: "Runtime") -> None:
        from mtcli.core.inference.model import open_model
        from mtcli.core.inference.run import GenerateRequest, generate_all
        from mtcli.core.inference.token_choice import Sampling

        opened = open_model(checkpoint, overrides, runtime, base=base, weights=weights)
        cuts = temperature, top_k, top_p, seed, min_p
        sampling = Sampling(*cuts, repetition_penalty, biases)
        if talks:
            from mtcli.core.inference.generate import Ends
            from mtcli.core.inference.talk import Talk

            limit = max_tokens if given_flags(context, ["max_tokens"]) else 10**9
            return Talk(opened, sampling, Ends(limit, opened.end_ids(), stop), system).run()
        limits = max_tokens, stop, logprobs
        where = output, done, int(cache_gib * 2**30)
        request = GenerateRequest(texts, n, sampling, *limits, chat, system, *where)
        generated = generate_all(request, opened, runtime)
        if runtime.rank == 0:
            _print(checkpoint, generated, output, json_out)

    run_ranks(nproc, train, work)


def _print(checkpoint: str, generated: list[Any], output: str | None, json_out: str | None) -> None:
    answer({"checkpoint": checkpoint, "generated": generated}, json_out)
    for one in generated if not (json_out or output) else ():
        echo(f"{one['prompt']}{one['text']}")
    say_wrote(output)


def _prompts(
    given: list[str], file: str | None, output: str | None, samples: int, resume: bool
) -> "tuple[list[Prompt], Finished]":
    """The prompts, and which of their texts the output file has. Raises MtcliError for none, for a
    bad file, and for --resume without an output."""
    from mtcli.core.inference.prompts import Prompt, finished, read_prompts

    if resume and output is None:
        raise wrong("there is no file to go on with", "--output FILE.jsonl", "--resume")
    if not given and file is None:
        hint = "--prompt TEXT, --prompts FILE, or --chat on a terminal"
        raise wrong("no prompt is given", hint, "--prompt")
    _require_text(given, "--prompt")
    texts = [Prompt(text, {"prompt": text}) for text in given]
    texts += [] if file is None else read_prompts(file)
    return texts, finished(output, texts, samples, resume) if output else ()


def _require_text(texts: list[str], flag: str) -> None:
    """Raises MtcliError for command-line bytes that are no text (lone surrogates)."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            hint = "UTF-8, and a locale that has it, such as C.UTF-8"
            raise wrong(f"{text!r} is not text in this locale", hint, flag) from None


def _require_stops(stops: list[str]) -> None:
    """Raises MtcliError for --stop words that are empty, or that UTF-8 cannot encode."""
    _require_text(stops, "--stop")
    if "" in stops:
        raise wrong("an empty text would end every text", '--stop "TEXT", or none', "--stop")


def _require_draws(context: typer.Context, temperature: float) -> None:
    """Raises MtcliError for sampling flags where the temperature is 0, which is greedy."""
    given = given_flags(context, DRAWS) if temperature == 0.0 else []
    if given:
        what = "temperature=0 takes the likeliest token and draws none"
        raise MtcliError(
            *(Problem(what, f"leave {flag} out, or --temperature 1", flag) for flag in given)
        )


def _require_top_p(top_p: float) -> None:
    if top_p == 0.0:
        raise wrong("top_p=0 keeps no token", "above 0 and at most 1; 1 cuts nothing", "--top-p")


def _require_chat(
    context: typer.Context, chat: bool, system: str | None, talks: bool, world: int
) -> None:
    """Raises MtcliError for flags that have no use without --chat, or in a talk."""
    if system is not None:
        _require_text([system], "--system")
        if not chat:
            raise wrong("it is a message of a conversation", "add --chat", "--system")
    if talks and world > 1:
        raise wrong(
            f"{world} ranks read no terminal", "leave --nproc out, or --prompt TEXT", "--nproc"
        )
    if talks and (given := given_flags(context, OF_TEXTS)):
        what = "it is of texts for prompts, and a talk has none"
        raise MtcliError(*(Problem(what, "--prompt TEXT", flag) for flag in given))


def _biases(given: list[str]) -> dict[int, float]:
    """Parses ID=VALUE. Raises MtcliError for what is none, and for an id given twice."""
    biases: dict[int, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            id, number = int(name), float(value)
        except ValueError:
            id, number = -1, 0.0
        if id < 0 or not -1e4 <= number <= 1e4 or id in biases:
            again = f"{text} names an id again" if id in biases else f"{text} is no ID=VALUE"
            hint = "a token's id and a number of -10000 to 10000, such as 50256=-100"
            raise wrong(again, hint, "--logit-bias")
        biases[id] = number
    return biases
