"""The config of forward passes: of evaluation and generation, on any layout."""

from collections.abc import Iterator, Sequence

from mtcli.core.config import rules
from mtcli.core.config.errors import Problem, wrong
from mtcli.core.config.layout_rules import context_divides, experts_see_tokens_once
from mtcli.core.config.loading import validate, with_overrides
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig

# Rules that forward passes need not keep. tp ranks ask the experts alike, and are answered alike;
# cp is refused, so that another length is no advice.
OF_TRAINING = (*rules.TRAINING_RULES, experts_see_tokens_once, context_divides)


def forward_config(model: ModelConfig, overrides: Sequence[str], world: int) -> RunConfig:
    """The config of forward passes of any shape: no sequence parallelism, one sequence a rank.

    Raises MtcliError with all that is wrong with the overrides, or with their layout.
    """
    base = {
        "model": model.model_dump(exclude_none=True),
        "parallel": {"sequence_parallel": False},
        "batch": {"seq_len": model.max_seq_len, "global_batch_size": world},
    }
    config, found = validate(with_overrides(base, overrides))
    more = (*rules.ENGINE_RULES, _whole_sequences)
    return rules.require(config, world, *more, without=OF_TRAINING, found=found)


def require_causal(path: str, model: ModelConfig) -> None:
    """Raises MtcliError where the tokens of a checkpoint see those that they would predict."""
    if not model.causal:
        message = f"{path} has causal=false: its tokens see the ones they would predict"
        hint = "generate and eval take models trained with model.causal=true"
        raise wrong(message, hint, "model.causal")


def _whole_sequences(config: RunConfig, world: int) -> Iterator[Problem]:
    if config.parallel.cp > 1:
        message = f"cp={config.parallel.cp}: evaluation and generation hold whole sequences"
        yield Problem(message, "parallel.cp = 1, and more tp, pp or dp", "parallel.cp")
    if config.parallel.sequence_parallel:
        message = "sequence_parallel=true: evaluation and generation hold whole sequences"
        yield Problem(message, "leave it out", "parallel.sequence_parallel")
