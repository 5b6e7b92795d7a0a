"""Says what curating 10 TB on a Ray cluster would take, from rates that bench_curate.py measured.

    python benchmarks/curate_10tb.py [--tb 10] [--cores 512] [--dollars 0.05]

Sizes follow from what each document leaves with the cluster; seconds from the measured rates of one
core. Assumptions, each an option: how much of that rate is left where many cores and Ray share the
work, the share of documents that goes, and the price of a rented core.
"""

import argparse
import json
from pathlib import Path

from arguments import Arguments, write_rows

from mtcli.core.curate.config import FuzzyConfig
from mtcli.core.curate.minhash import bands_of

RATES = Path(__file__).parent / "results" / "curate.json"
CORES_PER_NODE = 32
NODE_GB_PER_S = 3.1  # a network of 25 Gbit/s
HEAD_BYTES = 48  # of a removed document: its row of five numbers, and masks
TASK_PARTS = 512  # of 8 MiB: cluster.GROUP_PARTS


def rows_of(rates: dict, options: argparse.Namespace) -> tuple[dict[str, str], float]:
    """What each part takes, in words, and the hours of all."""
    config, text = FuzzyConfig(), options.tb * 1e12
    documents = text / options.document_bytes
    bands = bands_of(config)[0]
    removed = documents * options.removed
    kept = text * (1 - options.removed)
    shuffled = documents * bands * 16 + kept
    rate = rates["whole_mb_per_s"]["pipeline"] * options.efficiency
    core_seconds = text / 1e6 / rate
    nodes = options.cores / CORES_PER_NODE
    work = core_seconds / options.cores
    network = shuffled / (nodes * NODE_GB_PER_S * 1e9)
    head = removed / 1e6 * rates["head_s_per_million"]
    hours = (work + network + head) / 3600
    objects = text + documents * (config.hashes + 8 * bands + 96)
    groups = text / (TASK_PARTS * 8 * 2**20)
    rows = {
        "documents": f"{documents / 1e9:.2f} billion of {options.document_bytes:,} bytes",
        "objects of the parts": f"{objects / 1e12:.1f} TB, {objects / nodes / 1e12:.2f} TB a node",
        "shuffled: bands, then lines": f"{shuffled / 1e12:.1f} TB",
        "tasks of a shuffle": f"{groups:,.0f}, which exchange {groups**2 / 1e6:.1f} M objects",
        "work": f"{core_seconds / 3600:,.0f} core hours: {work:,.0f} s on {options.cores} cores",
        "network": f"{network:,.0f} s at {NODE_GB_PER_S} GB/s a node",
        "the head's report": f"{head:,.0f} s, {removed * HEAD_BYTES / 1e9:,.0f} GB",
        "in all": f"{hours:.1f} hours, {hours * options.cores * options.dollars:,.0f} dollars",
    }
    return rows, hours


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--tb", type=float, default=10, help="of text")
    parser.add_argument("--document-bytes", type=int, default=4000)
    parser.add_argument("--removed", type=float, default=0.5, help="share of documents")
    parser.add_argument("--cores", type=int, default=512)
    parser.add_argument("--dollars", type=float, default=0.05, help="of a core for an hour")
    parser.add_argument("--efficiency", type=float, default=0.7, help="of a core among many")
    parser.add_argument("--rates", default=str(RATES), help="what bench_curate.py --json wrote")
    options = parser.parse_args()
    rates = json.loads(Path(options.rates).read_text())
    rows, hours = rows_of(rates, options)
    for name, value in rows.items():
        print(f"{name:30}{value}")
    write_rows(options.json, rows | {"hours": hours})


if __name__ == "__main__":
    main()
