"""BERT and Megatron-LM's BERT with every head: transformers' logits and losses, its bytes back."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import ALONE, assert_same_bytes

from mtcli.core.checkpoint.huggingface.config_json import config_to_hf, family_of, model_of
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.config.errors import MtcliError
from mtcli.core.convert.layout import parse_layout
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.data.bert.row_format import EncoderRows, Segments, lay_out
from mtcli.core.data.bert.special_tokens import SpecialTokens
from mtcli.core.inference.bert_heads import head_outputs
from mtcli.core.inference.model import open_inference_model

HEADS = ("PreTraining", "MaskedLM", "SequenceClassification", "MultipleChoice")
CASES = [(kind, head) for kind in ("Bert", "MegatronBert") for head in HEADS]
CASES += [("Roberta", head) for head in HEADS[1:]]
PADDING = 1  # RoBERTa's id, which is in no row but at its end
S, VOCAB = 12, 53


def theirs(kind, head, folder, **others):
    """A random model of transformers, none of whose parameters is zeros or ones, in a folder."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB,
        hidden_size=21,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=18,
        max_position_embeddings=19,
        **{"type_vocab_size": 2} | others,
        **({"num_labels": 5} if head == "SequenceClassification" else {}),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}For{head}")(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return model


def packed(head):
    """(two rows of two sequences each, of 7 and 5 tokens, the four sequences apart)."""
    random = np.random.default_rng(3)
    tokens, types = random.integers(2, VOCAB, (2, S)), random.integers(0, 2, (2, S))
    documents = np.tile((np.arange(S) >= 7).astype(np.int32), (2, 1))
    weights = (random.random((2, S)) < 0.4).astype(np.float32)
    labels = np.array([2, 0]) if head == "MultipleChoice" else np.array([1, 0, 1, 1])
    labels = labels % 2
    firsts = np.array([0, 7, S, S + 7])
    ones = np.ones(len(labels), np.float32)
    rows = EncoderRows(tokens, types, documents, tokens[::-1].copy(), weights, firsts, labels, ones)
    spans = [(row, slice(a, b)) for row in range(2) for a, b in ((0, 7), (7, S))]
    return rows, spans


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_a_head_has_transformers_logits_on_packed_rows_and_gives_its_bytes_back(
    kind, head, tmp_path
):
    model = theirs(kind, head, tmp_path / "hf")
    layout = parse_layout("tp=3,pp=3")
    to_mtcli(open_checkpoint(tmp_path / "hf"), tmp_path / "x", *layout, WriteOptions())
    to_hf(open_checkpoint(tmp_path / "x"), tmp_path / "back", 3000, WriteOptions())
    assert_same_bytes(tmp_path / "hf", tmp_path / "back")
    rows, spans = packed(head)
    ours = open_inference_model(open_checkpoint(tmp_path / "x"), (), ALONE)
    (found,) = head_outputs(ours, [rows])
    losses, logits = [0.0, 0.0], []
    for row, span in spans:
        ids, types = (torch.from_numpy(x[row : row + 1, span]) for x in (rows.tokens, rows[1]))
        if head == "MultipleChoice":
            ids, types = ids[None], types[None]
        with torch.no_grad():
            said = model(input_ids=ids, token_type_ids=types)
        if head in HEADS[:2]:
            predicted = said.prediction_logits if head == "PreTraining" else said.logits
            targets = torch.from_numpy(rows.labels[row, span])
            each = torch.nn.functional.cross_entropy(predicted[0], targets, reduction="none")
            losses[row] += float((each * torch.from_numpy(rows.weights[row, span])).sum())
        if head != "MaskedLM":
            logits.append(said.seq_relationship_logits if head == HEADS[0] else said.logits)
    assert found.losses_R.tolist() == pytest.approx(losses, rel=1e-5)
    if logits:
        expected = torch.cat(logits).double().view(found.logits_MC.shape)
        error = (found.logits_MC - expected).abs().max() / expected.abs().max()
        assert error < 1e-4


def test_a_published_folder_of_old_names_is_read_with_its_heads(tmp_path):
    theirs("Bert", "PreTraining", tmp_path / "new", architectures=["BertForMaskedLM"])
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        for new, before in old.items():
            name = name.replace(new, before)
        renamed[name] = tensor
    renamed["cls.predictions.decoder.weight"] = tensors[
        "bert.embeddings.word_embeddings.weight"
    ].clone()
    (tmp_path / "old").mkdir()
    config = (tmp_path / "new" / "config.json").read_text()
    config = config.replace("BertForPreTraining", "BertForMaskedLM")
    (tmp_path / "old" / "config.json").write_text(config)
    save_file(renamed, tmp_path / "old" / "model.safetensors")
    new, found = open_checkpoint(tmp_path / "new"), open_checkpoint(tmp_path / "old")
    assert found.model == new.model and found.model.sentence_order
    for name in new.names():
        assert torch.equal(new.read(name), found.read(name)), name


def padded_rows(sequences, size):
    """Rows of one sequence each, with padding behind it and random weights ahead."""
    special = SpecialTokens(0, 2, 50, PADDING, np.arange(VOCAB) > 3, np.ones(VOCAB, bool))
    rows = lay_out([[sequence] for sequence in sequences], size, special)
    weights = np.random.default_rng(4).random(rows.padding.shape) * ~rows.padding
    none = np.zeros(len(sequences))
    return rows._replace(
        weights=weights.astype(np.float32), classes=none.astype(np.int64), class_weights=none
    )


def assert_losses(model, folder, rows, **given):
    """The losses of rows are transformers' with its mask of padding."""
    ours = open_inference_model(open_checkpoint(folder), (), ALONE)
    (found,) = head_outputs(ours, [rows])
    ids, seen = torch.from_numpy(rows.tokens), torch.from_numpy(~rows.padding)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=seen.long(), **given).logits
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    expected = (each * torch.from_numpy(rows.weights)).sum(1)
    assert found.losses_R.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("types", [1, 2])
def test_robertas_positions_count_text_alone_where_rows_end_in_padding(types, tmp_path):
    model = theirs("Roberta", "MaskedLM", tmp_path, type_vocab_size=types)
    pair = Segments(np.array([9, 4, 7]), np.array([30, 31]))
    rows = padded_rows([Segments(np.array([5, 17, 44, 6, 23])), pair], S)
    assert rows.padding.sum(1).tolist() == [5, 4] and (rows.tokens[rows.padding] == PADDING).all()
    token_types = torch.from_numpy(rows.token_types).clamp(max=types - 1)
    assert_losses(model, tmp_path, rows, token_type_ids=token_types)


def test_a_published_roberta_has_a_pooler_that_no_head_reads(tmp_path):
    theirs("Roberta", "MaskedLM", tmp_path, type_vocab_size=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    before = {
        name: open_checkpoint(tmp_path).read(name) for name in open_checkpoint(tmp_path).names()
    }
    more = {"roberta.embeddings.position_ids": torch.arange(19)[None]}
    more |= {f"roberta.pooler.dense.{kind}": torch.ones(21) for kind in ("weight", "bias")}
    more["lm_head.decoder.weight"] = tensors["roberta.embeddings.word_embeddings.weight"].clone()
    more["lm_head.decoder.bias"] = tensors["lm_head.bias"].clone()
    save_file(tensors | more, file)
    found = open_checkpoint(tmp_path)
    assert found.names() == list(before)
    assert all(torch.equal(found.read(name), tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id=null is no id, and positions follow it"),
        ({"pad_token_id": -1}, "pad_token_id=-1 is no id"),
        ({"max_position_embeddings": 2}, "max_position_embeddings=2 with pad_token_id=1: no row"),
        ({"hidden_act": "gelu_new"}, "hidden_act='gelu_new' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ],
)
def test_a_roberta_that_cannot_be_said_is_refused(change, message, tmp_path):
    theirs("Roberta", "MaskedLM", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(MtcliError, match=re.escape(message)):
        open_checkpoint(tmp_path)


def test_what_a_roberta_leaves_out_has_transformers_defaults(tmp_path):
    theirs("Roberta", "MaskedLM", tmp_path)
    config = tmp_path / "config.json"
    table = json.loads(config.read_text())
    for name in ("layer_norm_eps", "pad_token_id"):
        del table[name]
    config.write_text(json.dumps(table))
    model = open_checkpoint(tmp_path).model
    assert model.norm_eps == 1e-12
    assert (model.position_offset, model.max_seq_len, model.token_types) == (2, 17, 2)


def test_a_modernbert_as_published_has_its_windows_by_a_period(tmp_path):
    table = {"model_type": "modernbert", "num_hidden_layers": 7, "local_attention": 9}
    table |= {"global_attn_every_n_layers": 3, "global_rope_theta": 5e4, "local_rope_theta": 99.0}
    model = model_of(table, tmp_path)
    assert [model.layer_window(layer) for layer in range(7)] == [0, 4, 4, 0, 4, 4, 0]
    assert (model.rope_theta, model.rope_local_theta) == (5e4, 99.0)
    assert not model.causal and model.window_pattern == "GLL"
    back = config_to_hf(model, family_of(model))
    assert back["local_attention"] == 8  # which is the same
    for name in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"):
        assert back[name] == table[name]


@pytest.mark.parametrize("width", [2, 7, 12, 40])
def test_modernberts_windows_and_padding_are_transformers(width, tmp_path):
    import transformers

    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=5, num_attention_heads=3,
        intermediate_size=18, max_position_embeddings=19, pad_token_id=PADDING,
        local_attention=width,
    )  # fmt: skip
    model = transformers.ModernBertForMaskedLM(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(tmp_path)
    texts = [Segments(np.random.default_rng(4).integers(4, 50, size)) for size in (17, 12)]
    assert_losses(model, tmp_path, padded_rows(texts, 19))


def test_a_class_without_a_head_of_ours_is_refused(tmp_path):
    theirs("Bert", "MaskedLM", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("ForMaskedLM", "ForTokenClassification"))
    with pytest.raises(MtcliError, match="BertForTokenClassification.*is not supported"):
        open_checkpoint(tmp_path)
