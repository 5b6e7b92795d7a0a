"""Private words that the field's terms replaced, and where they stand.

Names are split into words (`GraphedPipeline`, `taped_ops`) and held to all of RETIRED; docstrings,
comments and pages of docs to those that are no plain English besides.

python tests/words.py           # how often each word stands where, by folder
python tests/words.py piece     # each place of one word
"""

import ast
import functools
import re
import sys
from collections import Counter

from sources import FUSED, ROOT, SOURCES, nodes

PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

# Retired word -> the field's term. These are looked for in names and in prose.
RETIRED = {
    "rectangle": "box",
    "slab": "box, or chunk of a box",
    "region": "box",
    "piece": "shard, box or chunk",
    "ledger": "flight recorder; record of consumed samples",
    "wire": "transport",
    "agreement": "consistency check",
    "alarm": "watchdog",
    "taped": "memory model",
    "foreign": "untrusted",
    "graphed": "CUDA graphs",
    "attribution": "time breakdown",
    "remake": "recompute",
    "hollow": "fake",
    "give back": "all-gather, return, free",
    "let go": "free, release",
    "hand on": "send, pass",
}
# Of names alone: in prose they are plain English, or the field's word for something else.
RETIRED_NAMES = {
    "feed": "loader",
    "seen": "attention mask",
    "beside": "compare: measured vs planned",
    "track": "Chrome trace",
    "product": "GEMM",
    "choices": "autotune table",
    "hop": "p2p",
    "cut": "shard, sharding",
    "whole": "replicated, global, full",
    "place": "placement, coordinates, box",
    "held": "saved, alive, shards",
}
SHARDED = (
    "checkpoint",
    "convert",
    "mesh",
    "model",
    "optim",
    "parallel",
    "plan",
    "sync",
    "training",
)
# The folders where a word is a private one, where it is plain English elsewhere.
ONLY_IN = {
    "piece": ("checkpoint", "convert", "kernels", "mesh", "model", "parallel", "plan", "training"),
    "seen": ("kernels", "model", "parallel", "plan"),
    "beside": ("profile",),
    "agreement": ("parallel",),
    "cut": SHARDED,  # a tokenizer cuts words, and a block of work is cut out of a file
    "whole": SHARDED,
    "place": SHARDED,
    "held": SHARDED,
    "choices": ("kernels",),
    "hop": ("parallel", "profile", "schedule"),  # a ring's hop in plan is the field's word
}
IRREGULAR = {
    "give back": r"g(?:ive|ives|iven|ave|iving)[\s_]back",
    "let go": r"let(?:s|ting)?[\s_]go(?:es)?",
    "hand on": r"hand(?:s|ed|ing)?[\s_]on\b(?! hand)",
    "choices": "choices",
    "cut": "cuts?",
    "held": "held",
    "taped": "taped",
    "beside": "beside",
}
# Where a retired word is right: (word, the text around it) -> why.
ALLOWED = {
    ("piece", r'"pieces"|`pieces`|\bpieces: |pieces \(file'): "a key of manifest.json",
    ("region", r"parallel regions?"): "Megatron's term for what lies between f and g",
    ("feed", r"feed.?forward"): "the field's word",
    ("ledger", r"`samples`"): "a key of manifest.json",
}


def words_of(name):
    """The words of an identifier, lowercase: GraphedPipeline -> "graphed pipeline"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name).lower().strip()


def room(path):
    """The folder that a file belongs to: `plan` of mtcli/core/plan/search.py."""
    parts = [p for p in path.relative_to(ROOT).parts[:-1] if p not in ("mtcli", "core")]
    return parts[0] if parts else "top"


@functools.cache
def names_in(path):
    """The identifiers that a file defines, each once: itself, classes, functions, arguments, fields
    and variables."""
    names = {path.stem: 1}
    for node in nodes(path):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.setdefault(node.name, line)
        elif isinstance(node, ast.arg):
            names.setdefault(node.arg, line)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, line)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.attr, line)
    return [(words_of(name), line) for name, line in names.items()]


@functools.cache
def prose_in(path):
    """The docstrings of a file and its text from a # on, or a page, each with its first line."""
    text = path.read_text()
    if path.suffix == ".md":
        return [(text, 1)]
    found = [
        (node.value.value, node.lineno)
        for node in nodes(path)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    lines = enumerate(text.splitlines(), start=1)
    return found + [(line[line.index("#") :], number) for number, line in lines if "#" in line]


def places(word):
    """(path, line, text around it) wherever a retired word stands, but for where it is allowed."""
    pattern = re.compile(rf"\b{IRREGULAR.get(word, word + r'(?:s|es)?')}\b", re.IGNORECASE)
    allowed = [re.compile(text, re.IGNORECASE) for retired, text in ALLOWED if retired == word]
    found = []
    for path in [*SOURCES, *FUSED, *(PAGES if word in RETIRED else [])]:
        if path.suffix == ".py" and room(path) not in ONLY_IN.get(word, (room(path),)):
            continue
        texts = names_in(path) if path.suffix == ".py" else []
        texts = [*texts, *(prose_in(path) if word in RETIRED else [])]
        for text, line in texts:
            for match in pattern.finditer(text):
                around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
                if not any(it.search(around) for it in allowed):
                    line_of = line + text[: match.start()].count("\n")
                    found.append((path.relative_to(ROOT), line_of, around))
    return found


if __name__ == "__main__":
    for retired in sys.argv[1:] or [*RETIRED, *RETIRED_NAMES]:
        here = places(retired)
        if sys.argv[1:]:
            print(*(f"{path}:{line}: {text}" for path, line, text in here), sep="\n")
        by_room = Counter(room(ROOT / path) for path, _, _ in here)
        print(f"{retired} {len(here)}:", *(f"{room} {n}" for room, n in by_room.most_common()))
