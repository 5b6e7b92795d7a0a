"""Resolves a run's config as `mtcli train` does: files, flags, and what the data decides; without
torch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from os.path import exists, isfile  # false for names that no file can have, where Path's raises
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.checkpoint.fine_tuning import (
    checkpoint_of_config,
    is_weights,
    source_of,
    starting_tokenizer,
)
from mtcli.core.checkpoint.folder import CONFIG
from mtcli.core.config.annotated import annotated
from mtcli.core.config.errors import MtcliError, collect_errors
from mtcli.core.config.loading import (
    Table,
    preset_names,
    read_config,
    read_table,
    table_of,
    with_overrides,
)
from mtcli.core.config.origins import Origin, entries, origins, values_of, what_decides
from mtcli.core.config.rules import NEEDS, load_checked
from mtcli.core.config.schema import OtherConfig, RunConfig
from mtcli.core.config.untrusted import shown
from mtcli.core.data.epochs import with_steps
from mtcli.core.data.indexed import with_suffix
from mtcli.core.data.tokenized import Say, TextData, is_text, texts_of, with_prefixes
from mtcli.core.data.vocabulary import with_vocabulary
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import pattern_problems, stage_layers
from mtcli.core.runtime.private_folder import adds_to_caches
from mtcli.core.training.run_tokenizer import extended_tokenizer

STEPS = "train.steps"
OF_STEPS = ("optimizer.decay_steps", "sync.warmup_steps")


def planned_config(source: str | Table, overrides: Sequence[str], world: int) -> RunConfig:
    """Loads the config of a run on `world` ranks, with the steps of its epochs, where the data
    decides their number.

    Raises MtcliError with all problems of the config, or of data that decides.
    """
    config = load_checked(source, overrides, world)
    if wrong_patterns := pattern_problems(config):
        raise MtcliError(*wrong_patterns)
    return with_data_steps(config)


class Tokenized(NamedTuple):
    """Overrides that name datasets in the place of text; in a dry run without the data, and the
    text that is yet to be tokenized."""

    overrides: list[str]
    pending: list[TextData]


def with_texts(
    source: str | Table,
    overrides: list[str],
    world: int,
    say: Say,
    *checks: Callable[[], object],
    config_name: str | None = None,
) -> Tokenized:
    """Tokenizes the text that a config's data names, once the config and further `checks` are
    right; not where nothing may be added to caches, as in a dry run. The tokenizer is that of
    data.tokenizer, of the initial weights, or of the checkpoint in the folder `config_name`.

    Raises MtcliError with all problems of the config, or of its text.
    """
    try:
        config, _ = read_config(source, overrides)
    except MtcliError:  # what reads it next says so, with all else that is wrong
        return Tokenized(overrides, [])
    words = chain(*config.words_by_field.values()) if config else ()
    if config is None or config.data.format != "tokens" or not any(map(is_text, words)):
        return Tokenized(overrides, [])
    run = config
    saved = checkpoint_of_config(config_name)
    texts, *_ = collect_errors(
        lambda: texts_of(run, extended_tokenizer(run) or (saved and saved.tokenizer_folder)),
        lambda: load_checked(source, overrides, world),
        *checks,
    )
    if not adds_to_caches() and not all(text.is_ready for text in texts):
        return Tokenized([*overrides, "data.train=[]", "data.valid=[]"], texts)
    for text in texts:
        text.tokenize(say)
    named: dict[str, Any] = {
        field: with_prefixes(words, texts) for field, words in run.words_by_field.items()
    }
    if run.data.tokenizer:  # such as train:8192, which nothing else can load
        named["data.tokenizer"] = str(with_suffix(texts[0].prefix, ".tokenizer"))
    flags = [f"{field}={json.dumps(value, ensure_ascii=False)}" for field, value in named.items()]
    return Tokenized([*overrides, *flags], [])


def with_data_steps(run: RunConfig) -> RunConfig:
    """Returns the config with the steps of its epochs, where the data decides their number. Raises
    MtcliError where that is wrong, or the warm-up is longer."""
    if run.data.format == "tokens" or not run.data.train:
        return run
    return with_steps(run, extended_tokenizer(run))


@dataclass(frozen=True)
class ResolvedConfig:
    """A config as it would run on `world` ranks; values, origins and values in the run by field.

    The value of train.steps is None where epochs decide it, of data that cannot be read.
    """

    name: str
    config: RunConfig
    world: int
    values: Mapping[str, Any]
    origins: Mapping[str, Origin]
    in_run: Mapping[str, Any]  # for values that leave it to other fields

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a step that follow from the number of ranks."""
        layout, batch = ParallelLayout.of_run(self.config, self.world), self.config.batch
        return {
            "ranks": self.world,
            "num_micro_batches": batch.num_micro_batches(layout.batch_shards),
            "tokens_per_step": batch.tokens_per_step,
        }

    def as_json(self) -> dict[str, Any]:
        """Returns the sizes, and each field's value, origin and value in the run."""
        fields = {
            field: {"value": value, "from": self.origins[field]}
            | ({"in_run": self.in_run[field]} if field in self.in_run else {})
            for field, value in self.values.items()
        }
        return {"run": self.sizes, "fields": fields}

    def as_toml(self) -> str:
        """Returns TOML that runs again, with each field's origin as a comment."""
        ranks, micro_batches, tokens = self.sizes.values()
        title = f"# {self.name} on {ranks:,} rank{'s' * (ranks > 1)}: a step has {tokens:,} tokens,"
        title += f" {micro_batches:,} micro-batches on each data rank\n"
        unknown = [STEPS] if self.values[STEPS] is None else []
        return title + annotated(self.config, dict(self._comments()), unknown)

    def _comments(self) -> Iterator[tuple[str, str]]:
        for field, value in self.values.items():
            origin, number = self.origins[field], self.in_run.get(field)
            in_run = "" if number is None else f", {shown(number)} in the run"
            left_open = (
                origin == "default" and value in (None, 0, 0.0, (), "") and value is not False
            )
            reason = ""
            if (left_open or origin == "derived") and _is_used(self.config, field):
                reason = what_decides(self.config, field)
            if field == STEPS and value is None:
                reason = "train.epochs decides, of data that is not here"
            yield field, f"{origin}{in_run}" + f": {reason}" * bool(reason)


def resolve(name: str, overrides: Sequence[str] = (), world: int | None = None) -> ResolvedConfig:
    """Resolves a CONFIG with overrides, as `train` would run it on `world` ranks, or on the fewest
    that hold it.

    Raises MtcliError with all of its problems. Data that is not on this machine is none.
    """
    source, given = source_of(name), list(overrides)
    flags = with_vocabulary(source, given, starting_tokenizer)
    world = world or _fewest_ranks(source, flags)
    config, unknown = load_checked(source, flags, world), False
    by_data = bool(config.train.epochs) and "steps" not in config.train.model_fields_set
    try:
        config = with_data_steps(config)
    except MtcliError:
        if all(map(exists, _inputs(config))):
            raise
        if by_data and isfile(Path(name) / CONFIG):  # the run knew its steps
            source, config, by_data = name, load_checked(name, flags, world), False
        unknown = by_data
    found = origins(config, _layers(name, source, flags, given))
    found |= {STEPS: "data"} if by_data else {}
    values, in_run = dict(values_of(config)), dict(_in_run(config, world))
    if unknown:
        values[STEPS], in_run = None, {f: v for f, v in in_run.items() if f not in OF_STEPS}
    return ResolvedConfig(name, config, world, values, found, in_run)


def _inputs(config: RunConfig) -> list[str]:
    """Lists the paths on which the steps of a run's epochs depend."""
    paths = (*config.data.train, *config.data.valid_words, config.data.tokenizer, config.train.init)
    return [path for path in paths if path]


def _fewest_ranks(source: str | Table, overrides: Sequence[str]) -> int:
    config, _ = read_config(source, overrides)
    return config.parallel.smallest_world * (config.sync.replicas or 1) if config else 1


def _layers(
    name: str, source: str | Table, flags: list[str], given: list[str]
) -> list[tuple[Origin, Mapping[str, Any]]]:
    """Returns what each origin sets, the one that wins first. `flags` are `given` ones after those
    that follow from the data."""
    base = dict(entries(source if isinstance(source, dict) else read_table(source)))
    table = table_of(source, flags)
    result = dict(entries(table))
    kept_entries = {f: v for f, v in base.items() if f in result and result[f] == v}
    changed = {f: v for f, v in result.items() if f not in kept_entries}
    origin: Origin = "preset" if name in preset_names() else "file"
    if is_weights(name):  # which say nothing of the optimizer
        origin = "weights"
        kept_entries = {f: v for f, v in kept_entries.items() if not f.startswith("optimizer.")}
    preset = table["model"].get("preset")
    shapes = read_table(preset)["model"] if preset else {}
    fitted = flags[: len(flags) - len(given)]
    return [
        ("flag", dict(entries(with_overrides({}, given)))),
        ("data", dict(entries(with_overrides({}, fitted)))),
        (origin, kept_entries),
        ("flag", changed),
        ("preset", dict(entries({"model": shapes}))),
    ]


def _in_run(config: RunConfig, world: int) -> Iterator[tuple[str, Any]]:
    """Yields (field, value in the run) of fields whose own value leaves it to others."""
    m, p, o, s = config.model, config.parallel, config.optimizer, config.sync
    layout, replicas = ParallelLayout.of_run(config, world), config.num_replicas(world)
    other = o.of_others.model_dump(include=set(OtherConfig.model_fields))
    found = {
        **{f"model.{name}": getattr(m, f"has_{name}") for name in ("norm_bias", "out_bias")},
        "model.mlp_bias": m.has_mlp_bias,
        "parallel.tp_rows": p.grid_rows,
        "parallel.stage_layers": [
            len(layers) for layers in stage_layers(m, layout, p.stage_layers)
        ],
        "optimizer.decay_steps": o.steps_of_decay(config.train.steps),
        **{f"optimizer.other.{name}": value for name, value in other.items()},
        "sync.replicas": replicas,
        "sync.warmup_steps": s.warmup(config.train.steps),
        "sync.period": s.steps_between,
        "sync.global_period": s.steps_between_global,
        "sync.group_size": s.workers_of_group(replicas),
        "data.seed": config.data_seed,
    }
    values = dict(values_of(config))
    for field, value in found.items():
        is_open = field in values and not values[field] and values[field] != value
        if is_open and _is_used(config, field):
            yield field, value


def _is_used(config: RunConfig, field: str) -> bool:
    """Says whether a config has the settings without which a field has no meaning."""
    return all(need.holds(config) for need in NEEDS if field in need.fields)
