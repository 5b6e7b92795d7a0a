"""Fields explained: every rule that reports a field is said to, and every place is there."""

import re
from pathlib import Path

import pytest
from test_rules import BROKEN

from mtcli.core.config.field_facts import explain, rules_on
from mtcli.core.config.loading import all_fields, read_config
from mtcli.core.config.rules import ENGINE_RULES, NEEDS, RULES

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "config.md"


def test_every_rule_that_reports_a_field_is_among_its_rules():
    """The oracle runs all rules on configs that break them."""
    reported = set()
    for overrides, world, *_ in BROKEN.values():
        config, _ = read_config("tiny", overrides)
        for rule in (*RULES, *ENGINE_RULES):
            fields = {p.field for p in rule(config, world)} & set(all_fields())
            reported |= {(rule, field) for field in fields}
    unused = {(rule, field) for rule, field in reported if rule.__name__ == "fields_are_used"}
    assert len(reported - unused) > 40
    assert [pair for pair in reported - unused if pair[0] not in rules_on(pair[1])] == []
    for _, field in unused:
        assert any(f"{field}: of use with" in rule for rule in explain(field)[0].rules), field


def test_a_rule_that_reads_a_field_in_a_function_of_its_own_is_among_its_rules():
    (rule,) = (rule for rule in RULES if rule.__name__ == "_batch_divides")
    for pp, found in ((1, 1), (4, 0)):  # so the rule depends on pp, by data_parallel_size
        config, _ = read_config("tiny", [f"parallel.pp={pp}"])
        assert len([*rule(config, 4)]) == found
    assert rule in rules_on("parallel.pp")


def test_a_rule_on_one_section_is_not_of_a_field_of_that_name_in_another():
    names = {rule.__name__ for rule in rules_on("sync.top_k")}
    assert "_experts_are_whole" not in names
    assert "_experts_are_whole" in {rule.__name__ for rule in rules_on("model.top_k")}


def test_a_setting_says_which_fields_need_it():
    rules = explain("optimizer.name")[0].rules
    assert "optimizer.trust_bounds: of use with optimizer.name = 'lamb' alone" in rules
    fields = "lora.alpha, lora.dropout, lora.targets, lora.modules_to_save"
    assert f"{fields}: of use with lora.rank of 1 or more alone" in explain("lora.rank")[0].rules
    assert all(need.setting in all_fields() for need in NEEDS)


def test_a_preset_is_explained_though_it_is_no_field():
    (fact,) = explain("model.preset")
    assert "tiny" in fact.kind.options and fact.docs == "docs/reference/config.md#presets"


def test_every_field_is_described_where_it_is_said_to_be():
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)
    by_anchor = {}
    for section in sections[1:]:
        title = section.partition("\n")[0].lower()
        by_anchor[re.sub(r"[^\w\- ]", "", title).replace(" ", "-")] = section
    for field in all_fields():
        (fact,) = explain(field)
        page, _, anchor = fact.docs.partition("#")
        assert page == "docs/reference/config.md"
        assert f"| `{field.rpartition('.')[2]}` |" in by_anchor[anchor], field
        assert fact.help and "\n" not in fact.help and fact.default


@pytest.mark.parametrize("field, values, default", [
    ("parallel.tp", "a whole number from 1 to 1048576", "1"),
    ("optimizer.name", "'adamw', 'lamb', 'sgd' or 'muon'", "'adamw'"),
    ("model.num_layers", "a whole number from 1 to 10000", "required"),
    ("model.head_dim", "a whole number from 1 to 1000000000", "derived"),
    ("model.norm", "'layernorm' or 'rmsnorm'",
     "'layernorm' for gpt or bert; 'rmsnorm' for llama, mixtral or qwen2-moe"),
    ("train.compile", "true or false", "false"),
    ("data.seed", "a whole number from 0 to 4294967295", "none"),
])  # fmt: skip
def test_legal_values_and_defaults_are_in_words(field, values, default):
    (fact,) = explain(field)
    assert (fact.kind.words, fact.default) == (values, default)
