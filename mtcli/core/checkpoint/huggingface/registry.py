"""The families that are read and written, and which of them a model belongs to."""

from mtcli.core.checkpoint.huggingface.family import Family
from mtcli.core.checkpoint.huggingface.gpt2 import GPT2
from mtcli.core.checkpoint.huggingface.llama import LLAMA
from mtcli.core.checkpoint.huggingface.mistral import MISTRAL
from mtcli.core.checkpoint.huggingface.mixtral import MIXTRAL
from mtcli.core.checkpoint.huggingface.qwen2 import QWEN2
from mtcli.core.checkpoint.huggingface.qwen2_moe import QWEN2_MOE

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA, MISTRAL, QWEN2, MIXTRAL, QWEN2_MOE)
BY_TYPE = {family.model_type: family for family in FAMILIES}
