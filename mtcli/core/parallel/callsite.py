"""Where a rank is in the code, in words: `tp.py:63 in forward`."""

import os
import sys
from pathlib import Path
from types import FrameType

import torch

HERE = Path(__file__).parent
PACKAGE = str(HERE.parents[1]) + os.sep
# What stands between a collective and the code that wanted it: these, and all of torch.
_FILES = ("ledger", "collectives", "agreement", "wire", "shared_memory")
_BETWEEN = {str(HERE / f"{name}.py") for name in _FILES}
_TORCH = os.path.dirname(torch.__file__) + os.sep


def caller(frame: FrameType | None) -> str:
    """The innermost frame that is neither torch's nor of the collectives: who called one.

    In a thread of autograd's the collective itself, as nothing else is on its stack.
    """
    innermost = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _BETWEEN and not name.startswith(_TORCH):
            return _words(frame)
        frame = frame.f_back
    return _words(innermost)


def place(thread: int) -> str:
    """Where a thread of this process is: its innermost frame in this package, or at all."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return _words(frame or innermost)


def calling(thread: int) -> str:
    """Where a thread that waits in a collective has called it."""
    return caller(sys._current_frames().get(thread))


def _words(frame: FrameType | None) -> str:
    if frame is None:
        return "the end of its thread"
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
