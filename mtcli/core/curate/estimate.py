"""Estimates a run's documents, bytes, memory and disk from a sample of the input.

Memory is the size of the arrays that a phase holds, per document and per worker.
"""

from itertools import islice
from typing import Any

from mtcli.core.config.errors import wrong
from mtcli.core.curate.documents import BadRecord, CorpusFiles, Document, blocks_of
from mtcli.core.curate.minhash import bands_of
from mtcli.core.curate.reading import Reader
from mtcli.core.curate.request import CurateRequest, find_corpora

SAMPLED_BLOCKS = 8
SAMPLED_DOCUMENTS = 5000  # of a block
PROCESS_BYTES = 140 << 20  # a process with its libraries and a batch's arrays: 120 were measured
COMPILED_BYTES = 140 << 20  # numba and its loops, compiled in a first run, for two of the stages
FORKED_BYTES = 80 << 20  # a worker, which shares its libraries with the process that forked it
FINAL_BYTES = 64  # per document in the process that decides: hashes, orders, routes
BAND_BYTES = 40  # per document in each worker that sorts a band
KEY_BYTES = 40  # of an id and its offset
RATIO = 0.45  # of a shard to its lines, under Zstandard


def estimate(request: CurateRequest) -> dict[str, Any]:
    """Estimates a run from a sample of each corpus."""
    corpora = find_corpora(request)
    samples = (_sample(request, files) for files in corpora if files)
    documents, text = map(sum, zip(*samples, strict=True))
    stages, per_document = request.config.ordered, KEY_BYTES + 40
    if "exact" in stages:
        per_document += 16
    if "fuzzy" in stages:
        per_document += request.config.fuzzy.hashes + 8 * bands_of(request.config.fuzzy)[0]
    workers = request.workers
    # Its lines one by one, together, and compressed.
    shard = int((2 + RATIO) * min(request.config.shard_mb * 1_000_000, text))
    phase = max(BAND_BYTES * documents if "fuzzy" in stages else 0, shard)
    compiled = 0 if {"fuzzy", "rules"}.isdisjoint(stages) else COMPILED_BYTES
    deciding = PROCESS_BYTES + compiled + FINAL_BYTES * documents
    working = workers * (FORKED_BYTES + phase) if workers > 1 else phase
    return {
        "files": len(corpora.new.sources),
        "input_bytes": corpora.new.size,
        "documents": documents,
        "text_bytes": text,
        "stages": list(stages),
        "workers": workers,
        "memory_bytes": deciding + working,
        "disk_bytes": int(text * (1 + RATIO) + per_document * documents),
        "output_bytes": int(text * RATIO),
    }


def _sample(request: CurateRequest, files: CorpusFiles) -> tuple[int, int]:
    """Counts (documents, bytes of text) of a corpus by extrapolation from blocks spread over it."""
    blocks = blocks_of(files, request.split_on_blank)
    html = "extract" in request.config.ordered
    reader = Reader.of(files, request.text_key, request.split_on_blank, html=html)
    step = -(-len(blocks) // SAMPLED_BLOCKS)
    documents = text = 0
    consumed = 0.0

    def count(size: float) -> None:
        nonlocal consumed
        consumed += size

    for block in blocks[::step]:
        for piece in block.pieces:
            for item in islice(reader.read(piece, count), SAMPLED_DOCUMENTS):
                if isinstance(item, BadRecord) and not request.skip_bad:
                    raise wrong(str(item), "--skip-bad leaves such records out; or mend this one")
                if isinstance(item, Document):
                    documents += 1
                    text += item.size
    scale = files.size / consumed if consumed else 0.0
    return round(documents * scale), round(text * scale)
