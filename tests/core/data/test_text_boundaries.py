"""Where a prompt ends and its completion begins, with tokenizers that prepend a space to a text.

The oracle is transformers' encoding of the whole text, and its decoding of all ids.
"""

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer

TEXT = "def f(x): return x\nThe capital of France is Paris. The capital of Italy is Rome.\n" * 20
STRIP = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
STRIP.append(decoders.Strip(" ", 1, 0))


def with_metaspace(scheme):
    return {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme=scheme),
        "decoder": decoders.Metaspace(prepend_scheme=scheme),
    }


KINDS = {  # as Llama 1 and 2, T5, Mistral, RoBERTa and GPT-2 have them
    "prepend": {
        "normalizer": normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        ),
        "decoder": decoders.Sequence(STRIP),
    },
    "metaspace always": with_metaspace("always"),
    "metaspace first": with_metaspace("first"),
    "prefix space": {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "decoder": decoders.ByteLevel(),
    },
    "no space": {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": decoders.ByteLevel(),
    },
}
PAIRS = [("def f(", "x):"), ("The capital of France is", " Paris."), ("The capital ", "of Italy"),
         ("", "Rome"), ("x\n", "\nx")]  # fmt: skip


def make(folder, kind, template):
    """transformers' and our tokenizer of a kind, whose template is such as "<s> $A"."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    for part, value in KINDS[kind].items():
        setattr(backend, part, value)
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    if kind == "prepend":  # SentencePiece trains on words
        backend.normalizer, backend.pre_tokenizer = None, pre_tokenizers.Metaspace()
    backend.train_from_iterator([TEXT], trainer)
    if kind == "prepend":
        backend.normalizer, backend.pre_tokenizer = KINDS[kind]["normalizer"], None
    named = [(name, backend.token_to_id(name)) for name in special[1:]]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    theirs.save_pretrained(folder)
    return theirs, load_tokenizer(folder)


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_its_completion_are_encoded_as_the_one_text_that_they_are(
    tmp_path, kind, template
):
    theirs, ours = make(tmp_path, kind, template)
    for prompt, completion in PAIRS:
        ids, counts = ours.encode_example(prompt, completion)
        whole = theirs(prompt + completion, return_offsets_mapping=True)
        assert ids == [*whole.input_ids, ours.eod_id][: len(ids)]
        assert ids[-1] == ours.eod_id and ids.count(ours.eod_id) == 1
        ends = [end for _, end in whole.offset_mapping]
        ends[0] = 0 if ids[0] == theirs.bos_token_id else ends[0]
        expected = [end > len(prompt) for end in ends[: len(ids) - 1]]
        assert counts == [*expected, True], (prompt, completion)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_on_is_what_an_evaluation_scores(tmp_path, kind):
    _, ours = make(tmp_path, kind, "<s> $A")
    for prompt, completion in (PAIRS[1], ("def", " f(x):")):  # where no token has some of both
        ids, counts = ours.encode_example(prompt, completion)
        (scored,) = eval_tokenizer(ours).requests(prompt, [completion])
        assert [*scored.tokens, ours.eod_id] == ids
        assert scored.num_targets + 1 == sum(counts)


@pytest.mark.parametrize("kind", KINDS)
def test_generated_text_is_what_follows_the_prompt_in_the_decoded_whole(tmp_path, kind):
    theirs, ours = make(tmp_path, kind, "<s> $A")
    ids = ours.encode_prompt("The capital of France is Paris.\n\ndef f(x): return x is Rome, x")
    assert len(ids) > 20
    for cut in range(1, len(ids)):
        before, whole = (theirs.decode(part) for part in (ids[:cut], ids))
        assert before + ours.decode_after(ids[:cut], ids[cut:]) == whole


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_a_prompt_begins_as_the_template_says_once_and_has_no_end(tmp_path, template):
    theirs, ours = make(tmp_path, "prepend", template)
    bos, eos = theirs.convert_tokens_to_ids(["<s>", "</s>"])
    plain = ours.encode_prompt("Rome")
    assert plain == [bos, *theirs("Rome", add_special_tokens=False).input_ids]
    assert eos not in plain
    spelled = ours.encode_prompt("<s>Rome")
    assert spelled == theirs("<s>Rome", add_special_tokens=False).input_ids
    assert spelled.count(bos) == 1
