"""The dtypes of stored tensors as torch's; their names are in `dtype_names.py`."""

import torch

from mtcli.core.checkpoint.dtype_names import CODES
from mtcli.core.config.errors import wrong

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of a torch dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def code_of(dtype: torch.dtype) -> str:
    """The safetensors code of a dtype that checkpoints hold.

    Raises MtcliError for a dtype that they do not hold.
    """
    name = dtype_name(dtype)
    if name not in CODES:
        raise wrong(f"a checkpoint cannot hold {name} tensors", f"one of {', '.join(CODES)}")
    return CODES[name]


def dtype_of_code(code: str) -> torch.dtype | None:
    """The torch dtype of a safetensors code, or None where checkpoints do not hold it."""
    for name, known in CODES.items():
        if known == code:
            return DTYPES[name]
    return None
