"""Every page is run: its commands in order, its configs, and its tables against the code.

In a ```console block, a line that starts with `$ ` is a command, which must exit with 0 or with the
code that a closing `# exit 2` states; the lines below it must be in its output. Each page runs in
an empty folder of its own, with a small trained run at runs/tiny where it names one. Commands are
forks of the warm process, and `stdlib` stands for a twelfth of its files.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules

import pytest
from command_line import mtcli, stand_ins
from marks import slow

from mtcli.cli import COMMANDS
from mtcli.core.config.fields import section_at
from mtcli.core.config.loading import load_config, preset_names
from mtcli.core.config.schema import RunConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose commands `make test` runs.
QUICK = ("config.md", "generate.md", "tasks.md")
FOLDERS = ("mtcli", "tests", "benchmarks", "scripts", "fuzz", "fused")
CODE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
NAMES = [f"/{path.relative_to(ROOT)}" for path in CODE]
MAKE_TINY = (
    "mtcli preprocess text.txt --output tiny --tokenizer bytes",
    "mtcli train tiny --set model.num_layers=2 --set model.hidden_size=64 "
    "--set model.vocab_size=512 --set model.max_seq_len=64 --set batch.seq_len=64 "
    "--set train.steps=2 --set train.output=runs/tiny --set data.train=\"['tiny']\"",
)


def blocks(page, language):
    """The bodies of a page's fenced blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page):
    """(command, exit code, the lines of output that the page shows), in order."""
    found = []
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                command, _, code = line[2:].partition("# exit ")
                found.append((command.strip(), int(code or 0), []))
            elif line.strip(" ."):  # `...` stands for lines left out
                found[-1][2].append(line.strip())
    return found


def run(command, folder):
    """Runs a line as a reader would type it; a shell runs what is more than words of ours."""
    name, *words = words_of(command)
    if name == "mtcli":
        return mtcli(*words, folder=folder, fault=with_less_text, COLUMNS="120")
    return shell(command, folder)


def with_less_text(rank):
    """A twelfth of the standard library's files stands for all."""
    from mtcli.core.data import sources

    stdlib = sources._stdlib
    sources._stdlib = lambda: stdlib()[::12]


def words_of(command):
    """The words of a command; [""] where only a shell can say what they are."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    operators = any(set(word) <= set(lexer.punctuation_chars) for word in words if word)
    return [""] if operators or set(command) & set("$`*?~") else words


def shell(command, folder):
    """Runs a line in a shell, with stand-ins for commands and this environment's in reach."""
    path = os.pathsep.join([str(stand_ins()), str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder, env=os.environ | {"PATH": path, "COLUMNS": "120"}, timeout=120,
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A folder with runs/tiny, a model that was trained for two steps."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text("all the world is a stage\n" * 400)
    for command in MAKE_TINY:
        done = run(command, folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "page",
    [page if page.name in QUICK else pytest.param(page, marks=slow("0 to 30 s a page"))
     for page in PAGES if commands(page)],
    ids=lambda page: page.name,
)  # fmt: skip
def test_a_page_s_commands_do_what_it_says(page, tmp_path, request):
    typed = commands(page)
    if any("runs/tiny" in command for command, _, _ in typed):
        shutil.copytree(request.getfixturevalue("tiny_run"), tmp_path, dirs_exist_ok=True)
    for command, code, shown in typed:
        done = run(command, tmp_path)
        assert done.returncode == code, f"$ {command}\n{done.stdout}{done.stderr}"
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        assert [line for line in shown if line not in said] == [], f"$ {command}"


def test_the_python_of_its_page_runs_block_by_block(tmp_path, tiny_run):
    shutil.copytree(tiny_run, tmp_path, dirs_exist_ok=True)
    code = "\n".join(blocks(ROOT / "docs" / "reference" / "python.md", "python"))
    (tmp_path / "page.py").write_text(code)
    assert code.count("import mtcli") == 4
    done = shell("python page.py", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_configs_of_pages_load(tmp_path):
    for page in PAGES:
        for block in blocks(page, "toml"):
            if re.search(r"^\[model\]", block, re.MULTILINE):
                (tmp_path / f"{page.stem}.toml").write_text(block)
                config = load_config(str(tmp_path / f"{page.stem}.toml"))
                assert isinstance(config, RunConfig), page.name


def test_links_within_the_project_lead_somewhere_and_their_anchors_are_headings():
    headings = cache(anchors)
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if "://" not in target:
                path = page.parent / target if target else page
                assert path.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in headings(path), f"{page.name}: {target}#{anchor}"


def anchors(page):
    """The anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_what_python_on_pages_imports_is_there():
    for page in PAGES:
        for block in blocks(page, "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom):
                    module = import_module(node.module)
                    folders = {one.name for one in iter_modules(getattr(module, "__path__", []))}
                    missing = {alias.name for alias in node.names} - folders - vars(module).keys()
                    assert not missing, f"{page.name}: {missing}"


# Files that are named and are not ours: of torch, of Megatron-LM, and of a user.
THEIRS = {"_fsdp_collectives.py", "_fsdp_param_group.py", "preprocess_data.py", "parallel_state.py"}
THEIRS |= {"sitecustomize.py"}
# What a name may begin with: the docs name files of the package from any of these folders on.
BASES = ("", "mtcli/", "mtcli/core/", "docs/")
PLACES = r"`((?:mtcli|core|tests|benchmarks|scripts|fuzz|fused|docs|spec|cost|report)/[\w/.*-]*)`"


def files_named(text):
    """The Python files that a text names, such as `tensor.py` or `parallel/tensor.py`."""
    names = re.findall(r"(?<![\w/.*<-])(?:\.\./)*(\w+(?:/\w+)*\.py)\b", text)
    return {name for name in names if name.rsplit("/", 1)[-1] not in THEIRS}


def test_every_file_that_a_page_names_is_there():
    for page in PAGES:
        text = page.read_text()
        assert sorted(name for name in files_named(text) if not is_there(name)) == [], page.name
        gone = [
            n for n in re.findall(PLACES, text) if not any(any(ROOT.glob(b + n)) for b in BASES)
        ]
        assert gone == [], page.name


def test_every_file_that_a_docstring_or_comment_names_is_there():
    missing = {}
    for path in CODE:
        source = path.read_text()
        if not files_named(source):
            continue
        text = "\n".join([*docstrings(source), *re.findall(r"#.*", source)])
        if names := [name for name in files_named(text) if not is_there(name)]:
            missing[str(path.relative_to(ROOT))] = names
    assert missing == {}


def docstrings(source):
    """The docstrings of a file."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(n) for n in ast.walk(ast.parse(source)) if isinstance(n, nodes)]
    return [text for text in found if text]


def is_there(name):
    """Whether a file of the project has this name, or ends with it after a folder's name."""
    return any(path.endswith(f"/{name}") for path in NAMES)


# A row of a table of files in order: its number, a file, symbols of it, and what they are for.
STEP_OF_PATH = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \|([^|]*)\|", re.MULTILINE)
MOST_LINES = 1_500  # of the reading path


def symbols_in_order(text):
    """(file, symbol) of every row; the symbol is "" where a row names the file alone."""
    for file, cell in STEP_OF_PATH.findall(text):
        path = ROOT / file if file.startswith("tests/") else ROOT / "mtcli" / file
        yield from ((path, symbol) for symbol in re.findall(r"`([\w.]+)`", cell) or [""])


def num_lines(path, symbol):
    """The lines of a file's class, function, `Class.method` or constant; of all of it for ""."""
    node = ast.parse(path.read_text())
    if not symbol:
        return len(path.read_text().splitlines())
    for name in symbol.split("."):
        matches = [child for child in node.body if name in names_bound(child)]
        assert matches, f"{path.name} has no {symbol}"
        node = matches[0]
    starts = [one.lineno for one in (node, *getattr(node, "decorator_list", ()))]
    return node.end_lineno - min(starts) + 1


def names_bound(node):
    """The names that a statement defines or assigns."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {getattr(node, "name", None)} | {getattr(target, "id", None) for target in targets}


def test_the_reading_path_names_what_is_there_in_at_most_1500_lines():
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    steps = [*symbols_in_order(page[page.index("## One process") : page.index("## The folders")])]
    assert len({path for path, _ in steps}) > 20
    lines = sum(num_lines(path, symbol) for path, symbol in steps)
    assert lines <= MOST_LINES, f"{lines} lines to read"


def test_the_symbols_to_edit_are_in_their_files():
    steps = [*symbols_in_order((ROOT / "docs" / "concepts" / "contributing.md").read_text())]
    assert len(steps) > 60
    assert all(num_lines(path, symbol) for path, symbol in steps)


def test_the_index_lists_every_page():
    index = ROOT / "docs" / "index.md"
    links = {
        (index.parent / link).resolve() for link in re.findall(r"\]\(([^)#]*)", index.read_text())
    }
    assert [page for page in PAGES[2:] if page not in links] == [index]


def test_the_readme_lists_every_command():
    readme = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"`mtcli {name}" not in readme] == []


def script_named(name):
    """A file of scripts/ as a module."""
    spec = spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_of_families_is_current():
    script = script_named("families_docs")
    text = script.PAGE.read_text()
    assert text == script.with_tables(text), "run python scripts/families_docs.py"


def test_the_page_of_performance_is_what_its_result_files_say():
    script = script_named("performance_docs")
    text = script.PAGE.read_text()
    assert text == script.with_tables(text), "run python scripts/performance_docs.py"
    assert "| flash forward | 4 x 32 x 8 x 8192 x 128 | bfloat16 | 4.960 |" in script.with_tables(
        re.sub(r"(?m)^\| flash forward.*\n", "", text)
    )


def test_a_file_of_make_bench_becomes_a_table_of_rates_and_ratios(tmp_path):
    script = script_named("performance_docs")
    samples = {"mtcli": {"best": 500.0}, "Megatron": {"best": 40.0}, "gather": {"best": 1250.0}}
    entry = {"arguments": [], "seconds": 9.0, "status": 0, "rows": samples}
    found = {
        "what": "bench",
        "date": "2026-01-02",
        "commit": "abc",
        "tiny": False,
        "versions": {"torch": "2.0"},
    }
    found |= {"machine": {"cpu": "A", "cores": 2, "memory_gib": 8.0, "gpus": []}}
    found |= {"scripts": {"samples": entry, "train": entry | {"status": 1, "rows": None}}}
    older = found | {"date": "2026-01-01", "scripts": {}}
    for name, file in {"2026-01-02-A": found, "2026-01-01-A": older}.items():
        (tmp_path / f"bench-{name}.json").write_text(json.dumps(file))
    (tmp_path / "bench-2026-01-03-A.json").write_text(json.dumps(older | {"tiny": True}))
    text = script.with_tables(script.PAGE.read_text(), tmp_path)
    assert "A, 2 cores, 8 GiB, 2026-01-02, commit abc. torch 2.0.\n" in text
    row = "| sample fetch, one thread | `bench_samples.py` | 500 Mtok/s "
    assert row + "| Megatron 40, gather 1,250 | 12.5, 0.4 |\n" in text
    assert "Failed: train.\n" in text and "2026-01-01, commit" not in text
    assert "2026-01-03" not in text and "flash forward | 4 x 32" not in text


def test_the_config_page_is_current_and_names_every_field():
    script = script_named("config_docs")
    text = script.PAGE.read_text()
    assert text == script.with_tables(text), "run python scripts/config_docs.py"
    for name in RunConfig.model_fields:
        section = section_at(RunConfig, [name])
        fields = section.model_fields if section else [name]
        values = [field for field in fields if not section_at(RunConfig, [name, field])]
        assert [field for field in values if f"`{field}`" not in text] == []


def test_no_page_names_a_preset_that_is_not_there():
    families = r"\b(?:gpt2|gpt3|megatron|narayanan|mt-nlg|llama|tinyllama|mixtral|qwen2)-[\w.]+b\b"
    for page in PAGES:
        named = {name for name in re.findall(families, " ".join(blocks(page, "console")))}
        assert named <= set(preset_names()), page
