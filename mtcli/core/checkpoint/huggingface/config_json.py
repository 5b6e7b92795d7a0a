"""Converts config.json of a Hugging Face folder to our ModelConfig and back, by family."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtcli.core.checkpoint.huggingface.bert import BERTS
from mtcli.core.checkpoint.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from mtcli.core.checkpoint.huggingface.falcon import FALCON
from mtcli.core.checkpoint.huggingface.family import Family, Field, Table
from mtcli.core.checkpoint.huggingface.gemma import GEMMA2, GEMMA3
from mtcli.core.checkpoint.huggingface.glm4 import GLM4
from mtcli.core.checkpoint.huggingface.glm4_moe import GLM4_MOE
from mtcli.core.checkpoint.huggingface.gpt2 import GPT2
from mtcli.core.checkpoint.huggingface.gpt_neox import GPT_NEOX
from mtcli.core.checkpoint.huggingface.gpt_oss import GPT_OSS
from mtcli.core.checkpoint.huggingface.granite import GRANITE
from mtcli.core.checkpoint.huggingface.json_files import CONFIG_JSON
from mtcli.core.checkpoint.huggingface.llama import LLAMA
from mtcli.core.checkpoint.huggingface.mistral import MISTRAL, MIXTRAL
from mtcli.core.checkpoint.huggingface.modernbert import MODERNBERT
from mtcli.core.checkpoint.huggingface.multimodal import TEXT, TEXT_MODELS, text_of
from mtcli.core.checkpoint.huggingface.nemotron import NEMOTRON
from mtcli.core.checkpoint.huggingface.olmo import OLMO2, OLMO3
from mtcli.core.checkpoint.huggingface.phi import PHI
from mtcli.core.checkpoint.huggingface.phi3 import PHI3
from mtcli.core.checkpoint.huggingface.qwen2 import QWEN2, QWEN2_MOE
from mtcli.core.checkpoint.huggingface.qwen3 import QWEN3, QWEN3_MOE
from mtcli.core.checkpoint.huggingface.roberta import ROBERTAS
from mtcli.core.checkpoint.huggingface.smollm3 import SMOLLM3
from mtcli.core.checkpoint.huggingface.stablelm import STABLELM
from mtcli.core.checkpoint.huggingface.starcoder2 import STARCODER2
from mtcli.core.checkpoint.huggingface.window import read_window, write_window
from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import refused_value
from mtcli.core.config.model import OF_ROPE, ModelConfig
from mtcli.core.config.synonyms import closest
from mtcli.core.config.untrusted import shown

FAMILIES: tuple[Family, ...] = (
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GRANITE, OLMO2, OLMO3),
    *(SMOLLM3, PHI, PHI3, STABLELM, GLM4, GPT_NEOX, FALCON),
    *(DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE),
    *(GEMMA2, GEMMA3, STARCODER2, NEMOTRON, GPT_OSS),
    *(*BERTS, *ROBERTAS, MODERNBERT),
)
BY_TYPE = {family.model_type: family for family in reversed(FAMILIES)}  # the first head of each
LONG_NAME = 100  # letters, with which no name is compared
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}  # of a family's model_type
# Fields that training alone reads, or that others' defaults follow: a family that lacks them
# still represents the model. Every
# other field counts, so that a new one is refused until a family can say it.
TRAINING = {"architecture", "bias", "dropout", "attention_dropout", "init_std"}
TRAINING |= {"aux_loss_coeff", "sequence_aux_loss_coeff", "z_loss_coeff", "dispatcher"}
TRAINING |= {"capacity_factor", "drop_policy", "drop_scope", "pad_to_capacity"}
TRAINING |= {"router_bias_update_rate"}
EXPERTS = {"top_k", "moe_ffn_hidden_size", "shared_expert_ffn_hidden_size", "shared_expert_gate"}
EXPERTS |= {"normalize_top_k", "router_score", "router_groups", "router_top_groups"}
EXPERTS |= {"router_biases", "first_dense_layers", "routed_scale"}
EXPERTS |= {"expert_bias", "router_bias"}
# Fields by which related models compute something that no family here does. transformers ignores
# some of them in these families and reads others (`is_causal`). Whoever wrote one meant it, so each
# is refused unless its value changes nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "no_rope_layers": (None, []),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "scoring_func": (None, "softmax"),
}
ONES = ("partial_rotary_factor", "logit_scale", "logits_scaling", "embedding_multiplier")
ZEROS: tuple[str, ...] = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_softcap",
    "n_shared_experts",
)
ZEROS += ("num_nextn_predict_layers", "first_k_dense_replace")
ABSENT = ("attention_chunk_size", "attention_multiplier", "query_pre_attn_scalar", "clip_qkv")
UNSUPPORTED |= dict.fromkeys((*ONES, "residual_multiplier", "routed_scaling_factor"), (None, 1.0))
UNSUPPORTED |= dict.fromkeys(ZEROS, (None, 0))
UNSUPPORTED |= dict.fromkeys((*ABSENT, "quantization_config"), (None,))


def family_in(table: Table, path: Path, tensors: Collection[str] = ()) -> Family:
    """Finds the family by a config.json, or by `tensors` of a head where there are any.

    Raises MtcliError that lists the supported ones.
    """
    table = text_of(table, path)
    kind = table.get("model_type")
    kind = OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in BY_TYPE:
        types = (*BY_TYPE, *TEXT_MODELS)
        near = closest(kind, types) if isinstance(kind, str) and len(kind) < LONG_NAME else ""
        hint = f"one of {', '.join(types)}{near}"
        message = f"{path}: model_type={shown(kind)} is not supported"
        if isinstance(text := table.get(TEXT), dict):
            inner = text.get("model_type")
            if isinstance(inner, str) and inner in BY_TYPE:
                hint = f"save its text model alone, model_type={shown(inner)}, as a folder; {hint}"
            else:
                message += f", and neither is its text model, model_type={shown(inner)}"
        raise wrong(message, hint)
    heads = {family.architecture: family for family in FAMILIES if family.model_type == kind}
    by_tensors = [family for family in heads.values() if family.told_by in tensors]
    named = table.get("architectures")
    if by_tensors or len(heads) == 1 or not isinstance(named, list) or not named:
        return (by_tensors or [BY_TYPE[kind]])[0]
    if named[0] not in heads:
        message = f"{path}: architectures={shown(named)} of model_type={shown(kind)}"
        raise wrong(f"{message} is not supported", f"one of {', '.join(heads)}")
    return heads[named[0]]


def model_of(table: Table, path: Path, tensors: Collection[str] = ()) -> ModelConfig:
    """Converts config.json to a ModelConfig. Raises MtcliError with everything that we cannot
    represent."""
    family, table = family_in(table, path, tensors), text_of(table, path)
    problems = _alias_problems(table, family)
    named = {family.aliases.get(name, name): value for name, value in table.items()}
    table = {**family.defaults, **named}
    required = UNSUPPORTED | {entry.theirs: entry.values for entry in family.required}
    for name in (*family.supports, *(field.theirs for field in family.fields)):
        required.pop(name, None)
    problems += [
        _unmet(name, table.get(name), values)
        for name, values in required.items()
        if table.get(name) not in values
    ]
    values: Table = dict(family.constants)
    for field in family.fields:
        problems += _read_field(field, table, values)
    for read in (partial(read_window, rule=family.window), family.read_more):
        try:
            values |= read(table)
        except MtcliError as error:
            problems += error.problems
    if problems:
        raise MtcliError(*(p._replace(message=f"{path}: {p.message}") for p in problems))
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors()
        causes = [detail for detail in details if detail["type"] != "missing"]
        faults = (_fault(path, family, detail) for detail in causes or details)
        raise MtcliError(*faults) from None


def config_to_hf(model: ModelConfig, family: Family) -> Table:
    """Converts a model to a family's config.json, without the fields of tensors and tokenizer.

    Fields that the family cannot express are lost; `family_of` finds one that expresses all.
    """
    table: Table = {"architectures": [family.architecture], "model_type": family.model_type}
    for field in family.fields:
        value = getattr(model, field.written or field.ours)
        if field.values is not None:
            names = [theirs for theirs, ours in field.values.items() if ours == value]
            value = (names or list(field.values))[0]
        table[field.theirs] = value
    for required in family.required:
        if required.values[0] is not None:
            table[required.theirs] = required.values[0]
    return table | write_window(model, family.window) | family.write_more(model)


def family_of(model: ModelConfig) -> Family:
    """Finds the first family whose config.json expresses a model completely.

    Raises MtcliError with the fields that the nearest family cannot express.
    """
    differences = {}
    for family in FAMILIES:
        differences[family.architecture] = lost = _lost(model, family)
        if not lost:
            return family
    near = min(differences, key=lambda name: len(differences[name]))
    kind = next(family.model_type for family in FAMILIES if family.architecture == near)
    message = f"no Hugging Face family has this model: {kind} cannot have "
    hint = f"the families are {', '.join(BY_TYPE)}; a checkpoint of ours holds any model"
    raise wrong(message + ", ".join(differences[near]), hint)


def family_named(name: str, model: ModelConfig) -> Family:
    """Finds the family of a model_type, with the head of a model. Raises MtcliError with the fields
    that it cannot express, or for a name that is none."""
    heads = [family for family in FAMILIES if family.model_type == name]
    if not heads:
        raise wrong(f"{shown(name)} is no family", f"one of {', '.join(BY_TYPE)}", "--family")
    lost = [(_lost(model, family), family) for family in heads]
    least, nearest = min(lost, key=lambda pair: len(pair[0]))
    if not least:
        return nearest
    message = f"{name} cannot have {', '.join(least)}"
    raise wrong(message, "leave --family out, and the first family that can is written", "--family")


def differing_fields(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Lists the fields by which two models compute different functions, with both values."""
    ours, theirs = _function(model), _function(other)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [f"{name} is {ours.get(name)} and {theirs.get(name)}" for name in names]


def _lost(model: ModelConfig, family: Family) -> list[str]:
    ours = _function(model)
    try:
        back = _function(model_of(config_to_hf(model, family), Path(CONFIG_JSON)))
    except MtcliError:  # such as a dense model in a family of experts
        back = {}
    return [f"{name}={ours[name]!r}" for name in ours if ours[name] != back.get(name)]


def _function(model: ModelConfig) -> Table:
    unread = set() if model.position == "rope" else set(OF_ROPE)
    if not model.num_experts:
        unread |= EXPERTS
    elif not model.first_dense_layers:
        unread.add("ffn_hidden_size")
    windows = [model.layer_window(layer) for layer in range(model.num_layers)]
    derived = {"windows": windows, "out_bias": model.has_out_bias, "mlp_bias": model.has_mlp_bias}
    if model.num_experts:
        derived["router_biases"] = model.has_router_biases
    derived |= {"norm_bias": model.has_norm_bias, "embedding_norm": model.has_embedding_norm}
    if model.position == "rope":
        derived["rotating"] = [model.layer_rotates(layer) for layer in range(model.num_layers)]
    if model.attention_scale == model.head_dim**-0.5:
        derived["attention_scale"] = 0.0  # which is the same
    unread |= {"window_pattern", "rope_pattern"}
    return model.model_dump(exclude=TRAINING | unread) | derived


def _alias_problems(table: Table, family: Family) -> list[Problem]:
    """Finds fields whose two names have two values."""
    return [
        Problem(
            f"{alias}={shown(table[alias])} and {name}={shown(table[name])} differ, and are one",
            f"name it {name} alone in config.json",
        )
        for alias, name in family.aliases.items()
        if alias in table and table.get(name, table[alias]) != table[alias]
    ]


def _read_field(field: Field, table: Table, values: Table) -> list[Problem]:
    value = table.get(field.theirs)
    if value is None:
        if field.default is not None:
            values.setdefault(field.ours, field.default)
        return []
    if field.values is not None:
        if not isinstance(value, str) or value not in field.values:
            supported = ", ".join(field.values)
            return [
                Problem(f"{field.theirs}={shown(value)} is not supported", f"one of {supported}")
            ]
        value = field.values[value]
    values[field.ours] = value
    return []


def _unmet(name: str, value: Any, values: tuple[Any, ...]) -> Problem:
    supported = " or ".join(shown(value) for value in values if value is not None)
    hint = f"only {supported} can" if supported else "only a model without it can"
    return Problem(f"{name}={shown(value)} cannot be represented", hint)


def _fault(path: Path, family: Family, detail: Any) -> Problem:
    ours = str(detail["loc"][0]) if detail["loc"] else ""
    names = {field.ours: field.theirs for field in family.fields}
    theirs, read = names.get(ours, ours), detail["input"]
    is_table = isinstance(read, dict)
    if ours == "head_dim" and is_table and {"num_heads", "hidden_size"} <= read.keys():
        parts = (f"{names[name]}={read[name]}" for name in ("num_heads", "hidden_size"))
        message = f"{path}: {' does not divide '.join(parts)}"
        return Problem(message, "is it the config.json of the weights?")
    if detail["type"] == "missing":
        return Problem(f"{path} has no {theirs}", "is it the config.json of the weights?")
    problem = refused_value(ModelConfig, detail)
    return Problem(f"{path}: {theirs}: {problem.message}", problem.hint)
