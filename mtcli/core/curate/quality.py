"""Classifies quality by logistic regression on hashed word 1- and 2-grams, in numpy.

As in MT-NLG (arXiv:2201.11990, section 3), the classifier is trained to tell curated from crawled
text, and GPT-3's Pareto rule decides by its score which documents stay. The draw is keyed by the
document's id, so it depends on no order and no other document. fastText classifiers are read too.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import open_untrusted, read_untrusted
from mtcli.core.curate.batch import Batch, batches
from mtcli.core.curate.config import QualityConfig
from mtcli.core.curate.documents import BadRecord, Document, blocks_of, find_files
from mtcli.core.curate.extras import require
from mtcli.core.curate.hashing import SECOND, Array, mix
from mtcli.core.curate.reading import Reader
from mtcli.core.runtime.atomic_writes import aside

MAGIC = b"mtcli-quality-1\n"
BITS = 20  # of a feature's number: a million weights, 4 MB
EPOCHS = 5
RATE = 0.5  # of AdaGrad
HELD_OUT = 10  # every so many documents is held out of training
FIELD = "quality.model"


class Classifier(NamedTuple):
    """A linear model: weights float32 [2^BITS] by n-gram hash, and a bias."""

    weights: Array
    bias: float

    def scores(self, features: Array, bounds: Array) -> Array:
        """Returns the probability that each document is good [documents]."""
        sums = _sums(self.weights[features], bounds)
        logits = self.bias + sums / np.maximum(np.diff(bounds), 1)
        return 1 / (1 + np.exp(-logits))


def features_of(batch: Batch) -> tuple[Array, Array]:
    """Returns the feature numbers of each document's 1- and 2-grams, and their bounds: (int64
    [n-grams], [documents + 1]).

    A document of n words has 2n features: each word alone, and each with the word that follows;
    after the last word, none follows.
    """
    hashes, owners = batch.word_hashes, batch.words.owners
    following = np.zeros_like(hashes)
    following[:-1] = hashes[1:]
    following[:-1][owners[1:] != owners[:-1]] = 0
    pairs = mix(hashes * SECOND + following)
    both = np.stack([hashes, pairs], axis=1).reshape(-1)
    return (both >> np.uint64(64 - BITS)).astype(np.int64), 2 * batch.words.bounds


def make_quality(config: QualityConfig) -> Callable[[Batch], None]:
    """Builds the stage that drops documents by the classifier's score and the rule of `keep`."""
    assert config.model is not None, "checked with the configuration"
    score = open_model(config)

    def quality(batch: Batch) -> None:
        scores = score(batch)
        for index in batch.alive():
            value = float(scores[index])
            if config.keep == "threshold":
                is_kept = value >= config.min_score
            else:
                draw = pareto_draw(batch.documents[index].key, config.alpha, config.seed)
                is_kept = draw > 1 - value
            if not is_kept:
                batch.drop(index, "quality", "low score", score=round(value, 4))

    return quality


def open_model(config: QualityConfig) -> Callable[[Batch], Array]:
    """Builds the function that scores a batch [documents]. Raises MtcliError for a file that is no
    model."""
    path = Path(config.model or "")
    try:
        with open_untrusted(path) as file:
            is_ours = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        hint = "`mtcli curate train-quality --good A --bad B --output q.bin` writes one"
        raise wrong(f"{path} cannot be read: {error.strerror}", hint, FIELD) from None
    if is_ours:
        model = load_classifier(path)
        return lambda batch: model.scores(*features_of(batch))
    return _fasttext(path, config.label)


def load_classifier(path: Path) -> Classifier:
    """Reads what `save_classifier` wrote. Raises MtcliError for a damaged file."""
    data = read_untrusted(path).removeprefix(MAGIC)
    head, _, weight_bytes = data.partition(b"\n")
    try:
        facts = json.loads(head)
        weights = np.frombuffer(weight_bytes, "<f4")
        if weights.size != 1 << facts["bits"] or facts["bits"] != BITS:
            raise ValueError(f"{weights.size} weights, and 2^{facts['bits']} are said")
        return Classifier(weights, float(facts["bias"]))
    except (ValueError, KeyError, TypeError) as error:
        raise wrong(f"{path} is damaged: {error}", "train it again", FIELD) from None


def save_classifier(model: Classifier, facts: dict[str, Any], path: Path) -> None:
    """Writes a classifier and the facts of its training."""
    head = json.dumps(facts | {"bits": BITS, "bias": model.bias}).encode()
    with aside(path) as temporary:
        temporary.write_bytes(MAGIC + head + b"\n" + model.weights.astype("<f4").tobytes())


def _fasttext(path: Path, label: str) -> Callable[[Batch], Array]:
    fasttext = require("fasttext", "quality")
    try:
        model = fasttext.load_model(str(path))
    except ValueError as error:
        hint = "a file of `mtcli curate train-quality`, or a fastText .bin or .ftz"
        raise wrong(f"{path} is no model: {error}", hint, FIELD) from None

    def scores(batch: Batch) -> Array:
        values = np.zeros(len(batch.documents))
        for index in batch.alive():
            text = batch.documents[index].text.replace("\n", " ")
            labels, chances = model.predict(text, k=-1)
            chance_of = dict(zip(labels, chances, strict=True))
            if label not in chance_of:
                hint = f"label = '{labels[0]}'" if labels else ""
                raise wrong(f"{path} has no label {label}", hint, "quality.label")
            values[index] = chance_of[label]
        return values

    return scores


def pareto_draw(key: bytes, alpha: float, seed: int) -> float:
    """Draws from numpy's Pareto (Lomax) distribution, seeded by a document's id."""
    uniform = (xxhash.xxh3_64_intdigest(key, seed) + 1) / 2**64  # above 0
    return float(uniform ** (-1 / alpha) - 1)


# Training


def train_quality(
    good: Sequence[str], bad: Sequence[str], output: Path, text_key: str = "text"
) -> dict[str, Any]:
    """Trains a classifier to tell two corpora apart and writes it; returns its accuracy and sizes.

    Every tenth document is held out. Both corpora have the same total weight. Raises MtcliError for
    a corpus without text.
    """
    rows: list[Array] = []
    counts = []
    for flag, inputs in (("--good", good), ("--bad", bad)):
        first_row = len(rows)
        for batch in batches(_documents(inputs, text_key)):
            features, bounds = features_of(batch)
            rows += [features[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True) if b > a]
        counts.append(len(rows) - first_row)
        if counts[-1] < 2:
            said = f"{counts[-1]} documents with words"
            raise wrong(said, "give at least 2 documents", flag)
    test = np.arange(len(rows)) % HELD_OUT == HELD_OUT - 1
    labels = np.repeat([1, 0], counts)
    model = fit([rows[i] for i in np.flatnonzero(~test)], labels[~test])
    facts = {
        "documents": len(rows),
        "accuracy": _accuracy(model, [rows[i] for i in np.flatnonzero(test)], labels[test]),
        "good_documents": counts[0],
        "bad_documents": counts[1],
    }
    save_classifier(model, facts, output)
    return facts | {"output": str(output)}


def fit(rows: Sequence[Array], labels: Array) -> Classifier:
    """Fits weights by AdaGrad, a document at a time, in a fixed order of hashes.

    Both classes have the same total weight, however many documents each has.
    """
    weights = np.zeros(1 << BITS, np.float64)
    squares = np.full(1 << BITS, 1e-8)
    bias, bias_square = 0.0, 1e-8
    share = {label: len(labels) / (2 * max(1, int((labels == label).sum()))) for label in (0, 1)}
    for epoch in range(EPOCHS):
        for index in np.random.default_rng(epoch).permutation(len(rows)):
            features, label = rows[index], int(labels[index])
            logit = bias + weights[features].mean()
            gradient = share[label] * (1 / (1 + np.exp(-logit)) - label)
            once, counts = np.unique(features, return_counts=True)
            slope = gradient * counts / len(features)
            squares[once] += slope**2
            weights[once] -= RATE * slope / np.sqrt(squares[once])
            bias_square += gradient**2
            bias -= RATE * gradient / bias_square**0.5
    return Classifier(weights.astype(np.float32), float(bias))


def _accuracy(model: Classifier, rows: Sequence[Array], labels: Array) -> float | None:
    if not rows:
        return None
    bounds = np.cumsum([0, *map(len, rows)])
    scores = model.scores(np.concatenate(rows), bounds)
    return float(np.mean((scores > 0.5) == (labels > 0)))


def _sums(values: Array, bounds: Array) -> Array:
    """Sums values between bounds [len(bounds) - 1]; 0 for empty ranges."""
    totals = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    sums: Array = totals[bounds[1:]] - totals[bounds[:-1]]
    return sums


def _documents(inputs: Sequence[str], text_key: str) -> Iterator[Document]:
    files = find_files(inputs)
    reader = Reader.of(files, text_key)
    for block in blocks_of(files, False):
        for piece in block.pieces:
            for item in reader.read(piece, lambda _: None):
                if isinstance(item, BadRecord):
                    raise wrong(str(item), "mend the record, or take it out of the file")
                if isinstance(item, Document):
                    yield item
