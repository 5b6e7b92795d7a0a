"""The JSON Schema takes every preset, and refuses types, ranges and names as loading does."""

import pytest

from mtcli.core.config.json_schema import config_schema
from mtcli.core.config.loading import all_fields, preset_names, read_table, with_overrides

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = config_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
MODEL = {"model": {"preset": "tiny"}}


def test_it_is_a_schema_and_takes_every_preset():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for name in preset_names():
        VALIDATOR.validate(read_table(name))
        VALIDATOR.validate({"model": {"preset": name}})


# fmt: off
@pytest.mark.parametrize("override", [
    "seed=-1", "seed=1.5", "optimizer.lrr=1", "batch.seq_len=0", "batch.seq_len=1000000001",
    "optimizer.betas=[0.9, 1.0]", "optimizer.betas=[0.9]", "parallel.zero=2", "train.compile=maybe",
    "optimizer.name=adam", "optimizer.ns_coefficients=[1, 2]", "model.mla.kv_rank=0",
    "data.train=[1]", "lora.dropout=1.0", "train.eval_every=often", "model.preset=tinny",
    "data.valid.wiki=5", "eval=[{task='race=a'}]", "eval.task='race=a'",
])
# fmt: on
def test_it_refuses_what_loading_refuses(override):
    from mtcli.core.config.loading import validate

    table = with_overrides(MODEL, [override])
    assert validate(table)[1], override
    assert not VALIDATOR.is_valid(table), override


@pytest.mark.parametrize("override", [
    "data.train=data/a", "data.train=['0.7', 'data/a']", "optimizer.ns_coefficients=[1, 2, 3]",
    "optimizer.other.lr=1", "model.mla.kv_rank=8", "lora.dropout=0.5", "parallel.zero=3",
    "data.valid.wiki=data/a", "eval=[{task='race=a', every=5}]",
])  # fmt: skip
def test_it_takes_what_loading_takes(override):
    from mtcli.core.config.loading import validate

    table = with_overrides(MODEL, [override])
    assert validate(table)[1] == []
    VALIDATOR.validate(table)


def test_a_model_needs_a_preset_or_its_sizes():
    sizes = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "max_seq_len": 64}
    assert not VALIDATOR.is_valid({"model": sizes}) and not VALIDATOR.is_valid({})
    assert VALIDATOR.is_valid({"model": sizes | {"vocab_size": 100}})


def test_every_field_has_its_help():
    for field in all_fields():
        node = SCHEMA
        for name in field.split("."):
            node = resolved(node)["properties"][name]
        assert node["description"], field


def resolved(node):
    """The definition that a node, one of its alternatives or an array's items refer to."""
    for one in (node, node.get("items", {}), *node.get("anyOf", ())):
        if "$ref" in one:
            return SCHEMA["$defs"][one["$ref"].rpartition("/")[2]]
    return node
