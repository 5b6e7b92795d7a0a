"""Converts a tokenizer.json to GGUF's vocabulary.

llama.cpp knows two kinds of BPE. "gpt2" is byte-level: it merges by rank, and names the pattern
that splits words. "llama" is SentencePiece's: it has spaces as ▁, bytes as <0x0A>, and merges the
pair whose token has the best score. A tokenizer.json has lost such scores; minus the rank of the
merge that makes a token orders pairs alike.
"""

import json
import re
from typing import Any, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.data.tokenize import Tokenizer, configured_token

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF's types of tokens
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
NO_SCORE = -1e9  # of tokens that no merge makes: they are never the result of one
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_OF_O = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?" + _UPPER
# Patterns by which llama.cpp knows how to split: of GPT-2 it is ByteLevel's own.
PATTERNS = {
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST: "llama-bpe",
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST: "qwen2",
    f"{_WORDS}*{_LOWER}+{_CONTRACTIONS}?|{_WORDS}+{_LOWER}*{_CONTRACTIONS}?|"
    + r"\p{N}{1,3}|"
    + _REST_OF_O: "gpt-4o",
    f"{_WORDS}*{_LOWER}+|{_WORDS}+{_LOWER}*|" + r"\p{N}|" + _REST_OF_O: "tekken",
}


class Vocabulary(NamedTuple):
    """GGUF's vocabulary: the keys under `tokenizer.`, and its tokens [vocab_size] with their types
    and, for SentencePiece's, scores; merges of byte-level BPE."""

    facts: dict[str, Any]
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]


def vocabulary_of(tokenizer: Tokenizer, size: int, template: str | None) -> Vocabulary:
    """Converts a tokenizer for a model of `size` ids.

    Raises MtcliError where it is no BPE that llama.cpp knows, or has more ids than the model.
    """
    definition = json.loads(tokenizer.definition)
    table = definition["model"]
    if tokenizer.vocab_size > size:
        message = f"the tokenizer has {tokenizer.vocab_size} ids, and the model {size}"
        raise wrong(message, "is it the tokenizer of these weights?")
    if table.get("type") != "BPE":
        raise wrong(f"a tokenizer of type {table.get('type')} has no form in GGUF", HINT)
    has_byte_tokens = bool(table.get("byte_fallback"))
    merges = [one.split(" ") if isinstance(one, str) else one for one in table["merges"]]
    tokens, types = _tokens(definition, size, has_byte_tokens)
    facts = _facts(tokenizer, template)
    for name in ("bos", "eos", "padding"):  # a tokenizer of ours has its end as a plain token
        if (number := facts.get(f"ggml.{name}_token_id")) is not None:
            types[number] = CONTROL
    if has_byte_tokens:
        facts |= {"ggml.model": "llama", "ggml.add_space_prefix": _adds_space(definition)}
        return Vocabulary(facts, tokens, types, _scores(tokens, merges), [])
    facts |= {"ggml.model": "gpt2", "ggml.pre": _pattern(definition)}
    # llama.cpp wants merges: where there are none, one that makes no token
    ranked = [" ".join(pair) for pair in merges] or ["Ġ Ġ"]
    return Vocabulary(facts, tokens, types, [], ranked)


def name_of(name: str, architecture: str, vocabulary: Vocabulary) -> str:
    """Words a model's name in its file, by which llama.cpp knows Phi-3's vocabulary: it strips
    spaces behind special tokens of a model that is named so, and loads none that lacks them."""
    is_named = any(word in name.lower() for word in ("phi-3", "phi3"))
    if not {"</s>", "<unk>", "<s>", "<|endoftext|>"} <= {*vocabulary.tokens}:
        return "model" if is_named else name
    return f"phi-3 {name}" if architecture == "phi3" and not is_named else name


HINT = "byte-level BPE and SentencePiece's BPE have; --to hf keeps any"


def _tokens(
    definition: dict[str, Any], size: int, has_byte_tokens: bool
) -> tuple[list[str], list[int]]:
    """Lists the tokens by id, and their types; ids that the tokenizer has not are unused."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [UNUSED] * size
    unknown = definition["model"].get("unk_token")
    for token, number in definition["model"]["vocab"].items():
        is_byte = has_byte_tokens and BYTE_TOKEN.fullmatch(token)
        tokens[number] = token
        types[number] = BYTE if is_byte else UNKNOWN if token == unknown else NORMAL
    for added in definition.get("added_tokens") or ():
        number, token = added["id"], added["content"]
        tokens[number] = token.replace("▁", " ") if has_byte_tokens else token
        if token != unknown:
            types[number] = CONTROL if added.get("special") else USER_DEFINED
    return tokens, types


def _facts(tokenizer: Tokenizer, template: str | None) -> dict[str, Any]:
    """Returns the ids of special tokens, whether they are added to a prompt, and the template."""
    facts: dict[str, Any] = {}
    for role, name in ROLES.items():
        token = configured_token(tokenizer.config, role)
        number = None if token is None else tokenizer.backend.token_to_id(token)
        if number is not None:
            facts[f"ggml.{name}_token_id"] = number
    if tokenizer.eod_id is not None:
        facts["ggml.eos_token_id"] = tokenizer.eod_id
    begin = tokenizer.encode_prompt("a")[:1]
    adds = begin != tokenizer.encode("a")[:1]
    if adds:
        facts.setdefault("ggml.bos_token_id", begin[0])
    facts["ggml.add_bos_token"] = adds
    facts["ggml.add_eos_token"] = False
    if template is not None:
        facts["chat_template"] = template
    return facts


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores each token by the first merge that makes it."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks[token]) if token in ranks else NO_SCORE for token in tokens]


def _adds_space(definition: dict[str, Any]) -> bool:
    """Says whether a text gets a space ahead, by a normaliser or a Metaspace."""
    words = json.dumps([definition.get("normalizer"), definition.get("pre_tokenizer")])
    if '"Prepend"' in words:
        return True
    return '"Metaspace"' in words and '"never"' not in words


def _pattern(definition: dict[str, Any]) -> str:
    """Names the pattern by which words are split, as llama.cpp does."""
    steps = definition.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    splits = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    by_bytes = [step for step in steps if step.get("type") == "ByteLevel"]
    if kinds == ["ByteLevel"] and by_bytes[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "starcoder"
    if kinds == ["Split", "ByteLevel"] and splits[0] in PATTERNS:
        return PATTERNS[splits[0]]
    if not definition["model"]["merges"]:
        return "gpt-2"  # without merges, words do not matter
    said = splits[0] if splits else ", ".join(map(str, kinds))
    raise wrong(f"the tokenizer splits words by {said!r}, which llama.cpp has no name for", HINT)
