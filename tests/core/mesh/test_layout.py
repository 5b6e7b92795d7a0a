"""Rank grids against a reshaped arange, and against rank lists printed in public documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtcli.core.config.schema import ParallelConfig
from mtcli.core.mesh.layout import Grid, ParallelLayout

sizes = st.sampled_from([1, 2, 3, 4])


@given(sizes, sizes, sizes, sizes)
def test_a_grid_numbers_ranks_as_a_reshaped_arange(tp, cp, dp, pp):
    grid = Grid(("tp", "cp", "dp", "pp"), (tp, cp, dp, pp))
    ranks = np.arange(tp * cp * dp * pp).reshape(pp, dp, cp, tp)  # outermost first
    assert grid.world == ranks.size
    for place in np.ndindex(ranks.shape):
        named = dict(zip(("pp", "dp", "cp", "tp"), place, strict=True))
        assert grid.rank(**named) == ranks[place]
        assert grid.coordinates(int(ranks[place])) == named
    assert grid.groups("tp") == ranks.reshape(-1, tp).tolist()
    assert sorted(grid.groups("pp")) == sorted(ranks.reshape(pp, -1).T.tolist())
    together = ranks.transpose(0, 3, 1, 2).reshape(-1, dp * cp)
    assert sorted(grid.groups("dp", "cp")) == sorted(np.sort(together, axis=1).tolist())


def test_groups_of_no_axis_are_single_ranks_and_of_every_axis_the_world():
    grid = Grid(("tp", "pp"), (2, 3))
    assert grid.groups() == [[0], [1], [2], [3], [4], [5]]
    assert grid.groups("tp", "pp") == [[0, 1, 2, 3, 4, 5]]


def test_sixteen_ranks_group_as_megatron_documents_it():
    # megatron/core/parallel_state.py, initialize_model_parallel: tp 2, pp 4, 16 GPUs
    grid = ParallelLayout(16, tp=2, pp=4).attention
    assert grid.groups("tp") == [[i, i + 1] for i in range(0, 16, 2)]
    assert grid.groups("dp") == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15],
    ]  # fmt: skip
    assert grid.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_folding_keeps_the_pipeline_and_lets_experts_span_data_ranks():
    # MoE Parallel Folding's best Mixtral 8x22B layout: TP 2, EP 8, ETP 1, PP 8 on 128 GPUs.
    layout = ParallelLayout(128, tp=2, pp=8, ep=8, etp=1)
    assert (layout.dp, layout.edp) == (8, 2)
    assert layout.experts.groups("ep")[0] == list(range(8))  # 4 data ranks of tp 2
    assert layout.experts.groups("edp")[0] == [0, 8]
    assert layout.attention.groups("tp")[0] == [0, 1]
    assert layout.attention.groups("pp") == layout.experts.groups("pp")
    assert layout.attention.groups("pp")[5] == [5 + 16 * stage for stage in range(8)]


@given(sizes, sizes, sizes, sizes, st.data())
def test_both_grids_agree_on_the_pipeline_for_every_legal_layout(tp, cp, dp, pp, data):
    stage = tp * cp * dp
    divisors = [d for d in range(1, stage + 1) if stage % d == 0]
    ep = data.draw(st.sampled_from(divisors))
    etp = data.draw(st.sampled_from([d for d in divisors if stage // ep % d == 0]))
    layout = ParallelLayout(stage * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    assert layout.dp == dp
    assert layout.edp * ep * etp == stage
    assert layout.attention.world == layout.experts.world == layout.world
    assert layout.attention.groups("pp") == layout.experts.groups("pp")
    for rank in range(layout.world):
        place, q = layout.coordinates(rank), rank % stage  # arXiv:2504.14960, with pp outermost
        assert place["pp"] == rank // stage
        assert (place["tp"], place["cp"], place["dp"]) == (q % tp, q // tp % cp, q // tp // cp)
        assert (place["etp"], place["ep"], place["edp"]) == (q % etp, q // etp % ep, q // etp // ep)
        assert layout.attention.rank(**{a: place[a] for a in layout.attention.axes}) == rank
        assert layout.experts.rank(**{a: place[a] for a in layout.experts.axes}) == rank


def test_every_axis_has_a_size_whichever_grid_it_is_of():
    layout = ParallelLayout(48, tp=2, cp=3, pp=2, ep=4, etp=3)
    sizes_of = {axis: layout.size(axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")}
    assert sizes_of == {"tp": 2, "cp": 3, "dp": 4, "pp": 2, "ep": 4, "etp": 3, "edp": 2}


def test_a_pipeline_rank_holds_every_pp_th_stage():
    layout = ParallelLayout(4, pp=4, vpp=3)
    assert layout.num_stages == 12
    assert layout.stages(1) == (1, 5, 9)


def test_a_layout_is_read_from_the_config():
    parallel = ParallelConfig(tp=2, cp=2, pp=2, vpp=2, schedule="interleaved", ep=4, etp=1)
    assert ParallelLayout.of(parallel, 16) == ParallelLayout(16, 2, 2, 2, 2, 4, 1)


def test_an_axis_that_no_grid_has_is_an_error():
    with pytest.raises(ValueError, match="not in tuple"):
        ParallelLayout(4).size("zp")
