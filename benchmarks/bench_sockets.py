"""Processor time of a GB from one process's socket to another's: over loopback, and over links.

A calibration of plan measures it over loopback, which no network device takes part in; what a
device takes more is a factor in plan/hardware.py, and comes from here. Links are those of
slow_links.py: Linux, root, iproute2. All processors' time counts, so that the machine must be idle.

    python benchmarks/bench_sockets.py
"""

import socket
import subprocess
import sys
from pathlib import Path
from statistics import median

import slow_links
from arguments import Arguments, write_rows

PORT, PIECE, TRIES = 29519, 2**20, 5


def main() -> None:
    if sys.argv[1:] and not sys.argv[1].startswith("--"):
        size = int(sys.argv[2])
        return receive(size) if sys.argv[1] == "receive" else send(sys.argv[1], size)
    args = Arguments(__doc__).parse_args()
    tries, most = (1, 0.01) if args.tiny else (TRIES, 2.0)
    alone = processor_seconds([], [], "127.0.0.1", most, tries)
    rows: list[dict[str, object]] = [{"link": "loopback", "seconds": alone}]
    print("| link | s of processors for a GB | of loopback |\n| --- | --- | --- |")
    print(f"| loopback | {alone:.3f} | 1.00 |")
    lacks = "no links are made for --tiny" if args.tiny else slow_links.missing()
    if lacks:
        print(f"links are left out: {lacks}")
        rows.append({"link": "links", "skipped": lacks})
    for gbits in () if lacks else (1.0, 10.0, 40.0):
        with slow_links.linked(2, gbits) as (here, there):
            size = min(most, gbits / 5)
            seconds = processor_seconds(here, there, "10.77.0.2", size, tries)
        rows.append({"link": f"{gbits:g} Gbit/s", "seconds": seconds})
        print(f"| {gbits:g} Gbit/s | {seconds:.3f} | {seconds / alone:.2f} |")
    write_rows(args.json, rows)


def processor_seconds(
    here: list[str], there: list[str], host: str, gigabytes: float, tries: int
) -> float:
    """Seconds of all processors per GB that one process sends another, each with a prefix."""
    size, found = str(round(gigabytes * 1e9)), []
    for _ in range(tries):
        words = [*there, sys.executable, __file__, "receive", size]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None and receiver.stdout.readline(), "it listens"
            sender = [*here, sys.executable, __file__, host, size]
            used = float(subprocess.run(sender, check=True, capture_output=True).stdout)
        found.append(used / gigabytes)
    return median(found)


def receive(size: int) -> None:
    buffer = bytearray(PIECE)
    with socket.create_server(("", PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        while size > 0:
            size -= connection.recv_into(buffer)
        connection.sendall(b"!")


def send(host: str, size: int) -> None:
    """Sends bytes and, once the last is there, prints what processors were busy meanwhile."""
    data = bytes(PIECE)
    with socket.create_connection((host, PORT)) as connection:
        before = busy()
        for _ in range(-(-size // PIECE)):
            connection.sendall(data)
        connection.recv(1)
    print(busy() - before)


def busy() -> float:
    """Seconds that this machine's processors have not been idle."""
    user, nice, system, _idle, _wait, *interrupts = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, *interrupts))) / 100


if __name__ == "__main__":
    main()
