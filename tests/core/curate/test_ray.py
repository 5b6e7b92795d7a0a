"""A real Ray cluster of two nodes on this machine."""

import os
import random
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from corpora import refusal, tree, write_jsonl
from marks import slow

from mtcli.core.config.errors import MtcliError
from mtcli.core.curate import documents as documents_module
from mtcli.core.curate.cluster import ClusterEngine

# Ray reads them when it is imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
pytest.importorskip("ray", reason="the extra ray is not installed")

from ray.cluster_utils import Cluster  # noqa: E402

from mtcli.core.curate import ray_cluster as ray_cluster_module  # noqa: E402
from mtcli.core.curate.ray_cluster import RayCluster, ray_cluster  # noqa: E402

WORDS = re.findall(r"[a-z]{2,}", Path(random.__file__).read_text())
HEAD = """
from ray.cluster_utils import Cluster
print(Cluster(initialize_head=True, head_node_args={"num_cpus": 1}).address, flush=True)
input()
"""
STAGES = ["normalise", "exact", "fuzzy", "decontaminate", "rules"]


@pytest.fixture
def nodes():
    """A head and a second node, of a CPU each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    yield cluster, second
    cluster.shutdown()


@contextmanager
def head(auth_mode):
    """The address of a cluster that another process has started in a mode of authentication."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        env=os.environ | {"RAY_AUTH_MODE": auth_mode},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate("\n")


@pytest.fixture
def curated(run, tmp_path, monkeypatch):
    """Curates three megabytes in blocks of a half, a tenth of it copies, by an engine."""
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 1 << 19)
    source, texts = random.Random(5), []
    for number in range(1200):
        text = " ".join(source.choices(WORDS, k=350))
        texts.append(source.choice(texts) + " again" if texts and number % 10 == 0 else text)
    records = [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)]
    files = [write_jsonl(tmp_path / f"{n}.jsonl", records[n::2]) for n in range(2)]
    tasks = write_jsonl(tmp_path / "task.jsonl", [{"text": texts[1]}, {"text": texts[7]}])
    settings = [f"decontaminate.tasks=['{tasks}']", "rules.min_stop_words=0", "shard_mb=1"]

    def curated(name, engine=None):
        return tree(run(*files, stages=STAGES, settings=settings, name=name, engine=engine))

    return curated


@slow("a cluster of two nodes, 5.3 s")
def test_two_nodes_or_the_one_that_is_left_midway_write_the_bytes_of_one_machine(nodes, curated):
    class Dying(RayCluster):
        """It loses its second node when a phase begins."""

        phase, died = "fuzzy: pairs", False

        def run(self, function, items, what, returns=1):
            if what == self.phase and not self.died:
                self.died = True
                nodes[0].remove_node(nodes[1], allow_graceful=False)
            return super().run(function, items, what, returns)

    one = curated("one")
    with ray_cluster(nodes[0].address, 1) as cluster:
        assert cluster.cores == 2
        assert curated("two", ClusterEngine(cluster)) == one
        dying = Dying()
        assert curated("left", ClusterEngine(dying)) == one
        assert dying.died


@slow("starts Ray, 2.5 s")
def test_an_error_in_a_task_is_the_user_s_as_on_one_machine(run, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n{"id": "b", "te\n')
    one = refusal(lambda: run(path))
    with ray_cluster(None, 1) as cluster:
        assert refusal(lambda: run(path, engine=ClusterEngine(cluster), force=True)) == one
        os.environ.pop("RAY_ADDRESS", None)


def test_a_cluster_that_neither_answers_nor_wants_a_token_is_not_joined(monkeypatch):
    monkeypatch.setattr(ray_cluster_module, "_refusal", lambda *_: "in GcsClient\nRpcError: late")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(MtcliError) as caught, ray_cluster(address, 1):
            pass
    assert caught.value.code == 2
    assert f"--address: no Ray cluster at {address}: RpcError: late" in str(caught.value)


def test_a_node_that_does_not_start_is_told_without_a_trace(monkeypatch):
    import ray

    def slow(**where):
        raise Exception("The current node timed out during startup.\nIt could be overloaded.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", slow)
    expected = "Ray did not start at this machine: The current node timed out during startup"
    with pytest.raises(MtcliError, match=expected) as caught, ray_cluster(None, 1):
        pass
    assert caught.value.code == 1
    assert "--engine local" in str(caught.value)


@slow("starts Ray, 7 s")
def test_a_cluster_is_joined_with_its_token_alone(monkeypatch):
    with head("token") as address:
        with ray_cluster(address, 1) as cluster:
            assert cluster.cores == 1
        monkeypatch.setenv("RAY_AUTH_TOKEN", "6" * 64)
        with pytest.raises(MtcliError) as caught, ray_cluster(address, 1):
            pass
    assert caught.value.code == 2
    assert f"--address: the cluster at {address} refuses our token" in str(caught.value)
    assert "`ray get-auth-token --generate`" in str(caught.value)


@slow("starts Ray, 5 s")
def test_a_cluster_that_lets_anyone_in_is_not_joined():
    with (
        head("disabled") as address,
        pytest.raises(MtcliError) as caught,
        ray_cluster(address, 1),
    ):
        pass
    assert caught.value.code == 2
    expected = f"--address: the cluster at {address} runs the code of anyone who can reach it"
    assert expected in str(caught.value)
    assert "RAY_AUTH_MODE=token" in str(caught.value)
