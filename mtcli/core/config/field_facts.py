"""Explains fields of the config: help, legal values, default, rules, and place in the docs."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.config.fields import FieldKind, either, field_kind, section_at
from mtcli.core.config.layout_rules import Rule
from mtcli.core.config.loading import all_fields, meant_by, preset_names
from mtcli.core.config.model import ARCHITECTURES, ModelConfig
from mtcli.core.config.origins import help_of, missing_default
from mtcli.core.config.rules import ENGINE_RULES, NEEDS, RULES
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import shown

PAGE = "docs/reference/config.md"
PRESET = "the preset whose shapes the other fields of [model] change"  # model.preset is no field
FULL_NAME = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+")


class FieldFacts(NamedTuple):
    """Describes a field: help, values, default, and the rules that read it, a sentence each."""

    name: str
    help: str
    kind: FieldKind
    default: str
    rules: tuple[str, ...]
    docs: str

    def as_json(self) -> dict[str, Any]:
        """Returns the facts without the name; numbers have `minimum` and `maximum`, or `below`."""
        kind = self.kind
        base = type(kind.options[0]) if kind.base is Literal else kind.base
        limits = {"minimum": kind.low, "maximum": kind.high, "below": kind.below}
        return {
            "help": self.help,
            "type": "list" if base is tuple else base.__name__,
            "options": list(kind.options),
            **{name: limit for name, limit in limits.items() if limit is not None},
            "default": self.default,
            "rules": list(self.rules),
            "docs": self.docs,
        }


def explain(name: str) -> list[FieldFacts]:
    """Returns the facts of a field, as section.name, or of all fields of a section.

    Raises MtcliError with the nearest names for any other.
    """
    names = all_fields(with_repeated=True)
    fields = [field for field in names if field == name or field.startswith(f"{name}.")]
    if fields:
        return [_facts(field) for field in fields]
    if name == "model.preset":
        kind = FieldKind(Literal, preset_names())
        return [FieldFacts(name, PRESET, kind, "none", (), f"{PAGE}#presets")]
    near = meant_by(name.split("."))
    sections = (f for f in RunConfig.model_fields if section_at(RunConfig, [f]))
    hint = f"did you mean {either(near)}?" if near else f"sections: {', '.join(sections)}"
    raise wrong(f"there is no field or section {shown(name)}", hint, "FIELD")


def _facts(field: str) -> FieldFacts:
    *parents, name = field.split(".")
    section = section_at(RunConfig, parents)
    assert section, field
    info = section.model_fields[name]
    anchor = "".join(parents) or "the-top-level"
    return FieldFacts(
        field,
        help_of(section, name),
        field_kind(info),
        _default(field, info.get_default(), missing_default(section, name)),
        tuple(_rules_of(field)),
        f"{PAGE}#{anchor}",
    )


def _default(field: str, value: Any, missing: str) -> str:
    """Words a field's default, or how it comes about."""
    if missing != "by architecture":
        return missing or ("none" if value is None else shown(value))
    name = field.removeprefix("model.")
    default = ModelConfig.model_fields[name].get_default()
    by_value: dict[str, list[str]] = {}
    for kind, fields in ARCHITECTURES.items():
        by_value.setdefault(shown(fields.get(name, default)), []).append(kind)
    return "; ".join(f"{value} for {either(kinds)}" for value, kinds in by_value.items())


def _rules_of(field: str) -> Iterator[str]:
    for need in NEEDS:
        if field in need.fields or field == need.setting:
            fields = [field] if field in need.fields else need.fields
            yield f"{', '.join(fields)}: of use with {need.words} alone"
    for rule in rules_on(field):
        assert rule.__doc__, f"{rule.__name__} says in its docstring what it checks"
        sentence = " ".join(rule.__doc__.split()).partition(". ")[0].removesuffix(".")
        yield sentence.removeprefix("Checks ").removeprefix("that ")


def rules_on(field: str) -> list[Rule]:
    """Lists the rules that mention a field: its section and name, or both in a text."""
    *sections, name = field.split(".")
    return [
        rule
        for rule in (*RULES, *ENGINE_RULES)
        if field in _words_of(rule) or {*sections, name} <= _words_of(rule)
    ]


@cache
def _words_of(rule: Rule) -> frozenset[str]:
    """Returns the names, and section.name in texts, of a rule and of the functions that it calls in
    this folder."""
    assert isinstance(rule, FunctionType)
    words: set[str] = set()
    codes, called = [rule.__code__], {rule}
    while codes:
        code = codes.pop()
        words |= {*code.co_names}
        for constant in _flat(code.co_consts):
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                words |= {constant, *FULL_NAME.findall(constant)}
        for helper in map(rule.__globals__.get, code.co_names):
            if not isinstance(helper, FunctionType) or helper in called:
                continue
            if helper.__module__.startswith("mtcli.core.config."):
                called.add(helper)
                codes.append(helper.__code__)
    return frozenset(words)


def _flat(constants: Iterable[Any]) -> Iterator[Any]:
    for constant in constants:
        if isinstance(constant, tuple | frozenset):
            yield from _flat(constant)
        else:
            yield constant
