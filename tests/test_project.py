"""House rules that a reviewer would otherwise have to remember, checked on the source itself.

Read by AST, so that nothing is imported for it and a rule holds for code that no test runs.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gockpt
from gockpt.devices import load_profile, profile_names

ROOT = Path(__file__).parent.parent
ENGINE = ROOT / "gockpt"
MAPPED = {"cli": "gockpt.cli", "dashboard": "gockpt.dashboard", "workloads": "gockpt.workloads"}
"""Folders beside the engine, and what they are installed as."""

FOUNDATIONS = {"errors", "events", "faults", "pace", "state"}
"""What every layer may stand on; among themselves they are ordered in MAY_IMPORT."""

MAY_IMPORT: dict[str, set[str]] = {
    # foundations
    "errors": set(),
    "events": set(),
    "faults": set(),
    "pace": set(),
    "state": {"errors"},
    # pure planning
    "situation": set(),
    "course": {"situation"},
    "plan": {"course", "situation"},
    "goodput": set(),
    # words for people
    "units": set(),
    # optimizers
    "optim": {"state"},
    "recipe": {"optim"},
    "replay": {"optim", "recipe"},
    "sample": {"optim", "recipe", "replay"},
    # the user's objects
    "tagged_kinds": set(),
    "tagged": {"tagged_kinds"},
    "rng": set(),
    "extras": {"rng", "tagged"},
    # state and memory
    "fingerprint": set(),
    "arena": set(),
    "inventory": {"optim"},
    # subsystems
    "devices": set(),
    "storage": {"tagged"},
    "agent": {"arena", "fingerprint", "optim", "recipe", "replay", "storage"},
    "strategies": {
        "agent", "arena", "devices", "extras", "fingerprint", "hostmemory", "inventory", "optim",
        "plan", "recipe", "replay", "sample", "situation", "storage", "tagged",
    },
    "results": set(),
    # the face
    "exits": set(),
    "hostmemory": set(),
    "hooks": set(),
    "contents": {"inventory", "storage"},
    "signals": set(),
    "preemption": {"agent", "signals", "storage"},
    "restore": {"inventory", "tagged"},
    "recall": {"agent", "arena", "storage"},
    "checkpointer": {
        "agent", "devices", "exits", "extras", "hooks", "inventory", "preemption", "recall",
        "restore", "storage",
        "strategies",
    },
    "__init__": {"agent", "checkpointer", "restore", "storage"},
}  # fmt: skip
"""Part of the engine → the parts it may import, next to the foundations and itself.

Nothing imports upwards; ``cli``, ``dashboard`` and ``workloads`` are imported by nobody in here.
"""


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


ENGINE_MODULES = modules(ENGINE)
PACKAGE_MODULES = [*ENGINE_MODULES, *(one for name in MAPPED for one in modules(ROOT / name))]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def part(path: Path) -> str:
    """``gockpt/agent/job.py`` → ``agent``, ``gockpt/plan.py`` → ``plan``."""
    return path.relative_to(ENGINE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all modules (or names in them) that a file imports, anywhere in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{ids(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """``os.environ.get`` of an attribute chain; '' for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


@functools.cache
def names_used(path: Path) -> set[str]:
    return {name for node in ast.walk(tree(path)) if (name := dotted(node))}


# -- import direction ------------------------------------------------------------------------------


def imports_of_parts(path: Path) -> set[str]:
    """Parts of the engine that a module imports (``gockpt`` itself: its face)."""
    found = set()
    for name in imported(path):
        head, _, rest = name.partition(".")
        if head == "gockpt":
            found.add(rest.split(".")[0] or "__init__")
    return found


def test_every_part_of_the_engine_has_its_place_in_the_order() -> None:
    assert {part(path) for path in ENGINE_MODULES} - {"__main__"} == set(MAY_IMPORT)


def test_the_order_has_no_cycle() -> None:
    reached: set[str] = set()
    left = dict(MAY_IMPORT)
    while free := [name for name, may in left.items() if may <= reached]:
        reached |= set(free)
        for name in free:
            del left[name]
    assert not left


@pytest.mark.parametrize("path", ENGINE_MODULES, ids=ids)
def test_the_engine_imports_only_downwards(path: Path) -> None:
    if part(path) == "__main__":
        assert imports_of_parts(path) <= {"cli"}
        return
    allowed = MAY_IMPORT[part(path)] | {part(path)}
    if part(path) not in FOUNDATIONS:
        allowed |= FOUNDATIONS
    assert imports_of_parts(path) <= allowed


@pytest.mark.parametrize("pure", ["situation", "course", "plan"])
def test_planning_needs_no_torch(pure: str) -> None:
    heads = {name.partition(".")[0] for name in imported(ENGINE / f"{pure}.py")}
    assert not heads & {"torch", "numpy", "msgspec"}


def test_the_devices_know_nothing_of_checkpoints() -> None:
    found = set().union(*map(imports_of_parts, modules(ENGINE / "devices")))
    assert found <= {"devices", "errors", "events", "pace"}


@pytest.mark.parametrize("path", modules(ENGINE / "agent"), ids=ids)
def test_the_agent_never_touches_an_accelerator(path: Path) -> None:
    assert "devices" not in imports_of_parts(path)
    assert not {name for name in names_used(path) if name.startswith("torch.cuda")}


def test_workloads_do_not_know_the_commands() -> None:
    found = set().union(*map(imports_of_parts, modules(ROOT / "workloads")))
    assert not found & {"cli", "dashboard", "agent", "strategies", "checkpointer"}


@pytest.mark.parametrize("path", modules(ROOT / "cli"), ids=ids)
def test_the_commands_load_the_dashboard_only_when_it_is_asked_for(path: Path) -> None:
    top = [node for node in tree(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in top
        for alias in node.names
    }
    assert not [name for name in names if name and name.startswith("gockpt.dashboard")]


def test_only_the_servers_part_of_the_dashboard_knows_the_server() -> None:
    """Figures, sentences and verdicts are pure: they are tested, and reported, without one."""
    served = {"api", "app", "asking", "assets", "drawing", "guard", "pages", "templating"}
    for path in modules(ROOT / "dashboard"):
        if path.stem not in served:
            heads = {name.partition(".")[0] for name in imported(path)}
            assert not heads & {"fastapi", "starlette", "uvicorn", "jinja2"}, path


# -- the public face -------------------------------------------------------------------------------


def test_all_is_exactly_the_public_names() -> None:
    bound: set[str] = {"__version__"}
    for node in ast.walk(tree(ENGINE / "__init__.py")):
        if isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in node.names}
    assert sorted(gockpt.__all__) == sorted(bound)
    assert all(hasattr(gockpt, name) for name in gockpt.__all__)


def test_on_windows_it_says_where_it_runs() -> None:
    code = "import sys; sys.platform = 'win32'; import gockpt"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith("ImportError: gockpt does not run on Windows")
    assert "WSL 2" in ran.stderr


def test_every_exception_is_public() -> None:
    classes = {
        node.name for node in tree(ENGINE / "errors.py").body if isinstance(node, ast.ClassDef)
    }
    assert classes <= set(gockpt.__all__)


def test_public_names_are_documented() -> None:
    public = [getattr(gockpt, name) for name in gockpt.__all__ if name != "__version__"]
    assert [one for one in public if not one.__doc__] == []
    members = [
        (name, method)
        for name, method in vars(gockpt.Checkpointer).items()
        if not name.startswith("_")
    ]
    assert [name for name, method in members if not method.__doc__] == []


def test_the_version_is_the_same_everywhere() -> None:
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert stated is not None
    assert stated[1] == gockpt.__version__
    assert f"## {gockpt.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_marked_as_typed() -> None:
    assert (ENGINE / "py.typed").is_file()


# -- what package code does not do -----------------------------------------------------------------


@pytest.mark.parametrize("path", PACKAGE_MODULES, ids=ids)
def test_modules_say_what_they_are_for(path: Path) -> None:
    if path.stat().st_size:
        assert ast.get_docstring(tree(path)), "no module docstring"


@pytest.mark.parametrize("path", PACKAGE_MODULES, ids=ids)
def test_no_assert_and_no_bare_except(path: Path) -> None:
    """``python -O`` removes asserts, and a bare except catches KeyboardInterrupt."""
    for node in ast.walk(tree(path)):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: assert"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"


@pytest.mark.parametrize("path", PACKAGE_MODULES, ids=ids)
def test_no_wait_on_a_queue_that_forgets_its_deadline(path: Path) -> None:
    """``queue.SimpleQueue.get(timeout=...)`` can wait for ever (CPython 3.11)."""
    used = names_used(path) | set(imported(path))
    if any(name.endswith("SimpleQueue") for name in used):
        assert ".get(timeout" not in path.read_text()


@pytest.mark.parametrize("path", [*ENGINE_MODULES, *modules(ROOT / "workloads")], ids=ids)
def test_only_the_commands_read_the_environment(path: Path) -> None:
    assert not names_used(path) & {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
    assert not {name for name in imported(path) if name in {"os.environ", "os.getenv"}}


UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


@pytest.mark.parametrize("path", ENGINE_MODULES, ids=ids)
def test_nothing_that_is_read_can_run_code(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imported(path)} & UNSAFE
    used = names_used(path)
    assert not used & {"torch.load", "torch.save", "torch.serialization", "eval", "exec"}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            raise AssertionError(f"line {node.value.lineno}: allow_pickle")


# -- files -----------------------------------------------------------------------------------------

FILE_CALLS = re.compile(
    r"""os\.(open|close|read|write|p?readv?|pwritev?|preadv|fsync|fdatasync|rename|replace|truncate
        |ftruncate|posix_fallocate|posix_fadvise|unlink|remove|rmdir|mkdir|makedirs|listdir|scandir
        |stat|lstat|fstat|link|symlink|chmod|walk|path\..*)
    |fcntl\..*|shutil\..*|tempfile\..*|mmap\.mmap|io\.open""",
    re.VERBOSE,
)
PATH_METHODS = {
    "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "iterdir", "lstat", "mkdir",
    "open", "read_bytes", "read_text", "rename", "rglob", "rmdir", "stat", "symlink_to",
    "touch", "unlink", "write_bytes", "write_text",
}  # fmt: skip
"""Methods of ``pathlib.Path`` that reach the disk (``fs.unlink`` is none: a module's function)."""


NO_CHECKPOINTS = {
    "gockpt/storage/fs.py": "the one place",
    "gockpt/arena.py": "memfd segments: memory, not files",
    "gockpt/agent/launch.py": "the agent's log: opened before there is an agent, lost without harm",
    "gockpt/agent/channel.py": "closes a pidfd",
    "gockpt/agent/ownership.py": "reads when a process was started",
    "gockpt/agent/rendezvous.py": "sockets, and the directory that they are in",
    "gockpt/hostmemory.py": "reads the control group's limits",
    "gockpt/devices/profiles.py": "reads profiles that are part of the package, or the user's",
    "gockpt/results/database.py": "the results database: its directory, and if it is there",
}
"""Modules that make file calls, and why that harms no checkpoint."""


@pytest.mark.parametrize(
    "path", [one for one in ENGINE_MODULES if ids(one) not in NO_CHECKPOINTS], ids=ids
)
def test_only_fs_makes_file_calls(path: Path) -> None:
    """Else a fault could not be injected there, and an error would carry no path."""
    assert file_calls(path) == []


@pytest.mark.parametrize("name", NO_CHECKPOINTS)
def test_every_exception_is_still_one(name: str) -> None:
    assert file_calls(ROOT / name)


def file_calls(path: Path) -> list[str]:
    """Calls that reach the file system, by line (``fs.unlink`` does not: a module's function)."""
    file = tree(path)
    of_modules = {name.rpartition(".")[2] for name in imported(path)}
    own = {node.name for node in ast.walk(file) if isinstance(node, ast.FunctionDef)}
    found = []
    for node in ast.walk(file):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if (
            FILE_CALLS.fullmatch(name)
            or (name == "open" and "open" not in own)
            or (method in PATH_METHODS and name.partition(".")[0] not in of_modules)
        ):
            found.append(f"line {node.lineno}: {name or method}")
    return found


# -- documents -------------------------------------------------------------------------------------

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings of a document."""
    found: set[str] = set()
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            title = line.lstrip("#").strip().lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), f"{target} is not there"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_files_that_documents_name_exist(document: Path) -> None:
    for name in re.findall(
        r"`((?:gockpt|tests|docs|examples|benchmarks)/[\w/.-]+)`", document.read_text()
    ):
        assert (ROOT / name).exists(), f"{name} is not there"


def test_the_documents_that_are_promised_are_there() -> None:
    expected = {"architecture.md", "emulation.md", "format.md", "metrics.md"}
    assert expected <= {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {"README.md", "CHANGELOG.md", "LICENSE"} <= {path.name for path in ROOT.iterdir()}


def test_the_readme_names_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)\b", (ROOT / "README.md").read_text()))
    assert {"bench", "test"} <= named <= targets


def test_why_each_dependency_is_there_is_written_down() -> None:
    block = re.search(
        r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert block is not None
    names = re.findall(r'"([a-z0-9-]+)', block[1])
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[text.index("## Dependencies") :]
    assert [name for name in names if name not in section] == []


def test_the_table_of_profiles_is_that_of_the_shipped_files() -> None:
    lines = (ROOT / "docs" / "emulation.md").read_text().splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| figure | a100"))
    columns = [cell.strip() for cell in lines[head].strip("|").split("|")][1:]
    assert sorted(columns) == sorted(profile_names())
    profiles = [load_profile(name) for name in columns]
    for line in itertools.takewhile(lambda row: row.startswith("|"), lines[head + 2 :]):
        figure, *values = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        assert [float(value) for value in values] == [
            float(getattr(profile, figure)) for profile in profiles
        ], figure


# -- images and workflows --------------------------------------------------------------------------

IMAGES = sorted((ROOT / "docker").glob("Dockerfile*"))


@pytest.mark.parametrize("path", IMAGES, ids=ids)
def test_images_are_pinned_and_run_without_rights(path: Path) -> None:
    text = path.read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases
    assert all(re.fullmatch(r"[\w/.-]+:\d+\.\d+\.\d+[\w.-]*", base) for base in bases)
    user = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert user
    assert int(user[-1]) >= 1000
    assert not re.search(r"\b(?:ARG|ENV)\b.*(?:TOKEN|SECRET|PASSWORD)", text, re.IGNORECASE)


def test_workflows_pin_what_they_use_by_commit() -> None:
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    texts.append((ROOT / "docs" / "ci.md").read_text())
    used = [name for text in texts for name in re.findall(r"uses: (\S+)", text)]
    assert len(used) >= 5
    assert [name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)] == []
