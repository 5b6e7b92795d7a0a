import pytest
import torch
import torch.distributed as dist

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime import rendezvous
from mtcli.core.runtime.attempts import Attempt
from mtcli.core.runtime.rendezvous import endpoint, on_one_machine

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07,12]",
}
ONE, ALL = {"LOCAL_WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "here"),
    [
        (ONE | ALL, True),
        (ONE | ALL | {"MASTER_ADDR": "node7"}, True),  # torchrun on one node
        (ONE | {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, False),
        (ALL | {"MASTER_ADDR": "localhost"}, True),
        (ALL | {"MASTER_ADDR": "192.0.2.1"}, False),
        ({"SLURM_NNODES": "2"}, True),  # a batch script
        (STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "2"}, True),  # on one node of two
        (STEP, False),
    ],
)
def test_a_launcher_tells_whether_all_ranks_are_on_one_machine(environ, here):
    assert on_one_machine(environ) is here


def test_slurms_job_gives_the_port_and_the_step_s_first_node_the_address():
    login = {"SLURM_LAUNCH_NODE_IPADDR": "192.0.2.1"}  # where srun runs, and rank 0 does not
    job = STEP | login | {"SLURM_JOB_ID": "1234567"}
    assert endpoint(job) == ("gpu07", 34567)
    assert endpoint(login | {"SLURM_JOB_ID": "1234567"})[0] == "127.0.0.1"
    assert endpoint(job | {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}) == ("node7", 29500)
    for port in ("70000", "0", "http", "-1"):
        with pytest.raises(MtcliError) as caught:
            endpoint({"MASTER_PORT": port})
        assert caught.value.code == 2 and repr(port) in caught.value.problems[0].message


@pytest.mark.parametrize(
    ("device", "backend", "bound"),
    [
        (torch.device("cuda", 3), "nccl", {"device_id": torch.device("cuda", 3)}),
        (torch.device("cpu"), "gloo", {}),
    ],
)
def test_nccl_connects_each_rank_by_its_device_when_ranks_meet(monkeypatch, device, backend, bound):
    given = {}
    kept = dist.HashStore()
    monkeypatch.setattr(rendezvous, "_connect", lambda rank, limit: kept)
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **more: given.update(more, backend=name)
    )
    store, attempt = rendezvous.meet(0, 1, 10.0, device)
    assert isinstance(attempt, Attempt) and (attempt.number, attempt.restarted) == (1, False)
    times = {"timeout": given.pop("timeout")}
    assert times["timeout"].total_seconds() == 10.0 + rendezvous.LATER
    assert given == {"backend": backend, "store": store, "rank": 0, "world_size": 1} | bound
