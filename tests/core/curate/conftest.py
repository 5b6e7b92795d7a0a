import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

WORDS = re.findall(r"[a-z]{2,}", Path(random.__file__).read_text() * 3)


@pytest.fixture
def prose():
    """Makes texts of words, each other than the last; the same texts in every run."""
    source = random.Random(7)

    def make(num_words=120):
        return " ".join(source.choice(WORDS) + str(source.randrange(900)) for _ in range(num_words))

    return make


@pytest.fixture
def run(tmp_path):
    """Curates in this process, on one worker unless told; returns the output folder."""
    from mtcli.core.curate.config import load_config
    from mtcli.core.curate.engine import LocalEngine
    from mtcli.core.curate.passes import curate
    from mtcli.core.curate.request import CurateRequest

    def run(*inputs, stages=(), name="out", settings=(), engine=None, **options):
        config = load_config(None, [f"stages={list(stages)}", *settings])
        output = tmp_path / name
        request = CurateRequest(tuple(map(str, inputs)), output, config, **options)
        curate(request, engine or LocalEngine(request.workers), lambda _: None)
        return output

    return run
