"""Writes the tables of docs/reference/families.md from the families' data and the tests' layouts.

python scripts/families_docs.py          # after a family or a preset has changed
"""

import ast
from pathlib import Path

from mtcli.core.checkpoint.huggingface.config_json import FAMILIES, UNSUPPORTED, family_of
from mtcli.core.checkpoint.huggingface.family import Family
from mtcli.core.config.loading import load_config, preset_names

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "families.md"
LAYOUTS = ROOT / "tests" / "core" / "checkpoint" / "huggingface" / "test_huggingface.py"
BEGIN, END = (
    "<!-- families: written by scripts/families_docs.py -->\n",
    "<!-- end of families -->\n",
)
PLAIN = {"architecture", "dropout", "bias", "norm", "position", "head"}  # of most families


def main() -> None:
    """Rewrites the page."""
    PAGE.write_text(with_tables(PAGE.read_text()))


def with_tables(text: str) -> str:
    """The page with its tables written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + family_table() + refused_table() + END + after


def family_table() -> str:
    """A row for each family: what it always sets, what its config.json may say, where it is
    tested, and the presets that are written as it."""
    presets: dict[str, list[str]] = {}
    for name in preset_names():
        presets.setdefault(family_of(load_config(name).model).model_type, []).append(name)
    layouts = tested_layouts()
    columns = (
        "`model_type`",
        "sets in `[model]`",
        "reads into `[model]`",
        "round trip on",
        "presets",
    )
    rows = [f"| {' | '.join(columns)} |\n", "|---" * len(columns) + "|\n"]
    first_heads = {family.model_type: family for family in reversed(FAMILIES)}
    for family in reversed(first_heads.values()):
        kind = family.model_type
        tested = [layout for name, layout in layouts.items() if name.split("-")[0] == kind]
        cells = [f"`{kind}`", _constants(family), _fields(family), _words(dict.fromkeys(tested))]
        rows.append(f"| {' | '.join([*cells, _words(presets.get(kind, []))])} |\n")
    return "\n" + "".join(rows)


def refused_table() -> str:
    """What config.json may not say, but for the families that read it."""
    rows = ["\n| in config.json | only | read by |\n|---|---|---|\n"]
    for name, values in UNSUPPORTED.items():
        names = {
            family.model_type: None
            for family in FAMILIES
            if name in family.supports or name in {field.theirs for field in family.fields}
        }
        allowed = " or ".join("absent" if value is None else f"`{value!r}`" for value in values)
        rows.append(f"| `{name}` | {allowed} | {_words(names)} |\n")
    return "".join(rows) + "\n"


def tested_layouts() -> dict[str, str]:
    """LAYOUTS of the tests of Hugging Face folders, by the name of their tiny config."""
    for node in ast.parse(LAYOUTS.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYOUTS":
            return dict(ast.literal_eval(node.value))
    raise LookupError(f"no LAYOUTS in {LAYOUTS}")


def _constants(family: Family) -> str:
    given = {name: value for name, value in family.constants.items() if name not in PLAIN and value}
    return ", ".join(f"`{name} = {_toml(value)}`" for name, value in given.items()) or "-"


def _fields(family: Family) -> str:
    sizes = (
        "num_",
        "hidden_size",
        "head_dim",
        "vocab",
        "max_seq",
        "ffn_",
        "init",
        "tie",
        "norm_eps",
    )
    names = [field.ours for field in family.fields if not field.ours.startswith(sizes)]
    names += ["window", "window_pattern"] if family.window else []
    return _words(dict.fromkeys(names))


def _words(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"  # type: ignore[attr-defined]  # any iterable


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


if __name__ == "__main__":
    main()
