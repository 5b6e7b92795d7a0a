"""Imports torch without collecting garbage."""

import gc
import sys


def import_torch() -> None:
    """Imports torch where nothing has yet. No garbage is collected meanwhile, and later collections
    pass over its 170,000 objects, which stay: looking at them took 0.2 s of a run's start."""
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
