"""Recipes of mixtures of experts: what they make of a dense model, and what they refuse."""

import pytest
from tiny import GPT, LLAMA, MOE

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.model import ModelConfig
from mtcli.core.convert.upcycle_recipe import FLAG, ROUTING, recipe_of

DENSE = ModelConfig(**LLAMA)  # ffn_hidden_size 24
GPT_PLAIN = ModelConfig(**GPT, bias=False)
EXPERT_FIELDS = {"num_experts", "top_k", "moe_ffn_hidden_size", "architecture"}


def test_a_mixture_has_the_dense_models_shapes_and_the_experts_asked_for():
    recipe = recipe_of("num_experts=8,top_k=2", DENSE)
    model = recipe.model
    assert (model.num_experts, model.top_k, model.moe_ffn_hidden_size) == (8, 2, 24)
    assert (model.architecture, recipe.granularity, recipe.seed) == ("mixtral", 1, 1234)
    assert model.model_dump(exclude=EXPERT_FIELDS) == DENSE.model_dump(exclude=EXPERT_FIELDS)


def test_a_granularity_divides_the_width_and_a_seed_is_kept():
    recipe = recipe_of(" granularity=4, num_experts=12 ,top_k=8,seed=0,", GPT_PLAIN)
    assert (recipe.model.moe_ffn_hidden_size, recipe.granularity, recipe.seed) == (16, 4, 0)
    assert recipe.model.architecture == "gpt"


def test_the_fields_of_routing_are_taken():
    chosen = {
        "normalize_top_k": True,
        "router_score": "sigmoid",
        "router_groups": 4,
        "router_top_groups": 2,
        "capacity_factor": 4.0,
        "drop_policy": "position",
        "drop_scope": "sub_sequence",
        "pad_to_capacity": True,
        "aux_loss_coeff": 0.01,
        "sequence_aux_loss_coeff": 0.02,
        "z_loss_coeff": 0.001,
    }
    assert {*chosen, "num_experts", "top_k"} == set(ROUTING)
    text = ",".join(f"{name}={value}" for name, value in chosen.items())
    model = recipe_of(f"num_experts=8,top_k=2,{text.replace('True', 'true')}", DENSE).model
    assert model.model_dump(include=set(chosen)) == chosen


WRONG = {
    "an unknown option": ("num_expert=8", "unknown option 'num_expert'", "did you mean 'num_e"),
    "nothing like an option": ("zz", "unknown option 'zz'", "known: num_experts, top_k"),
    "a shape of the dense model": (
        "hidden_size=8", "hidden_size stays as it is in the dense model", "options are num_exp"),
    "the width of an expert": (
        "moe_ffn_hidden_size=8", "moe_ffn_hidden_size follows from granularity", "granularity=G"),
    "no value": ("router_score", "router_score has no value", "such as router_score=2"),
    "an empty value": ("seed=", "seed has no value", "such as seed=2"),
    "no slices": ("granularity=0", "granularity=0", "a whole number from 1 on"),
    "a seed below 0": ("seed=-1", "seed=-1", "a whole number from 0 on"),
    "a seed of any length": ("seed=" + "9" * 5000, "seed=999", "a whole number from 0 on"),
    "half a slice": ("granularity=1.5", "granularity=1.5", "a whole number from 1 on"),
    "slices of the width": (
        "granularity=5", "granularity=5 does not divide ffn_hidden_size=24",
        "1, 2, 3, 4, 6, 8, 12 or 24"),
    "slices of the experts": (
        "granularity=3", "granularity=3 does not divide num_experts=8", "1, 2, 4 or 8"),
    "part of a virtual group": (
        "granularity=4", "granularity=4 does not divide top_k=2", "1 or 2"),
    "router groups that part a virtual group": (
        "granularity=2,router_groups=8,router_top_groups=4",
        "granularity=2 does not divide the 1 experts of a router group", "granularity 1"),
    "weights that do not sum to 1": (
        "normalize_top_k=false", "normalize_top_k=false: the chosen weights would sum to",
        "normalize_top_k=true, so that"),
    "sigmoids that do not sum to 1": (
        "normalize_top_k=false,top_k=8,router_score=sigmoid", "normalize_top_k=false: the chosen",
        "normalize_top_k=true, so that"),
    "a capacity that drops tokens": (
        "capacity_factor=1.25", "capacity_factor=1.25 drops tokens, which meet no MLP then",
        "4 or more; or leave capacity_factor out and train with --set "
        "model.capacity_factor=1.25, which"),
    "no experts": ("num_experts=0", "num_experts is 0", "such as num_experts=8,top_k=2"),
}  # fmt: skip
ILLEGAL = {
    "a score that is none": ("router_score=tanh", "'tanh' should be 'softmax' or 'sigmoid'"),
    "more than all experts": ("top_k=9", "top_k=9 of num_experts=8 experts"),
    "too few router groups": (
        "top_k=4,router_groups=4", "top_k=4 of the 2 experts of router_top_groups=1"),
    "groups that do not divide": ("router_groups=3", "router_groups=3 does not divide num_expe"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_the_dense_function_is_refused_with_the_reason(case):
    text, message, hint = WRONG[case]
    problems = refused(f"num_experts=8,top_k=2,{text}", DENSE)
    starts = [p for p in problems if p.message.startswith(message) and p.hint.startswith(hint)]
    assert [problem.field for problem in starts] == [FLAG], problems


@pytest.mark.parametrize("case", ILLEGAL)
def test_the_models_own_rules_hold(case):
    text, message = ILLEGAL[case]
    problems = refused(f"num_experts=8,top_k=2,{text}", DENSE)
    assert [p.field[:6] for p in problems if p.message.startswith(message)] == ["model."], problems


def refused(text, dense):
    with pytest.raises(MtcliError) as error:
        recipe_of(text, dense)
    return error.value.problems


def test_biases_and_mixtures_are_refused():
    (problem,) = refused("num_experts=8,top_k=2", ModelConfig(**GPT))
    assert problem.message == "the MLP has biases (model.bias = true), and experts have none"
    (problem,) = refused("num_experts=8,top_k=2", ModelConfig(**MOE))
    assert problem.message == "the model is a mixture of 4 experts already"


def test_all_problems_come_at_once():
    text = "num_expert=8,granularity=x,router_score=tanh"
    found = [problem.message.split(":")[0] for problem in refused(text, ModelConfig(**GPT))]
    assert found == [
        "unknown option 'num_expert'",
        "granularity=x",
        "'tanh' should be 'softmax' or 'sigmoid'",
        "the MLP has biases (model.bias = true), and experts have none",
        "num_experts is missing",
        "top_k is missing",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "num_experts=8,top_k=8,normalize_top_k=false",  # a whole softmax sums to 1
        "num_experts=8,top_k=2,capacity_factor=4",  # room for every token in one expert
        "num_experts=8,top_k=4,granularity=2,router_groups=4,router_top_groups=2",
        "num_experts=8,top_k=4,router_groups=4,router_top_groups=2",
    ],
)
def test_what_is_just_exact_is_taken(text):
    assert recipe_of(text, DENSE).model.num_experts == 8
