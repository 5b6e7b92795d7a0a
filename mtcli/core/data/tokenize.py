"""Loads and trains tokenizers as one class, whose ids are those of `tokenizers`.

A specification is a `tokenizer.json`, a folder that holds one (or GPT-2's `vocab.json` and
`merges.txt`), a Hugging Face name, or the word `bytes`. `encode` adds no special tokens. The text
of a special token inside a document becomes the special id for tokenizers from Hugging Face, as
there. For our own (`bytes` and trained ones) it becomes ordinary bytes: their end-of-document token
is not an added token, so no document can contain it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import cast

from tokenizers import Encoding, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer

from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import parse_json, read_untrusted
from mtcli.core.data.tokenizer_limits import (
    MAX_IDS,
    bounded,
    no_panics,
    require_measured,
    require_tokens,
)
from mtcli.core.runtime.hub import fetch_small, is_hub

MAX_DEFINITION_BYTES = 256 << 20  # 262,144 ids and their merges take 35 MB
END_OF_DOCUMENT = "<|endoftext|>"
# What families call it, where the folder's tokenizer_config.json does not say.
END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
CONTEXT = 16  # ids of a prompt that tell how what follows them is decoded
ANY_TEXT = "a"
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # of BERT's tokenizers, ids 0 to 4
LETTERS = 1000  # of WordPieces, each as a word's begin and further on
HUB_FILES = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "merges.txt")
KINDS = (
    "a tokenizer.json, a folder with one or with vocab.json and merges.txt, a Hugging Face name "
    "or hub:owner/name@revision that the network or its cache has, bytes, or train:8192 for a new "
    "one of 8192 ids"
)


class Tokenizer:
    """A tokenizer: text to ids and back, saved as its original `tokenizer.json`."""

    def __init__(self, source: str | HfTokenizer, config: dict[str, object] | None = None) -> None:
        """Takes the text of a tokenizer.json, or a tokenizer; `config` is its
        tokenizer_config.json.

        Raises MtcliError where the text is no tokenizer.
        """
        if isinstance(source, str):
            self.definition, self._growth = bounded(source)  # the text of tokenizer.json
            with no_panics("not a tokenizer definition"):
                self.backend = HfTokenizer.from_str(self.definition)
        else:
            self.definition, self._growth, self.backend = source.to_str(), 1, source
        self.config = dict(config or {})  # tokenizer_config.json, where there is one
        vocab = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        ends = (configured_token(self.config, "eos_token"), *END_NAMES)
        self.eod_token = next((name for name in ends if name in vocab), None)
        self.eod_id: int | None = vocab[self.eod_token] if self.eod_token else None
        self.is_bytes = self.vocab_size == 257 and (
            json.loads(self.definition) == json.loads(_bytes_backend().to_str())
        )

    def encode(self, text: str) -> list[int]:
        """Encodes `text`, with no special tokens added."""
        if self.is_bytes:
            return list(text.encode())
        (ids,) = self.encode_all([text])
        return ids

    def encode_all(self, texts: Sequence[str], with_specials: bool = False) -> list[list[int]]:
        """Encodes each text. Raises MtcliError for one that the tokenizer refuses."""
        encoded = []
        with no_panics("the tokenizer fails on a text"):
            for text in texts:
                require_measured(self.backend.normalizer, self._growth, text)
                encoded.append(self.backend.encode(text, add_special_tokens=with_specials).ids)
        return encoded

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes `text` as a prompt: after the special tokens that tokenizer.json's template puts
        first, such as Llama's <s>, unless the text spells them, and without those at the end."""
        if self.is_bytes:
            return self.encode(text)
        begin, encoded, _ = self._framed(text)
        return begin + encoded.ids

    def encode_example(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """Encodes a prompt and its completion as one text, and marks the completion's tokens: from
        the token of its first character on. The text ends as the template ends it, and with one
        end-of-document token."""
        begin, encoded, end = self._framed(prompt + completion)
        first, _ = _tokens_of(encoded, len(prompt), len(prompt) + len(completion))
        if self.eod_id is not None and end[-1:] != [self.eod_id]:
            end = [*end, self.eod_id]
        ids = begin + encoded.ids + end
        return ids, [i >= len(begin) + first for i in range(len(ids))]

    def _framed(self, text: str) -> tuple[list[int], Encoding, list[int]]:
        """Returns (the template's ids before a text, the text's encoding, ids after it)."""
        with no_panics("the tokenizer fails on a text"):
            require_measured(self.backend.normalizer, self._growth, text)
            framed = self.backend.encode(text, add_special_tokens=True).ids
            encoded = self.backend.encode(text, add_special_tokens=False)
        ids, count = encoded.ids, len(encoded.ids)
        if not ids and text != ANY_TEXT:  # nothing is between what begins and what ends it
            begin, _, end = self._framed(ANY_TEXT)
            return begin, encoded, end
        starts = (i for i in range(len(framed) - count + 1) if framed[i : i + count] == ids)
        start = next(starts, 0)
        begin, end = framed[:start], framed[start + count :]
        return begin if ids[: len(begin)] != begin else [], encoded, end

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]], weights: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """Encodes the text of a chat template, its special tokens as such, with a weight per token.

        A token has the weight of the span [first, end) of characters that it overlaps; 0 outside of
        all spans.
        """
        with no_panics("the tokenizer fails on a text"):
            require_measured(self.backend.normalizer, self._growth, text)
            encoded = self._with_specials.encode(text, add_special_tokens=False)
        of_tokens = [0.0] * len(encoded.ids)
        for (first, end), weight in zip(spans, weights, strict=True):
            begin, stop = _tokens_of(encoded, first, end)
            of_tokens[begin:stop] = [weight] * (stop - begin)
        return encoded.ids, of_tokens

    @cached_property
    def _with_specials(self) -> HfTokenizer:
        """Builds the tokenizer whose end of document, and tokens named by its config, are special
        tokens, as transformers loads it."""
        roles = ("bos_token", "eos_token", "pad_token", "unk_token")
        named = (self.eod_token, *(configured_token(self.config, role) for role in roles))
        backend = HfTokenizer.from_str(self.definition)
        specials = [name for name in named if name and backend.token_to_id(name) is not None]
        backend.add_special_tokens(specials)
        return backend

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        with no_panics("the tokenizer fails on token ids"):
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def decode_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Decodes `ids` as the continuation of a prompt's: with the space that decoders strip at a
        text's beginning."""
        context = prompt[-CONTEXT:]
        context_text, whole = self.decode(context), self.decode([*context, *ids])
        return whole[len(context_text) :] if whole.startswith(context_text) else self.decode(ids)

    def save(self, folder: str | Path) -> Path:
        """Writes the files that `load_tokenizer(folder)` reads; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.definition, encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        if self.eod_token:
            config.setdefault("eos_token", self.eod_token)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        return folder

    @property
    def sha256(self) -> str:
        """The hash of the tokenizer's definition, which identifies it."""
        return hashlib.sha256(self.definition.encode()).hexdigest()

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, object]]]:
        return Tokenizer, (self.definition, self.config)


def _tokens_of(encoded: Encoding, first: int, end: int) -> tuple[int, int]:
    """Returns the range of tokens [begin, stop) that overlap the characters [first, end) of a text.
    Some characters, such as spaces, may have no token."""
    token_at = encoded.char_to_token
    begin = next((token for i in range(first, end) if (token := token_at(i)) is not None), None)
    last = next(
        (token for i in range(end - 1, first - 1, -1) if (token := token_at(i)) is not None), -1
    )
    return (len(encoded.ids), len(encoded.ids)) if begin is None else (begin, last + 1)


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Loads the tokenizer that `spec` names.

    Raises MtcliError where no such file, folder or name exists, or it cannot be read.
    """
    if spec == "bytes":
        return byte_tokenizer()
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.exists():
        return _from_file(path)
    text = str(spec)
    if is_hub(text):
        return load_tokenizer(fetch_small(text))
    if text.startswith("train:"):
        message = f"tokenizer {text} is trained on a corpus, and there is none here"
        hint = "only mtcli preprocess trains one; name the folder it wrote, PREFIX.tokenizer"
        raise wrong(message, hint)
    if text.count("/") > 1 or text[:1] in "./~" or text.endswith(".json"):
        raise wrong(f"tokenizer {text}: no such file or folder", f"give {KINDS}")
    return _from_hub(text)


def byte_tokenizer() -> Tokenizer:
    """Builds a tokenizer of UTF-8 bytes: 256 ids, and id 256 for the end of a document."""
    return Tokenizer(_bytes_backend())


def configured_token(config: Mapping[str, object], role: str) -> str | None:
    """Returns the text of a special token, such as eos_token, in a tokenizer_config.json."""
    token = config.get(role)
    if isinstance(token, dict):  # older files store the AddedToken
        token = token.get("content")
    return token if isinstance(token, str) else None


def require_trainable(vocab_size: int, pieces: bool = False) -> None:
    """Raises MtcliError where a vocabulary, of WordPieces (`pieces`) or of bytes, is too small."""
    least = len(SPECIALS) + 2 if pieces else 257
    of_pieces = f"{len(SPECIALS)} special tokens and a letter that begins a word or goes on"
    what = of_pieces if pieces else "256 bytes and the end-of-document token"
    if vocab_size > MAX_IDS:
        message = f"train:{vocab_size} is more than the {MAX_IDS} ids that a tokenizer may have"
        raise wrong(message, "train:8192 is a usual size for a small model")
    if vocab_size < least:
        raise wrong(
            f"train:{vocab_size} is less than the {what} = {least}",
            "train:8192 is a usual size for a small model",
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of at most `vocab_size` ids, with GPT-2's words, on `texts`.

    Ids 0 to 255 are bytes in the alphabet's order, the last one is the end of a document. A small
    corpus may not fill the vocabulary, which then is smaller.
    """
    require_trainable(vocab_size)
    backend = HfTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    definition = json.loads(backend.to_str())
    vocab = definition["model"]["vocab"]
    vocab[END_OF_DOCUMENT] = len(vocab)
    return Tokenizer(json.dumps(definition, ensure_ascii=False))


def train_word_pieces(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains BERT's kind of tokenizer on `texts`: WordPiece of lower-case words, at most
    `vocab_size` ids, of which 0 to 4 are [PAD], [UNK], [CLS], [SEP] and [MASK].

    Where the corpus has more letters than the vocabulary has room for, the rarest are [UNK].
    """
    require_trainable(vocab_size, pieces=True)
    normalizer, words = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    normal = [normalizer.normalize_str(text) for text in texts]
    counts = Counter(chain.from_iterable(normal))
    del counts[" "]
    most = min(LETTERS, (vocab_size - len(SPECIALS)) // 2)
    letters = sorted(letter for letter, _ in counts.most_common(most))

    def is_inside_words(letter: str) -> bool:
        return len(words.pre_tokenize_str(normalizer.normalize_str("a" + letter))) == 1

    # Equal pairs merge in the order of their ids, and the trainer numbers letters inside words as a
    # random hash has it: as special tokens their ids are fixed, and so is the vocabulary.
    inside = [f"##{letter}" for letter in letters if is_inside_words(letter)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *inside],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    trained = HfTokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = words
    trained.train_from_iterator(normal, trainer)
    vocab = trained.get_vocab(with_added_tokens=False)
    backend = HfTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.add_special_tokens([*SPECIALS])
    backend.normalizer, backend.pre_tokenizer = normalizer, words
    backend.decoder = decoders.WordPiece()
    cls, sep = (("[CLS]", 2), ("[SEP]", 3))
    backend.post_processor = processors.BertProcessing(sep, cls)
    roles = {f"{name.strip('[]').lower()}_token": name for name in SPECIALS}
    return Tokenizer(
        backend, {"tokenizer_class": "BertTokenizerFast", "do_lower_case": True} | roles
    )


def _bytes_backend() -> HfTokenizer:
    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    backend = HfTokenizer(models.BPE(vocab={**vocab, END_OF_DOCUMENT: 256}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_letters() -> list[str]:
    """Returns GPT-2's letter for each byte 0 to 255: itself where printable, else from U+0100
    on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = (byte for byte in range(256) if byte not in plain)
    letters = {byte: chr(256 + n) for n, byte in enumerate(unprintable)}
    return [letters.get(byte, chr(byte)) for byte in range(256)]


def _from_folder(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        return _from_file(folder / "tokenizer.json")
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return _from_gpt2_files(folder / "vocab.json", folder / "merges.txt")
    message = f"{folder} holds neither tokenizer.json nor vocab.json with merges.txt"
    raise wrong(message, f"give {KINDS}")


def _from_file(path: Path) -> Tokenizer:
    if path.suffix != ".json":
        raise wrong(f"{path} is not a tokenizer.json", f"give {KINDS}")
    try:
        return Tokenizer(_read(path), _config_beside(path))
    except MtcliError as error:
        raise wrong(f"{path}: {error.problems[0].message}", error.problems[0].hint) from None


def _from_gpt2_files(vocab: Path, merges: Path) -> Tokenizer:
    """Builds GPT-2's byte-level BPE from OpenAI's two files, ids as transformers' GPT2Tokenizer."""
    texts = _read(vocab), _read(merges)
    with no_panics(f"{vocab} and {merges} are not a BPE vocabulary"):
        table = parse_json(texts[0])
        require_tokens(table)
        lines = texts[1].removesuffix("\n").replace("\r\n", "\n").split("\n")
        merges_first = [tuple(ln.split(" ")) for ln in lines if not ln.startswith("#version")]
        pairs = cast(list[tuple[str, str]], merges_first)  # BPE refuses what is no pair
        backend = HfTokenizer(models.BPE(table, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if backend.token_to_id(END_OF_DOCUMENT) is not None:
        backend.add_special_tokens([END_OF_DOCUMENT])
    return Tokenizer(backend, _config_beside(vocab))


def _config_beside(path: Path) -> dict[str, object]:
    config = path.with_name("tokenizer_config.json")
    if not config.exists():
        return {}
    try:
        loaded = parse_json(_read(config))
    except ValueError as error:
        raise wrong(f"{config} is not JSON: {error}", "use another copy, or remove it") from None
    return loaded if isinstance(loaded, dict) else {}


def _read(path: Path) -> str:
    try:
        return read_untrusted(path, MAX_DEFINITION_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(f"{path} cannot be read: {error}", "use another copy") from None


def _from_hub(name: str) -> Tokenizer:
    """Loads a tokenizer from the hub, or from the local cache where the hub does not answer."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        files = {file.rfilename for file in HfApi().model_info(name, timeout=5).siblings or ()}
        reason = "it holds no tokenizer.json"
    except Exception as error:  # no network, no such name or a refusal: many kinds of error
        files, reason = None, (str(error).strip().splitlines() or [type(error).__name__])[0]

    def get(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(name, file, local_files_only=files is None))
        except (OSError, ValueError):
            return None

    paths = {
        file: path for file in HUB_FILES if (files is None or file in files) and (path := get(file))
    }
    if "tokenizer.json" in paths:
        return _from_file(paths["tokenizer.json"])
    if "vocab.json" in paths and "merges.txt" in paths:
        return _from_gpt2_files(paths["vocab.json"], paths["merges.txt"])
    raise wrong(
        f"tokenizer {name} is no file or folder here, and Hugging Face does not give it: {reason}",
        f"give {KINDS}",
    )
