"""The nearest legal layouts: held to trying every layout, and read as a user reads them."""

import random
import sys
from collections import Counter
from itertools import product
from math import log2

import pytest

from mtcli.core.config import rules
from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.loading import load_config
from mtcli.core.config.suggest import FIELDS, SHOWN, layout_sizes, nearest_layouts, with_sizes

SMALL = ("model.num_layers=6", "model.num_heads=12", "model.num_kv_heads=4", "model.head_dim=8")
SMALL += ("model.ffn_hidden_size=48", "batch.seq_len=24", "batch.global_batch_size=12")
MOE = ("model.num_experts=6", "model.top_k=2", "model.moe_ffn_hidden_size=24")
MODELS = {  # and their ranks
    "dense": (12, ()),
    "moe": (8, MOE),
    "a2a": (6, (*MOE, "parallel.cp_mode=a2a")),
    "uneven": (4, ("parallel.stage_layers=[2, 1, 1, 2]",)),
    "short": (6, ("batch.seq_len=6",)),
    "few key heads": (8, ("model.num_kv_heads=2", "model.head_dim=6")),
    "odd batch": (6, ("batch.global_batch_size=3", *MOE)),
}


def config_of(*overrides):
    return load_config("tiny", [*SMALL, *overrides])


def every_legal_layout(config, world):
    """All of them, as sizes by FIELDS: every number up to the world along every axis."""
    sizes, batch = range(1, world + 1), range(1, config.batch.global_batch_size + 1)
    grids = [
        (tp, cp, pp, ep, etp)
        for tp, cp, pp in product(sizes, sizes, sizes)
        if world % (tp * cp * pp) == 0
        for ep, etp in product(sizes, sizes)
        if world % (pp * ep * etp) == 0
    ]
    pipes = [(1, "gpipe"), (1, "1f1b"), *((vpp, "interleaved") for vpp in range(2, 7))]
    for (tp, cp, pp, ep, etp), (vpp, schedule) in product(grids, pipes):
        for size in batch if config.model.num_layers >= pp * vpp else ():
            found = (size, tp, cp, pp, vpp, schedule, ep, etp)
            alike = with_sizes(config, dict(zip(FIELDS, found, strict=True)))
            fills = config.batch.global_batch_size * tp * cp * pp % (size * world) == 0
            if fills and not rules.problems(alike, world):
                yield found


def best_of(legal, wanted):
    """The first SHOWN of them: fewest fields, then the sum of |log2|, then the sizes."""
    now, told = layout_sizes(wanted), []

    def distance(layout):
        new = dict(zip(FIELDS, layout, strict=True))
        changed = [name for name in FIELDS if new[name] != now[name]]
        ratios = [new[name] / now[name] for name in changed if name != "schedule"]
        return len(changed), round(sum(abs(log2(r)) for r in ratios), 9), layout

    for layout in sorted(legal, key=distance):
        changes = {(n, s) for n, s in zip(FIELDS, layout, strict=True) if s != now[n]}
        if not any(nearer <= changes for nearer, _ in told):
            told.append((changes, distance(layout)))
        if len(told) == SHOWN:
            break
    return [found for _, found in told]


@pytest.mark.parametrize("model", MODELS)
def test_the_nearest_are_the_best_of_trying_every_layout(model):
    world, overrides = MODELS[model]
    config, drawn = config_of(*overrides), random.Random(f"{model} {world}")
    legal, refused = set(every_legal_layout(config, world)), 0
    for _ in range(25):
        axes = {axis: drawn.randint(1, world) for axis in ("tp", "cp", "pp", "ep", "etp")}
        sizes = axes | {"micro_batch_size": drawn.randint(1, 4), "vpp": drawn.choice([1, 1, 2, 3])}
        wanted = with_sizes(config, sizes | {"schedule": drawn.choice(["1f1b", "interleaved"])})
        if rules.problems(wanted, world):
            shown = {s for s in legal if s[5] != "gpipe"}
            found = nearest_layouts(wanted, world, lambda c, w: not rules.problems(c, w))
            assert [tuple(near[:3]) for near in found] == best_of(shown, wanted), sizes
            refused += 1
    assert refused > 10


# fmt: off
TRIED = {  # what a user would try: (overrides, ranks, the flags of the nearest)
    "tp that does not divide the heads": (
        ["parallel.tp=3"], 12, ["parallel.tp=4", "parallel.tp=2", "parallel.tp=1"]),
    "fewer query groups than tp": (
        ["parallel.tp=8", "model.ffn_hidden_size=64"], 8,
        ["parallel.tp=4", "parallel.tp=2", "parallel.tp=1"]),
    "stages that do not divide the layers": (
        ["parallel.pp=4"], 12, ["parallel.pp=3", "parallel.pp=6", "parallel.pp=2"]),
    "stages of layers that are given": (
        ["parallel.pp=2", "parallel.stage_layers=[2, 2, 2]"], 12,
        ["parallel.pp=3", "parallel.pp=1 parallel.vpp=3 parallel.schedule=interleaved"]),
    "ranks that do not divide the experts": (
        [*MOE, "parallel.ep=4"], 4, ["parallel.ep=2", "parallel.ep=1"]),
    "a world that does not divide": (
        ["parallel.tp=2", "parallel.pp=2"], 6, ["parallel.pp=3", "parallel.tp=1", "parallel.pp=1"]),
    "a sequence that 2*cp does not divide": (
        ["parallel.cp=8"], 8, ["parallel.cp=4", "parallel.cp=2", "parallel.cp=1"]),
    "chunks for a plain schedule": (
        ["parallel.pp=2", "parallel.vpp=3"], 2,
        ["parallel.schedule=interleaved", "parallel.vpp=1"]),
    "a schedule that cannot shard": (
        ["parallel.zero=3", "parallel.pp=2", "parallel.schedule=zero_bubble"], 4,
        ["parallel.schedule=1f1b"]),
    "a micro-batch that is too large": (
        ["batch.micro_batch_size=16"], 4,
        ["batch.micro_batch_size=6", "batch.micro_batch_size=3", "batch.micro_batch_size=2"]),
    "everything at once": (
        [*MOE, "parallel.tp=3", "parallel.cp=5", "parallel.pp=5", "parallel.ep=5", "parallel.etp=5",
         "optimizer.min_lr=1"], 24,
        ["parallel.tp=2 parallel.cp=6 parallel.pp=2 parallel.ep=3 parallel.etp=4"]),
}
# fmt: on
BATCH = ("batch.micro_batch_size=1", "batch.global_batch_size=24")


def refusal_of(world, *overrides):
    config = config_of(*BATCH, *overrides)
    found = rules.problems(config, world or config.parallel.smallest_world)
    return str(rules.refusal(config, world, found))


@pytest.mark.parametrize(("overrides", "world", "flags"), TRIED.values(), ids=TRIED)
def test_what_a_user_would_try_is_answered_with_flags_to_paste(overrides, world, flags):
    told = refusal_of(world, *overrides).splitlines()
    *rows, last = told[told.index(f"hint: the nearest legal layouts on {world} ranks:") + 1 :]
    assert last == "`mtcli plan` says which fit in memory"
    given = [row.strip().partition("   ")[0].split("--set ")[1:] for row in rows]
    given = [[flag.strip() for flag in row] for row in given]
    assert [" ".join(row) for row in given][: len(flags)] == flags
    for row, pasted in zip(rows, given, strict=True):
        config = config_of(*BATCH, *overrides, *pasted, "optimizer.min_lr=0")
        assert rules.problems(config, world) == [], "what is pasted is legal"
        p = config.parallel
        sizes = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "vpp": p.vpp}
        sizes |= {"dp": world // (p.tp * p.cp * p.pp), "ep": p.ep, "etp": p.etp}
        words = [f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis in ("tp", "pp", "dp")]
        assert row.endswith("   " + " ".join(words)), "and as it is described"


def test_where_no_world_is_given_each_layout_has_the_ranks_that_it_needs():
    told = refusal_of(None, "parallel.tp=3", "parallel.pp=5")
    assert told.endswith(
        "hint: the nearest legal layouts:\n"
        "  --set parallel.tp=4 --set parallel.pp=6   tp=4 pp=6 dp=1\n"
        "  --set parallel.tp=2 --set parallel.pp=6   tp=2 pp=6 dp=1\n"
        "  --set parallel.tp=4 --set parallel.pp=3   tp=4 pp=3 dp=1\n"
        "`mtcli plan` says which fit in memory"
    )


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ["optimizer.min_lr=1"]),
        (7, ["batch.global_batch_size=5"]),
        (2, ["model.num_kv_heads=5", "parallel.pp=2"]),
        (4, ["parallel.stage_layers=[9]"]),
    ],
    ids=["not the layout's", "no layout divides", "a legal layout", "no layout has the stages"],
)
def test_no_layout_is_named_where_none_would_help(world, overrides):
    told = refusal_of(world, *overrides)
    assert "error: " in told and "nearest" not in told


def test_no_layout_is_named_where_sizes_were_not_understood(tmp_path):
    given = [*SMALL, *BATCH, "parallel.tp=3"]
    for misread, named in [("optimizer.lrr=1", True), ("parallel.pp=0", False)]:
        with pytest.raises(MtcliError) as caught:
            rules.load_checked("tiny", [*given, misread], 12)
        assert ("nearest legal layouts on 12 ranks" in str(caught.value)) == named
        assert "nearest" not in str(caught.value.problems), "the problems are as they were"


def test_the_rules_of_one_command_bind_what_it_is_told():
    def no_tp_of_two(config, world):
        if config.parallel.tp == 2:
            yield Problem("tp is two")

    config = config_of(*BATCH, "parallel.tp=3")
    with pytest.raises(MtcliError, match="parallel.tp=4") as caught:
        rules.require(config, 12, no_tp_of_two)
    assert "parallel.tp=2" not in str(caught.value)
    with pytest.raises(MtcliError, match="tp is two(.|\n)*--set parallel.tp=1"):
        rules.require(config_of(*BATCH, "parallel.tp=2"), 12, no_tp_of_two)


ENDLESS = {  # no factor of 7 fits, and there are a million ways to find that out
    "model.num_layers": 720, "model.num_experts": 240, "model.moe_ffn_hidden_size": 20160,
    "batch.global_batch_size": 5, "batch.seq_len": 4096, "parallel.tp": 3, "parallel.cp": 9,
}  # fmt: skip
DEEP = {"model.num_layers": 720, "parallel.tp": 7, "parallel.pp": 35}


@pytest.mark.parametrize(
    ("preset", "world", "sizes"),
    [
        ("mt-nlg-530b", 3072, DEEP | {"parallel.cp": 9, "batch.micro_batch_size": 7}),
        ("mixtral-8x7b", 2520, ENDLESS),
    ],
    ids=["all wrong", "none legal"],
)
def test_thousands_of_ranks_and_a_deep_model_take_a_third_of_a_second(preset, world, sizes):
    config = load_config(preset, [f"{field}={size}" for field, size in sizes.items()])
    found, calls = rules.problems(config, world), Counter()
    sys.setprofile(lambda frame, event, what: calls.update([event]))
    try:
        rules.refusal(config, world, found)
    finally:
        sys.setprofile(None)
    assert calls["call"] < 900_000, "0.3 s on a quiet machine"
