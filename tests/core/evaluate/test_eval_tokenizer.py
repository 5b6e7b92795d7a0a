"""Text to requests gives the ids of transformers' tokenizers under lm-eval's rules."""

import json

import pytest
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from mtcli.core.config.errors import MtcliError
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer

PAIRS = [
    ("the cat", " sat"),
    ("the cat ", "sat"),
    ("the cat \n ", " sat  "),
    ("", "the"),
    ("", "<s>the"),
    ("<s> the", " cat"),
    ("the<s>", "<s>"),
    ("c", "at"),
]
CONFIGS = {
    "gpt2": {"bos_token": "<e>", "eos_token": "<e>", "tokenizer_class": "PreTrainedTokenizerFast"},
    "llama3": {
        "bos_token": "<s>",
        "eos_token": "<e>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "llama3 in the older form": {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "add_bos_token": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "no bos": {"eos_token": "<e>", "tokenizer_class": "PreTrainedTokenizerFast"},
}


def folder_like(path, family):
    """A tiny byte-level tokenizer folder; llama3's template puts <s> first."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "Ġc", "at", "Ġcat", "th", "the"])}
    merges = [("Ġ", "c"), ("a", "t"), ("Ġc", "at"), ("t", "h"), ("th", "e")]
    tokenizer = HfTokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<e>"])
    if family.startswith("llama3"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIGS[family]))
    return path


class Recorder(HFLM):
    """lm-eval's backend up to the ids, without a model."""

    def __init__(self, tokenizer):
        self.tokenizer, self.backend = tokenizer, "causal"
        self.custom_prefix_token_id = self.add_bos_token = self.enable_thinking = None

    def _loglikelihood_tokens(self, requests, **kwargs):
        return [(context, continuation) for _, context, continuation in requests]


class Args:
    def __init__(self, *args):
        self.args = args


@pytest.mark.parametrize("family", CONFIGS)
def test_pairs_and_texts_have_the_ids_of_lm_eval(tmp_path, family):
    folder = folder_like(tmp_path, family)
    theirs = Recorder(AutoTokenizer.from_pretrained(folder))
    tokenizer = eval_tokenizer(load_tokenizer(folder))
    expected = theirs.loglikelihood([Args(*pair) for pair in PAIRS], disable_tqdm=True)
    for (context, continuation), (head, tail) in zip(PAIRS, expected, strict=True):
        (ours,) = tokenizer.requests(context, [continuation])
        assert (ours.tokens.tolist(), ours.num_targets) == (head + tail, len(tail))
    assert tokenizer.prefix_id == theirs.prefix_token_id
    for text in ("the cat", "<s>the", ""):
        assert tokenizer.text(text) == theirs.tok_encode(text)


def test_a_context_of_spaces_belongs_to_its_continuation(tmp_path):
    tokenizer = eval_tokenizer(load_tokenizer(folder_like(tmp_path, "gpt2")))
    (ours,) = tokenizer.requests(" ", ["cat"])
    assert ours.tokens.tolist() == [tokenizer.prefix_id, *tokenizer.encode(" cat")]


def test_one_context_gives_one_request_per_continuation(tmp_path):
    tokenizer = eval_tokenizer(load_tokenizer(folder_like(tmp_path, "llama3")))
    together = tokenizer.requests("the cat", [" sat", " cat"])
    apart = [tokenizer.requests("the cat", [c])[0] for c in (" sat", " cat")]
    assert [r.tokens.tolist() for r in together] == [r.tokens.tolist() for r in apart]


def test_a_tokenizer_that_marks_no_boundary_is_refused(tmp_path):
    tokenizer = HfTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(MtcliError) as caught:
        eval_tokenizer(load_tokenizer(tmp_path))
    assert caught.value.problems[0].message == (
        "the tokenizer has 2 tokens, and none that begins or ends a text"
    )
