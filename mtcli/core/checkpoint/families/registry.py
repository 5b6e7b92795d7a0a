"""The families that are read and written, and which of them a model belongs to."""

from mtcli.core.checkpoint.families.family import Family
from mtcli.core.checkpoint.families.gpt2 import GPT2
from mtcli.core.checkpoint.families.llama import LLAMA
from mtcli.core.checkpoint.families.mistral import MISTRAL
from mtcli.core.checkpoint.families.mixtral import MIXTRAL
from mtcli.core.checkpoint.families.qwen2 import QWEN2
from mtcli.core.checkpoint.families.qwen2_moe import QWEN2_MOE

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA, MISTRAL, QWEN2, MIXTRAL, QWEN2_MOE)
BY_TYPE = {family.model_type: family for family in FAMILIES}
