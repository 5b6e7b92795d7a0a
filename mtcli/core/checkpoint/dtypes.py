"""The dtypes of stored tensors: our names, torch's and those of the safetensors format."""

import torch

from mtcli.core.spec.errors import wrong

# Sizes in bytes of every code that a safetensors header may name; tensors of the codes below this
# table can be read, the others only stepped over (GPT-2's boolean masks, say).
CODE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


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


def parse_dtype(text: str) -> torch.dtype:
    """The dtype of a name such as "bf16" or "bfloat16", as flags give it.

    Raises MtcliError that lists the names.
    """
    name = SHORT.get(text, text)
    if name not in DTYPES:
        raise wrong(f"there is no dtype {text!r}", f"one of {', '.join(SHORT)}", "--dtype")
    return DTYPES[name]
