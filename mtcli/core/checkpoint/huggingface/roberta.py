"""Maps RoBERTa: BERT whose positions follow the padding id, so that the first token's is row
pad_token_id + 1 of their table, with the heads that transformers gives it.

XLM-R's and others' classes are of another model_type.
"""

from dataclasses import replace

from mtcli.core.checkpoint.huggingface.bert import (
    BERT,
    LAYER,
    POST_NORMS,
    classifiers,
    dense,
    embeddings,
)
from mtcli.core.checkpoint.huggingface.family import Table, same
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import shown

ROWS, PADDING = "max_position_embeddings", "pad_token_id"


def read_positions(theirs: Table) -> Table:
    """Reads the rows of the table of positions: those ahead of the first token's, and the rest.

    Raises MtcliError where none is left.
    """
    rows, padding = theirs.get(ROWS), theirs.get(PADDING)
    if type(padding) is not int or padding < 0:
        raise wrong(f"{PADDING}={shown(padding)} is no id, and positions follow it", "1")
    if type(rows) is not int or rows <= padding + 1:
        message = f"{ROWS}={shown(rows)} with {PADDING}={padding}: no row is a token's"
        raise wrong(message, f"{padding + 2} or more")
    return {"position_offset": padding + 1, "max_seq_len": rows - padding - 1}


def write_positions(model: ModelConfig) -> Table:
    """Writes what `read_positions` reads."""
    return {ROWS: model.position_offset + model.max_seq_len, PADDING: model.position_offset - 1}


TRUNK = embeddings("roberta") | dense("embedding_norm", "roberta.embeddings.LayerNorm")
MASKED = {
    "head.bias": same("lm_head.bias"),
    **dense("head.transform", "lm_head.dense"),
    **dense("head.norm", "lm_head.layer_norm"),
}
CLASSES = {
    **dense("head.pooler", "classifier.dense"),
    **dense("head.classifier", "classifier.out_proj"),
}
CHOICES = dense("head.pooler", "roberta.pooler.dense") | dense("head.classifier", "classifier")

ROBERTA = replace(
    BERT,
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    base="roberta.",
    block="roberta.encoder.layer.{layer}.",
    fields=tuple(
        field._replace(values={"gelu": "gelu"}) if field.ours == "activation" else field
        for field in BERT.fields
        if field.ours != "max_seq_len"
    ),
    defaults={**BERT.defaults, "vocab_size": 50265, PADDING: 1},
    constants={**BERT.constants, "sentence_order": False},
    outer=TRUNK | MASKED,
    inner=LAYER | POST_NORMS,
    # published folders have a pooler that no head reads
    ignored=(
        r"roberta\.embeddings\.position_ids",
        r"roberta\.pooler\.dense\.(weight|bias)",
        r"lm_head\.decoder\.bias",
    ),
    read_more=read_positions,
    write_more=write_positions,
    tied_head="lm_head.decoder.weight",
    told_by="",
    older_names=(),
)
ROBERTAS = (ROBERTA, *classifiers(ROBERTA, TRUNK | CLASSES, TRUNK | CHOICES))
