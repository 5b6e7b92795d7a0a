"""Which sockets a run listens on, and what somebody who reaches them can do: nothing.

Stores and gloo of a launcher and its ranks; their sockets are read from the system's tables.
"""

import base64
import ipaddress
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from command_line import fork_of, own_address, stand_ins, start, workers_of
from marks import slow
from tiny import write_run

DEADLINE = 120.0
STEPS = 10**6  # more than a test waits for


def until(condition):
    """Returns what the condition gives once that is true; a deadline fails the test."""
    end = time.monotonic() + DEADLINE
    while not (given := condition()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)
    return given


def listening(pids):
    """(address, port) of every TCP socket that these processes listen on."""
    found = set()
    for pid in pids:
        for one in psutil.Process(pid).net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.add((one.laddr.ip, one.laddr.port))
    return found


def reachable(sockets):
    """The addresses of sockets that another machine could reach."""
    addresses = [ipaddress.ip_address(address) for address, _ in sockets]
    return {one for one in addresses if not (getattr(one, "ipv4_mapped", None) or one).is_loopback}


def family(launcher):
    """The processes of a launcher and its workers."""
    return [fork_of(launcher.pid), *workers_of(launcher.pid)]


def steps_done(folder):
    """How many steps the run's log tells of so far."""
    log = folder / "run" / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


class Payload:
    """A pickle that makes a folder where it is loaded."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@contextmanager
def running(folder, *flags):
    """The launcher of a run of two ranks, once that trains."""
    config = write_run(folder, train={"steps": STEPS, "save_every": 3, "keep": 1})
    words = ["train", config, "--nproc", 2, "--set", "parallel.tp=2", *flags]
    command = [stand_ins() / "mtcli", *map(str, words)]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: steps_done(folder) >= 4 or process.poll() is not None)
        assert process.poll() is None, (folder / "output").read_text()
        yield process
    finally:
        process.kill()
        process.wait()


def attack(port, folder, run_id):
    """Writes a payload wherever torch's own rendezvous would unpickle it."""
    payload = pickle.dumps(Payload(folder))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    for name in (f"torch.rendezvous.{run_id}", "launcher/rank_0", "rank_0", "all here"):
        for value in (payload, base64.b64encode(payload)):
            store.set(name, value)


def test_ranks_of_one_machine_are_reached_from_it_alone_and_run_nothing_they_are_sent(tmp_path):
    with running(tmp_path, "--max-restarts", 1) as launcher:
        sockets = listening(family(launcher))
        assert len(sockets) >= 3, "the launcher's store, and gloo of two ranks"
        assert {address for address, _ in sockets} == {"127.0.0.1"}
        for _, port in sockets:
            if address := own_address():
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((address, port), timeout=5.0)
        marker, run_id = tmp_path / "ran", f"mtcli-{fork_of(launcher.pid)}"
        for _, port in listening([fork_of(launcher.pid)]):
            attack(port, marker, run_id)
        os.kill(
            workers_of(launcher.pid)[-1], signal.SIGKILL
        )  # the ranks meet again, through what the store holds
        done = steps_done(tmp_path)
        until(lambda: steps_done(tmp_path) > done + 3)
        assert {address for address, _ in listening(family(launcher))} == {"127.0.0.1"}
        assert not marker.exists()


@slow("a launcher and two ranks, 2 s")
def test_a_launcher_that_is_interrupted_prints_no_words_of_torchs(tmp_path):
    with running(tmp_path) as launcher:
        for pid in family(launcher):  # as a terminal does
            os.kill(pid, signal.SIGINT)
        assert launcher.wait(DEADLINE) == 130
    said = (tmp_path / "output").read_text()
    assert "torch" not in said and "Traceback" not in said and "saved" in said


def test_ranks_of_several_machines_listen_on_the_interface_of_the_master_alone(tmp_path):
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address that another could reach")
    config = write_run(tmp_path, train={"steps": STEPS})
    words = ("train", config, "--nproc", 2, "--set", "parallel.tp=2")
    run = start(*words, MASTER_ADDR=address, LOCAL_WORLD_SIZE="1")
    try:
        until(lambda: steps_done(tmp_path) >= 2)
        sockets = listening([rank.pid for rank in run.ranks])
    finally:
        run.ended(wanted=[])
    assert len(sockets) >= 3 and {one for one, _ in sockets} == {address}


@slow("starts Ray, 10 s")
def test_a_ray_cluster_is_reached_from_its_machine_alone_and_with_its_token_alone(tmp_path):
    pytest.importorskip("ray", reason="the extra ray is not installed")
    texts = [" ".join(f"word{n * m}" for m in range(200)) for n in range(500)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    environ = os.environ | {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": ""}
    for name in ("RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        environ.pop(name, None)
    words = ["curate", "in.jsonl", "--output", "out", "--engine", "ray", "--workers", "1"]
    command = [sys.executable, "-m", "mtcli", *words]
    driver = psutil.Popen(command, env=environ, cwd=tmp_path, stderr=subprocess.PIPE)
    processes = [driver]

    def sockets():
        assert driver.poll() is None, driver.stderr.read().decode()
        processes[1:] = driver.children(recursive=True)
        found = listening(one.pid for one in processes)
        return found if len(found) >= 6 else None

    try:
        found = until(sockets)
        driver.suspend()
        assert not reachable(found)
        token = driver.children()[0].environ()["RAY_AUTH_TOKEN"]
        assert len(token) == 64 and not any(token in " ".join(p.cmdline()) for p in processes)
        assert not (tmp_path / ".ray").exists()
        (gcs,) = (one for one in processes if one.name() == "gcs_server")
        ((_, port),) = listening([gcs.pid])
        ask = [sys.executable, "-m", "ray.scripts.scripts", "health-check"]
        ask += ["--address", f"127.0.0.1:{port}"]
        environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        refused = subprocess.run(ask, env=environ, capture_output=True, text=True)
        assert refused.returncode == 1 and "InvalidAuthToken" in refused.stderr
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        subprocess.run(ask, env=environ, check=True)
    finally:
        for one in processes:
            one.kill()
        driver.wait()


def test_an_address_that_no_other_machine_can_use_is_refused(tmp_path):
    config = write_run(tmp_path, train={"steps": 2})
    words = ("train", config, "--nproc", 2, "--set", "parallel.tp=2")
    for address, said in (
        ("0.0.0.0", "stands for every interface of a machine"),
        ("::", "stands for every interface of a machine"),
        ("localhost", "is 127.0.0.1 here, which no other machine can reach"),
        ("no.such.host.invalid", "is not reached: "),
    ):
        done = start(*words, MASTER_ADDR=address, LOCAL_WORLD_SIZE="1").ended()
        assert done.codes == [2, 2], address
        for error in done.errors:
            assert f"MASTER_ADDR={address} {said}" in error, error
            assert "hint: set MASTER_ADDR to the address of rank 0's" in error
            assert "Traceback" not in error


def test_a_port_that_is_taken_is_named(tmp_path):
    config = write_run(tmp_path, train={"steps": 2})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ("train", config, "--nproc", 2, "--set", "parallel.tp=2")
        done = start(*words, MASTER_PORT=str(port)).ended(wanted=[0])
    assert done.codes[0] == 1
    assert f"rank 0 cannot listen on 127.0.0.1, port {port}: Address already in use" in done.stderr
    assert "hint: set MASTER_PORT to a port that is free" in done.stderr
