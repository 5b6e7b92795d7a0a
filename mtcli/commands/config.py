"""`mtcli config`: the whole config as it would run, two compared, fields explained, the schema."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtcli.commands.options import JsonOut, Overrides, refuse_flags, taken_from_hub
from mtcli.commands.output import answer, answering, echo, write_json
from mtcli.core.config.errors import MtcliError, collect_errors, wrong
from mtcli.core.config.nameable import CONFIGS

if TYPE_CHECKING:
    from mtcli.core.training.run_config import ResolvedConfig

WORDS = {"show": "CONFIG", "diff": "A B", "explain": "FIELD", "schema": ""}
IN_CONFIG = "CONFIG FIELD"  # of explain too
Action = Annotated[
    Literal["show", "diff", "explain", "schema"],
    typer.Argument(metavar="show|diff|explain|schema", help="what to do"),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG | A B | [CONFIG] FIELD]",
        callback=taken_from_hub,
        help=f"CONFIG, A and B: {CONFIGS}; FIELD: section.name, or a section",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2**20,
        help="show: number of devices",
        show_default="the fewest that hold the layout",
    ),
]


@answering
def config(
    context: typer.Context,
    action: Action,
    overrides: Overrides,
    names: Names = None,
    gpus: Gpus = None,
    json_out: JsonOut = None,
) -> None:
    """Show, compare and explain run configs; write their JSON Schema.

    show prints the whole config as it would run, as TOML that runs again; comments say where each
    value comes from. diff lists the fields in which two configs differ. explain says what a field
    means, which values are legal, which rules there are, and with a CONFIG its value there.
    """
    names = names or []
    in_config = action == "explain" and len(names) == len(IN_CONFIG.split())
    if len(names) != len(WORDS[action].split()) and not in_config:
        usage = f"mtcli config {action} {WORDS[action]}".rstrip()
        said = f"{action} takes {WORDS[action] or 'no name'}, and {len(names)} names are given"
        raise wrong(said, usage)
    if action != "show":
        refuse_flags(context, ("overrides", "gpus"), "goes with show")
    if action == "show":
        _show(names[0], overrides, gpus, json_out)
    elif action == "diff":
        _diff(names[0], names[1], json_out)
    elif action == "explain":
        _explain(names[-1], names[0] if in_config else None, json_out)
    else:
        from mtcli.core.config.json_schema import config_schema

        write_json(config_schema(), json_out or "-")


def _show(name: str, overrides: list[str], gpus: int | None, json_out: str | None) -> None:
    from mtcli.core.training.run_config import resolve

    resolved = resolve(name, overrides, gpus)
    if answer(resolved.as_json(), json_out):
        echo(resolved.as_toml().rstrip("\n"))


def _diff(a: str, b: str, json_out: str | None) -> None:
    from mtcli.core.config.origins import differences
    from mtcli.core.runtime.console import print_table

    one, other = collect_errors(lambda: _resolved(a), lambda: _resolved(b))
    rows = differences(one.values, other.values)
    fields = {
        field: {"values": pair, "from": [one.origins.get(field), other.origins.get(field)]}
        for field, *pair in rows
    }
    if not answer({"names": [a, b], "fields": fields}, json_out):
        return
    if rows:
        print_table("", ("field", a, b), [[field, *map(_cell, pair)] for field, *pair in rows])
    else:
        echo("no field differs")


def _cell(value: object) -> str:
    from mtcli.core.config.untrusted import shown

    if value is None:
        return "-"
    return shown(list(value) if isinstance(value, tuple) else value)


def _resolved(name: str) -> "ResolvedConfig":
    """Resolves a config; names it in its problems."""
    from mtcli.core.training.run_config import resolve

    try:
        return resolve(name)
    except MtcliError as error:
        problems = (p._replace(message=f"{p.message} (in {name})") for p in error.problems)
        raise MtcliError(*problems, code=error.code, hint=error.hint) from None


def _explain(name: str, source: str | None, json_out: str | None) -> None:
    """Explains a field or section, with its values in a config where one is named."""
    from mtcli.core.config.field_facts import explain
    from mtcli.core.runtime.console import print_line, print_table

    facts, resolved = collect_errors(
        lambda: explain(name), lambda: None if source is None else _resolved(source)
    )
    values: dict[str, dict[str, Any]] = {}
    if resolved:
        values = {
            fact.name: {
                "value": resolved.values.get(fact.name),
                "from": resolved.origins.get(fact.name),
            }
            for fact in facts
        }
    table = {fact.name: fact.as_json() | values.get(fact.name, {}) for fact in facts}
    if not answer({"fields": table}, json_out):
        return
    shown = {
        field: f"{_cell(one['value'])} ({one['from'] or 'not set'})"
        for field, one in values.items()
    }
    if len(facts) > 1 or facts[0].name != name:
        rows = [
            [fact.name, shown.get(fact.name, ""), fact.kind.words, fact.default, fact.help]
            for fact in facts
        ]
        print_table("", ("field", source or "", "values", "default", "meaning"), rows)
        return
    fact = facts[0]
    lines = {"values": fact.kind.words, "default": fact.default, "docs": fact.docs}
    lines = {"here": shown[name]} | lines if shown else lines
    print_line(f"{fact.name}: {fact.help}", indent="  ")
    for title, text in lines.items():
        print_line(f"  {title:<9}{text}", indent=" " * 11)
    for number, rule in enumerate(fact.rules):
        print_line(f"  {'' if number else 'rules':<9}{rule}", indent=" " * 11)
