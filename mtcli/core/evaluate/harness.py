"""Runs lm-evaluation-harness on our models through an `LM` of its own, scored by packing.

Needs the `eval` extra. lm-eval's tasks define prompts and metrics, and its `TemplateLM` the token
conventions, by calls to our `EvalTokenizer`; only the scoring of token ids is ours.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from mtcli.core.config.errors import MtcliError, failed, wrong
from mtcli.core.config.synonyms import closest
from mtcli.core.data.text_files import read_text
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.loglikelihood import Request, Score, request, rolling_windows
from mtcli.core.evaluate.packing import plan, run
from mtcli.core.evaluate.tasks.task import Advance, Report
from mtcli.core.inference.chat import ChatPrompts
from mtcli.core.inference.generate import GREEDY, Ends, Generator, TextRequest
from mtcli.core.inference.model import InferenceModel
from mtcli.core.inference.token_choice import Sampling

BOOTSTRAP_ITERS = 100  # for standard errors without a closed form; lm-eval's 100,000 take minutes
GENERATED_TOKENS = 256  # where a task names no limit, as lm-eval's Hugging Face backend
# What tasks call that limit: lm-eval takes the first of these.
TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

RECENT_TEXTS = 16  # lm-eval asks for an item's context again with each of its endings


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model and its tokenizer as an `LM` for lm-eval's tasks.

    Every rank of a model-parallel run builds one, receives the same requests and reports rank 0.
    """

    def __init__(
        self,
        scorer: InferenceModel,
        tokenizer: EvalTokenizer,
        batch_tokens: int,
        progress: Advance = lambda done: None,
        ends: Collection[int] = (),
        chat: ChatPrompts | None = None,
    ) -> None:
        """Takes the scorer and tokenizer; `ends` are the tokens that end a generated text, and
        `chat` renders contexts as conversations."""
        super().__init__()
        self.chat = chat
        self.scorer, self.eval_tokenizer = scorer, tokenizer
        self.batch_tokens, self.progress = batch_tokens, progress
        self.ends = ends
        self._text = lru_cache(RECENT_TEXTS)(tokenizer.text)

    @property
    def eot_token_id(self) -> int:
        """The token before an empty context, which lm-eval reads as `prefix_token_id` too."""
        return self.eval_tokenizer.prefix_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Returns the ids of `string`, with the tokenizer's prefix unless `add_special_tokens` is
        false."""
        if add_special_tokens is False:
            return list(self.eval_tokenizer.encode(string))
        return list(self._text(string))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        return [
            (score.logprob, score.is_greedy)
            for score in self._score([request(context, ids) for _, context, ids in requests])
        ]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of each text, alone, in disjoint windows
        (`rolling_windows`)."""
        windows = [
            rolling_windows(
                np.array(self.tok_encode(instance.args[0]), np.int64),
                self.eval_tokenizer.prefix_id,
                self.scorer.max_seq_len,
            )
            for instance in requests
        ]
        scores = iter(self._score([window for document in windows for window in document]))
        return [sum(next(scores).logprob for _ in document) for document in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates a text after each context, up to the first of its `until`, a token that ends a
        text, or the task's limit of tokens (256 by default)."""
        asked = [self._request(n, *instance.args) for n, instance in enumerate(requests)]
        texts = [""] * len(asked)
        for text in Generator(self.scorer).run(asked):
            assert text.result is not None, "a text that was yielded has ended"
            texts[text.index] = text.result.text
            self.progress(1)
        return texts

    def _request(self, number: int, context: str, settings: Mapping[str, Any]) -> TextRequest:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        given = (settings.get(name) for name in TOKEN_LIMITS)
        limit = int(next((value for value in given if value is not None), GENERATED_TOKENS))
        room = max(1, self.scorer.max_seq_len - limit)  # what is longer loses its beginning
        prompt = (self.tok_encode(context) or [self.eval_tokenizer.prefix_id])[-room:]
        sampled = settings.get("do_sample", True)
        temperature = float(settings.get("temperature", 0.0)) if sampled else 0.0
        tops = int(settings.get("top_k", 0)), float(settings.get("top_p", 1.0))
        ends = Ends(limit, self.ends, [stop for stop in stops if stop])
        sampling = Sampling(temperature, *tops) if temperature else GREEDY
        return TextRequest(prompt, ends, sampling, self.eval_tokenizer.decode, number)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation; without the system's message where the template takes none."""
        assert self.chat is not None, "evaluate_harness asks for it with a template alone"
        try:
            return self.chat.text(chat_history, add_generation_prompt)
        except MtcliError:
            said = [message for message in chat_history if message["role"] != "system"]
            if len(said) == len(chat_history):
                raise
            return self.chat.text(said, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the template's text, which lm-eval records."""
        return None if self.chat is None else self.chat.source

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in lm-eval's cache of requests."""
        return "mtcli"

    def _score(self, requests: list[Request]) -> list[Score]:
        return run(self.scorer, plan(self.scorer, requests, self.batch_tokens), self.progress)


def evaluate_harness(
    name: str, model: HarnessModel, limit: int | None, shots: int = 0, seed: int = 1234
) -> Report:
    """Returns lm-eval's metrics for the task, group or tag `name`, or for the one in a YAML file.

    Without `shots` a task uses its own number, drawn by `seed`. The metric of a group's member is
    "member.metric". Raises MtcliError for a name that lm-eval does not have, and (exit 1) where its
    data is unavailable.
    """
    manager, name = _find(name)
    try:
        results = simple_evaluate(
            model,
            tasks=[name],
            task_manager=manager,
            limit=limit,
            num_fewshot=shots or None,
            fewshot_random_seed=seed,
            bootstrap_iters=BOOTSTRAP_ITERS,
            log_samples=False,
            apply_chat_template=model.chat is not None,
            fewshot_as_multiturn=model.chat is not None,
        )
    except MtcliError:
        raise
    except Exception as error:
        if not _cannot_be_had(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"lm-eval cannot run the task {name}: {reason}"
        hint = "its data comes from the Hugging Face hub: check the network, or fill the cache once"
        raise failed(message, hint) from error
    return {} if results is None else _flatten(name, results)  # None: not the printing rank


def _cannot_be_had(error: Exception) -> bool:
    """Says whether datasets found no data, or the hub's client, httpx or httpx2, no network."""
    is_network = any(base.__name__ == "TransportError" for base in type(error).__mro__)
    return is_network or isinstance(error, (OSError, ValueError))


def _find(name: str) -> tuple[TaskManager, str]:
    """Finds the manager that has the task, and the task's name in it."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.exists():
            raise wrong(f"{name} does not exist", "give a task's YAML file, or its name", "--task")
        match = re.search(r"^(?:task|group):\s*['\"]?([^'\"\s#]+)", read_text(path), re.MULTILINE)
        if match is None:
            raise wrong(f"{name} names 0 tasks", "it must have a line `task: NAME`", "--task")
        folder = str(path.resolve().parent)
        return TaskManager(include_path=folder, include_defaults=False), match[1]
    manager = TaskManager()
    if name not in manager.all_tasks:
        message = f"lm-eval has {len(manager.all_tasks)} tasks, and none is called {name!r}"
        hint = f"`lm-eval ls tasks` lists them{closest(name, manager.all_tasks)}"
        raise wrong(message, hint, "--task")
    return manager, name


def _flatten(name: str, results: Mapping[str, dict[str, Any]]) -> Report:
    report: Report = {}
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            if isinstance(value, int | float) and key != "sample_len":  # it is our total
                metric = key.removesuffix(",none")
                report[metric if task == name else f"{task}.{metric}"] = value
    counts = results.get("n-samples", {}).values()
    return report | {"total": sum(count["effective"] for count in counts)}
