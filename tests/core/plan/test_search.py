"""The search is exact, its choices are legal, and what it finds an expert would defend."""

from dataclasses import replace

import pytest

from mtcli.core.config.loading import load_config
from mtcli.core.config.rules import problems
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.activations import MARGIN
from mtcli.core.plan.answer import read_request
from mtcli.core.plan.hardware import GPUS
from mtcli.core.plan.memory import fits, memory
from mtcli.core.plan.predict import predict_workload
from mtcli.core.plan.search import (
    _with,
    apply,
    choices,
    fewest,
    grids,
    lower_bound,
    search,
    works_of,
)
from mtcli.core.plan.sensitivity import FIELDS, neighbours
from mtcli.core.plan.step_time import pipeline_seconds, step_costs
from mtcli.core.plan.tables import (
    group_lines,
    rank_coordinates,
    rank_groups,
    rank_table,
)
from mtcli.core.plan.workload import Workload

GIVEN = ["batch.global_batch_size=64", "train.precision=bf16"]
SMALL = load_config("gpt2-1.5b", GIVEN)
# Fewer micro-batches than ranks: here the bound is loose, and its order is not that of the steps.
FEW = load_config("gpt2-1.5b", ["batch.global_batch_size=4", "model.num_layers=24"])
MIXTURE = load_config("mixtral-8x7b", ["batch.global_batch_size=8", "batch.seq_len=1024"])
SHALLOW = MIXTURE.model_copy(
    update={"model": MIXTURE.model.model_copy(update={"num_layers": 2, "num_experts": 4})}
)


def every_work(config, world, device):
    start = Workload.of(config, world)
    plain = [_with(start, choice, config.parallel) for choice in choices(config, world)]
    return [*plain, *grids(config, world, device, frozenset())]


@pytest.mark.parametrize(
    ("config", "device"), [(FEW, "v100-32gb"), (SHALLOW, "rtx-5000")], ids=["few", "experts"]
)
def test_the_search_finds_what_trying_everything_finds(config, device):
    gpu = GPUS[device]
    works = [w for w in every_work(config, 8, gpu) if memory(w, gpu).total <= gpu.usable_bytes]
    legal = [w for w in works if not problems(apply(config, w), 8)]
    steps = [(predict_workload(work, gpu).step_seconds, _axes(work)) for work in legal]
    fastest = {axes: seconds for seconds, axes in sorted(steps, reverse=True)}  # of each kind
    found = search(config, 8, gpu, 6)
    assert [c.prediction.step_seconds for c in found.best] == pytest.approx(
        sorted(fastest.values())[:6], rel=1e-9
    )
    kinds = {_axes(c.prediction.work) for c in found.best}
    assert len(kinds) == len(found.best) == min(6, len(fastest)) and len(fastest) < len(legal)
    assert (len(works) < found.tried) == (config is SHALLOW), "of which some do not fit"
    for candidate in found.best:
        assert problems(candidate.config, 8) == [] and candidate.prediction.fits
        again = predict_workload(Workload.of(candidate.config, 8), gpu)
        assert again.step_seconds == pytest.approx(candidate.prediction.step_seconds, rel=1e-9)


def _axes(work):
    """The axes and sharding by which the layouts that a plan shows differ."""
    p = work.layout
    return p.tp, p.tp_rows, p.cp, p.pp, p.ep, work.zero


@pytest.mark.parametrize(("config", "world"), [(SMALL, 48), (MIXTURE, 8)], ids=["dense", "experts"])
def test_the_bound_is_never_above_the_simulated_step(config, world):
    gpu = GPUS["a100-80gb"]
    for work in every_work(config, world, gpu)[::11]:
        costs = step_costs(work, gpu)
        step, _ = pipeline_seconds(work, costs)
        step += costs.gradients_exposed + costs.optimizer + costs.overhead
        assert lower_bound(work, gpu) <= step * (1 + 1e-9)


def test_the_replicas_of_every_layout_that_is_tried_are_those_of_a_run():
    sets = ["optimizer.name=sgd", "sync.method=decentlam", "batch.global_batch_size=64"]
    for config in (load_config(name, sets) for name in ("gpt2-1.5b", "mixtral-8x7b")):
        works = [work for work in every_work(config, 8, None) if work.zero == 0]
        runs = [Workload.of(apply(config, work), 8) for work in works]
        assert [work.layout for work in works] == [run.layout for run in runs]
        assert {work.layout.replicas for work in works} >= {1, 2, 4, 8}


def test_pinned_fields_stay():
    config = load_config("gpt2-1.5b", ["parallel.tp=2", "batch.micro_batch_size=4"])
    pinned = frozenset({"parallel.tp", "batch.micro_batch_size"})
    for candidate in search(config, 16, GPUS["h100"], 5, pinned).best:
        assert candidate.config.parallel.tp == 2
        assert candidate.config.batch.micro_batch_size == 4


def test_a_pinned_pipeline_leaves_tensor_cuts_that_its_ranks_hold():
    cuts = {
        "gpt2-1.5b": {1},  # 25 heads: tp=2 divides none, and tp=5 needs 20 ranks
        "narayanan-1.7b": {1, 2},
    }
    for name, expected in cuts.items():
        config = load_config(name, ["parallel.pp=4", "batch.global_batch_size=64"])
        works = works_of(config, 8, GPUS["h100"], frozenset({"parallel.pp"}))
        assert {work.layout.pp for work in works} == {4}
        assert {work.layout.tp for work in works if work.tp_mode == "1d"} == expected


@pytest.mark.parametrize("pin", ["schedule=1f1b", "schedule=interleaved", "vpp=3", "cp=8", "ep=2"])
def test_every_layout_that_is_tried_beside_a_pin_is_legal(pin):
    config = load_config("gpt2-1.5b", [f"parallel.{pin}", "batch.global_batch_size=64"])
    pinned = frozenset({f"parallel.{pin.partition('=')[0]}"})
    found = search(config, 16, GPUS["h100"], 3, pinned)
    assert all(
        problems(apply(config, work), 16) == [] for work in found.works if work.tp_mode == "1d"
    )
    assert bool(found.best) == (pin != "ep=2"), "this model has no experts"


def test_ranks_that_share_key_value_heads_are_searched():
    few = ["model.num_kv_heads=2", "model.head_dim=128", "batch.global_batch_size=64"]
    config = load_config("llama-3.1-8b", [*few, "train.precision=bf16"])  # 32 query heads
    found = search(config, 32, GPUS["h100"], 4)
    tried = {work.layout.tp for work in found.works if work.tp_mode == "1d"}
    assert tried == {1, 2, 4, 8, 16, 32}
    assert all(
        problems(apply(config, work), 32) == [] for work in found.works if work.tp_mode == "1d"
    )


def test_uneven_stages_are_searched_and_written_out():
    sizes = ["model.num_layers=30", "parallel.pp=4", "batch.global_batch_size=64"]
    config = load_config("llama-3.1-8b", [*sizes, "train.precision=bf16"])
    (best,) = search(config, 8, GPUS["h100"], 1, frozenset({"parallel.pp"})).best
    parallel = best.config.parallel
    assert len(parallel.stage_layers) == 4 * parallel.vpp and sum(parallel.stage_layers) == 30
    assert problems(best.config, 8) == []


def test_tp_ranks_that_cannot_share_a_micro_batch_s_tokens_see_all_of_them():
    fields = ["batch.seq_len=125", "batch.global_batch_size=4", "model.num_heads=20"]
    config = load_config("gpt2-1.5b", [*fields, "model.num_kv_heads=20", "model.head_dim=80"])
    works = [w for w in works_of(config, 20, GPUS["h200"], frozenset()) if w.tp_mode == "1d"]
    shared = {(w.layout.tp, w.micro_batch_size): w.sequence_parallel for w in works}
    assert shared[5, 1] and not shared[4, 1] and shared[4, 4]
    assert all(problems(apply(config, work), 20) == [] for work in works)


def test_what_is_too_large_is_counted_and_the_nearest_named():
    config, gpu = load_config("megatron-4.2b", ["batch.global_batch_size=64"]), GPUS["v100-32gb"]
    found = search(config, 2, gpu, 1)
    assert not found.best and found.too_large == found.tried
    least = min(memory(work, gpu).total for work in every_work(config, 2, gpu))
    assert memory(found.nearest, gpu).total == least > 32 * 2**30


def test_rank_maps_show_both_grids_over_the_same_pipeline():
    layout = ParallelLayout(16, tp=2, cp=2, pp=2, ep=4)
    places, groups = rank_coordinates(layout), rank_groups(layout)
    assert list(places[0]["attention"]) == ["pp", "dp", "cp", "tp"]
    assert list(places[0]["experts"]) == ["pp", "edp", "ep", "etp"]
    assert places[13] == {
        "attention": {"pp": 1, "dp": 1, "cp": 0, "tp": 1},
        "experts": {"pp": 1, "edp": 1, "ep": 1, "etp": 0},
    }
    assert groups["attention"]["pp"] == groups["experts"]["pp"]
    assert groups["attention"]["tp"][:2] == [[0, 1], [2, 3]]
    assert groups["experts"]["ep"][0] == [0, 1, 2, 3]


def test_a_large_world_is_told_by_ranges():
    layout = ParallelLayout(2240, tp=8, pp=35)
    title, columns, rows = rank_table(layout)
    assert "stage 0 of 35; stage p holds ranks p*64 to p*64+63" in title
    assert columns == ["ranks", "pp", "dp", "cp", "tp", "pp", "edp", "ep", "etp"]
    assert len(rows) == 8
    assert rows[1] == ["8-15", "0", "1", "0", "0-7", "0", "8-15", "0", "0"]
    lines = group_lines(layout)
    assert "attention tp: 280 groups of 8: 0-7, 2232-2239" in lines
    assert "attention dp: 280 groups of 8: 0-56 by 8, 2183-2239 by 8" in lines
    assert "experts pp: 64 groups of 35: 0-2176 by 64, 63-2239 by 64" in lines


def test_the_middle_of_a_long_map_is_left_out():
    _, _, rows = rank_table(ParallelLayout(1024, tp=8))
    assert len(rows) == 16
    assert rows[-2][0] == "..." and rows[-1][0] == "1016-1023"


def test_the_best_layout_falls_to_others_by_one_field_for_a_reason():
    """What is said of a neighbour is what its own prediction says, within the bound's slack."""
    gpu = GPUS["h200"]
    found = search(MIXTURE, 8, gpu, 3)
    best = [candidate.prediction for candidate in found.best]
    others = neighbours(best, found.works)
    assert {one.field for one in others} >= {"tp", "ep", "zero", "recompute"}
    for one in others:
        work = one.prediction.work
        read = FIELDS[one.field]
        assert read(work) == one.value != read(best[0].work)
        exact = predict_workload(work, gpu)
        assert one.prediction.step_seconds == pytest.approx(exact.step_seconds, rel=0.05)
        assert exact.fits == (not one.reason.startswith("does not fit"))
        if exact.fits:
            slower = exact.step_seconds / best[0].step_seconds - 1
            assert float(one.reason.partition("%")[0]) / 100 == pytest.approx(slower, abs=0.06)
    again = next(one for one in others if one.field == "recompute")
    assert "recomputation" in again.reason


def test_a_layout_that_is_quicker_than_the_best_was_found_not_to_fit():
    """A rehearsal takes the best by estimate out: it is then no neighbour that is quicker."""
    gpu = GPUS["h200"]
    found = search(MIXTURE, 8, gpu, 12)
    predictions = [candidate.prediction for candidate in found.best]
    seen = 0
    for number, best in enumerate(predictions[1:], start=1):
        for one in neighbours([best], found.works):
            p = one.prediction
            quicker = p.step_seconds < best.step_seconds
            assert quicker <= one.reason.startswith("does not fit"), (number, one.reason)
            seen += one.reason == "does not fit, as its real stages were rehearsed"
            assert not one.reason.startswith("-")
    assert seen


def test_squares_or_grids_of_given_rows_are_searched_where_two_dimensions_are_asked_for():
    pinned = frozenset({"parallel.tp_mode", "parallel.tp_rows"})
    for rows, sizes in ((0, {4, 16, 64}), (2, {2, 4, 8, 16, 32, 64})):
        fields = ["parallel.tp_mode=2d", f"parallel.tp_rows={rows}", "train.precision=bf16"]
        works = works_of(load_config("gpt3-175b", fields), 64, GPUS["h200"], pinned)
        assert {work.layout.tp for work in works} == sizes
        for work in works:
            assert work.layout.tp_rows == (rows or work.layout.tp_columns)


def test_other_grids_are_searched_and_compared_where_two_dimensions_are_asked_for():
    """8 ranks make no square: the best of 2 x 4, 4 x 2 and 8 x 1 is the answer, with its rows in
    its config, and the next is a neighbour."""
    fields = ["parallel.tp_mode=2d", "parallel.tp=8", "parallel.pp=8", "train.precision=bf16"]
    config, gpu = load_config("gpt3-175b", fields), GPUS["h100"]
    pinned = frozenset({"parallel.tp_mode", "parallel.tp", "parallel.pp"})
    found = search(config, 64, gpu, 3, pinned)
    best = [candidate.prediction for candidate in found.best]
    assert {work.layout.tp_rows for work in found.works} == {2, 4, 8}
    chosen = found.best[0].config
    assert chosen.parallel.grid_rows == best[0].work.layout.tp_rows == 2
    assert problems(chosen, 64) == []
    (other,) = [one for one in neighbours(best, found.works) if one.field == "tp_rows"]
    assert other.value == other.prediction.work.layout.tp_rows == 4
    assert not search(config, 64, gpu, 1, pinned | {"parallel.tp_rows"}).best, "no square of 8"


def test_the_rows_of_a_grid_can_be_fixed():
    fixed = ["parallel.tp_rows=2"]
    request = read_request("gpt3-175b", ["parallel.tp_mode=2d"], fixed, 64, "h100")
    assert request.problems == ()
    assert request.pinned == {"parallel.tp_rows"} and request.config.parallel.tp_rows == 2


def test_squares_of_ranks_are_searched_beside_one_dimension():
    gpu = GPUS["rtx-5000"]
    config = load_config("megatron-8.3b", ["train.precision=fp16"])
    found = search(config, 64, gpu, 3)
    best = [candidate.prediction for candidate in found.best]
    assert {one.work.tp_mode for one in best} == {"1d"}
    (square,) = [one for one in neighbours(best, found.works) if one.field == "tp_mode"]
    work = square.prediction.work
    assert square.value == "2d" and work.layout.tp_rows**2 == work.layout.tp > 1
    exact = predict_workload(work, gpu).step_seconds
    assert square.prediction.step_seconds == pytest.approx(exact, rel=0.05)
    pinned = works_of(config, 64, gpu, frozenset({"parallel.tp_mode"}))
    assert {work.tp_mode for work in pinned} == {"1d"}


def test_a_grid_is_the_answer_where_it_is_quicker_and_the_config_has_it():
    """On 16 ranks of 4 nodes, of PCIe and 56 Gb/s, one dimension would send 8 bsh by network."""
    fields = ["train.precision=fp16", "parallel.tp=16", "parallel.pp=1"]
    config = load_config("megatron-8.3b", [*fields, "batch.global_batch_size=2048"])
    pinned = frozenset({"parallel.tp", "parallel.pp"})
    (best,) = search(config, 512, GPUS["rtx-5000"], 1, pinned).best
    chosen = best.config.parallel
    assert (chosen.tp_mode, chosen.grid_rows, problems(best.config, 512)) == ("2d", 4, [])
    one = search(config, 512, GPUS["rtx-5000"], 1, pinned | {"parallel.tp_mode"}).best[0]
    assert best.prediction.step_seconds < 0.8 * one.prediction.step_seconds


@pytest.mark.parametrize(
    ("name", "device", "fixed", "expected"),
    [
        ("llama-3.1-8b", "a100-40gb", (), 4),
        ("gpt2-1.5b", "rtx-5000", ("parallel.zero=0",), 3),
        ("mixtral-8x7b", "h100", ("parallel.pp=1", "batch.micro_batch_size=1"), 16),
    ],
    ids=["within a node", "no power of two", "beyond a node"],
)
def test_no_smaller_number_of_devices_is_enough(name, device, fixed, expected):
    def searched(gpus):
        """What `mtcli plan` finds on some devices."""
        request = read_request(name, [], fixed, gpus, device)
        return request, search(request.config, gpus, request.device, 1, request.pinned)

    request, found = searched(1)
    assert not found.best
    enough = fewest(request.config, 1, request.device, request.pinned, request.keeps_batch)
    assert enough.prediction.fits and enough.prediction.work.layout.world == expected
    node = request.device.node_size
    for world in range(2, expected):
        if world <= node or world % node == 0:
            assert not searched(world)[1].best, world
    assert searched(expected)[1].best


def _rehearsed(scale):
    """Gives predictions stages of so many times the bytes, by work."""

    def rehearse(plans):
        return [
            replace(p, stages=tuple(_scaled(stage, scale(p.work)) for stage in p.stages))
            for _, p in plans
        ]

    return rehearse


def _scaled(stage, factor):
    return replace(stage, working=stage.working + (factor - 1) * stage.total)


def test_a_layout_that_its_real_stages_do_not_fit_makes_room_for_the_next():
    estimated = search(SMALL, 8, GPUS["h100"], 3)
    first, *others = (candidate.prediction.work for candidate in estimated.best)
    rehearse = _rehearsed(lambda work: 10 if work == first else 1)
    found = search(SMALL, 8, GPUS["h100"], 2, rehearse=rehearse)
    assert [candidate.prediction.work for candidate in found.best] == others
    assert found.too_large == estimated.too_large + 1


def test_a_kind_whose_best_layout_does_not_fit_has_the_next_of_its_layouts():
    kind = _axes(search(SMALL, 8, GPUS["h100"], 1).best[0].prediction.work)
    works = [work for work in works_of(SMALL, 8, GPUS["h100"], frozenset()) if _axes(work) == kind]
    steps = [(predict_workload(work, GPUS["h100"]).step_seconds, work) for work in works]
    ordered = [
        work for _, work in sorted(steps, key=lambda one: one[0]) if fits(work, GPUS["h100"])
    ]
    rehearse = _rehearsed(lambda work: 10 if work in ordered[:-1] else 1)
    found = search(SMALL, 8, GPUS["h100"], 6, rehearse=rehearse)
    shown = [one.prediction.work for one in found.best if _axes(one.prediction.work) == kind]
    assert len(ordered) > 2 and shown == ordered[-1:]


def test_the_layouts_of_one_kind_are_shown_where_there_is_no_other():
    pins = ("tp=1", "cp=1", "pp=2", "ep=1", "zero=1", "tp_mode=1d")
    config = load_config("gpt2-1.5b", [*(f"parallel.{pin}" for pin in pins), *GIVEN])
    pinned = frozenset(f"parallel.{pin.partition('=')[0]}" for pin in pins)
    found = search(config, 8, GPUS["h100"], 5, pinned).best
    works = works_of(config, 8, GPUS["h100"], pinned)
    assert len({_axes(work) for work in works}) == 1 < len(works)
    steps = [predict_workload(w, GPUS["h100"]).step_seconds for w in works if fits(w, GPUS["h100"])]
    assert [one.prediction.step_seconds for one in found] == pytest.approx(sorted(steps)[:5])


@pytest.mark.parametrize(("over", "is_tried"), [(0.9 * MARGIN, True), (1.1 * MARGIN, False)])
def test_an_estimate_may_be_too_high_by_the_margin(over, is_tried):
    first = search(SMALL, 8, GPUS["h100"], 1).best[0].prediction
    usable = first.memory.total / (1 + over)
    share = GPUS["h100"].usable_bytes / GPUS["h100"].memory_bytes
    tight = replace(GPUS["h100"], memory_bytes=usable / share)
    found = search(SMALL, 8, tight, 1, rehearse=_rehearsed(lambda work: 1 - 2 * MARGIN))
    assert (found.best[0].prediction.work == first.work) == is_tried
    strict = search(SMALL, 8, tight, 1)
    assert strict.best[0].prediction.work != first.work
