"""Checks the arguments of Python calls; what is refused is named, shown, and has a hint."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike, fspath

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.untrusted import is_text

OVERRIDES = 'overrides=["section.field=value"] or {"section.field": value}'


def whole(name: str, value: object, least: int, most: int, usual: int) -> int:
    """Returns an argument that is a whole number of a range; a hint names a usual one."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most:
        return int(value)
    meant = value if isinstance(value, str) and value.isdecimal() else usual
    raise wrong(f"{value!r} is no whole number of {least} to {most}", f"{name}={meant}", name)


def number(name: str, value: object, least: float, most: float, usual: float) -> float:
    """Returns an argument that is a number of a range; a hint names a usual one."""
    if isinstance(value, Real) and not isinstance(value, bool) and least <= float(value) <= most:
        return float(value)
    raise wrong(f"{value!r} is no number of {least:g} to {most:g}", f"{name}={usual:g}", name)


def truth(name: str, value: object) -> bool:
    """Returns an argument that is True or False."""
    if isinstance(value, bool):
        return value
    raise wrong(f"{value!r} is neither True nor False", f"{name}=True", name)


def one_of(name: str, value: object, names: Sequence[str]) -> str:
    """Returns an argument that is one of several words."""
    if isinstance(value, str) and value in names:
        return value
    raise wrong(f"{value!r} is none of {', '.join(names)}", f'{name}="{names[0]}"', name)


def path(name: str, value: object, usual: str) -> str:
    """Returns an argument that is a text or a path; a hint names a usual one."""
    if isinstance(value, str | PathLike) and isinstance(text := fspath(value), str) and text:
        return text
    raise wrong(f"{value!r} is neither a text nor a path", f'{name}="{usual}"', name)


def texts(name: str, value: object, empty: bool = True) -> list[str]:
    """Returns an argument that is a text or several, which may be `empty` ones."""
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, Iterable) or isinstance(several, bytes | Mapping):
        raise wrong(f"{value!r} is neither a text nor a list of texts", f'{name}=["TEXT"]', name)
    given = list(several)
    if odd := [one for one in given if not is_text(one) or not (one or empty)]:
        what = "is no text that UTF-8 can encode" if odd[0] != "" else "is an empty text"
        raise wrong(f"{odd[0]!r} {what}", f'{name}=["TEXT"]', name)
    return given


def require_ids(biases: Mapping[int, float], vocab_size: int, name: str) -> None:
    """Raises MtcliError for a bias of an id beyond the vocabulary; `name` is the argument's."""
    if beyond := [id for id in biases if id >= vocab_size]:
        message = f"the id {beyond[0]} is not among the vocabulary's {vocab_size}"
        raise wrong(message, f"0 to {vocab_size - 1}", name)


def overrides_of(value: object) -> list[str]:
    """Returns `section.field=value` of each override: of a list of such, or of a mapping from
    fields or sections to values. Raises MtcliError with the problems of all of them."""
    if isinstance(value, Mapping):
        return [f"{field}={_toml(field, one)}" for field, one in _fields(value)]
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        text = isinstance(value, str) and "=" in value
        hint = f"overrides=[{value!r}]" if text else OVERRIDES
        raise wrong(f"{value!r} is no list of overrides", hint, "overrides")
    items = list(value)
    if odd := [item for item in items if not isinstance(item, str) or "=" not in item]:
        problems = (
            Problem(f"{one!r} is no section.field=value", OVERRIDES, "overrides") for one in odd
        )
        raise MtcliError(*problems)
    return items


def _fields(table: Mapping[object, object], *parents: str) -> list[tuple[str, object]]:
    """Lists (section.field, value) of a mapping and the mappings in it."""
    found: list[tuple[str, object]] = []
    for key, value in table.items():
        if not isinstance(key, str):
            raise wrong(f"{key!r} is no name of a field", OVERRIDES, "overrides")
        names = *parents, key
        found += (
            _fields(value, *names) if isinstance(value, Mapping) else [(".".join(names), value)]
        )
    return found


def _toml(field: str, value: object) -> str:
    """Writes a value as TOML on a line."""
    import tomlkit

    match value:
        case bool():
            return str(value).lower()
        case Integral():
            return str(int(value))
        case Real():
            return repr(float(value))
        case str() | PathLike():
            return tomlkit.item(str(value)).as_string()
        case Mapping():
            entries = (
                f"{tomlkit.key(str(k)).as_string()} = {_toml(field, v)}" for k, v in value.items()
            )
            return f"{{{', '.join(entries)}}}"
        case Sequence() if not isinstance(value, bytes):
            return f"[{', '.join(_toml(field, one) for one in value)}]"
    message = f"{value!r} of {field} is no value of a config"
    raise wrong(message, "a text, a number, True, False, or a list of them", "overrides")
