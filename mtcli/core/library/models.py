"""Opens a checkpoint of any format and layout for Python: logits, losses and texts."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from types import TracebackType

import torch
from torch import Tensor

from mtcli.core.checkpoint.folder import find_checkpoints
from mtcli.core.config import arguments
from mtcli.core.config.errors import collect_errors, wrong
from mtcli.core.config.loading import train_settings
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.rules import require_forward
from mtcli.core.config.untrusted import shown
from mtcli.core.data.tokenize import Tokenizer
from mtcli.core.inference.generate import CACHE_BYTES, GREEDY
from mtcli.core.inference.model import open_model
from mtcli.core.inference.prompts import Prompt
from mtcli.core.inference.run import GenerateRequest, generate_all
from mtcli.core.inference.scoring import ScoreBatch
from mtcli.core.inference.token_choice import Sampling
from mtcli.core.library.argument_names import naming_arguments
from mtcli.core.runtime.launch import bring_up

TokenRows = str | Sequence[int] | Sequence[Sequence[int]] | Tensor


class Model:
    """A model that is open on this rank; every rank of a launcher calls the same methods.

    A context manager: closing it ends the process groups of a launcher's ranks.
    """

    def __init__(
        self, checkpoint: str, overrides: list[str], device: str, base: str | None
    ) -> None:
        with naming_arguments("checkpoint"), ExitStack() as stack:
            require_forward(overrides)
            if base is not None:
                find_checkpoints([checkpoint], base)
            train = train_settings(overrides, device=device)
            self._runtime = stack.enter_context(bring_up(train.device, train.timeout, train.matmul))
            self._opened = open_model(checkpoint, overrides, self._runtime, base=base)
            self._stack, self._closed = stack.pop_all(), False
        self._name = checkpoint

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"on {self._runtime.device}"
        return f"<Model {self._name}: {self.config.architecture}, {state}>"

    @property
    def config(self) -> ModelConfig:
        """The shapes of the model."""
        return self._opened.scorer.config.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer: `encode(text)`, `decode(ids)`. Raises MtcliError where there is none."""
        return self._opened.require_tokenizer()

    def logits(self, tokens: TokenRows) -> Tensor:
        """The logits [b, s, V] in float32 after each token of rows [b, s], on the model's device. A
        text, or the tokens of one row, are a batch of one."""
        self._require_open()
        return self._opened.scorer.logits(self._rows(tokens))

    def losses(self, tokens: TokenRows) -> Tensor:
        """The losses [b, s - 1] in nats, float32 on the CPU, of the second and later tokens of
        rows [b, s]."""
        self._require_open()
        rows = self._rows(tokens)
        b, s = rows.shape
        places = torch.arange(b * s).view(b, s)[:, :-1].flatten()
        positions = torch.arange(s).expand(b, s)
        batch = ScoreBatch(rows, positions, None, places, rows[:, 1:].flatten())
        return -self._opened.scorer.score(batch)[0].view(b, s - 1)

    def generate(
        self,
        prompts: str | Sequence[str],
        max_tokens: int = 100,
        sampling: Sampling = GREEDY,
        stop: str | Sequence[str] = (),
        chat: bool = False,
    ) -> list[str]:
        """Texts that follow the prompts, without them. `chat` renders each as a conversation's
        message; a text ends before one of `stop`. `Sampling(temperature, top_k, top_p, seed)`; its
        default is greedy. Raises MtcliError with every problem of wrong arguments."""
        self._require_open()
        texts, limit, _, stops, chat = collect_errors(
            lambda: arguments.texts("prompts", prompts),
            lambda: arguments.whole("max_tokens", max_tokens, 1, MOST_NEW_TOKENS, 100),
            lambda: self._require_sampling(sampling),
            lambda: arguments.texts("stop", stop, empty=False),
            lambda: arguments.truth("chat", chat),
        )
        asked = [Prompt(text, {}) for text in texts]
        ends = limit, stops, None, chat, None, None, ()
        request = GenerateRequest(asked, 1, sampling, *ends, CACHE_BYTES)
        with naming_arguments():
            return [one["text"] for one in generate_all(request, self._opened, self._runtime)]

    def _require_open(self) -> None:
        if self._closed:
            hint = f"mtcli.open({self._name!r}) opens it again; calls belong inside its `with`"
            raise wrong("the model is closed", hint, "Model")

    def _require_sampling(self, sampling: object) -> None:
        if not isinstance(sampling, Sampling):
            hint = "sampling=mtcli.Sampling(temperature=0.8)"
            raise wrong(f"{sampling!r} is no mtcli.Sampling", hint, "sampling")
        arguments.require_ids(sampling.logit_bias, self.config.vocab_size, "logit_bias")

    def _rows(self, tokens: TokenRows) -> Tensor:
        """Tokens as rows [b, s]. Raises MtcliError for none, too many, or ids beyond the
        vocabulary."""
        if isinstance(tokens, str):
            (text,) = arguments.texts("tokens", tokens)
            tokens = self.tokenizer.encode(text)
        try:
            rows = torch.as_tensor(tokens).cpu()
            integers = rows.numel() == 0 or rows.dtype in INTEGERS
        except (TypeError, ValueError, RuntimeError, OverflowError):
            integers = False
        if not integers:
            raise wrong(f"{shown(tokens)} is no rows of equally many ids", ROWS, "tokens")
        rows = rows[None] if rows.dim() == 1 else rows
        model = self.config
        if rows.dim() != 2 or not rows.numel():
            raise wrong(f"tokens of shape {list(rows.shape)} are no rows", ROWS, "tokens")
        if rows.shape[1] > model.max_seq_len:
            message = f"rows of {rows.shape[1]} tokens, and the longest sequence is "
            message += f"{model.max_seq_len} (model.max_seq_len)"
            raise wrong(message, f"rows of at most {model.max_seq_len} tokens", "tokens")
        least, most = int(rows.min()), int(rows.max())
        if least < 0 or most >= model.vocab_size:
            message = f"tokens {least} to {most} of a vocabulary of {model.vocab_size}"
            raise wrong(message, f"0 to {model.vocab_size - 1}", "tokens")
        return rows.long()

    def close(self) -> None:
        """Ends the process groups, if a launcher started several ranks."""
        self._closed = True
        self._stack.close()

    def __enter__(self) -> "Model":
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._stack.__exit__(kind, error, trace)


ROWS = "a text, a list of ids, or rows [b, s] of one length"
INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
DEVICES = "auto", "cpu", "cuda"
MOST_NEW_TOKENS = 10**9


def open_checkpoint(
    checkpoint: str | PathLike[str],
    overrides: Sequence[str] | Mapping[str, object] = (),
    device: str = "auto",
    base: str | PathLike[str] | None = None,
) -> Model:
    """Opens a run, a checkpoint of any layout, a Hugging Face folder or hub:owner/name.

    `overrides` are `section.field=value` as of --set, in a list or as a mapping:
    `train.precision=bf16`, or under torchrun `parallel.tp=2`. `base` is the folder of the weights
    under adapters, where it was moved. Raises MtcliError with every problem of wrong arguments, and
    for what cannot be opened.
    """
    given = collect_errors(
        lambda: arguments.path("checkpoint", checkpoint, "runs/a"),
        lambda: arguments.overrides_of(overrides),
        lambda: arguments.one_of("device", device, DEVICES),
        lambda: None if base is None else arguments.path("base", base, "FOLDER"),
    )
    return Model(*given)
