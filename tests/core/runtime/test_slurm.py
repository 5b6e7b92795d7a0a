"""Slurm's lists, as its manual writes them."""

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime.launch import environment_world
from mtcli.core.runtime.slurm import first_host, require_srun, tasks_per_node


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[01-03,07],login", "gpu01"),
        ("gpu[07,01-03]", "gpu07"),
        ("rack[1-2]n[3-4]-ib,gpu5", "rack1n3-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("text", "tasks"), [("8", [8]), ("4(x2),3", [4, 4, 3]), ("2,1(x3)", [2, 1, 1, 1])]
)
def test_the_tasks_of_each_node(text, tasks):
    assert tasks_per_node(text) == tasks


BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (BATCH, "this Slurm job has 16 tasks on 2 nodes, and srun has started none"),
        (BATCH | {"SLURM_JOB_NUM_NODES": "1"}, "16 tasks on 1 node, and srun"),
        (BATCH | {"SLURM_NTASKS": "1"}, "1 tasks on 2 nodes"),
    ],
)
def test_a_batch_script_of_several_tasks_is_refused_without_srun(environ, said):
    with pytest.raises(MtcliError) as caught:
        require_srun(1, environ)
    assert said in str(caught.value) and "hint: srun mtcli train" in str(caught.value)
    require_srun(2, environ)  # of this node alone, as asked for


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7"},
        BATCH | {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        BATCH | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "3"},
        BATCH | {"SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1
        BATCH | {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun
    ],
)
def test_what_srun_or_another_launcher_has_started_is_not_refused(environ):
    require_srun(1, environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x is no number"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 of WORLD_SIZE=2"),
        ({"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS=two is no number"),
    ],
)
def test_a_launcher_s_variable_that_is_no_rank_is_named(environ, said):
    with pytest.raises(MtcliError, match=said):
        environment_world(environ)
