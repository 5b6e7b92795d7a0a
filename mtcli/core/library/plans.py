"""Plans a run for Python, as `mtcli plan` does; torch is imported in subprocesses alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from mtcli.core.checkpoint.fine_tuning import source_of, starting_tokenizer
from mtcli.core.config import arguments
from mtcli.core.config.errors import collect_errors
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.vocabulary import with_vocabulary
from mtcli.core.library.argument_names import naming_arguments
from mtcli.core.plan.answer import MOST_TOKENS, PlanAnswer, answer, read_request, with_run
from mtcli.core.plan.certainty import step_range
from mtcli.core.plan.hardware import gib
from mtcli.core.plan.tables import as_json
from mtcli.core.rehearse.request import rehearsed

MOST_GPUS = 2**20
MOST_LAYOUTS = 1000


@dataclass(frozen=True, repr=False)
class Plan:
    """The plan of a config, or the best of a search: its cost, and the config that has it."""

    answer: PlanAnswer

    def __repr__(self) -> str:
        memory = gib(self.memory_bytes) + (" a rank" if self.fits else " a rank, too many")
        return f"<Plan of {self.answer.title}: {self.step_seconds:.4g} s a step, {memory}>"

    @property
    def config(self) -> RunConfig:
        """The run's config, with the layout."""
        return self.answer.config

    @property
    def layout(self) -> str:
        """The layout in words, such as tp=8 dp=8 pp=4 micro-batch 1 1f1b zero=1."""
        return self.answer.prediction.work.layout_words

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device's memory."""
        return self.answer.prediction.fits

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fullest rank."""
        return round(self.answer.prediction.memory.total)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.answer.prediction.step_seconds

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """The seconds that hold 8 of 10 published runs of the kind; None where there are none."""
        spread = step_range(self.answer.prediction)
        return None if spread is None else (spread.low, spread.high)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices in a second."""
        p = self.answer.prediction
        return p.tokens_per_second_per_gpu * p.work.layout.world

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, from 0 to 1."""
        return self.answer.prediction.mfu

    def as_json(self) -> dict[str, Any]:
        """All figures: the JSON of `mtcli plan --json`."""
        return as_json(self.answer)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the config as TOML for `mtcli train`."""
        self.answer.save_config(arguments.path("path", path, "run.toml"))


def plan(
    config: str | PathLike[str],
    gpus: int | None = None,
    device: str | None = None,
    top: int | None = None,
    tokens: str | float | None = None,
    overrides: Sequence[str] | Mapping[str, object] = (),
) -> Plan:
    """Plans a config, or searches its best layout where `top` is given or it is a bare preset with
    `gpus`; `tokens` such as "15T" adds the whole run. The arguments are the flags of `mtcli plan`.

    Raises MtcliError with every problem of wrong arguments or an illegal config. A plan that does
    not fit is returned.
    """
    name, gpus, device, top, length, given = collect_errors(
        lambda: arguments.path("config", config, "run.toml"),
        lambda: None if gpus is None else arguments.whole("gpus", gpus, 1, MOST_GPUS, 8),
        lambda: None if device is None else arguments.path("device", device, "h100"),
        lambda: None if top is None else arguments.whole("top", top, 1, MOST_LAYOUTS, 5),
        lambda: None if tokens is None else _tokens(tokens),
        lambda: arguments.overrides_of(overrides),
    )
    with naming_arguments("config"):
        source = source_of(name)
        given = with_vocabulary(source, given, starting_tokenizer)
        asked = read_request(source, given, (), gpus, device)
        return Plan(answer(with_run(asked, length, None, "time"), top, rehearsed))


def _tokens(tokens: object) -> str:
    """The number of tokens as text."""
    if isinstance(tokens, str):
        return tokens
    return repr(arguments.number("tokens", tokens, 1, MOST_TOKENS, 300e9))
