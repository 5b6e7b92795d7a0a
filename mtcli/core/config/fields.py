"""Describes the legal values of a config field, for errors and for docs/reference/config.md.

A section is a frozen pydantic model. Every number has a range, its field's own bounds, to catch
typing errors; this module repeats no number.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from math import isfinite, isqrt
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from mtcli.core.config.errors import Problem
from mtcli.core.config.synonyms import meant_value
from mtcli.core.config.untrusted import names_a_file, shown

LARGEST = 10**9  # of a config's whole numbers: none overflows, and its divisors are found at once
MAX_RANKS = 2**20
SMALLEST = 1e-30  # what is nearer to 0 is lost in products of float32
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _is_number(value: Any) -> Any:
    """Returns a number. Raises ValueError for a boolean, which is a number in Python though not in
    TOML, and for one that is nearer to 0 than SMALLEST."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    if isinstance(value, float) and 0.0 < abs(value) < SMALLEST:
        raise ValueError(f"should be 0 or at least {SMALLEST:g}")
    return value


Int = Annotated[int, BeforeValidator(_is_number)]
Real = Annotated[float, BeforeValidator(_is_number)]
Positive = Annotated[Int, Field(ge=1, le=LARGEST)]
Whole = Annotated[Int, Field(ge=0, le=LARGEST)]
Ranks = Annotated[Int, Field(ge=1, le=MAX_RANKS)]
Fraction = Annotated[Real, Field(ge=0.0, lt=1.0)]
Count = Annotated[Int, Field(ge=0)]


NO_PATH: Final = "{text} names nothing"


def _path(text: str) -> str:
    if not names_a_file(text):
        raise PydanticCustomError("no_path", NO_PATH, {"text": shown(text)})
    return text


PathText = Annotated[str, AfterValidator(_path)]


def _one_fault(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError as error:
        for detail in error.errors():
            if detail["type"] == "no_path":
                raise PydanticCustomError("no_path", NO_PATH, detail["ctx"]) from None
        raise ValueError("fits no alternative") from None


# Annotates a union, each of whose alternatives pydantic would report by itself.
AnyOf = WrapValidator(_one_fault)


class Section(BaseModel):
    """A frozen config section that refuses unknown keys, infinity and NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class FieldKind(NamedTuple):
    """The legal values of a field."""

    base: Any  # int, float, bool, str, tuple, Literal, or the class of a section
    options: tuple[Any, ...] = ()  # of a Literal, or of one beside a tuple
    items: tuple["FieldKind", ...] = ()  # of a tuple; one where it has any length
    low: float | None = None
    high: float | None = None
    below: float | None = None

    @property
    def holds_tables(self) -> bool:
        """True for an array of tables, such as [[name]] in TOML."""
        return self.base is tuple and bool(self.items) and _is_section(self.items[0].base)

    @property
    def range(self) -> str:
        """The bounds in words: 'from 1 to 1,000,000,000'; empty where the kind has none."""
        if self.low is None:
            return ""
        return f"from {_figure(self.low)} to " + (
            f"below {_figure(self.below)}" if self.high is None else _figure(self.high)
        )

    @property
    def words(self) -> str:
        """The legal values in words: 'a whole number from 1 to 1,000,000,000', ''a' or 'b''."""
        lists = f"a list of {len(self.items)}" if len(self.items) > 1 else "a list"
        if self.options:
            return either([*map(shown, self.options), *[lists] * (self.base is tuple)])
        if self.base is tuple:
            return "an array of tables" if self.holds_tables else lists
        name = NAMES.get(self.base, "a table of fields")
        return f"{name} {self.range}".rstrip()


def either(words: Iterable[str]) -> str:
    """Joins words as '1, 2 or 3'."""
    *head, last = words
    return f"{', '.join(head)} or {last}" if head else last


def kind_of(annotation: Any, bounds: Sequence[Any] = ()) -> FieldKind:
    """Returns the kind of a type, bounded by `bounds` and its annotations."""
    if get_origin(annotation) is Annotated:
        inner, *extras = get_args(annotation)
        more = [extra.metadata if isinstance(extra, FieldInfo) else [extra] for extra in extras]
        return kind_of(inner, [*chain(*more), *bounds])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind_of(arg, bounds) for arg in get_args(annotation) if arg is not NoneType]
        options = tuple(option for kind in kinds for option in kind.options)
        return kinds[-1]._replace(options=options)
    if get_origin(annotation) is Literal:
        return FieldKind(Literal, get_args(annotation))
    if get_origin(annotation) is tuple:
        items = [arg for arg in get_args(annotation) if arg is not Ellipsis]
        return FieldKind(tuple, items=tuple(map(kind_of, items)))
    low, high, below = (
        next((getattr(bound, key) for bound in bounds if hasattr(bound, key)), None)
        for key in ("ge", "le", "lt")
    )
    return FieldKind(annotation, low=low, high=high, below=below)


def field_kind(field: FieldInfo) -> FieldKind:
    """Returns the kind of a section's field."""
    return kind_of(field.annotation, field.metadata)


def section_at(root: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel] | None:
    """Finds the section at a path of names; None where there is none. That of an array of tables is
    the section of each; numbers, which say the table, may follow it."""
    section = root
    for key in (key for key in path if not str(key).isdecimal()):
        if key not in section.model_fields:
            return None
        kind = field_kind(section.model_fields[str(key)])
        inner = kind.items[0].base if kind.holds_tables else kind.base
        if not _is_section(inner):
            return None
        section = inner
    return section


def table_header(path: str) -> str:
    """Returns the TOML header of the section at a path: [model], [[eval]] for eval.0, and
    [phase.batch] for phase.0.batch."""
    keys = path.split(".")
    name = ".".join(key for key in keys if not key.isdecimal())
    return f"[[{name}]]" if keys[-1].isdecimal() else f"[{name}]"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def refused_value(root: type[BaseModel], detail: ErrorDetails) -> Problem:
    """Builds the problem of a value that pydantic refused, with a legal value as its hint."""
    *parents, name = detail["loc"]
    items = [name] if isinstance(name, int) else []
    if items:
        *parents, name = parents
    section = section_at(root, parents)
    path = ".".join(map(str, detail["loc"]))
    if detail["type"] == "missing":
        return Problem("this field is missing", f"add {name}", path)
    if section is None or name not in section.model_fields:
        return Problem(f"{shown(detail['input'])} is not legal here", f"leave {path} out", path)
    field = section.model_fields[str(name)]
    kind, default = field_kind(field), None if field.is_required() else field.get_default()
    if items:
        kind, default = kind.items[min(items[0], len(kind.items) - 1)], None
    return refused(path, kind, detail["input"], default)


def refused(name: str, kind: FieldKind, value: Any, default: Any = None) -> Problem:
    """Builds the problem of an illegal value of a field or flag, with a legal one as its hint.

    Text is read as the number that it spells.
    """
    number = _number(value) if name.startswith("--") and kind.base in (int, float) else value
    said = f"{shown(number)} should be {_fault(kind, number)}"
    return Problem(said, _hint(kind, name, value, default), name)


def _number(word: Any) -> Any:
    for read in (int, float):
        with suppress(ValueError, TypeError):
            return read(word)
    return word


def _fault(kind: FieldKind, value: Any) -> str:
    """Words the legal values, with the bound that a number breaks."""
    if kind.base not in (int, float):
        return kind.words
    if type(value) not in (int, float):
        return NAMES[kind.base]
    if not isfinite(value):
        return "a finite number"
    if kind.base is int and value != int(value):
        return "a whole number"
    if kind.low is not None and value < kind.low:
        return f"at least {_figure(kind.low)}"
    if kind.high is not None and value > kind.high:
        return f"at most {_figure(kind.high)}"
    if kind.below is not None and value >= kind.below:
        return f"below {_figure(kind.below)}"
    return f"0 or at least {SMALLEST:g}"


def _hint(kind: FieldKind, name: str, value: Any, default: Any) -> str:
    if kind.options:
        if (near := meant_value(name, value, kind.options)) is not None:
            return f"did you mean {shown(near)}?"
        return f"such as {_assigned(name, kind.options[0] if default is None else default)}"
    if kind.holds_tables:
        return f"a table of fields for each, as [[{name}]]"
    if kind.base is tuple:
        if isinstance(value, str):
            options = kind.items[0].options
            near = meant_value(name, value, options) or (options[0] if options else value)
            return _pasteable(name, [near])
        return f"such as {_pasteable(name, list(default or ['a']))}"
    if kind.base is str:
        return "text in quotes"
    if kind.base is bool:
        return f"{_assigned(name, True)}, or false"
    if kind.range:
        if numbers := _written_out(value):
            return either(numbers)
        return f"{kind.words}, such as {_figure(kind.low if default is None else default)}"
    return f"fields of its own, as {table_header(name)} or {name}.FIELD=VALUE"


def _written_out(value: Any) -> list[str]:
    """Returns in digits the numbers that a word such as 8k, 10% or 1,000 may stand for."""
    match = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d{1,9})([kKmMbB%]?)", str(value))
    if not match or match[0].isdecimal():
        return []
    number, unit = int(match[1].replace(",", "")), match[2].lower()
    if unit == "%":
        return [f"{number / 100:g}"]
    factors = {"": (1,), "k": (1024, 1000), "m": (10**6,), "b": (10**9,)}[unit]
    return [str(number * factor) for factor in factors]


def _assigned(name: str, value: Any) -> str:
    """Words how a user sets a field of the config, or a flag."""
    if name.startswith("--"):
        return f"{name} {value}"
    return f"{name.rpartition('.')[2]} = {shown(value)}"


def _pasteable(name: str, value: list[Any]) -> str:
    """Words a list as a word of the command line, where the name is that of a config's field."""
    is_field = "." in name and not any(key.isdecimal() for key in name.split("."))
    return f'--set "{name}={shown(value)}"' if is_field else _assigned(name, value)


def _figure(number: Any) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def divisors(n: int) -> list[int]:
    """Returns the divisors of n, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def multiples_around(number: int, unit: int) -> list[int]:
    """Returns the multiples of `unit` on both sides of a number, ascending; at least one unit."""
    return sorted({max(unit, number // unit * unit), -(-number // unit) * unit})


def listing(numbers: list[int]) -> str:
    """Joins values as '1, 2, 4 or 8'; shortens long lists to their ends."""
    if len(numbers) > 10:
        return f"{', '.join(map(str, numbers[:8]))}, ... or {numbers[-1]}"
    return either(map(str, numbers))


def divides(
    field: str, size: int, dividend: str, number: int, called: str = ""
) -> Iterator[Problem]:
    """Yields a problem of `field` where `size` does not divide `number`.

    The message names the number `dividend`, and the size as the field, or as `called`.
    """
    if number % size:
        name = dividend.removeprefix("model.")
        short = called or field.rpartition(".")[2]
        legal = [d for d in divisors(number) if d <= 4 * size]
        yield Problem(f"{short}={size} does not divide {name}={number}", listing(legal), field)
