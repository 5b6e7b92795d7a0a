"""Writes the launch file that fits a plan: a Slurm batch script, or a JobSet of Kubernetes.

Both run `mtcli train --resume --start-over`, so that the same file begins a run and goes on with
it. docs/reference/cluster.md says what to change for a cluster.
"""

from math import ceil
from pathlib import PurePath
from shlex import quote
from typing import NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.config.phases import tokens_of
from mtcli.core.plan.answer import PlanAnswer
from mtcli.core.plan.budget import HOUR, RunTotals
from mtcli.core.plan.interruptions import DAY, MINUTE, Interruptions
from mtcli.core.plan.predict import Prediction
from mtcli.core.runtime.atomic_writes import aside

CORES = 12  # of a rank, for its threads and loaders
LEAST_NOTICE = 5 * MINUTE
PORT = 29500


class LaunchPlan(NamedTuple):
    """The plan of a launch file: its first lines, as comments, and what it starts."""

    title: str
    prediction: Prediction  # of the phase with the longest steps
    run: Interruptions
    config: str  # the config's file


def write_launch_files(
    answer: PlanAnswer, config: str, sbatch: str | None, jobset: str | None
) -> None:
    """Writes the files that are named, for the config in a file, each aside and renamed.

    Raises MtcliError where the plan's ranks fill no whole nodes, before anything is written.
    """
    p, run_config = answer.prediction, answer.config
    totals = RunTotals(tokens_of(run_config), None, run_config.train, phases=answer.phases)
    run = (answer.budget or totals).interrupted(p, p.step_seconds)
    p = max((p, *(one.prediction for one in answer.phases)), key=lambda p: p.step_seconds)
    title = f"# {p.work.layout_words}, on {p.work.layout.world} x {p.device.name}"
    title += f"\n# The run: {answer.length}" * bool(answer.length)
    launch = LaunchPlan(title, p, run, config)
    texts = [(sbatch, batch_script(launch)), (jobset, job_set(launch))]
    for target, text in texts:
        if target:
            with aside(target) as path:
                path.write_text(text, encoding="utf-8")


def nodes_of(p: Prediction) -> tuple[int, int]:
    """(nodes, GPUs of each). Raises MtcliError where the ranks fill no whole nodes, and for this
    machine's CPU."""
    world, size = p.work.layout.world, p.device.node_size
    if p.device.name == "cpu":
        raise wrong("a launch file is for GPUs", "--gpus N --device h100", "--device")
    if world > size and world % size:
        near = f"--gpus {ceil(world / size) * size}, or --device {p.device.name},node=GPUS"
        raise wrong(f"{world} GPUs fill no whole nodes of {size}", near, "--gpus")
    return ceil(world / size), min(world, size)


def notice(p: Prediction, run: Interruptions) -> int:
    """Seconds ahead of a time limit in which a run ends its step, waits for a write, and saves."""
    needs = p.step_seconds + run.stall + 2 * run.write
    return ceil(max(LEAST_NOTICE, 1.5 * needs) / MINUTE) * int(MINUTE)


def batch_script(plan: LaunchPlan) -> str:
    """A script for sbatch, a task for each GPU."""
    title, p, run, config = plan
    nodes, gpus = nodes_of(p)
    minutes = ceil(min(DAY, HOUR + 2 * run.wall + notice(p, run)) / MINUTE)
    late = 60 * minutes - notice(p, run) - 60  # Slurm's clock is that of minutes
    return f"""#!/bin/bash
{title}
# The name in the queue.
#SBATCH --job-name=mtcli
# The ranks of the plan: nodes, a task for each GPU, and the cores of a task.
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={gpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={CORES}
# The limit of one job; the run goes on in the next one.
#SBATCH --time={minutes // 60:02}:{minutes % 60:02}:00
# Seconds ahead of the limit, in which a step ends (planned: {p.step_seconds:.3g} s) and is saved.
#SBATCH --signal=TERM@{notice(p, run)}
# Slurm starts the job again when a node fails.
#SBATCH --requeue
# The output of every start in one file.
#SBATCH --open-mode=append
set -euo pipefail

# The config of the plan, or another one.
config=${{1:-{quote(config)}}}
# The threads of a rank.
export OMP_NUM_THREADS=${{SLURM_CPUS_PER_TASK:-1}}

# Goes on from the newest checkpoint. When one rank ends, the others do too.
status=0
srun --kill-on-bad-exit=1 mtcli train "$config" --resume --start-over || status=$?
# 130: stopped and saved. At the limit, and not by scancel, the same job waits for its next turn.
if [ "$status" -eq 130 ] && [ "$SECONDS" -ge {late} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def job_set(plan: LaunchPlan) -> str:
    """A JobSet (jobset.x-k8s.io), a pod with a launch agent for each node."""
    title, p, run, config = plan
    nodes, gpus = nodes_of(p)
    return f"""{title}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  # The name of the run in the cluster.
  name: mtcli
spec:
  network:
    # Each pod has a name, by which the agents meet.
    enableDNSHostnames: true
    subdomain: mtcli
  failurePolicy:
    # All pods start again when one is lost; the run goes on from its newest checkpoint.
    maxRestarts: 20
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          # The nodes of the plan, all at once.
          completionMode: Indexed
          completions: {nodes}
          parallelism: {nodes}
          # A lost pod ends the job, and the JobSet starts it again.
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              # A step ends (planned: {p.step_seconds:.3g} s) and is saved when a pod is moved.
              terminationGracePeriodSeconds: {notice(p, run)}
              containers:
                - name: mtcli
                  # Your image, with mtcli and the network plugin of your cluster for NCCL.
                  image: registry.example.com/mtcli:latest
                  command: [torchrun]
                  args:
                    - --nnodes={nodes}
                    # Ranks that fail start again within the pods.
                    - --max-restarts=20
                    - --rdzv-backend=c10d
                    - --rdzv-endpoint=mtcli-workers-0-0.mtcli:{PORT}
                    - --rdzv-id=mtcli
                    - -m
                    - mtcli
                    - train
                    # The config of the plan, in the volume of the data.
                    - /data/{PurePath(config).name}
                    - --resume
                    - --start-over
                  env:
                    # A rank for each GPU.
                    - name: PET_NPROC_PER_NODE
                      value: "{gpus}"
                    # The threads of a rank.
                    - name: OMP_NUM_THREADS
                      value: "{CORES}"
                    # Restarts need a store that outlives rank 0.
                    - name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE
                      value: "1"
                  resources:
                    limits:
                      nvidia.com/gpu: {gpus}
                  volumeMounts:
                    - name: data
                      mountPath: /data
                    - name: shm
                      mountPath: /dev/shm
              volumes:
                # Read and written by all pods: config, data and run folder.
                - name: data
                  persistentVolumeClaim:
                    claimName: mtcli-data
                # NCCL needs more than the usual 64 MiB.
                - name: shm
                  emptyDir:
                    medium: Memory
                    sizeLimit: 32Gi
"""
