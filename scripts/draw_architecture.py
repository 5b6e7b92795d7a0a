"""Draws docs/images/architecture.svg from the import statements of the package.

python scripts/draw_architecture.py          # after an import between folders has come or gone
python scripts/draw_architecture.py --check  # exit 1 where the picture is not current

A box is a folder, an arrow says "imports". Imports inside functions and under TYPE_CHECKING count.
An arrow that follows from two others is left out (transitive reduction), so every import goes down
along a path of arrows. A box lies one layer below the lowest box that imports it.
"""

import ast
import sys
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
# Pixels. A layer is a row of boxes; an arrow that passes a layer bends in a lane of its own.
BOX_WIDTH, BOX_HEIGHT, BOX_GAP, LAYER_HEIGHT, LANE_WIDTH, MARGIN = 116, 34, 48, 76, 44, 28
SWEEPS = 6
KEYS = ("an arrow points at what is imported", "blue imports torch or triton, green neither")

Graph = dict[str, set[str]]
Edge = tuple[str, str]
Point = tuple[float, float]


def main() -> None:
    """Writes the picture, or with --check says whether it is current."""
    current = picture()
    if "--check" in sys.argv[1:]:
        stale = f"error: {PICTURE} is not current\n\nhint: run {__file__}"
        sys.exit(0 if PICTURE.read_text() == current else stale)
    PICTURE.write_text(current)


def picture() -> str:
    """The picture as SVG."""
    graph, with_torch = folder_imports()
    edges = reduced(graph)
    layers = layers_of(graph)
    lanes = [list(layer) for layer in layers]
    paths = {edge: _path(edge, layers, lanes) for edge in edges}
    order(lanes, paths)
    return _svg(positions(lanes), paths, graph, with_torch)


def folder_imports() -> tuple[Graph, set[str]]:
    """(which folders each folder imports, the folders that import torch or triton)."""
    folders = {p.parent.name for p in (ROOT / "mtcli").glob("core/*/__init__.py")}
    folders |= {p.parent.name for p in (ROOT / "mtcli").glob("*/__init__.py")} - {"core"}

    def folder(module: str) -> str:
        parts = [part for part in module.split(".")[1:] if part != "core"]
        return parts[0] if parts and parts[0] in folders else "cli"

    graph: Graph = {name: set() for name in (*sorted(folders), "cli")}
    with_torch: set[str] = set()
    for path in sorted((ROOT / "mtcli").rglob("*.py")):
        here = folder(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name in _imported(path):
            if name.split(".")[0] in ("torch", "triton"):
                with_torch.add(here)
            elif name.startswith("mtcli.") and folder(name) != here:
                graph[here].add(folder(name))
    return graph, with_torch


def _imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def reduced(graph: Graph) -> list[Edge]:
    """The edges that do not follow from others."""

    def reach(node: str) -> set[str]:
        return graph[node].union(*map(reach, graph[node]))

    edges = []
    for node, needs in sorted(graph.items()):
        implied = set().union(*map(reach, needs))
        edges += [(node, need) for need in sorted(needs - implied)]
    return edges


def layers_of(graph: Graph) -> list[list[str]]:
    """The folders by the longest path of imports that leads to them."""
    users: defaultdict[str, set[str]] = defaultdict(set)
    for node, needs in graph.items():
        for need in needs:
            users[need].add(node)

    def depth(node: str) -> int:
        return max((1 + depth(user) for user in users[node]), default=0)

    depths = {node: depth(node) for node in sorted(graph)}
    return [[n for n in depths if depths[n] == d] for d in range(max(depths.values()) + 1)]


def _path(edge: Edge, layers: list[list[str]], lanes: list[list[str]]) -> list[str]:
    """The nodes along an edge: its ends, and a bend in each layer between, added to `lanes`."""
    first, last = (next(i for i, layer in enumerate(layers) if end in layer) for end in edge)
    bends = [f"{edge[0]}>{edge[1]}@{depth}" for depth in range(first + 1, last)]
    for depth, bend in enumerate(bends, start=first + 1):
        lanes[depth].append(bend)
    return [edge[0], *bends, edge[1]]


def order(lanes: list[list[str]], paths: dict[Edge, list[str]]) -> None:
    """Sorts each layer by the mean place of its neighbours; keeps the order that crosses least."""
    hops = sorted({hop for path in paths.values() for hop in pairwise(path)})
    down = [(depth, depth - 1) for depth in range(1, len(lanes))]
    up = [(depth, depth + 1) for depth in reversed(range(len(lanes) - 1))]
    best = [list(layer) for layer in lanes]
    for depth, other in (down + up) * SWEEPS:
        place = _places(lanes)
        mean = {}
        for node in lanes[depth]:
            ends = [a if b == node else b for a, b in hops if node in (a, b)]
            near = [place[end] for end in ends if end in lanes[other]]
            mean[node] = sum(near) / len(near) if near else place[node]
        lanes[depth].sort(key=mean.__getitem__)
        if _crossings(lanes, hops) < _crossings(best, hops):
            best = [list(layer) for layer in lanes]
    lanes[:] = best


def _places(lanes: list[list[str]]) -> dict[str, float]:
    """How far right in its layer each node is, from 0 to 1."""
    return {node: (i + 0.5) / len(layer) for layer in lanes for i, node in enumerate(layer)}


def _crossings(lanes: list[list[str]], hops: list[Edge]) -> int:
    place = _places(lanes)
    depth = {node: i for i, layer in enumerate(lanes) for node in layer}
    return sum(
        depth[a] == depth[c] and (place[a] - place[c]) * (place[b] - place[d]) < 0
        for (a, b), (c, d) in combinations(hops, 2)
    )


def positions(lanes: list[list[str]]) -> dict[str, Point]:
    """The centre of every box and bend; each layer is centred."""

    def width(node: str) -> int:
        return LANE_WIDTH if "@" in node else BOX_WIDTH + BOX_GAP

    widest = max(sum(map(width, layer)) for layer in lanes)
    centres = {}
    for depth, layer in enumerate(lanes):
        x = MARGIN + (widest - sum(map(width, layer))) / 2
        for node in layer:
            centres[node] = (x + width(node) / 2, MARGIN + BOX_HEIGHT / 2 + depth * LAYER_HEIGHT)
            x += width(node)
    return centres


def _svg(
    centres: dict[str, Point], paths: dict[Edge, list[str]], graph: Graph, with_torch: set[str]
) -> str:
    xs = [centres[node][0] for node in graph]
    right, centre = max(xs) + BOX_WIDTH / 2 + MARGIN, (min(xs) + max(xs)) / 2
    bottom = max(y for _, y in centres.values()) + BOX_HEIGHT / 2 + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {bottom + 40:.0f}" '
        f'width="{right:.0f}" font-family="sans-serif" font-size="15" text-anchor="middle">',
        "<title>What each folder of mtcli imports</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#64748b"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    half = BOX_HEIGHT / 2
    for path in paths.values():
        points = [centres[node] for node in path]
        curve = f"M{points[0][0]:.0f} {points[0][1] + half:.0f}"
        for (x0, y0), (x1, y1) in pairwise(points):
            begin, end = y0 + half, y1 - half
            middle = (begin + end) / 2
            curve += f" C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {end:.0f}"
            if (x1, y1) != points[-1]:
                curve += f" V{y1 + half:.0f}"  # straight past the boxes of the layer
        stroke = 'fill="none" stroke="#64748b" stroke-width="1.5" marker-end="url(#head)"'
        lines.append(f'<path d="{curve}" {stroke}/>')
    for node in sorted(graph):
        x, y = centres[node]
        fill, stroke = ("#dbeafe", "#2563eb") if node in with_torch else ("#dcfce7", "#15803d")
        lines.append(
            f'<rect x="{x - BOX_WIDTH / 2:.0f}" y="{y - BOX_HEIGHT / 2:.0f}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" fill="#0f172a">{node}</text>'
        )
    for row, key in enumerate(KEYS):
        place = f'x="{centre:.0f}" y="{bottom + 18 * row:.0f}"'
        lines.append(f'<text {place} font-size="13" fill="#475569">{key}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
