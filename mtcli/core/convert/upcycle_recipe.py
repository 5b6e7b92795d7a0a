"""Plans upcycling: the mixture of experts of a dense model, and the rules by which it is the same
function.

Every expert is a copy of the dense MLP and the router is new (arXiv:2212.05055). With granularity G
an expert is a slice of 1/G of the MLP (arXiv:2410.07524): experts g*G .. g*G + G - 1 are a virtual
group, which holds every slice once and shares a router row, so that top-k selects whole groups. The
chosen weights sum to 1 and are spread over the G slices that add up to the MLP, so the slices are
scaled by G. That paper spreads the scale over all matrices of the MLP, whose nonlinearity makes
this inexact; here `down` alone is scaled: exact in any dtype where G is a power of 2.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from mtcli.core.config import rules
from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.fields import divisors, listing
from mtcli.core.config.loading import validate, with_overrides
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.synonyms import closest

FLAG = "--upcycle"
SIZES = ("num_experts", "top_k")
ROUTING = (
    *SIZES,
    *("normalize_top_k", "router_score", "router_groups", "router_top_groups"),
    *("capacity_factor", "drop_policy", "drop_scope", "pad_to_capacity"),
    *("aux_loss_coeff", "sequence_aux_loss_coeff", "z_loss_coeff"),
)
OWN = {"granularity": 1, "seed": 1234}  # options that are no fields of the model
SMALLEST = {"granularity": 1, "seed": 0}


class UpcycleRecipe(NamedTuple):
    """The recipe of an upcycling: the mixture's config, the slices per MLP, and the router's
    seed."""

    model: ModelConfig
    granularity: int
    seed: int


def recipe_of(text: str, dense: ModelConfig) -> UpcycleRecipe:
    """Parses options such as "num_experts=8,top_k=2" into the recipe for a dense model.

    Raises MtcliError with everything at once: unknown options, illegal values, and whatever makes
    the mixture differ from the dense function.
    """
    given, problems = _parse(text)
    options = OWN | {name: given.pop(name) for name in OWN if name in given}
    model, more = _mixture(dense, given, options["granularity"])
    problems += more + [*_is_copied(dense), *_has_sizes(given)]
    if model.num_experts and model.top_k:
        broken = rules.problems(RunConfig(model=model), 1, rules.TRAINING_RULES)
        problems += [problem for problem in broken if problem.field.startswith("model.")]
        problems += [*_slices(model, dense, options["granularity"]), *_is_exact(model)]
    if problems:
        raise MtcliError(*problems)
    return UpcycleRecipe(model, options["granularity"], options["seed"])


def _parse(text: str) -> tuple[dict[str, Any], list[Problem]]:
    given: dict[str, Any] = {}
    problems = []
    for item in filter(None, map(str.strip, text.split(","))):
        name, _, value = map(str.strip, item.partition("="))
        if name not in (*ROUTING, *OWN):
            problems.append(_unknown(name))
        elif not value:
            problems.append(Problem(f"{name} has no value", f"such as {name}=2", FLAG))
        # of thousands of digits Python makes no number
        elif name in OWN and not (value.isdecimal() and SMALLEST[name] <= int(value[:11]) < 2**32):
            hint = f"a whole number from {SMALLEST[name]} on, and below 2**32"
            problems.append(Problem(f"{name}={value[:40]}", hint, FLAG))
        else:
            given[name] = with_overrides({}, [f"{name}={value}"])[name]
    return given, problems


def _unknown(name: str) -> Problem:
    if name == "moe_ffn_hidden_size":
        return Problem(f"{name} follows from granularity", "granularity=G makes it ffn / G", FLAG)
    if name in ModelConfig.model_fields:
        hint = f"options are {', '.join((*ROUTING, *OWN))}"
        return Problem(f"{name} stays as it is in the dense model", hint, FLAG)
    near = closest(name, (*ROUTING, *OWN))[2:] or f"known: {', '.join((*ROUTING, *OWN))}"
    return Problem(f"unknown option {name!r}", near, FLAG)


def _mixture(
    dense: ModelConfig, given: dict[str, Any], granularity: int
) -> tuple[ModelConfig, list[Problem]]:
    """Builds the mixture's config, with illegal values left at their defaults, and lists the
    problems."""
    table = dense.model_dump(exclude_none=True) | given
    table["moe_ffn_hidden_size"] = dense.ffn_hidden_size // granularity
    table["architecture"] = "mixtral" if dense.architecture == "llama" else dense.architecture
    config, problems = validate({"model": table})
    assert config is not None, f"the dense model's fields were legal: {problems}"
    return config.model, problems


def _is_copied(dense: ModelConfig) -> Iterator[Problem]:
    if dense.num_experts:
        message = f"the model is a mixture of {dense.num_experts} experts already"
        yield Problem(message, "upcycle the dense model", FLAG)
    elif dense.has_mlp_bias:
        hint = "of a gpt-like model, one that was trained with model.bias = false"
        field = "bias" if dense.mlp_bias is None else "mlp_bias"
        message = f"the MLP has biases (model.{field} = true), and experts have none"
        yield Problem(message, hint, FLAG)


def _has_sizes(given: dict[str, Any]) -> Iterator[Problem]:
    for name in SIZES:
        if not given.get(name):
            message = f"{name} is 0" if name in given else f"{name} is missing"
            yield Problem(message, "such as num_experts=8,top_k=2", FLAG)


def _slices(model: ModelConfig, dense: ModelConfig, granularity: int) -> Iterator[Problem]:
    """Yields problems of slices that are unequal, and of a top-k that selects part of a group."""
    sizes = {"ffn_hidden_size": dense.ffn_hidden_size}
    sizes |= {"num_experts": model.num_experts, "top_k": model.top_k}
    for name, size in sizes.items():
        if size % granularity:
            message = f"granularity={granularity} does not divide {name}={size}"
            yield Problem(message, listing(divisors(size)), FLAG)
    share = model.num_experts // model.router_groups
    if granularity > 1 and model.router_groups > 1 and share % granularity:
        message = f"granularity={granularity} does not divide the {share} experts of a router group"
        yield Problem(message, f"granularity {listing(divisors(share))}", FLAG)


def _is_exact(model: ModelConfig) -> Iterator[Problem]:
    """Yields problems where the chosen weights do not sum to 1, or tokens are dropped."""
    all_chosen = model.top_k == model.num_experts and model.router_score == "softmax"
    if not model.normalize_top_k and not all_chosen:
        message = "normalize_top_k=false: the chosen weights would sum to another number for each "
        hint = "normalize_top_k=true, so that the mixture starts as the dense function"
        yield Problem(message + "token, and the MLP be scaled by it", hint, FLAG)
    least = model.num_experts / model.top_k
    if 0.0 < model.capacity_factor < least:
        message = f"capacity_factor={model.capacity_factor} drops tokens, which meet no MLP then"
        hint = f"{least:g} or more; or leave capacity_factor out and train with --set "
        hint += f"model.capacity_factor={model.capacity_factor}, which changes no weight"
        yield Problem(message, hint, FLAG)
