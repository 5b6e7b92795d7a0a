"""Defines the configuration of `mtcli curate`: TOML, a section per stage, each with published
defaults.

`stages` orders the stages; a missing section has its defaults. Unknown keys are errors with the
nearest name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.fields import (
    Fraction,
    Int,
    PathText,
    Positive,
    Real,
    Section,
    Whole,
    refused_value,
    section_at,
)
from mtcli.core.config.loading import read_table, with_overrides
from mtcli.core.config.synonyms import closest

Stage = Literal[
    "extract", "normalise", "language", "rules", "quality", "exact", "fuzzy", "decontaminate"
]
STAGES: tuple[Stage, ...] = get_args(Stage)
CORPUS_STAGES = ("exact", "fuzzy", "decontaminate")  # what they do to a document is of them all


class ExtractConfig(Section):
    """Extracts text from pages: HTML files, and the HTML of WARC files."""

    engine: Literal["resiliparse", "justext"] = "resiliparse"
    """resiliparse (main content, fast) or justext (MT-NLG's own choice)."""
    stop_words: str = "English"
    """The language of jusText's stop words, as it names them."""


class NormaliseConfig(Section):
    """Mends broken Unicode with ftfy."""

    uncurl_quotes: bool = True
    """Make curly quotes straight, as ftfy does by default."""


class LanguageConfig(Section):
    """Drops documents in other languages."""

    keep: tuple[str, ...] = Field(default=("en",), min_length=1)
    """ISO 639-1 codes of the languages to keep."""
    characters: Positive = 500
    """Characters from the middle of a document that are looked at."""
    min_score: Fraction = 0.5
    """The least probability that fastText must give where CLD2 is unsure."""


class RulesConfig(Section):
    """Length and symbol rules: Gopher's (arXiv:2112.11446, appendix A.1.1), with its values."""

    min_words: Whole = 50
    """The fewest words."""
    max_words: Positive = 100_000
    """The most words."""
    min_word_length: Real = Field(default=3.0, ge=0.0, le=1000.0)
    """The least mean length of a word, in characters."""
    max_word_length: Real = Field(default=10.0, ge=0.0, le=1e9)
    """The greatest mean length of a word, in characters."""
    max_symbol_ratio: Real = Field(default=0.1, ge=0.0, le=1e9)
    """The most hash signs, and the most ellipses, per word."""
    max_bullet_lines: Real = Field(default=0.9, ge=0.0, le=1.0)
    """The largest share of lines that begin with a bullet."""
    max_ellipsis_lines: Real = Field(default=0.3, ge=0.0, le=1.0)
    """The largest share of lines that end with an ellipsis."""
    min_alphabetic_words: Real = Field(default=0.8, ge=0.0, le=1.0)
    """The least share of words with a letter in them."""
    min_stop_words: Int = Field(default=2, ge=0, le=8)
    """The fewest of the, be, to, of, and, that, have, with that a document must hold."""


class QualityConfig(Section):
    """A linear classifier of word n-grams, with GPT-3's Pareto rule (arXiv:2005.14165, A)."""

    model: PathText | None = None
    """A file of `mtcli curate train-quality`, or a fastText .bin or .ftz."""
    label: str = "__label__hq"
    """The label of a fastText model whose probability is the score."""
    keep: Literal["pareto", "threshold"] = "pareto"
    """pareto: keep where a Pareto draw, keyed by the document's id, exceeds 1 - score."""
    alpha: Real = Field(default=9.0, ge=0.001, le=1e6)
    """The Pareto distribution's shape."""
    min_score: Real = Field(default=0.5, ge=0.0, le=1.0)
    """The least score that keep = "threshold" keeps."""
    seed: Whole = 0
    """Another seed draws anew."""


class ExactConfig(Section):
    """Keeps one of the documents with the same text."""

    priority: tuple[str, ...] | None = None
    """Sources, the best first, whose copy stays; [fuzzy]'s by default."""


class FuzzyConfig(Section):
    """Keeps one of the documents that resemble each other: MinHash, LSH, verified Jaccard."""

    threshold: Real = Field(default=0.7, ge=0.01, le=1.0)
    """The least Jaccard similarity of two duplicates' sets of shingles."""
    shingle: Int = Field(default=12, ge=1, le=64)
    """Characters in a shingle: two long tables of numbers have most shingles of 5 in common."""
    hashes: Int = Field(default=160, ge=16, le=1024)
    """Values in a MinHash signature; bands have the most rows that allow a recall of 0.995."""
    priority: tuple[str, ...] = ()
    """Sources, the best first, whose copy stays; unnamed sources come last."""


class DecontaminateConfig(Section):
    """Cuts out n-grams of evaluation tasks, with 200 characters on both sides."""

    tasks: tuple[PathText, ...] = ()
    """Task files: JSON lines, text, or a RACE folder; relative to the working directory or the
    config's folder."""
    ngram: Int = Field(default=13, ge=2, le=64)
    """Words of an n-gram of a task."""
    min_ngram: Int = Field(default=8, ge=1, le=64)
    """Words of the shortest task text that is matched, as one n-gram."""
    common: Positive = 10
    """N-grams with as many matches in the corpus are common phrases and spared, unless all n-grams
    of a task's text are common."""
    margin: Whole = 200
    """Characters cut on each side of a match, and on to the end of the sentence."""
    min_piece: Whole = 200
    """A piece between cuts becomes a document where it has more characters than this."""
    max_pieces: Whole = 10
    """A document that is cut into more pieces is dropped."""
    fields: tuple[str, ...] = ("text", "question", "questions", "goal", "sentence", "article")
    """Keys of a task's JSON lines; the first one that a line has holds its text."""


class CurateConfig(Section):
    """The configuration of a curation."""

    stages: tuple[Stage, ...] = ()
    """The stages, in order; by default all whose required settings are given."""
    shard_mb: Int = Field(default=64, ge=1, le=100_000)
    """Megabytes of JSON lines in a shard, before compression."""
    blend: dict[str, Real] = Field(default_factory=dict)
    """Weights by source. With weights, each source has its own shards, and the report has a
    `data.train`."""
    extract: ExtractConfig = ExtractConfig()
    normalise: NormaliseConfig = NormaliseConfig()
    language: LanguageConfig = LanguageConfig()
    rules: RulesConfig = RulesConfig()
    quality: QualityConfig = QualityConfig()
    exact: ExactConfig = ExactConfig()
    fuzzy: FuzzyConfig = FuzzyConfig()
    decontaminate: DecontaminateConfig = DecontaminateConfig()

    @property
    def ordered(self) -> tuple[Stage, ...]:
        if "stages" in self.model_fields_set:
            return self.stages
        lacking = {
            "quality": self.quality.model is None,
            "decontaminate": not self.decontaminate.tasks,
        }
        return tuple(stage for stage in STAGES if not lacking.get(stage))

    def priority(self, stage: Stage) -> tuple[str, ...]:
        """Returns the sources whose copies a deduplication stage keeps, the best first."""
        if stage == "exact" and self.exact.priority is not None:
            return self.exact.priority
        return self.fuzzy.priority


def load_config(path: str | None, overrides: Sequence[str] = ()) -> CurateConfig:
    """Reads a TOML file, with `section.field=value` overrides on top; the defaults for None.

    Raises MtcliError with every problem at once.
    """
    table = with_overrides({} if path is None else read_table(path), overrides)
    try:
        config = CurateConfig.model_validate(table)
    except ValidationError as error:
        raise MtcliError(*map(_problem, error.errors())) from None
    if problems := _problems(config):
        raise MtcliError(*problems)
    base = Path(path).parent if path else Path()
    tasks = tuple(_resolved_path(task, base) for task in config.decontaminate.tasks)
    model = config.quality.model and _resolved_path(config.quality.model, base)
    return config.model_copy(
        update={
            "decontaminate": config.decontaminate.model_copy(update={"tasks": tasks}),
            "quality": config.quality.model_copy(update={"model": model}),
        }
    )


def _problem(detail: ErrorDetails) -> Problem:
    path = [str(key) for key in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        *parents, name = path
        section = section_at(CurateConfig, parents)
        names = tuple(section.model_fields) if section else ()
        near = closest(name, names).removeprefix("; ")
        where = f"in [{'.'.join(parents)}]" if parents else "at the top level"
        hint = near or f"known: {', '.join(names)}"
        return Problem(f"unknown key {name!r} {where}", hint, ".".join(path))
    if path[0] == "blend":
        return Problem("a weight is a number >= 0", "such as wiki = 0.3", ".".join(path))
    if path[0] == "stages" and len(path) > 1:
        hint = f"known: {', '.join(STAGES)}" + closest(str(detail["input"]), STAGES)
        return Problem(f"there is no stage {detail['input']!r}", hint, "stages")
    return refused_value(CurateConfig, detail)


def _problems(config: CurateConfig) -> list[Problem]:
    """Checks the rules that join several fields."""
    problems, stages = [], config.ordered
    for stage in sorted({stage for stage in stages if stages.count(stage) > 1}):
        said = f"{stage} is named {stages.count(stage)} times"
        problems.append(Problem(said, "name it once", "stages"))
    if "extract" in stages[1:]:
        said = f"extract comes after {stages[0]}, and there is no text before it"
        problems.append(Problem(said, "name extract first", "stages"))
    if "quality" in stages and config.quality.model is None:
        hint = "model = 'q.bin', which `mtcli curate train-quality` writes; or leave the stage out"
        problems.append(Problem("the stage quality has no model", hint, "quality.model"))
    if "decontaminate" in stages and not config.decontaminate.tasks:
        hint = "tasks = ['lambada.jsonl']; or leave the stage out"
        problems.append(Problem("the stage decontaminate has 0 tasks", hint, "decontaminate.tasks"))
    decontaminate = config.decontaminate
    if decontaminate.min_ngram > decontaminate.ngram:
        said = f"min_ngram={decontaminate.min_ngram} is more than ngram={decontaminate.ngram}"
        hint = f"at most {decontaminate.ngram}"
        problems.append(Problem(said, hint, "decontaminate.min_ngram"))
    low, high = config.rules.min_words, config.rules.max_words
    if low > high:
        said = f"min_words={low} is more than max_words={high}"
        problems.append(Problem(said, f"at most {high}", "rules.min_words"))
    if config.blend and not (min(config.blend.values()) >= 0 < sum(config.blend.values())):
        said = f"weights {list(config.blend.values())} are not all >= 0 with a sum > 0"
        problems.append(Problem(said, "shares, of any sum, such as 0.7 and 0.3", "blend"))
    return problems


def _resolved_path(name: str, base: Path) -> str:
    """Resolves a path from the working directory, or else from the config's folder."""
    return name if Path(name).exists() or not (base / name).exists() else str(base / name)


def as_dict(config: CurateConfig) -> dict[str, Any]:
    """Returns the settings that the result depends on, for the report."""
    stages = config.ordered
    dumped = config.model_dump(mode="json", include={*stages, "shard_mb", "blend"})
    return {"stages": list(stages), **dumped}
