"""Opens a checkpoint of any format and layout for Python: logits, losses and texts."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mtcli.core.config.errors import wrong
from mtcli.core.config.loading import train_settings
from mtcli.core.config.model import ModelConfig
from mtcli.core.data.tokenize import Tokenizer
from mtcli.core.inference.generate import CACHE_BYTES, GREEDY
from mtcli.core.inference.model import open_model
from mtcli.core.inference.prompts import Prompt
from mtcli.core.inference.run import GenerateRequest, generate_all
from mtcli.core.inference.scoring import ScoreBatch
from mtcli.core.inference.token_choice import Sampling
from mtcli.core.runtime.launch import bring_up

TokenRows = str | Sequence[int] | Sequence[Sequence[int]] | Tensor


class Model:
    """A model that is open on this rank; every rank of a launcher calls the same methods.

    A context manager: closing it ends the process groups of a launcher's ranks.
    """

    def __init__(
        self, checkpoint: str, overrides: Sequence[str], device: str, base: str | None
    ) -> None:
        train = train_settings(overrides, device=device)
        with ExitStack() as stack:
            self._runtime = stack.enter_context(bring_up(train.device, train.timeout, train.matmul))
            self._opened = open_model(checkpoint, overrides, self._runtime, base=base)
            self._stack = stack.pop_all()

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
        return self._opened.scorer.logits(self._rows(tokens))

    def losses(self, tokens: TokenRows) -> Tensor:
        """The losses [b, s - 1] in nats, float32 on the CPU, of the second and later tokens of
        rows [b, s]."""
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
        stop: Sequence[str] = (),
        chat: bool = False,
    ) -> list[str]:
        """Texts that follow the prompts, without them. `chat` renders each as a conversation's
        message. `Sampling(temperature, top_k, top_p, seed)`; its default is greedy."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        asked = [Prompt(text, {}) for text in texts]
        ends = max_tokens, list(stop), None, chat, None, None, ()
        request = GenerateRequest(asked, 1, sampling, *ends, CACHE_BYTES)
        return [one["text"] for one in generate_all(request, self._opened, self._runtime)]

    def _rows(self, tokens: TokenRows) -> Tensor:
        """Tokens as rows [b, s]. Raises MtcliError for none, too many, or ids beyond the
        vocabulary."""
        if isinstance(tokens, str):
            tokens = self.tokenizer.encode(tokens)
        try:
            rows = torch.as_tensor(tokens, dtype=torch.int64).cpu()
        except (TypeError, ValueError):
            raise wrong("the rows of tokens are no equally long lists of ids", ROWS) from None
        rows = rows[None] if rows.dim() == 1 else rows
        model = self.config
        if rows.dim() != 2 or not rows.numel():
            raise wrong(f"tokens of shape {list(rows.shape)} are no rows", ROWS)
        if rows.shape[1] > model.max_seq_len:
            message = f"rows of {rows.shape[1]} tokens, and the longest sequence is "
            raise wrong(f"{message}{model.max_seq_len}", "shorter rows", "model.max_seq_len")
        least, most = int(rows.min()), int(rows.max())
        if least < 0 or most >= model.vocab_size:
            message = f"tokens {least} to {most} of a vocabulary of {model.vocab_size}"
            raise wrong(message, f"0 to {model.vocab_size - 1}")
        return rows

    def close(self) -> None:
        """Ends the process groups, if a launcher started several ranks."""
        self._stack.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)


ROWS = "a text, a list of ids, or rows [b, s] of one length"


def open_checkpoint(
    checkpoint: Any, overrides: Sequence[str] = (), device: str = "auto", base: Any = None
) -> Model:
    """Opens a run, a checkpoint of any layout, a Hugging Face folder or hub:owner/name.

    `overrides` are `section.field=value` as of --set: `train.precision=bf16`, or under torchrun
    `parallel.tp=2`. `base` is the folder of the weights under adapters, where it was moved. Raises
    MtcliError for what cannot be opened.
    """
    return Model(str(checkpoint), overrides, device, None if base is None else str(base))
