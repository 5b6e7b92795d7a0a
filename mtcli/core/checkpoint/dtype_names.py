"""The names of stored tensors' dtypes: ours, those of flags and those of the safetensors format."""

from mtcli.core.config.errors import wrong

# Sizes in bytes of every code that a safetensors header may name; tensors of the codes below this
# table can be read, the others only stepped over (GPT-2's boolean masks, say).
CODE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip

CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(text: str) -> str:
    """Our name of a dtype such as "bf16" or "bfloat16", as flags give it.

    Raises MtcliError that lists the names.
    """
    name = SHORT.get(text, text)
    if name not in CODES:
        raise wrong(f"there is no dtype {text!r}", f"one of {', '.join(SHORT)}", "--dtype")
    return name
