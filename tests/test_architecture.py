"""The house: which room may import which, what opens files, and in which words it is written.

Read from the syntax trees, so an import inside a function counts as well.
docs/concepts/architecture.md has the same table, and a picture that scripts/draw_architecture.py
draws from the imports.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location

from ranks import run_ranks
from sources import FUSED, ROOT, SOURCES, last_name, nodes
from words import RETIRED, RETIRED_NAMES, places, words_of

# By torch, pydantic, tokenizers and accelerate.
BROUGHT = {"triton", "pydantic_core", "huggingface_hub", "packaging"}

# What each folder may import of the others, besides itself.
FACTS = {"config", "mesh", "schedule"}
ENGINES = FACTS | {"parallel", "kernels", "runtime"}
STEP = ENGINES | {"data", "checkpoint", "model", "exchange", "sync", "optim"}
ARROWS = {
    "kernels": set(),
    "config": set(),
    "mesh": {"config"},
    "schedule": {"config"},
    "exchange": {"config"},
    "runtime": {"config", "kernels"},
    "parallel": FACTS | {"kernels", "runtime"},
    "data": {"config", "runtime"},
    "checkpoint": {"config", "mesh", "parallel", "runtime"},
    "sync": FACTS | {"exchange", "parallel", "kernels", "runtime", "optim"},
    "optim": FACTS | {"parallel", "kernels"},
    "model": FACTS | {"parallel", "kernels", "checkpoint"},
    "training": STEP,
    "inference": STEP,
    "curate": {"config", "data", "runtime"},
    "evaluate": {"config", "data", "inference", "runtime"},
    "select": STEP | {"inference"},
    "convert": STEP | {"inference"},
    "plan": FACTS | {"exchange", "kernels", "model", "runtime"},
    "rehearse": STEP | {"training", "plan"},
    "profile": STEP | {"training", "plan", "rehearse"},
    "sweep": STEP | {"training", "plan", "profile"},
    "library": {"checkpoint", "config", "data", "inference", "plan", "rehearse", "runtime"},
    "doctor": {"config", "kernels", "parallel", "plan", "profile", "runtime"},
    "runs": {"config", "runtime", "checkpoint", "training", "sweep", "profile", "evaluate"},
    "commands": STEP
    | {"training", "inference", "evaluate", "select", "convert", "curate"}
    | {"plan", "rehearse", "profile", "sweep", "doctor", "runs"},
    "cli": {"commands", "config", "inference", "library"},
}
# What command modules may import before they run.
LIGHT_FACTS = {"mtcli.core.config.errors", "mtcli.core.config.nameable"}
TORCH_FREE = ("config", "mesh", "schedule", "exchange")
# Modules of other folders that import no torch either: what a command asks before its work.
LIGHT = (
    "checkpoint.folder",
    "convert.upcycle_recipe",
    "curate.config",
    "curate.passes",
    "data.chat_program",
    "data.loader",
    "data.preprocess",
    "data.subset",
    "evaluate.request",
    "evaluate.tasks.templates",
    "library.datasets",
    "library.plans",
    "plan.answer",
    "runtime.atomic_writes",
    "runtime.console",
    "runtime.launch",
    "runs.prunable",
    "runs.run_pictures",
    "runs.run_summary",
    "runs.run_tables",
    "runs.watch_screen",
    "runtime.sandbox",
    "select.request",
    "training.run_config",
    "training.run_lock",
)


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(module):
    """The folder of one of our modules: a row of ARROWS."""
    parts = [part for part in module.split(".") if part not in ("mtcli", "core")]
    return parts[0] if parts and parts[0] in ARROWS else "cli"


def in_rooms(*rooms):
    """The source files of some folders: at least one."""
    found = [path for path in SOURCES if room(module_name(path)) in rooms]
    assert found
    return found


def imports(path, module_level=False):
    """The modules that a file imports, `from a import b` being a.b where that is a module."""
    for node in _at_module_level(nodes(path)[0]) if module_level else nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def _at_module_level(tree):
    for node in tree.body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from node.body


MODULES = {module_name(path) for path in SOURCES}


def test_imports_follow_the_arrows():
    against = []
    for path in SOURCES:
        here = room(module_name(path))
        ours = [n for n in imports(path) if n.split(".")[0] == "mtcli" and n != "mtcli"]
        allowed = ARROWS[here] | {here}
        against += [f"{module_name(path)}: {name}" for name in ours if room(name) not in allowed]
    assert against == []


def test_fused_stands_on_three_folders_of_the_package():
    """That no folder stands on it follows from the packages that are declared."""
    ours = {n for path in FUSED for n in imports(path) if n.startswith("mtcli.")}
    assert {room(name) for name in ours} == {"config", "kernels", "optim"}


def test_every_folder_has_a_row_and_the_rows_make_no_circle():
    folders = {path.name for top in ("mtcli", "mtcli/core") for path in (ROOT / top).iterdir()}
    packages = {name for name in folders if (ROOT / "mtcli/core" / name / "__init__.py").exists()}
    assert set(ARROWS) == packages | {"commands", "kernels", "cli"}
    assert not _in_circles(ARROWS)


def test_the_docs_table_of_arrows_is_this_one():
    page = (ROOT / "docs" / "concepts" / "architecture.md").read_text()
    page = page[page.index("## The folders") : page.index("## Eight types")]
    sets = {"nothing": set()}
    for name, words in re.findall(r"^\| \*(\w+)\* \| (.*) \|$", page, re.MULTILINE):
        sets[name] = _folders_named(words.partition(":")[0], sets)
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE)
    assert {name: _folders_named(words, sets) for name, words in rows} == ARROWS


def _folders_named(words, sets):
    """The folders in a cell: `named` ones, and those of the sets that it names."""
    named = {re.sub(r"\W", "", word): word for word in words.split(",")}
    return set().union(*({n} if "`" in word else sets[n] for n, word in named.items()))


def test_the_docs_picture_is_drawn_from_the_imports_as_they_are():
    script = _drawing()
    assert script.PICTURE.read_text() == script.picture(), "run python scripts/draw_architecture.py"


def test_the_picture_has_a_path_for_every_import_and_for_no_other():
    """The oracle is this file's own reading of the imports."""
    script = _drawing()
    graph = defaultdict(set)
    for path in SOURCES:
        here = room(module_name(path))
        graph[here] |= {room(n) for n in imports(path) if n.startswith("mtcli.")} - {here}
    drawn = defaultdict(set)
    for user, used in script.reduced(script.folder_imports()[0]):
        drawn[user].add(used)
    assert {n: _reached(graph, n) for n in ARROWS} == {n: _reached(drawn, n) for n in ARROWS}
    for user, useds in drawn.items():
        for used in useds:  # each arrow is needed: no other way leads there
            assert all(used not in _reached(drawn, other) for other in useds - {used}), (user, used)


def _reached(graph, node):
    return set().union(*({n} | _reached(graph, n) for n in graph.get(node, ())))


@cache
def _drawing():
    """The script that draws the picture, which reads each file once."""
    spec = spec_from_file_location("drawing", ROOT / "scripts" / "draw_architecture.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    script._imported = cache(script._imported)
    return script


def test_the_torch_free_zone_names_no_torch():
    heavy = {"torch", "transformers", "accelerate", "triton", "lm_eval"}
    for path in in_rooms(*TORCH_FREE):
        assert not heavy & {name.split(".")[0] for name in imports(path)}, path


def test_importing_the_whole_torch_free_zone_loads_no_torch():
    zone = [name for name in sorted(MODULES) if room(name) in TORCH_FREE]
    assert len(zone) > 10
    zone += [f"mtcli.core.{name}" for name in LIGHT]
    code = f"import {', '.join(zone)}, sys; print('torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_training_loads_no_numba_before_it_has_a_loop_to_compile():
    """The warm process, of which a rank is a fork, has imported the loop and more."""
    assert run_ranks(1, _has_imported, "mtcli.core.training.loop", "numba") == [[True, False]]


def _has_imported(runtime, *names):
    return [name in sys.modules for name in names]


def test_kernels_import_only_torch_and_triton():
    for path in in_rooms("kernels"):
        outside = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names
        assert outside <= {"torch", "triton", "mtcli"}, path


def test_a_command_module_is_light_until_it_runs():
    light = ("commands", "cli")
    for path in in_rooms(*light):
        outside = set(imports(path, module_level=True))
        ours = {name for name in outside if name.split(".")[0] == "mtcli"}
        others = {name.split(".")[0] for name in outside - ours} - sys.stdlib_module_names
        assert others <= {"typer"}, path
        assert all(room(n) in light or n in LIGHT_FACTS for n in ours), path


def test_no_module_imports_itself_around_a_circle():
    """Imports inside functions and under TYPE_CHECKING count."""
    graph = {module_name(path): set(imports(path)) & MODULES for path in SOURCES}
    assert not _in_circles(graph)


def _in_circles(graph):
    """The nodes of a graph that lie on a circle, or lead to one."""
    settled: set[str] = set()
    while ready := {n for n, needs in graph.items() if n not in settled and needs <= settled}:
        settled |= ready
    return sorted(set(graph) - settled)


def test_a_class_name_means_one_thing():
    homes = defaultdict(set)
    for path in [*SOURCES, *FUSED]:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(module_name(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_every_package_that_is_imported_is_declared():
    always, extras = _declared()
    for path in SOURCES:
        assert _outside(imports(path)) <= always | extras, path


def test_a_module_that_needs_an_extra_is_imported_only_inside_functions():
    always, _ = _declared()
    needing = {
        module_name(path) for path in SOURCES if _outside(imports(path, module_level=True)) - always
    }
    for path in SOURCES:
        assert not needing & set(imports(path, module_level=True)), path


def test_a_bar_of_progress_is_made_in_one_place():
    """Elsewhere than on a terminal it is lines; training has lines with figures of its own."""
    using = {module_name(path) for path in SOURCES if "tqdm" in _outside(imports(path))}
    assert using == {"mtcli.core.runtime.progress", "mtcli.core.training.run_log"}


# File names that several folders may have, as each stands for one idea: a kernel and the rule or
# layer that calls it, the facts of a method and its exchange, a command and what it does.
SHARED_NAMES = {
    *("adamw", "attention", "dropout", "fp8", "lamb", "onebit", "rope"),
    *("decentralized", "diloco", "easgd", "exchange", "lsgd", "methods", "traffic"),
    *("config", "generate", "preprocess", "reselect", "run", "shard", "sweep"),
    *("adapters", "blend", "contamination", "documents", "html", "layout", "loader", "lora"),
    *("model", "reader", "request", "rules"),
}


def test_a_file_name_means_one_thing():
    names = Counter(path.stem for path in SOURCES)
    shared = {name for name, count in names.items() if count > 1} - {"__init__"}
    assert shared - SHARED_NAMES == set()


def test_files_are_named_after_ideas():
    names = {path.stem for path in [*SOURCES, *FUSED]}
    assert not names & {"utils", "util", "helpers", "misc", "common"}


def test_no_hint_leaves_the_reader_to_find_what_it_is_about():
    vague = re.compile(r"\"[^\"]*\b(?:leave (?:it|them|one of them) out|mend (?:it|them))\b")
    found = {str(path): vague.findall(path.read_text()) for path in SOURCES}
    assert {path: hints for path, hints in found.items() if hints} == {}


def test_no_word_that_the_field_s_terms_replaced_comes_back():
    found = {}
    for word, use in (RETIRED | RETIRED_NAMES).items():
        if at := places(word):
            found[f"write {use}, not {word}"] = at[:5]
    assert found == {}


def test_a_name_is_split_into_its_words():
    assert words_of("GraphedPipeline") == "graphed pipeline"
    assert words_of("_taped_ops") == "taped ops"
    assert words_of("give_back") == "give back"


# As the name of a value they say nothing and cannot be searched for; `kept_rows` can.
FUNCTION_WORDS = {
    *("told", "own", "of", "there", "here", "beside", "about", "each", "every", "before"),
    *("others", "rest", "known", "wanted", "made", "kept"),
}


def variables(nodes):
    """(line, name) of what is bound to a value: arguments, locals, loop variables and the like.

    Fields of classes are none of them: an object's name comes before theirs.
    """
    fields = {
        id(name)
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for part in node.body
        if isinstance(part, ast.Assign | ast.AnnAssign)
        for target in getattr(part, "targets", None) or [part.target]
        for name in ast.walk(target)
    }
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if id(node) not in fields:
                yield node.lineno, node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.lineno, node.rest
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def test_no_variable_is_a_function_word():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in variables(nodes(path))
        if name.strip("_") in FUNCTION_WORDS
    ]
    assert found == []


def test_every_kind_of_variable_is_looked_at():
    source = """
class A:
    field: int
    other_field = 1
    def f(self, argument, *more, only=lambda x: x, **options):
        local, (inner, *starred) = argument
        with open(argument) as opened, (yield): typed: int = 0
        for loop in [comprehended for comprehended in more if (walrus := 1)]: pass
        try: import a as alias
        except ValueError as caught: pass
        match only:
            case {"a": _, **rest}: pass
            case [1, *stars] as whole: pass
"""
    assert {name for _, name in variables(list(ast.walk(ast.parse(source))))} == {
        *("self", "argument", "more", "only", "x", "options", "local", "inner", "starred"),
        *("opened", "typed", "loop", "comprehended", "walrus", "alias", "caught"),
        *("rest", "stars", "whole"),
    }


def test_the_contributing_page_lists_the_function_words():
    page = (ROOT / "docs" / "concepts" / "contributing.md").read_text()
    rule = page[page.index("3. No local, ") :].partition(" is fine")[0]
    assert {*re.findall(r"`(\w+)`", rule)} == FUNCTION_WORDS | {"kept_rows"}


def test_test_files_have_distinct_names():
    folders = (ROOT / "tests", ROOT / "fused/tests")
    names = Counter(path.name for folder in folders for path in folder.rglob("test_*.py"))
    assert {"test_cli.py", "test_fuse.py"} <= set(names)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_folder_of_the_package_is_a_package():
    folders = {path.parent for path in SOURCES}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def _outside(names):
    """The packages among them that are neither ours nor Python's."""
    return {n.split(".")[0] for n in names} - sys.stdlib_module_names - BROUGHT - {"mtcli"}


def _declared():
    """The packages of pyproject.toml: those always installed, and those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        item
        for name, items in project["optional-dependencies"].items()
        if name != "test"
        for item in items
    ]
    return ({_distribution(item) for item in items} for items in (project["dependencies"], extras))


def _distribution(requirement):
    """The module name of a requirement such as `lm-eval>=0.4` or `mtcli[data]`."""
    name = requirement.split(">")[0].split("=")[0].split("[")[0].strip()
    return name.replace("-", "_").lower()


# What could run or unpickle the content of a file.
UNPICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNPICKLING |= {"yaml", "tarfile", "runpy", "code", "pandas"}
RUNNING = {"eval", "exec", "compile", "__import__", "unsafe_load", "extractall"}
RUNNING |= {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
RUNNING |= {"send_object_list", "recv_object_list"}  # of torch.distributed: they unpickle
ALLOWING = {"allow_pickle", "weights_only", "trust_remote_code"}
# A source that may, and why nothing of a stranger's can run there: path -> reason.
MAY_UNPICKLE = {
    "core/curate/ray_cluster.py": "what our own driver sent, by a cluster that runs our code",
    "core/checkpoint/megatron/torch_save.py": "names become records; nothing is imported or called",
}


def unsafe(nodes):
    """What a source could run a file's content with."""
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").split(".")[0]]
        yield from (f"import {name}" for name in names if name in UNPICKLING)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func) if last_name(node) in RUNNING | {"load"} else ""
            if called == "torch.load" or last_name(node) in RUNNING:
                yield called if called not in ("re.compile", "torch.compile") else ""
            yield from (key.arg for key in node.keywords if key.arg in ALLOWING)


# What opens files by itself, and why a stranger's cannot be in their place.
OPENERS: dict[str, str] = {
    "core/config/untrusted.py": "the one way to open what may be a stranger's",
    "core/runtime/atomic_writes.py": "what this process has just written",
    "core/config/loading.py": "presets of the package",
    "core/evaluate/tasks/task_file.py": "tasks of the package",
    "core/profile/measure.py": "a trace that this process has just written",
    "core/plan/calibration.py": "the kernel's files, and sources of packages",
    "core/runtime/process_pool.py": "the kernel's files",
    "core/runtime/worker_errors.py": "the kernel's files",
    "core/runtime/remote.py": "files of the network: nothing here is opened by their names",
    "core/training/run_lock.py": "the kernel's files",
    "core/parallel/transport/same_machine.py": "the kernel's files",
    "core/profile/clock.py": "the kernel's files",
    "core/doctor/readings.py": "the kernel's files",
    "kernels/autotune.py": "the user's own cache",
    "kernels/limits.py": "the kernel's files",
}


def opened_by_name(nodes):
    """The calls of a source that open a file by its name to read it."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name, method = last_name(node), isinstance(node.func, ast.Attribute)
        if name == "open":
            called, texts = ast.unparse(node.func), {ast.unparse(word) for word in node.args}
            writes = texts & {f"'{mode}'" for mode in ("w", "wb", "a", "ab", "x", "xb")}
            if not writes and not called.startswith(("os.", "gzip.", "lzma.", "bz2.")):
                yield called
        elif method and name in ("read_text", "read_bytes", "from_file", "open_memmap"):
            yield ast.unparse(node.func)


def found_by(search):
    """What a search finds in the sources of both packages, by file."""
    found = {path: list(search(nodes(path))) for path in [*SOURCES, *FUSED]}
    paths = [path for path, calls in found.items() if any(calls)]
    return {str(path.relative_to(ROOT)).removeprefix("mtcli/"): found[path] for path in paths}


def test_no_source_unpickles_evaluates_or_unpacks():
    found = found_by(unsafe)
    assert found.keys() == MAY_UNPICKLE.keys(), found
    for source in (
        "import pickle", "from dill import loads", "torch.load(x)", "np.load(x, allow_pickle=True)",
        "dist.all_gather_object(out, x)", "eval(x)", "exec(x)", "yaml = __import__('yaml')",
        "import os, joblib",
    ):  # fmt: skip
        assert list(unsafe(ast.walk(ast.parse(source)))), f"the search does not find {source}"


def test_every_file_of_a_stranger_is_opened_in_one_way():
    found = found_by(opened_by_name)
    assert found.keys() == OPENERS.keys(), found
    for source in (
        "open(x)", "open(x, 'rb')", "path.open('rb')", "path.read_text()",
        "models.BPE.from_file(x, y)",
    ):  # fmt: skip
        assert list(opened_by_name(ast.walk(ast.parse(source)))), source
    writing = ast.parse("open(x, 'w'); path.open('ab'); os.open(x, 0)")
    assert not list(opened_by_name(ast.walk(writing)))
