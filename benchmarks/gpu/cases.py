"""What bench_step.py measures: models with their batches, and who is beside us, by importance.

Shapes come from the presets. A model that no single device holds with its optimizer is measured by
its layers: two depths, whose difference is what each layer more costs. Every table that this gives
says so.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtcli.core.config.loading import config_of, read_table
from mtcli.core.config.rules import require
from mtcli.core.config.schema import RunConfig

OURS = "mtcli"
PACKAGES = {"hf": "transformers", "hf-bf16": "transformers", "hf-liger": "liger_kernel"}
PACKAGES |= {"torchtitan": "torchtitan"}
LIFELONG = 10**6  # steps of the configs: longer than any measurement


@dataclass(frozen=True)
class Case:
    """A model and its batch: `batch` sequences of `seq_len` tokens in each of some micro-batches.

    `goal` is the model FLOPs utilisation to reach. `steps` are those of a turn. A device needs
    memory of `gib`.
    """

    name: str
    preset: str
    batch: int
    seq_len: int
    goal: float
    steps: int = 1
    settings: tuple[str, ...] = ()
    layers: int | None = None  # instead of the preset's
    rivals: tuple[str, ...] = ("hf", "hf-bf16")
    rank: int = 0  # of importance: smaller is measured earlier
    micro_batches: int = 8  # of a step
    gib: float = 0.0

    def config(self, settings: Sequence[str] = (), tiny: bool = False) -> RunConfig:
        """The run config; `tiny` shrinks every size. Raises MtcliError for settings that it lacks.

        The optimizer is the one of bench_train.py, at a constant rate.
        """
        batch, seq_len, number = (2, 32, 2) if tiny else self.sizes
        table = {
            "model": read_table(self.preset)["model"] | {"max_seq_len": seq_len},
            "batch": {
                "seq_len": seq_len,
                "micro_batch_size": batch,
                "global_batch_size": batch * number,
            },
            "optimizer": {"lr": 1e-4, "schedule": "constant"},
            "train": {"steps": LIFELONG},
        }
        table["train"] |= {"precision": "fp32"} if tiny else {"precision": "bf16", "device": "cuda"}
        layers = [f"model.num_layers={self.layers}"] if self.layers else []
        small = _small(table["model"], self.layers) if tiny else []
        config = config_of(table, [*self.settings, *layers, *small, *settings])
        require(config, 1)
        return config

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences of a micro-batch, their tokens, and micro-batches."""
        return self.batch, self.seq_len, self.micro_batches

    def whole(self) -> RunConfig:
        """The config of the preset's own depth."""
        return replace(self, layers=None).config()


def _small(model: dict, layers: int | None) -> list[str]:
    """Settings that make any of the models quick to run in the tests."""
    sizes = {"num_layers": layers or 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 512}
    if "num_kv_heads" in model:
        sizes |= {"num_kv_heads": 2, "ffn_hidden_size": 192}
    if model["architecture"] == "mixtral":
        sizes |= {"num_experts": 4, "top_k": 2, "head_dim": 16}
    if model["architecture"] == "qwen2-moe":
        sizes |= {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 32}
        sizes |= {"shared_expert_ffn_hidden_size": 48}
    return [f"model.{field}={value}" for field, value in sizes.items()]


_GPT = ("hf", "hf-bf16", "plain")
_LLAMA = ("hf", "hf-bf16", "hf-liger", "torchtitan")
_MIXTRAL = ("hf", "hf-bf16", "hf-liger")
_XL = ("model.num_layers=24", "model.hidden_size=2048", "model.num_heads=16")  # arXiv:2005.14165
_FINE = ("model.num_experts=128", "model.top_k=8", "model.hidden_size=2048", "model.num_kv_heads=4")
_FINE += ("model.ffn_hidden_size=768", "model.head_dim=128")  # Qwen3-30B-A3B's layers
_LITE = ("model.hidden_size=2048", "model.num_heads=16", "model.num_kv_heads=16")
_LITE += ("model.top_k=6", "model.moe_ffn_hidden_size=1408", "model.vocab_size=102400")
_LITE += ("model.shared_expert_ffn_hidden_size=2816",)  # DeepSeek-V2-Lite's experts, two shared:
# arXiv:2405.04434, appendix B; attention of 16 plain heads, a gate of the shared ones as Qwen2's

# fmt: off
CASES = {case.name: case for case in (
    Case("gpt2-124m", "gpt2-124m", 64, 1024, 0.45, steps=2, rivals=_GPT),
    Case("llama-1b", "tinyllama-1.1b", 8, 2048, 0.55, rivals=_LLAMA),
    Case("gpt-1.3b", "gpt2-1.5b", 16, 1024, 0.55, settings=_XL, rivals=_GPT),
    Case("llama-8b/6", "llama-3.1-8b", 2, 4096, 0.52, layers=6, rivals=_LLAMA),
    Case("mixtral-8x7b/2", "mixtral-8x7b", 2, 4096, 0.50, layers=2, rivals=_MIXTRAL),
    Case("qwen2-57b/1", "qwen2-57b-a14b", 2, 4096, 0.40, layers=1),
    Case("llama-8b/2", "llama-3.1-8b", 2, 4096, 0.52, layers=2, rivals=_LLAMA, rank=1),
    Case("mixtral-8x7b/1", "mixtral-8x7b", 2, 4096, 0.50, layers=1, rivals=_MIXTRAL, rank=1),
    Case("qwen2-57b/2", "qwen2-57b-a14b", 2, 4096, 0.40, layers=2, rank=1, gib=100),
    Case("gpt-2.7b", "gpt3-2.7b", 8, 2048, 0.55, rivals=_GPT, rank=1),
    Case("deepseek-lite/2", "qwen2-57b-a14b", 4, 4096, 0.40, settings=_LITE, layers=2, rank=1),
    Case("deepseek-lite/4", "qwen2-57b-a14b", 4, 4096, 0.40, settings=_LITE, layers=4, rank=2),
    Case("gpt2-355m", "gpt2-355m", 32, 1024, 0.48, rivals=_GPT, rank=2),
    Case("fine-moe/2", "mixtral-8x7b", 4, 4096, 0.40, settings=_FINE, layers=2, rank=2),
    Case("fine-moe/4", "mixtral-8x7b", 4, 4096, 0.40, settings=_FINE, layers=4, rank=2),
)}
# fmt: on

# Our own step with other settings, beside our step without them. What the config refuses is left
# out with the config's own words.
VARIANTS: dict[str, tuple[str, ...]] = {
    "mtcli-compile": ("train.compile=true",),
    "mtcli-graphs": ("train.compile=true", "train.cuda_graphs=true"),
    "mtcli-fp8": ("train.precision=fp8",),
    "mtcli-fp8-compile": ("train.precision=fp8", "train.compile=true"),
    "mtcli-fp8-blockwise": ("train.precision=fp8", "train.fp8_scaling=blockwise"),
    "mtcli-fp8-tensorwise": ("train.precision=fp8", "train.fp8_scaling=tensorwise"),
}
# What tunes our step comes first.
RANKS = {"mtcli-compile": 0, "mtcli-fp8": 1, "hf": 1, "hf-liger": 2, "plain": 3, "torchtitan": 3}
LATER = 4  # the rank of every other


def pairs(cases: Sequence[str], contenders: Sequence[str]) -> list[tuple[str, str]]:
    """(case, contender) by importance, and those of a case together where they are alike in it."""
    met = [(c, w) for c in cases for w in contenders if w not in _rivals() or w in CASES[c].rivals]
    return sorted(met, key=lambda pair: CASES[pair[0]].rank + RANKS.get(pair[1], LATER))


def contenders() -> tuple[str, ...]:
    """Everyone who is measured beside our step."""
    return (*_rivals(), *VARIANTS)


def missing(contender: str) -> str | None:
    """Why a contender cannot run here, or None."""
    package = PACKAGES.get(contender)
    there = package is None or importlib.util.find_spec(package)
    return None if there else f"{package} is not installed"


def _rivals() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for case in CASES.values() for name in case.rivals))
