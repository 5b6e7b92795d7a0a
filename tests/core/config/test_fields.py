"""Every number of the config has a range; a wrong value is answered in words, with a right one."""

import math

import pytest
from pydantic import BaseModel, ValidationError

from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.fields import (
    FieldKind,
    Positive,
    Section,
    field_kind,
    refused_value,
    section_at,
    table_header,
)
from mtcli.core.config.loading import load_config, read_config, validate, with_overrides
from mtcli.core.config.schema import RunConfig


def numbers(section=RunConfig, path=""):
    """(field, its kind) of every number, those inside lists too."""
    for name, field in section.model_fields.items():
        kind = field_kind(field)
        if isinstance(kind.base, type) and issubclass(kind.base, BaseModel):
            yield from numbers(kind.base, f"{path}{name}.")
        for index, item in enumerate(kind.items):
            if item.base in (int, float):
                yield f"{path}{name}[{index}]", item
        if kind.base in (int, float):
            yield f"{path}{name}", kind


NUMBERS = dict(numbers())


def problems(*overrides):
    return read_config("tiny", overrides)[1]


def assigned(field, value):
    """An override that sets a number, in a list of as many as the field has where it is in one."""
    name, bracket, index = field.rstrip("]").partition("[")
    if not bracket:
        return f"{name}={value}"
    many = sum(other.startswith(f"{name}[") for other in NUMBERS)
    return f"{name}=[{', '.join(value if i == int(index) else '0.5' for i in range(many))}]"


def test_the_fields_are_those_that_the_config_has():
    assert len(NUMBERS) > 60
    assert NUMBERS["optimizer.betas[1]"] == FieldKind(float, low=0.0, below=1.0)
    assert NUMBERS["model.rope_scaling.factor"].low == 1.0


def test_every_number_has_a_finite_range_and_no_boolean_or_nan_is_one():
    for field, kind in NUMBERS.items():
        assert kind.low is not None, field
        assert math.isfinite(kind.high if kind.below is None else kind.below), field
        for value in ("true", "nan", "inf", "1e308", "-1e308", "1e-320", "1" + 40 * "0"):
            if value == "1e-320" and kind.base is int:
                value = "0.5"
            found = problems(assigned(field, value))
            places = [p.field.split(".")[:2] for p in found]
            assert places == [field.split("[")[0].split(".")[:2]], (field, value)
            assert all(p.hint and "docs/" not in p.hint for p in found), (field, value)


# fmt: off
NS = "should be 'jordan', 'quintic5', 'polar_express' or a list of 3"
PRECISIONS = "should be 'fp64', 'fp32', 'bf16', 'fp16' or 'fp8'"
WRONG = [  # an override, what is said of its value, and the hint
    ("parallel.tp=two", "'two' should be a whole number",
     "a whole number from 1 to 1048576, such as 1"),
    ("train.steps=1.5", "1.5 should be a whole number",
     "a whole number from 1 to 1000000000, such as 100"),
    ("optimizer.lr=-1", "-1 should be at least 0", "a number from 0 to 1e+38, such as 0.0003"),
    ("optimizer.lr=1e-320", "1e-320 should be 0 or at least 1e-30",
     "a number from 0 to 1e+38, such as 0.0003"),
    ("model.norm_eps=inf", "inf should be a finite number",
     "a number from 1e-30 to 1, such as 1e-30"),
    ("seed=4294967296", "4294967296 should be at most 4294967295",
     "a whole number from 0 to 4294967295, such as 1234"),
    ("optimizer.betas=[0.9, 1]", "1 should be below 1", "a number from 0 to below 1, such as 0"),
    ("optimizer.betas=[0.9]", "[0.9] should be a list of 2",
     'such as --set "optimizer.betas=[0.9, 0.95]"'),
    ("train.compile=2020-01-01", "2020-01-01 should be true or false", "compile = true, or false"),
    ("data.split=3", "3 should be text", "text in quotes"),
    ("data.train=[1]", "1 should be text", "text in quotes"),
    ("optimizer=3", "3 should be a table of fields",
     "fields of its own, as [optimizer] or optimizer.FIELD=VALUE"),
    ("parallel.zero=2", "2 should be 0, 1 or 3", "such as zero = 0"),
    ("train.precision=bfloat16", f"'bfloat16' {PRECISIONS}", "did you mean 'bf16'?"),
    ("train.precision=BF16", f"'BF16' {PRECISIONS}", "did you mean 'bf16'?"),
    ("train.precision=float32", f"'float32' {PRECISIONS}", "did you mean 'fp32'?"),
    ("optimizer.name=adam", "'adam' should be 'adamw', 'lamb', 'sgd' or 'muon'",
     "did you mean 'adamw'?"),
    ("optimizer.ns_coefficients=polar", f"'polar' {NS}", "did you mean 'polar_express'?"),
    ("optimizer.ns_coefficients=[1, 2]", f"[1, 2] {NS}",
     "such as ns_coefficients = 'jordan'"),
    ("train.device=gpu", "'gpu' should be 'auto', 'cpu' or 'cuda'", "did you mean 'cuda'?"),
]
UNKNOWN = {
    "lr": "did you mean 'optimizer.lr'?",
    "learning_rate": "did you mean 'optimizer.lr'?",
    "optimizer.learning-rate": "did you mean 'lr'?",
    "model.lr": "did you mean 'optimizer.lr'?",
    "batch_size": "did you mean 'batch.global_batch_size' or 'batch.micro_batch_size'?",
    "n_layers": "did you mean 'model.num_layers'?",
    "model.hidden": "did you mean 'hidden_size'?",
    "parallel.steps": "did you mean 'train.steps'?",
    "schedule": "did you mean 'parallel.schedule' or 'optimizer.schedule'?",
    "weigth_decay": "did you mean 'optimizer.weight_decay'?",
    "factor": "did you mean 'model.rope_scaling.factor'?",
    "dp": "dp is what the other axes leave of the ranks: world / (cp * tp * pp)",
    "xyz": "known: seed, model, parallel, batch, optimizer, sync, data, lora, train, phase, eval",
}
# fmt: on


def test_a_wrong_value_is_answered_with_what_it_should_be_and_a_right_one(subtests):
    for override, said, hint in WRONG:
        with subtests.test(override):
            (problem,) = problems(override)
            assert (problem.message, problem.hint) == (said, hint)


def test_an_unknown_key_is_looked_up_in_all_sections_and_other_tools(subtests):
    for key, hint in UNKNOWN.items():
        with subtests.test(key):
            (problem,) = problems(f"{key}=1")
            assert (problem.field, problem.hint) == (key, hint)


def test_an_unknown_architecture_is_one_problem_and_the_rules_still_speak():
    config, found = read_config("tiny", ["model.architecture=lama", "parallel.tp=x"])
    assert [p.field for p in found] == ["model.architecture", "parallel.tp"]
    assert found[0].hint == "did you mean 'llama'?"
    assert config.model.architecture == "llama"
    for wrong in ("foo", 3, ["gpt"], True):
        table = {"model": {"preset": "tiny", "architecture": wrong}}
        assert [p.field for p in validate(table)[1]] == ["model.architecture"]


def test_what_follows_from_a_wrong_field_is_no_second_problem():
    for wrong in ("true", "0", "x", "-3"):
        assert [p.field for p in problems(f"model.num_heads={wrong}")] == ["model.num_heads"]
        fields = [p.field for p in problems(f"model.hidden_size={wrong}")]
        assert fields == ["model.hidden_size"]


def test_a_section_that_is_no_table_is_one_problem():
    for wrong in (5, True, "tiny", [], None):
        config, found = validate({"model": wrong})
        assert config is None and [p.field for p in found] == ["model"], wrong
        assert found[0].message.endswith("should be a table of fields") and found[0].hint
        config, found = validate({"model": {"preset": "tiny"}, "train": wrong})
        assert [p.field for p in found] == ["train"] and config.train.steps == 100, wrong


def test_the_defaults_are_legal_values_of_their_own_fields():
    for name in ("tiny", "llama-3.1-8b", "mixtral-8x7b"):
        data = load_config(name).model_dump(mode="json", exclude_none=True)
        assert validate(data)[1] == []


class Item(Section):
    """A table of an array."""

    name: str
    """what it is called"""
    every: Positive = 1
    """how often"""


class Holder(Section):
    """A section with an array of tables."""

    items: tuple[Item, ...] = ()
    """an array of tables"""


def test_an_array_of_tables_has_the_section_of_its_tables():
    kind = field_kind(Holder.model_fields["items"])
    assert kind.holds_tables and kind.words == "an array of tables"
    paths = (["items"], ["items", 1], ["items", "1"], ["items", 1, "name"], ["items", "x"])
    assert [section_at(Holder, path) for path in paths] == [Item, Item, Item, None, None]
    assert section_at(RunConfig, ["optimizer", "betas"]) is None, "a list of numbers"
    assert [table_header(path) for path in ("model", "model.mla", "items.0")] == [
        "[model]",
        "[model.mla]",
        "[[items]]",
    ]


def test_every_wrong_table_of_an_array_is_named_by_its_number():
    with pytest.raises(ValidationError) as raised:
        Holder.model_validate({"items": [{"name": "a"}, {"name": "b", "every": 0}, 5]})
    problems = [refused_value(Holder, detail) for detail in raised.value.errors()]
    assert problems == [
        Problem(
            "0 should be at least 1",
            "a whole number from 1 to 1000000000, such as 1",
            "items.1.every",
        ),
        Problem(
            "5 should be a table of fields",
            "fields of its own, as [[items]] or items.2.FIELD=VALUE",
            "items.2",
        ),
    ]
    with pytest.raises(ValidationError) as raised:
        Holder.model_validate({"items": {"name": "a"}})
    (detail,) = raised.value.errors()
    problem = refused_value(Holder, detail)
    assert problem.message.endswith("should be an array of tables")
    assert problem.hint == "a table of fields for each, as [[items]]"


def test_an_override_reaches_into_a_table_of_an_array():
    table = {"items": [{"name": "a", "every": 1}, {"name": "b"}]}
    changed = with_overrides(table, ["items.1.every=7", "items.0.every=3"])
    assert changed == {"items": [{"name": "a", "every": 3}, {"name": "b", "every": 7}]}
    assert table == {"items": [{"name": "a", "every": 1}, {"name": "b"}]}
    added = with_overrides(changed, ["items.2.every=4", "items.2.name=c", "more.0.every=5"])
    assert added["items"] == [*changed["items"], {"every": 4, "name": "c"}]
    assert added["more"] == [{"every": 5}]
    for path in ("items.3.every", "items.name", "items.0.name.x"):
        with pytest.raises(MtcliError, match="inside a field that holds a value"):
            with_overrides(table, [f"{path}=1"])
