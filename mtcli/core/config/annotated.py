"""Writes a config as TOML with a comment on each field."""

from collections.abc import Collection, Mapping

from mtcli.core.config.loading import dump_toml
from mtcli.core.config.origins import values_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import shown

COMMENTS_AT = 36  # the column of comments, where a line is not longer


def annotated(config: RunConfig, comments: Mapping[str, str], without: Collection[str] = ()) -> str:
    """Returns TOML that `load_config` reads back to an equal config, apart from fields in
    `without`; these, and what TOML leaves out, stand at their section's end as comments."""
    lines_of: dict[str, list[str]] = {"": []}
    section, written = "", set[str]()
    for line in filter(None, dump_toml(config).splitlines()):
        if line.startswith("["):
            table = line.strip("[]")
            # A table inside one of an array stays there.
            section = next((field for field in written if table.startswith(f"{field}.")), table)
            written |= {section} & comments.keys()  # an array of tables, or a table of names
            header = _commented(line, comments[table]) if table in comments else line
            lines_of.setdefault(section, []).extend(["", header])
            continue
        field = f"{section}.{line.partition(' = ')[0]}".lstrip(".")
        if section in written:
            lines_of[section].append(line)
        elif field not in without:
            lines_of[section].append(_commented(line, comments[field]))
            written.add(field)
    for field, value in values_of(config):
        if field not in written:
            section, _, name = field.rpartition(".")
            assigned = "" if value is None or field in without else f" = {shown(value)}"
            lines_of[section].append(_commented(f"# {name}{assigned}", comments[field]))
    return "\n".join(line for lines in lines_of.values() for line in lines) + "\n"


def _commented(line: str, comment: str) -> str:
    return f"{line:<{COMMENTS_AT}}  # {comment}"
