"""The files of docs/cluster: checked, and run as their scheduler does, on ranks of this machine.

Stand-ins for srun and scontrol start a task per node, which is an address of this machine; torchrun
and mtcli are forks. What a Kubernetes container would run is read from its file and run with the
variables of its pod.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import free_port, own_address, stand_ins
from drills import STEPS, Drill
from marks import slow, slow_cases

FILES = Path(__file__).parents[2] / "docs" / "cluster"
SCRIPTS = sorted(FILES.glob("*.sbatch"))
MANIFESTS = sorted(FILES.glob("*.yaml"))
NODES = 2
DEADLINE = 240.0

SRUN = """
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
step |= {"SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"]}
tasks = []
for task in map(str, range(2)):
    place = {"SLURM_PROCID": task, "SLURM_NODEID": task, "SLURM_LOCALID": "0"}
    host = {"PET_RDZV_CONF": f"is_host={1 - int(task)}"}  # here all nodes have one name
    tasks.append(subprocess.Popen(words, env=os.environ | step | place | host))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import sys
assert sys.argv[1:3] == ["show", "hostnames"]
print(*sys.argv[3].split(","), sep="\\n")
"""
COMMANDS = {"srun": SRUN, "scontrol": SCONTROL}


@pytest.fixture
def cluster(tmp_path):
    """(a drill, the variables of a node with the scheduler's commands in reach, its address)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, code in COMMANDS.items():
        (folder / name).write_text(f"#!{sys.executable} -IS\n{code}\n")
        (folder / name).chmod(0o755)
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address that another could reach")
    path = os.pathsep.join([str(folder), str(stand_ins()), os.environ["PATH"]])
    environ = os.environ | {"PATH": path}
    environ |= {"PET_LOCAL_ADDR": address}  # a node's own name, where it has one
    return Drill(tmp_path / "run", timeout=60.0), environ, address


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script_is_a_script_without_faults(script):
    checks = [["bash", "-n"]]
    if linter := shutil.which("shellcheck"):
        checks.append([linter])
    for check in checks:
        done = subprocess.run([*check, script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash" and "set -euo pipefail" in lines
    first = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    assert not any("#SBATCH" in line for line in lines[first:]), "sbatch reads none after a command"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_says_what_kubernetes_needs(manifest):
    documents = list(yaml.safe_load_all(manifest.read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= one.keys() for one in documents)
    pod = pod_of(documents[-1])
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(environ_of(documents[-1], container)["PET_NPROC_PER_NODE"]) == gpus
    if documents[-1]["kind"] == "Job":
        assert documents[-1]["spec"]["completionMode"] == "Indexed"
        assert f"--nnodes={documents[-1]['spec']['completions']}" in container["args"]
        name, service = documents[-1]["metadata"]["name"], documents[0]
        assert service["spec"]["clusterIP"] == "None", "each pod has a name of its own"
        assert service["spec"]["selector"] == {"job-name": name}
        assert pod["subdomain"] == service["metadata"]["name"]
        assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:29500" in container["args"]


def pod_of(document):
    """The specification of a job's pods."""
    spec = document["spec"]
    if document["kind"] == "PyTorchJob":
        spec = spec["pytorchReplicaSpecs"]["Worker"]
    return spec["template"]["spec"]


def environ_of(document, container):
    """The variables of a container: its own, and those that the operator of its kind sets."""
    found = {one["name"]: one.get("value", "") for one in container["env"]}
    if document["kind"] == "PyTorchJob":
        policy = document["spec"]["elasticPolicy"]
        found |= {
            "PET_NPROC_PER_NODE": document["spec"]["nprocPerNode"],
            "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
            "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
            "PET_RDZV_BACKEND": policy["rdzvBackend"],
            "PET_RDZV_ENDPOINT": "mtcli-0.mtcli:29500",
            "PET_RDZV_ID": document["metadata"]["name"],
        }
    return found


@pytest.mark.parametrize(
    "script",
    [FILES / "srun.sbatch", *slow_cases("two agents, 3 s", FILES / "torchrun.sbatch")],
    ids=lambda path: path.name,
)
def test_a_batch_script_trains_on_its_nodes_and_goes_on_when_submitted_again(script, cluster):
    drill, environ, address = cluster
    job = {"SLURM_JOB_ID": str(free_port() % 12000), "SLURM_JOB_NUM_NODES": str(NODES)}
    job |= {"SLURM_JOB_NODELIST": f"{address},{address}", "SLURM_NTASKS": str(NODES)}
    job |= {"SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "1"}
    for steps in (3, 4):
        text = drill.config.read_text()
        drill.config.write_text(re.sub(r"(?m)^steps = \d+", f"steps = {steps}", text))
        done = subprocess.run(
            ["bash", script, drill.config],
            env=environ | job, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"layout {NODES} ranks" in done.stdout
        assert sorted(drill.losses()) == list(range(1, steps + 1))
    assert "from   " in done.stdout and "step-00000003" in done.stdout, "it went on"


@slow("two agents, 3 s")
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_the_pods_of_a_manifest_train_together(manifest, cluster):
    drill, environ, address = cluster
    document = list(yaml.safe_load_all(manifest.read_text()))[-1]
    (container,) = pod_of(document)["containers"]
    told = environ_of(document, container) | {"PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    told |= {"JOB_NAME": document["metadata"]["name"]}
    here = {"mtcli-0.mtcli:29500": f"{address}:{free_port()}", "/data/run.toml": str(drill.config)}

    def local(text):
        """A word of the container, with its variables, as it is on this machine."""
        text = re.sub(r"\$\((\w+)\)", lambda name: told[name[1]], text)
        for there, own in here.items():
            text = text.replace(there, own)
        return text

    words = [local(word) for word in container["command"] + container["args"]]
    told = {name: local(value) for name, value in told.items()}
    pods = [
        subprocess.Popen(
            words,
            env=environ | told | {"PET_RDZV_CONF": f"is_host={int(node == 0)}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node in range(NODES)
    ]
    answers = [pod.communicate(timeout=DEADLINE) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], answers
    assert any(f"layout {NODES} ranks".encode() in out for out, _ in answers)
    assert sorted(drill.losses()) == list(range(1, STEPS + 1))


def test_a_batch_script_that_forgets_srun_is_refused(cluster):
    drill, environ, _ = cluster
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(
        ["mtcli", "train", drill.config, "--resume"],
        env=environ | job, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert done.returncode == 2
    assert "16 tasks on 2 nodes, and srun has started none" in done.stderr
    assert not drill.output.exists()
