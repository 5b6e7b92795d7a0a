"""The files of docs/cluster and of `mtcli plan`: checked, and run as their scheduler does, on ranks
of this machine.

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

from mtcli.core.config.loading import load_config
from mtcli.core.plan.answer import PlanAnswer
from mtcli.core.plan.launch_files import write_launch_files
from mtcli.core.plan.predict import predict

FILES = Path(__file__).parents[2] / "docs" / "cluster"
PLANNED = Path("plan.sbatch"), Path("plan.yaml")  # which `planned_files` writes
SCRIPTS = [*sorted(FILES.glob("*.sbatch")), PLANNED[0]]
MANIFESTS = [*sorted(FILES.glob("*.yaml")), PLANNED[1]]
FIRST_PODS = ("mtcli-0.mtcli:29500", "mtcli-workers-0-0.mtcli:29500")
NODES = 2
PLAIN = ("set -euo pipefail", "fi", 'exit "$status"')  # lines without a comment
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


@pytest.fixture
def planned_files(tmp_path, monkeypatch):
    """Writes the launch files of a plan into the current folder."""
    monkeypatch.chdir(tmp_path)
    config = load_config("tiny", ["batch.global_batch_size=128"])
    answer = PlanAnswer(config, predict(config, 16, "h100"))
    write_launch_files(answer, "run.toml", *map(str, PLANNED))


@pytest.mark.usefixtures("planned_files")
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


@pytest.mark.usefixtures("planned_files")
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
    if documents[-1]["kind"] == "JobSet":
        spec, network = documents[-1]["spec"], documents[-1]["spec"]["network"]
        (jobs,) = spec["replicatedJobs"]
        job = jobs["template"]["spec"]
        assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 2
        assert (
            network["enableDNSHostnames"] and f"--nnodes={job['completions']}" in container["args"]
        )
        # jobset, its jobs, number of the job, of the pod; in the jobset's subdomain
        first = f"{documents[-1]['metadata']['name']}-{jobs['name']}-0-0.{network['subdomain']}"
        assert f"--rdzv-endpoint={first}:29500" in container["args"]
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
    if document["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
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
    [FILES / "srun.sbatch", PLANNED[0]] + slow_cases("two agents, 3 s", FILES / "torchrun.sbatch"),
    ids=lambda path: path.name,
)
@pytest.mark.usefixtures("planned_files")
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
@pytest.mark.usefixtures("planned_files")
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_the_pods_of_a_manifest_train_together(manifest, cluster):
    drill, environ, address = cluster
    document = list(yaml.safe_load_all(manifest.read_text()))[-1]
    (container,) = pod_of(document)["containers"]
    told = environ_of(document, container) | {"PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    told |= {"JOB_NAME": document["metadata"]["name"]}
    port = free_port()
    here = dict.fromkeys(FIRST_PODS, f"{address}:{port}") | {"/data/run.toml": str(drill.config)}

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


@pytest.mark.usefixtures("planned_files")
def test_a_planned_script_has_the_plan_s_ranks_and_goes_on_at_the_time_limit(tmp_path):
    lines = PLANNED[0].read_text().splitlines()
    options = dict(line[8:].partition("=")[::2] for line in lines if line.startswith("#SBATCH --"))
    assert options["--nodes"] == "2" and options["--ntasks-per-node"] == "8"
    assert options["--gpus-per-node"] == "8" and "--requeue" in options
    for number, line in enumerate(lines):  # a comment a line, but for lines of one thing
        if line and line[0] != "#" and line not in PLAIN:
            block = lines[:number][::-1]
            assert any(one.startswith("# ") for one in block[:3]), line
    hours, minutes, _ = map(int, options["--time"].split(":"))
    limit = 3600 * hours + 60 * minutes
    early = limit - int(options["--signal"].removeprefix("TERM@"))
    (seen,) = (line for line in lines if "$SECONDS" in line)
    assert int(re.search(r"-ge (\d+)", seen)[1]) == early - 60

    (tmp_path / "bin").mkdir()
    for name, code in {"srun": "exit ${CODE}", "scontrol": "echo scontrol $*"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def run(code, seconds):
        script = PLANNED[0].read_text().replace('"$SECONDS"', str(seconds))
        environ = os.environ | {"PATH": path, "CODE": str(code), "SLURM_JOB_ID": "7"}
        done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True)
        return done.returncode, done.stdout.strip()

    assert run(130, early) == (130, "scontrol requeue 7")
    assert run(130, 100) == (130, ""), "scancel"
    assert run(1, early) == (1, "") and run(0, early) == (0, "")
