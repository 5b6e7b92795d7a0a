"""Writes the field tables of docs/reference/config.md from the config's own types and docstrings.

python scripts/config_docs.py          # after a field has changed
python scripts/config_docs.py --check  # exit 1 where the page is not current
"""

import sys
from pathlib import Path
from types import NoneType
from typing import Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mtcli.core.config.fields import FieldKind, field_kind, section_at, table_header
from mtcli.core.config.model import ARCHITECTURES, ModelConfig
from mtcli.core.config.origins import missing_default
from mtcli.core.config.schema import RunConfig

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "config.md"
BEGIN, END = "<!-- fields: written by scripts/config_docs.py -->\n", "<!-- end of fields -->\n"


def main() -> None:
    """Rewrites the page, or with --check says whether it is current."""
    text = PAGE.read_text()
    current = with_tables(text)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if text == current else f"error: {PAGE} is not current\n\nhint: run {__file__}")
    PAGE.write_text(current)


def with_tables(text: str) -> str:
    """The page with its field tables written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + architecture_table() + "".join(sections(RunConfig)) + END + after


def sections(section: type[BaseModel], path: str = "") -> list[str]:
    """A table for a section, then those of the sections inside it."""
    rows, inside = [], []
    for name, field in section.model_fields.items():
        if path.startswith("phase.0.") and section_at(section, [name]):  # described above
            rows.append(f"| `{name}` | table | none | {field.description} |\n")
        elif inner := section_at(section, [name]):
            item = ".0" if field_kind(field).holds_tables else ""
            inside += sections(inner, f"{path}.{name}{item}".lstrip("."))
        else:
            default = _default(section, name, field)
            rows.append(
                f"| `{name}` | {_type(field_kind(field))} | {default} | {field.description} |\n"
            )
    title = f"`{table_header(path)}`" if path else "The top level"
    columns = "| field | type | default | meaning |\n|---|---|---|---|\n"
    return [
        f"\n### {title}\n\n{' '.join(section.__doc__.split())}\n\n{columns}" + "".join(rows),
        *inside,
    ]


def architecture_table() -> str:
    """What each architecture's name says."""
    names = sorted({name for fields in ARCHITECTURES.values() for name in fields})
    head = "".join(f" `{name}` |" for name in ARCHITECTURES)
    text = (
        f"\n### What `architecture` says\n\n| field |{head}\n|---|{'---|' * len(ARCHITECTURES)}\n"
    )
    for name in names:
        plain = ModelConfig.model_fields[name].get_default()
        cells = [fields.get(name, plain) for fields in ARCHITECTURES.values()]
        text += f"| `{name}` |" + "".join(f" {_value(cell)} |" for cell in cells) + "\n"
    return text


def _type(kind: FieldKind) -> str:
    if kind.options and kind.base is tuple:
        return f"{_type(kind._replace(base=Literal))} or {_type(kind._replace(options=()))}"
    if kind.options:
        return " or ".join(f"`{option}`" for option in kind.options)
    if kind.base is tuple:
        of = _type(kind.items[0])
        return f"list of {len(kind.items)}: {of}" if len(kind.items) > 1 else f"list of {of}"
    return f"{kind.base.__name__} {kind.range}".rstrip()


def _default(section: type[BaseModel], name: str, field: FieldInfo) -> str:
    return missing_default(section, name) or _value(field.get_default())


def _value(value: object) -> str:
    if isinstance(value, bool | NoneType):
        return str(value).lower()
    if isinstance(value, tuple):
        return "`[" + ", ".join(map(str, value)) + "]`"
    return f"`{value}`" if value != "" else '`""`'


if __name__ == "__main__":
    main()
