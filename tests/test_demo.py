"""The demo's own parts; `make demo` runs the whole."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "demo.py"


def test_there_is_text_to_hold_out(monkeypatch):
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.chdir(SCRIPT.parent.parent)
    assert len(demo.held_out_text()) > 10_000
