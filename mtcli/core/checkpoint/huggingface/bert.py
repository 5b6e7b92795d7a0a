"""Maps BERT and Megatron-LM's BERT, with the heads that transformers gives them.

BertModel is post-LN: norms follow the residual adds. MegatronBertModel is pre-LN. Their tensors
differ in the names of norms alone.
"""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.family import (
    Family,
    Field,
    RequiredValue,
    Table,
    TensorRule,
    nothing_written,
    same,
    separate_qkv,
)
from mtcli.core.checkpoint.huggingface.gpt2 import GELUS
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown

LABELS = 2  # of a classifier, where config.json does not say


def dense(ours: str, theirs: str) -> dict[str, TensorRule]:
    """Maps a layer's weight and bias."""
    return {f"{ours}.{kind}": same(f"{theirs}.{kind}") for kind in ("weight", "bias")}


def read_labels(theirs: Table) -> Table:
    """Reads the number of classes: `num_labels`, or the entries of `id2label`."""
    names = theirs.get("id2label")
    if names is not None and not isinstance(names, dict):
        raise wrong(f"id2label={shown(names)} is not a table", "a name for each class")
    return {"num_labels": theirs.get("num_labels", LABELS if names is None else len(names))}


def write_labels(model: ModelConfig) -> Table:
    """Writes names of the classes: LABEL_0 and so on."""
    names = [f"LABEL_{i}" for i in range(model.num_labels)]
    ids = {name: i for i, name in enumerate(names)}
    return {"id2label": {str(i): name for name, i in ids.items()}, "label2id": ids}


def embeddings(base: str) -> dict[str, TensorRule]:
    """Maps the tables of tokens, positions and token types."""
    tables = {"embedding": "word", "position_embedding": "position"}
    tables |= {"token_type_embedding": "token_type"}
    return {
        f"{ours}.weight": same(f"{base}.embeddings.{theirs}_embeddings.weight")
        for ours, theirs in tables.items()
    }


LAYER = {
    "attention.qkv.weight": separate_qkv("attention.self.{}.weight", ("query", "key", "value")),
    "attention.qkv.bias": separate_qkv("attention.self.{}.bias", ("query", "key", "value")),
    **dense("attention.out", "attention.output.dense"),
    **dense("mlp.up", "intermediate.dense"),
    **dense("mlp.down", "output.dense"),
}
POST_NORMS = dense("attention_norm", "attention.output.LayerNorm") | dense(
    "mlp_norm", "output.LayerNorm"
)
POST = embeddings("bert") | dense("embedding_norm", "bert.embeddings.LayerNorm")
PRE = embeddings("bert") | dense("final_norm", "bert.encoder.ln")

MASKED = {
    "head.bias": same("cls.predictions.bias"),
    **dense("head.transform", "cls.predictions.transform.dense"),
    **dense("head.norm", "cls.predictions.transform.LayerNorm"),
}
POOLER = dense("head.pooler", "bert.pooler.dense")
ORDER = POOLER | dense("head.sentence_order", "cls.seq_relationship")
CLASSIFIER = POOLER | dense("head.classifier", "classifier")

CONSTANTS: dict[str, str | bool] = {
    "architecture": "bert",
    "norm": "layernorm",
    "position": "learned",
}
CONSTANTS |= {"bias": True, "qkv_bias": True, "causal": False}

BERT = Family(
    model_type="bert",
    architecture="BertForPreTraining",
    base="bert.",
    block="bert.encoder.layer.{layer}.",
    fields=(
        Field("num_layers", "num_hidden_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_heads", "num_attention_heads"),
        Field("ffn_hidden_size", "intermediate_size"),
        Field("vocab_size", "vocab_size"),
        Field("max_seq_len", "max_position_embeddings"),
        Field("token_types", "type_vocab_size", 2),
        Field("norm_eps", "layer_norm_eps", 1e-12),
        Field("activation", "hidden_act", "gelu", GELUS),
        Field("dropout", "hidden_dropout_prob", 0.1),
        Field("attention_dropout", "attention_probs_dropout_prob", 0.1),
        Field("init_std", "initializer_range", 0.02),
    ),
    defaults={"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    | {"intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512},
    constants=CONSTANTS
    | {"norm_order": "post", "head": "mlm", "sentence_order": True, "tie_embeddings": True},
    required=(
        RequiredValue("position_embedding_type", (None, "absolute")),
        RequiredValue("is_decoder", (None, False)),
        RequiredValue("add_cross_attention", (None, False)),
        RequiredValue("tie_word_embeddings", (None, True)),
    ),
    outer=POST | MASKED | ORDER,
    inner=LAYER | POST_NORMS,
    ignored=(
        r"bert\.embeddings\.position_ids",
        r"cls\.predictions\.decoder\.bias",
    ),
    read_more=lambda theirs: {},
    write_more=nothing_written,
    tied_head="cls.predictions.decoder.weight",
    told_by="cls.seq_relationship.weight",
    older_names=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
)


def with_heads(pre_training: Family, trunk: dict[str, TensorRule]) -> tuple[Family, ...]:
    """Builds a family for each head: pre-training, masked tokens alone, and the two classifiers.

    `trunk` has the rules of parameters outside of blocks and head.
    """
    masked = replace(
        pre_training,
        architecture=pre_training.architecture.replace("ForPreTraining", "ForMaskedLM"),
        told_by="",
        constants={**pre_training.constants, "sentence_order": False},
        outer=trunk | MASKED,
    )
    outer = trunk | CLASSIFIER
    return (pre_training, masked, *classifiers(masked, outer, outer))


def classifiers(
    masked: Family, of_classes: dict[str, TensorRule], of_choices: dict[str, TensorRule]
) -> tuple[Family, Family]:
    """Builds the families that classify sequences and that choose among them, from that of masked
    tokens, with the rules of parameters outside of blocks."""
    name = masked.architecture.removesuffix("ForMaskedLM")
    constants = {**masked.constants, "tie_embeddings": False}
    free = tuple(field for field in masked.required if field.theirs != "tie_word_embeddings")
    classes = replace(
        masked,
        architecture=f"{name}ForSequenceClassification",
        constants=constants | {"head": "classification"},
        required=(*free, RequiredValue("problem_type", (None, "single_label_classification"))),
        outer=of_classes,
        read_more=lambda theirs: {**masked.read_more(theirs), **read_labels(theirs)},
        write_more=lambda model: {**masked.write_more(model), **write_labels(model)},
    )
    choices = replace(
        masked,
        architecture=f"{name}ForMultipleChoice",
        constants=constants | {"head": "multiple_choice"},
        required=free,
        outer=of_choices,
    )
    return classes, choices


MEGATRON_BERT = replace(
    BERT,
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    defaults={"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
    | {"intermediate_size": 4096, "vocab_size": 29056, "max_position_embeddings": 512},
    constants={**BERT.constants, "norm_order": "pre"},
    outer=PRE | MASKED | ORDER,
    inner=LAYER | dense("attention_norm", "attention.ln") | dense("mlp_norm", "ln"),
)
BERTS = (*with_heads(BERT, POST), *with_heads(MEGATRON_BERT, PRE))
