"""Chooses the rows of the parity table: `python tests/cover_parity.py` writes parity_rows.json.

The rows are a covering array of parity_factors.py: each pair of levels that some legal row has
occurs in one. Rows that are there stay, and those for pairs of new levels are added. They are
chosen greedily, as by AETG (Cohen et al. 1997): of some random legal rows with a pair that is still
missing, the one that has most missing pairs for each rank.
"""

import json
import random
import sys
from itertools import combinations

from parity_factors import FACTORS, GATE, PLAIN, ROWS, ROWS_FILE, row_of

TRIES = 300  # random rows among which no legal one is found that has an illegal pair
CLIMBS, RANKS = 4, 2  # searches for a row; ranks that a row costs besides its own
# Factors with so many levels that their pairs alone would be hundreds of rows; a layer's detail is
# computed alike in every model, and its gradient updated as any.
APART = ({"model", "detail"}, {"detail", "update"})
PAIRS = [
    frozenset({(a, x), (b, y)})
    for a, b in combinations(FACTORS, 2)
    if {a, b} not in APART
    for x in FACTORS[a]
    for y in FACTORS[b]
]


def pairs_of(row):
    """The pairs of levels that a row has."""
    levels = [(factor, row.level(factor)) for factor in FACTORS]
    return {frozenset(pair) for pair in combinations(levels, 2)}


def legal_row(pair, draw):
    """A legal row with a pair, and few other levels that are not plain; None if none is found."""
    for turn in range(TRIES):
        share = turn / TRIES  # of factors that are not left plain
        levels = {
            f: draw.choice(list(FACTORS[f])) if draw.random() < share else PLAIN[f] for f in FACTORS
        }
        row = row_of(levels | dict(pair))
        if row.is_legal:
            return row
    return None


def climbed(row, pair, missing, draw):
    """A row with other levels of one factor after another, wherever they add missing pairs."""

    def value(row):
        return len(pairs_of(row) & missing) / (RANKS + row.world)

    factors = [factor for factor in FACTORS if factor not in dict(pair)]
    for _ in range(2):
        draw.shuffle(factors)
        for factor in factors:
            others = [row_of(row.levels | {factor: level}) for level in FACTORS[factor]]
            draw.shuffle(others)
            row = max([row, *(other for other in others if other.is_legal)], key=value)
    return row


def cover(seed):
    """Rows that together with the table's have each pair of which some row is legal."""
    covered = set().union(*map(pairs_of, ROWS))
    draw, missing, rows = random.Random(seed), set(PAIRS) - covered, []
    while missing:
        pair = draw.choice(sorted(missing, key=sorted))
        start = legal_row(pair, draw)
        if start:
            tries = [climbed(start, pair, missing, draw) for _ in range(CLIMBS)]
            rows.append(max(tries, key=lambda row: len(pairs_of(row) & missing)))
            missing -= pairs_of(rows[-1])
        missing.discard(pair)
    return rows


def without_needless(rows):
    """The rows without those whose pairs all others have too, the largest first."""
    rows = list(rows)
    for row in sorted(rows, key=lambda row: -row.world):
        others = set().union(*(pairs_of(other) for other in [*ROWS, *rows] if other is not row))
        if pairs_of(row) <= others:
            rows.remove(row)
    return rows


def main(seeds=8):
    """Adds the rows of the seed that needs the fewest ranks to the table."""
    tables = (without_needless(cover(seed)) for seed in range(seeds))
    rows = min(tables, key=lambda rows: sum(RANKS + row.world for row in rows))
    write([row.levels for row in [*ROWS, *rows]], sorted(GATE))
    print(f"{len(rows)} rows more, {sum(row.world for row in rows)} ranks")


def write(rows, gate):
    """Writes the table: a line a row, and the names of those that `make test` runs."""
    lines = {"rows": map(json.dumps, rows), "gate": map(json.dumps, gate)}
    parts = (f'"{key}": [\n' + ",\n".join(values) + "\n]" for key, values in lines.items())
    ROWS_FILE.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    sys.exit(main())
