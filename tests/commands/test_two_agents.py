"""Two of torch's launch agents on one machine, as on two nodes: their ranks are killed in turn.

KILLS=10 python -m pytest tests/commands/test_two_agents.py  # as docs/reference/cluster.md
"""

import json
import os
import subprocess
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from command_line import FORKS, children_of, fork_of, own_address, stand_ins, words_of
from drills import EVERY, Drill
from marks import slow

KILLS = int(os.environ.get("KILLS", "2"))
APART = 3  # steps between kills
DEADLINE = 240.0
PACED = Path(__file__).parent / "paced.py"


class Nodes:
    """Two nodes of a run, whose rendezvous is on a third and takes an agent for lost that says
    nothing for `silence` seconds: on a busy machine one that lives may be silent for some."""

    def __init__(self, folder, steps, silence=30, **environ):
        self.folder, self.pace, self.environ = folder, folder / "pace", environ
        self.silence = silence
        self.folder.mkdir()
        self.drill = Drill(folder / "nodes", timeout=60.0)
        self.words = ["train", self.drill.config, "--set", f"train.steps={steps}"]
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.job = "drill"
        self.allow(0)
        self.agents = [None, None]

    def start(self, node):
        """Starts a node's agent."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", self.job]
        rendezvous += ["--local-addr", own_address()]
        rendezvous += ["--rdzv-endpoint", f"127.0.0.1:{self.store.port}", "--rdzv-conf"]
        rendezvous += [f"is_host=0,keep_alive_interval=1,keep_alive_max_attempt={self.silence}"]
        limits = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(2 * KILLS + 6)]
        command = ["-m", "torch.distributed.run", *limits, "--monitor-interval", "0.1", *rendezvous]
        command = [stand_ins() / "python", *command, PACED, *self.words]
        environ = os.environ | self.environ | {"PACE": str(self.pace)}
        with open(self.folder / f"agent-{node}", "ab") as output:
            self.agents[node] = subprocess.Popen(
                list(map(str, command)), env=environ, stdout=output, stderr=output
            )

    def allow(self, steps):
        """Lets ranks train up to a step."""
        part = self.pace.with_suffix(".part")
        part.write_text(str(steps))
        part.rename(self.pace)

    def reach(self, step):
        """Returns when a step's loss is written, and the last checkpoint before it."""
        self.allow(step)
        log, saved = self.drill.output / "metrics.jsonl", step // EVERY * EVERY

        def written():
            with suppress(json.JSONDecodeError):  # a line half of which is there
                return log.exists() and step in self.drill.losses()

        self.until(written, f"step {step}")
        self.until(lambda: saved in self.drill.steps(), f"the checkpoint of step {saved}")

    def worker(self, node, other_than=None):
        """The process of a node's rank."""

        def found():
            children = children_of(fork_of(self.agents[node].pid))
            ranks = {FORKS.get(child) for child in children if str(PACED) in words_of(child)}
            fresh = ranks - {other_than, None}
            return psutil.Process(fresh.pop()) if fresh else None

        return self.until(found, f"a rank on node {node}")

    def kill(self, node):
        """Kills a node's rank, as the other begins its next step; returns its process id."""
        worker = self.worker(node)
        worker.kill()
        self.allow(int(self.pace.read_text()) + 1)
        return worker.pid

    def leave(self, node):
        """Kills a node at once: its agent and its rank."""
        worker = self.worker(node)
        self.agents[node].kill()
        worker.kill()
        self.agents[node].wait()

    def end(self):
        """Returns both agents' exit codes."""
        self.allow(10**6)
        self.until(lambda: all(agent.poll() is not None for agent in self.agents), "the end")
        return [agent.returncode for agent in self.agents]

    def until(self, condition, what):
        """Returns what the condition gives once that is true; a deadline fails the test."""
        end = time.monotonic() + DEADLINE
        while not (given := condition()):
            said = [self.folder.joinpath(f"agent-{n}").read_text()[-6000:] for n in (0, 1)]
            assert time.monotonic() < end, "\n".join([f"{what} did not come about", *said])
            time.sleep(0.1)
        return given

    def close(self):
        """Kills all that is left."""
        for agent in filter(None, self.agents):
            agent.kill()
            agent.wait()


@pytest.fixture
def two_nodes(tmp_path):
    """Starts two nodes of a run of some steps."""
    if own_address() is None:
        pytest.skip("this machine has no address that another could reach")
    started = []

    def start(steps, **others):
        nodes = Nodes(tmp_path / f"run-{len(started)}", steps, **others)
        started.append(nodes)
        for node in (0, 1):
            nodes.start(node)
        return nodes

    yield start
    for nodes in started:
        nodes.close()


def undisturbed(folder, steps):
    """The losses of the same run on two ranks to which nothing happens."""
    drill = Drill(folder, timeout=60.0)
    done = drill.train(nproc=2, settings=[f"train.steps={steps}"])
    assert done.returncode == 0, done.errors
    return drill.losses()


def resumed_from(nodes):
    """The steps from which attempts went on."""
    lines = (nodes.drill.output / "events.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if row["event"] == "resumed"]


@pytest.mark.timeout(DEADLINE * (KILLS + 2))
@slow("two agents, two kills and a second launch, 10 s")
def test_ranks_that_are_killed_in_turn_meet_again_and_have_the_undisturbed_curve(
    two_nodes, tmp_path
):
    """Every second time the rank that comes next is killed too, as it starts. In the folder of the
    run that has ended, a second launch is refused, however often it starts."""
    steps = APART * (KILLS + 1)
    nodes = two_nodes(steps)
    for number in range(KILLS):
        nodes.reach(APART * (number + 1))
        killed = nodes.kill(number % 2)
        if number % 2:
            nodes.worker(number % 2, other_than=killed).kill()
    assert nodes.end() == [0, 0]
    assert len(resumed_from(nodes)) == KILLS
    assert nodes.drill.losses() == undisturbed(tmp_path / "undisturbed", steps)
    second_launch_is_refused(nodes, steps)


def second_launch_is_refused(nodes, steps):
    nodes.words += ["--set", f"train.steps={steps + 1}"]
    nodes.job = "another"
    nodes.allow(0)
    outputs = [nodes.folder / f"agent-{node}" for node in (0, 1)]
    for node in (0, 1):
        outputs[node].unlink()
        nodes.start(node)
    first = nodes.worker(0)
    nodes.until(
        lambda: "already holds a run" in "".join(file.read_text() for file in outputs), "a refusal"
    )
    nodes.until(lambda: not first.is_running(), "its end")
    second = nodes.worker(0, other_than=first.pid)
    nodes.until(lambda: not second.is_running(), "the end of the next")
    assert len(nodes.drill.losses()) == steps


@slow("two agents that wait 4 s for a lost one, 6 s")
def test_a_node_that_leaves_and_joins_again_has_the_undisturbed_curve(two_nodes, tmp_path):
    """It is rank 0's. An agent that stays tells one that joins nothing of a store that it shares
    with its ranks."""
    nodes = two_nodes(6, silence=4, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    nodes.reach(3)
    rank_0 = json.loads((nodes.drill.output / "run.lock").read_text())["pid"]
    node = [nodes.worker(node).pid for node in (0, 1)].index(rank_0)
    nodes.leave(node)
    nodes.start(node)
    assert nodes.end() == [0, 0]
    assert resumed_from(nodes)
    assert nodes.drill.losses() == undisturbed(tmp_path / "undisturbed", 6)
