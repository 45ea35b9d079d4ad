"""Imports point down. Each module has one place in the house; this file says which, and reads every import.

A new module must be placed in LAYERS; the failure says so. A new dependency must be placed in MAY_IMPORT.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from sandbox.limits.cgroup import whole_disks
from scripts.benches.launch import FULL, MANIFEST, STDERR
from scripts.benches.launch import policy as bench_policy
from tests.conftest import PACKAGES, ROOT, Caller
from tests.manifests import nexo
from tests.tables import one_case

# From the roof down. A module may import those of the lines below its own. A name ending in ".*" is a package
# whose modules may import each other; other neighbours on one line may not.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("runner.__main__",),
    ("runner.cli.*",),
    ("runner.fleet.*",),
    ("runner.gateway.*",),
    ("runner.serve.*",),
    ("runner.conformance.*",),
    ("runner.aio.lifecycle",),
    ("runner.aio", "runner.lifecycle.*", "runner.ledger.*"),
    ("runner.library", "runner.trio_thread"),
    ("runner.session.*", "runner.event_loop", "runner.learn.*"),
    ("runner.launch.*", "runner.exceptions"),
    ("runner.oci.*",),
    ("runner.package.*", "runner.approvals.*"),
    ("runner.contracts.*",),
    ("runner.install.*",),
    ("runner.manifest.*",),
    ("runner.contracts.registry",),
    ("runner.contracts.contract",),
    ("runner.contracts.configurations", "runner.contracts.prepared_calls", "runner.contracts.bindings"),
    ("runner.conformance.rpc",),
    ("runner.conformance.rules",),
    ("runner.conformance.report",),
    ("runner.protocol.*",),
    ("runner.plugin", "runner.outcome", "runner.supervision", "runner.build", "runner.extras"),
    ("runner",),
    ("sandbox.attacks.*",),
    ("sandbox.doctor.*",),
    ("sandbox.cell.*",),
    ("sandbox.streams.*",),
    ("sandbox.limits.*",),
    ("sandbox.plan.*",),
    ("sandbox.staged.*",),
    ("sandbox.policy.*",),
    ("sandbox.identity.*",),
    ("sandbox.broker.*",),
    ("sandbox.paths.*", "sandbox.document.*", "sandbox.gate.*"),
    ("sandbox.network.*",),
    ("sandbox.units", "sandbox.seccomp.*", "sandbox.spawn.*"),
    ("sandbox.spec",),
    ("sandbox.cache",),
    ("sandbox.files", "sandbox.process"),
    ("sandbox.look",),
    ("sandbox.facts", "sandbox.surroundings"),
    ("sandbox.speed.*",),
    ("sandbox",),
    ("policies",),
)


# The verbs that a contract brings along are part of the command line.
CONTRACT_VERBS = "runner.contracts.*.verb_*"


# Third-party packages, and the only modules that may import them. `lazily`: only inside a function, because
# something on the launch path imports the module and must not pay for the package.
class Use(NamedTuple):
    modules: tuple[str, ...]
    lazily: bool = False


MAY_IMPORT: Mapping[str, Use] = {
    "pydantic_core": Use(("sandbox.document.operator_table",)),
    "pydantic": Use(
        (
            "runner.contracts.*.manifest",
            "runner.contracts.*.tables",
            "runner.gateway.questions",
            "runner.gateway.settings_file",
            "runner.gateway.translate",
            "runner.serve.control.settings",
            "sandbox.document.operator_table",
            "sandbox.policy.tables",
        )
    ),
    "pyroute2": Use(("sandbox.network.recipe", "sandbox.network.redirect"), lazily=True),
    "trio": Use(
        (
            "runner.aio",
            "runner.cli.live.*",
            "runner.conformance.conversation",
            "runner.conformance.engine",
            "runner.contracts.*.compaction",
            "runner.contracts.*.files",
            "runner.contracts.*.services",
            "runner.contracts.*.sockets",
            "runner.contracts.*.storage",
            "runner.event_loop",
            "runner.fleet.*",
            "runner.gateway.*",
            "runner.ledger.database_thread",
            "runner.ledger.ledger",
            "runner.launch.remote.pipe",
            "runner.launch.remote.remote_cell",
            "runner.library",
            "runner.lifecycle.*",
            "runner.oci.*",
            "runner.protocol.bus",
            "runner.protocol.https.fetch",
            "runner.protocol.service_guard",
            "runner.serve.*",
            "runner.session.*",
            "runner.trio_thread",
        )
    ),
    "cryptography": Use(("runner.package.keys", "sandbox.broker.agent.host_key"), lazily=True),
    "h11": Use(
        (
            "runner.oci.client",
            "runner.protocol.https.request",
            "runner.protocol.https.response",
            "runner.serve.connections",
            "sandbox.broker.*",
            "sandbox.network.http_connection",
        )
    ),
    "idna": Use(("sandbox.network.hosts",), lazily=True),
    "jsonschema_rs": Use(("runner.protocol.schema",), lazily=True),
    "psutil": Use(("runner.serve.metrics", "sandbox.doctor.limits")),
    "prctl": Use(("sandbox.process",), lazily=True),
    # The extra [serve].
    "prometheus_client": Use(("runner.serve.metrics",)),
    "starlette": Use(
        (
            "runner.serve.answers",
            "runner.serve.calling",
            "runner.serve.control.api",
            "runner.serve.control.invoking",
            "runner.serve.event_stream",
            "runner.serve.page.page",
            "runner.serve.routes",
        )
    ),
    # The extra [oci].
    "httpcore": Use(("runner.oci.client",)),
    "httpx": Use(("runner.oci.client",)),
    "zstandard": Use(("runner.oci.layer",), lazily=True),
    # The extra [gateway].
    "mcp": Use(
        (
            "runner.gateway.http",
            "runner.gateway.hub",
            "runner.gateway.questions",
            "runner.gateway.server",
            "runner.gateway.sign_in",
            "runner.gateway.stdio",
        )
    ),
    "httpx2": Use(("runner.gateway.sign_in",)),
    "mcp_types": Use(("runner.gateway.questions", "runner.gateway.server", "runner.gateway.translate")),
    # The extra [fleet].
    "nats": Use(
        (
            "runner.fleet.client",
            "runner.fleet.connection",
            "runner.fleet.entries",
            "runner.fleet.operate",
            "runner.fleet.shares",
            "runner.fleet.streams",
            "runner.fleet.worker",
        )
    ),
    "yaml": Use(("sandbox.document.yaml", "sandbox.document.edit.yaml_spans")),
}

# The public face of a package: it names what is above it, for type checkers only, and imports it when asked.
FACES = ("runner",)

# Runs between fork and exec, alone in its process: the standard library, and of ours only each other and what
# stands for parts of the standard library, which imports nothing of ours.
STANDARD_LIBRARY_ONLY = (
    "sandbox.spawn.agent",
    "sandbox.spawn.spawner",
    "sandbox.spawn.init",
    "sandbox.spawn.network",
    "sandbox.spawn.observer",
    "sandbox.spawn.order",
    "sandbox.speed.libc",
    "sandbox.spawn.machine_code",
    "sandbox.spawn.reaper",
)
LOOK_ALIKES = ("sandbox.speed.",)


class Import(NamedTuple):
    module: str  # who imports
    line: int
    target: str  # what: "sandbox.plan.plan", or "sandbox.plan.plan.LaunchPlan" for a name taken from it
    lazy: bool  # inside a function
    typing: bool = False  # for type checkers only


def faults(root: Path) -> list[str]:
    """Everything wrong with the imports of the packages below `root`, one sentence each."""
    modules = {name: path for package in PACKAGES for name, path in _modules(root, package)}
    found: list[str] = []
    for name in modules:
        if _layer(name) is None:
            found.append(
                f"{name} has no place: add it to LAYERS in tests/test_layers.py, above all it imports"
            )
    for name, path in modules.items():
        for imported in _imports(name, path):
            fault = _fault(imported, modules)
            if fault:
                found.append(f"{path.relative_to(root)}:{imported.line}: {fault}")
    return sorted(set(found))


def _fault(imported: Import, modules: Mapping[str, Path]) -> str | None:
    source, top = imported.module, imported.target.partition(".")[0]
    if top in sys.stdlib_module_names:
        return None
    if source in STANDARD_LIBRARY_ONLY and not imported.target.startswith(("sandbox.spawn.", *LOOK_ALIKES)):
        return f"{source} imports {imported.target}: it may use the standard library only"
    if top not in PACKAGES:
        return _third_party_fault(imported, top)
    target = _longest(imported.target, modules)
    if target is None:
        return f"{imported.target} does not exist"
    if source.startswith("sandbox") and top == "runner":
        return f"{source} imports {target}: the cage knows no plugin, sandbox/ never imports runner/"
    contracts = _contract(source, modules), _contract(target, modules)
    if None not in contracts and contracts[0] != contracts[1]:
        return f"{source} imports {target}: a contract knows no other contract"
    if source in FACES and (imported.typing or imported.lazy):
        return None
    here, there = _layer(source), _layer(target)
    if here is None or there is None or target == source:
        return None  # reported as unplaced
    if there < here:
        return f"{source} imports {target}, which is a higher layer"
    if there == here and _slot(source) != _slot(target):
        return f"{source} imports {target}: neighbours in one layer do not know each other"
    return None


def _third_party_fault(imported: Import, top: str) -> str | None:
    use = MAY_IMPORT.get(top)
    if use is None:
        return (
            f"{imported.module} imports {top}, which is no dependency: see MAY_IMPORT in tests/test_layers.py"
        )
    if not any(_matches(imported.module, pattern) for pattern in use.modules):
        return f"{imported.module} imports {top}: only {', '.join(use.modules)} may"
    if use.lazily and not imported.lazy:
        return f"{imported.module} imports {top} when it is loaded: import it in the function that needs it"
    return None


def _modules(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((root / package).rglob("*.py")):
        if path.match("runner/contracts/*/example/*.py"):
            continue  # a plugin, which is data: it runs in the cage
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imports(module: str, path: Path) -> Iterator[Import]:
    """Every import in the file, wherever it stands; also import_module and __import__ of a literal."""

    def visit(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    for alias in child.names:
                        yield Import(module, child.lineno, alias.name, lazy, typing)
                case ast.ImportFrom():
                    base = child.module or ""
                    if child.level:
                        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                        kept = package[: len(package) - (child.level - 1)]
                        base = ".".join([*kept, *([child.module] if child.module else [])])
                    for alias in child.names:
                        yield Import(module, child.lineno, f"{base}.{alias.name}", lazy, typing)
                case ast.Call(
                    func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    yield Import(module, child.lineno, name, lazy)
            yield from visit(
                child,
                lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
                typing or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"),
            )

    yield from visit(ast.parse(path.read_text(), str(path)), False, False)


def _longest(target: str, modules: Mapping[str, Path]) -> str | None:
    """The module meant by "sandbox.plan.plan.LaunchPlan"."""
    while target not in modules:
        if "." not in target:
            return None
        target = target.rpartition(".")[0]
    return target


def _matches(module: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(module, pattern) or (pattern.endswith(".*") and module == pattern[:-2])


def _slot(module: str) -> str | None:
    """The entry of LAYERS that is meant: the longest that matches."""
    if fnmatch.fnmatchcase(module, CONTRACT_VERBS):
        return "runner.cli.*"
    entries = [entry for layer in LAYERS for entry in layer if _matches(module, entry)]
    return max(entries, key=len, default=None)


def _layer(module: str) -> int | None:
    slot = _slot(module)
    return None if slot is None else next(i for i, layer in enumerate(LAYERS) if slot in layer)


def _contract(module: str, modules: Mapping[str, Path]) -> str | None:
    """NAME, for everything in runner/contracts/NAME/; None for modules that stand beside the contracts."""
    folder = ".".join(module.split(".")[:3])
    path = modules.get(folder)
    return folder if path and path.match("runner/contracts/*/__init__.py") else None


# --- The house as it stands --------------------------------------------------------------------------------


def test_imports_point_down() -> None:
    assert faults(ROOT) == []


def test_every_layer_of_the_list_is_spelled_once() -> None:
    entries = [entry for layer in LAYERS for entry in layer]
    assert sorted(entries) == sorted(set(entries))


def test_every_name_in_these_lists_is_a_module() -> None:
    """A name that nobody has any more would let a new module of that name in unseen."""
    modules = [name for package in PACKAGES for name, _ in _modules(ROOT, package)]
    named = [entry for layer in LAYERS for entry in layer]
    named += [pattern for use in MAY_IMPORT.values() for pattern in use.modules]
    named += [*FACES, *STANDARD_LIBRARY_ONLY]
    assert [name for name in named if not any(_matches(module, name) for module in modules)] == []


def picture() -> str:
    """LAYERS as a diagram: a node for each line, and each may import what is below it."""
    lines = ["flowchart TD"]
    for top, about in (("runner", "knows plugins"), ("sandbox", "knows Linux, and no plugin")):
        rows = [", ".join(_short(entry) for entry in layer if _short(entry, top)) for layer in LAYERS]
        nodes = [f'{top}{at}["{row}"]' for at, row in enumerate(filter(None, rows))]
        lines += [f'    subgraph {top}["{top}: {about}"]', "        direction TB"]
        lines += [f"        {node}" for node in nodes]
        lines += [f"        {' --> '.join(f'{top}{at}' for at in range(len(nodes)))}", "    end"]
    return "\n".join((*lines, "    runner --> sandbox", ""))


def _short(entry: str, top: str = "") -> str:
    """The name within its package; '' if it is none of `top`, or what starts or describes the package."""
    package, _, name = entry.partition(".")
    return "" if (top and package != top) or name == "__main__" else name.removesuffix(".*")


def write_picture() -> None:
    """Put the picture into docs/architecture.md: `python -m tests.test_layers` does."""
    page = ROOT / "docs/architecture.md"
    before, after = page.read_text().split(_BEFORE_PICTURE)
    page.write_text(f"{before}{_BEFORE_PICTURE}{picture()}{after[after.index('```') :]}")


_BEFORE_PICTURE = "is made from that list.\n\n```mermaid\n"


def test_the_picture_of_the_layers_has_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert f"{_BEFORE_PICTURE}{picture()}```\n" in page, "run .venv/bin/python -m tests.test_layers"
    assert '"cli"' in picture() and "sandbox.cell" not in picture() and '"cell"' in picture()


def circles(root: Path) -> list[str]:
    """Modules that import each other, directly or by way of others: one line for each circle.

    An import inside a function counts too. Only the face of a package may import its own modules there: the
    public one of `runner`, and a contract's, whose methods import what they need.
    """
    modules = {name: path for package in PACKAGES for name, path in _modules(root, package)}
    needs: dict[str, set[str]] = {}
    for name, path in modules.items():
        is_face = name in FACES or name == _contract(name, modules)
        targets = (
            _longest(each.target, modules)
            for each in _imports(name, path)
            if not each.typing and not (is_face and each.lazy)
        )
        needs[name] = {target for target in targets if target is not None and target != name}
        if name in FACES:
            needs[name] = set()
    while ready := {name for name, targets in needs.items() if not targets & needs.keys()}:
        for name in ready:
            del needs[name]
    # What is left is in a circle, or imports something that is.
    return sorted(
        {
            " -> ".join((*circle, circle[0]))
            for name in needs
            if (circle := _way(name, name, needs)) is not None
        }
    )


def _way(start: str, end: str, needs: Mapping[str, set[str]]) -> tuple[str, ...] | None:
    """The shortest way from a module back to it, from the first name of the alphabet on."""
    ways: list[tuple[str, ...]] = [(start,)]
    seen: set[str] = set()
    for way in ways:
        for target in sorted(needs.get(way[-1], ())):
            if target == end:
                first = way.index(min(way))
                return way[first:] + way[:first]
            if target not in seen:
                seen.add(target)
                ways.append((*way, target))
    return None


# No launch imports these, so they take the standard library's own.
ORDINARY = """
    runner.fleet.* runner.gateway.* runner.serve.* runner.conformance.* runner.lifecycle.* runner.ledger.*
    runner.oci.* runner.package.* runner.learn.* runner.aio runner.aio.* runner.library runner.trio_thread
    runner.cli.approving.* runner.cli.learning.* runner.cli.serving.* runner.cli.signing.*
    runner.cli.attacking.* runner.cli.staging.* runner.cli.conformance runner.cli.doctor runner.cli.plan
    runner.cli.new runner.cli.schema runner.cli.state runner.cli.shared.install_* runner.cli.shared.registry
    runner.cli.live.* runner.session.* runner.protocol.https.* runner.protocol.bus runner.contracts.*.verb_*
    runner.contracts.ainb.host.* runner.contracts.ainb.screen runner.contracts.ainb.calls
    runner.contracts.kaged.compaction runner.contracts.kaged.knobs sandbox.attacks.* sandbox.doctor.*
    sandbox.staged.* sandbox.broker.* sandbox.document.edit.* sandbox.seccomp.profile
    sandbox.identity.all_states
""".split()


def test_only_what_is_started_in_a_hurry_takes_look_alikes() -> None:
    alikes = tuple(f"sandbox.speed.{name}." for name in ("typed", "value", "scopes", "signals"))
    modules = [each for package in PACKAGES for each in _modules(ROOT, package)]
    ordinary = {module: path for module, path in modules if any(_matches(module, room) for room in ORDINARY)}
    assert len(ordinary) > 100
    found = {
        module
        for module, path in ordinary.items()
        if any(each.target.startswith(alikes) for each in _imports(module, path))
    }
    assert found == set()


def test_no_modules_import_each_other() -> None:
    """Not even within one package: of two such modules, neither can be understood first."""
    assert circles(ROOT) == []


# --- The rules of the house --------------------------------------------------------------------------------

CONTRACTS = tuple(sorted(path.parent.name for path in (ROOT / "runner/contracts").glob("*/__init__.py")))
# Words of a contract's own: its name, and what its manifests and variables are called.
_NAMES = "|".join(spelling for name in CONTRACTS for spelling in (name, name.upper()))
_CLASS_NAMES = "|".join(name.title() for name in CONTRACTS)
CONTRACT_WORDS = re.compile(
    rf"(?<![a-zA-Z])(?:{_NAMES})(?![a-z])|(?:{_CLASS_NAMES})(?![a-z])|rterm|mcpServers|claude_desktop"
)


def _sources() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        yield from _modules(ROOT, package)


def _is_of_a_contract(path: Path) -> bool:
    return path.match("runner/contracts/*/*.py") or path.match("runner/contracts/*/*/*.py")


def _serves_a_protocol(path: Path, line: str) -> bool:
    """The gateway's own clients speak the protocol of one contract. It names no plugin of it. `line`: the one
    about the gateway in the table of verbs says so too."""
    if path.match("runner/cli/__init__.py"):
        return line.lstrip().startswith('"gateway": ')
    return path.match("runner/gateway/*.py") or path.match("runner/cli/serving/gateway.py")


def test_no_two_classes_share_a_name() -> None:
    """But for the same role in each contract's folder, and runner.aio, which has the names of the library."""
    places: dict[str, list[str]] = {}
    for name, path in _sources():
        if not _is_of_a_contract(path) and not _matches(name, "runner.aio.*"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_only_its_own_folder_names_a_contract() -> None:
    """Neither in code nor in a message or a comment. sandbox/ knows no contract's word either."""
    assert len(CONTRACTS) >= 3
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for _, path in _sources()
        if not _is_of_a_contract(path)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if CONTRACT_WORDS.search(line) and not _serves_a_protocol(path, line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        'name = "nexo"',
        "# as MCP has it",
        "NEXO_PLUGIN_X",
        "the rune contract",
        "is_mcp = 1",
        "McpDialect",
        "rune_x",
    ],
)
def test_a_contracts_word_is_recognised(line: str) -> None:
    assert CONTRACT_WORDS.search(line)
    assert not CONTRACT_WORDS.search("FORCE_COLOR, annexoed, prune, compcp")


# --- It can fail -------------------------------------------------------------------------------------------

Tree = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    def make(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


CLEAN = {
    "runner/__init__.py": "",
    "runner/plugin.py": "import os\nfrom sandbox.spec import SandboxSpec\n",
    "runner/cli/__init__.py": "from runner import plugin\nfrom runner.cli import exec\n",
    "runner/cli/exec.py": "from sandbox.plan import plan\n",
    "runner/contracts/__init__.py": "",
    "runner/contracts/nexo/__init__.py": "",
    "runner/contracts/nexo/manifest.py": "import pydantic\nfrom runner.plugin import Plugin\n",
    "runner/contracts/nexo/verb_show.py": "from runner.cli import exec\nfrom runner.plugin import Plugin\n",
    "runner/contracts/mcp/__init__.py": "",
    "runner/contracts/mcp/manifest.py": "from pydantic import BaseModel\n",
    "sandbox/__init__.py": "",
    "sandbox/process.py": "def load() -> object:\n    import prctl\n    return prctl\n",
    "sandbox/plan/find_bwrap.py": "",
    "sandbox/plan/plan.py": "from sandbox.plan import find_bwrap as host\nfrom sandbox.spec import Grant\n",
    "sandbox/spawn/spawner.py": "import ctypes\n",
    "sandbox/spec.py": "from dataclasses import dataclass\n",
}


def test_a_clean_tree_has_no_faults(tree: Tree) -> None:
    assert faults(tree(CLEAN)) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("sandbox/spec.py", "import runner.plugin", "sandbox/ never imports runner/"),
        ("sandbox/plan/plan.py", "def f():\n    from runner import plugin", "sandbox/ never imports runner/"),
        (
            "sandbox/plan/plan.py",
            "import importlib\nimportlib.import_module('runner.plugin')",
            "never imports runner/",
        ),
        ("sandbox/spec.py", "from sandbox.plan.plan import x", "sandbox.plan.plan, which is a higher layer"),
        ("sandbox/spec.py", "from .plan import plan", "sandbox.plan.plan, which is a higher layer"),
        ("sandbox/spec.py", "from .plan.plan import x", "sandbox.plan.plan, which is a higher layer"),
        ("runner/plugin.py", "from runner.cli import exec", "runner.cli.exec, which is a higher layer"),
        (
            "runner/plugin.py",
            "if TYPE_CHECKING:\n    import runner.cli",
            "runner.cli, which is a higher layer",
        ),
        ("runner/__init__.py", "from runner.plugin import Plugin", "which is a higher layer"),
        ("runner/outcome.py", "import runner.plugin", "neighbours in one layer"),
        (
            "runner/contracts/nexo/manifest.py",
            "import runner.contracts.mcp.manifest",
            "knows no other contract",
        ),
        ("runner/contracts/nexo/dialect.py", "from ..mcp import manifest", "knows no other contract"),
        ("runner/contracts/nexo/dialect.py", "import runner.cli.exec", "which is a higher layer"),
        ("runner/contracts/nexo/dialect.py", "import pydantic", "imports pydantic: only"),
        ("runner/plugin.py", "from pydantic import BaseModel", "imports pydantic: only"),
        ("sandbox/plan/plan.py", "import trio", "imports trio: only"),
        ("runner/cli/exec.py", "import trio.lowlevel", "imports trio: only"),
        (
            "sandbox/limits/cgroup.py",
            "from pyroute2 import NetNS",
            "imports pyroute2: only sandbox.network.recipe",
        ),
        ("sandbox/cell/unsandboxed.py", "import psutil", "imports psutil: only runner.serve.metrics"),
        ("sandbox/cell/unsandboxed.py", "import prctl", "imports prctl: only sandbox.process"),
        ("sandbox/process.py", "import prctl", "imports prctl when it is loaded"),
        ("sandbox/plan/plan.py", "import requests", "requests, which is no dependency"),
        ("sandbox/spawn/spawner.py", "from sandbox import spec", "the standard library only"),
        ("sandbox/spawn/spawner.py", "import prctl", "the standard library only"),
        ("sandbox/vault.py", "", "sandbox.vault has no place"),
        ("runner/plugin.py", "import sandbox.spec, policies.missing", "policies.missing does not exist"),
    ],
)
def test_a_violation_is_found(tree: Tree, file: str, text: str, complaint: str) -> None:
    found = faults(tree({**CLEAN, file: text + "\n"}))
    assert any(complaint in fault for fault in found), found


@pytest.mark.parametrize("way", ["{}", "def f():\n    {}", "class A:\n    def f(self):\n        {}"])
def test_a_circle_is_found(tree: Tree, way: str) -> None:
    circle = {
        "sandbox/plan/find_bwrap.py": way.format("from sandbox.plan.sources import x") + "\n",
        "sandbox/plan/sources.py": way.format("import sandbox.plan.plan") + "\n",
    }
    assert circles(tree(CLEAN)) == []
    assert circles(tree({**CLEAN, **circle})) == [
        "sandbox.plan.find_bwrap -> sandbox.plan.sources -> sandbox.plan.plan -> sandbox.plan.find_bwrap"
    ]
    typing = way.format("0\n") + "if TYPE_CHECKING:\n    from sandbox.plan.sources import x\n"
    assert circles(tree({**CLEAN, **circle, "sandbox/plan/find_bwrap.py": typing})) == []


def test_only_the_face_of_a_contract_imports_its_own_modules_in_functions(tree: Tree) -> None:
    manifest = {"runner/contracts/nexo/manifest.py": "from runner.contracts.nexo import CONTRACT\n"}
    lazy = "def f():\n    from runner.contracts.nexo import manifest\n"
    assert circles(tree({**CLEAN, **manifest, "runner/contracts/nexo/__init__.py": lazy})) == []
    at_once = "from runner.contracts.nexo import manifest\n"
    assert circles(tree({**CLEAN, **manifest, "runner/contracts/nexo/__init__.py": at_once})) != []


def test_the_line_of_a_violation_is_named(tree: Tree) -> None:
    root = tree({**CLEAN, "sandbox/spec.py": '"""Values."""\n\nimport trio\n'})
    assert faults(root)[0].startswith("sandbox/spec.py:3: ")


# --- What `runner exec` really loads -----------------------------------------------------------------------

TOO_SLOW_TO_START_WITH = (
    "cryptography",
    "h11",
    "jsonschema_rs",
    "pydantic",
    "psutil",
    "pyroute2",
    "trio",
    "yaml",
    "asyncio",
    "inspect",
    # Most of these take 2 to 10 ms, with what they import. sandbox/speed/ does without.
    "argparse",
    "array",
    "collections",
    "ctypes",
    "enum",
    "gettext",
    "json",
    "locale",
    "re",
    "signal",
    "typing",
)


def _loaded(importtime: str) -> set[str]:
    """Module names from the output of -X importtime: "import time:   self |  cumulative |   name"."""
    lines = [line for line in importtime.splitlines() if line.startswith("import time:") and "|" in line]
    return {line.rpartition("|")[2].strip() for line in lines}


def _slow(loaded: set[str], names: Sequence[str] = TOO_SLOW_TO_START_WITH) -> set[str]:
    return {name for name in loaded if name.partition(".")[0] in names}


def test_importtime_is_read_rightly() -> None:
    argv = [sys.executable, "-X", "importtime", "-c", "import inspect"]
    loaded = _loaded(subprocess.run(argv, capture_output=True, text=True, check=True).stderr)
    assert "inspect" in _slow(loaded)
    assert "inspect" not in _slow(
        _loaded(subprocess.run([*argv[:-1], "0"], capture_output=True, text=True).stderr)
    )


_STATE = '[plugin.sandbox]\nenabled = true\nfs_write_paths = ["${state_dir}"]\n'


@one_case(
    ("command", "asked"),
    [
        pytest.param("/bin/true", "", id="no state"),
        pytest.param("/bin/true", _STATE, id="state"),
        pytest.param("./plugin.py", "", id="Python"),
    ],
)
def test_launching_a_known_manifest_loads_nothing_slow(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path], command: str, asked: str
) -> None:
    manifest = write_file(plugin_dir / "plugin/nexo-plugin.toml", nexo("quick", command) + asked)
    write_file(plugin_dir / "plugin/plugin.py", "#!/usr/bin/python3\n", 0o755)
    runner_as.give(plugin_dir)
    words = ("exec", "--state-dir", str(plugin_dir / "state"), str(manifest))
    first = runner_as(*words)  # reads, validates and remembers
    assert (first.returncode, first.stderr) == (0, "")
    # Neither -m nor site, which import some of these themselves.
    start = ("-S", "-X", "importtime", "-c", "from runner.cli import entry; entry()")
    argv = [*runner_as.prefix, *runner_as.python, *start, *words]
    second = subprocess.run(argv, env=runner_as.environ, cwd="/", capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    loaded = _loaded(second.stderr)
    assert "runner.cli" in loaded  # or nothing was measured
    assert ("sandbox.plan.sources" in loaded) == bool(asked)
    assert _slow(loaded) == set()
    # Who may write to no folder of the host does not pay for the question whose the files are.
    assert not loaded & {"sandbox.plan.owners", "sandbox.identity.idmap", "sandbox.identity.accounts"}
    # Who asks for no host does not pay for the rules about hosts.
    assert not loaded & {"sandbox.network.rules", "sandbox.network.hosts", "ipaddress", "idna"}


# What makes a plan, and the words for what went wrong. A launch that has a plan needs none of it.
MAKES_PLANS = (
    "runner.approvals",
    "runner.contracts",
    "runner.manifest",
    "runner.plugin",
    *(
        f"runner.launch.{name}"
        for name in ("approve", "command", "plan", "denylist", "failures", "prepare", "read", "run")
    ),
    "runner.launch.read",
    "runner.launch.verdict",
    "sandbox.document.read",
    "sandbox.limits.assign",
    "sandbox.limits.cgroup_survey",
    *(
        f"sandbox.paths.{name}"
        for name in ("denied_paths", "denylist", "executable", "mounts", "scan", "source")
    ),
    *(
        f"sandbox.plan.{name}"
        for name in ("available_layers", "compile", "find_bwrap", "operations", "sources")
    ),
    "sandbox.policy",
)


def test_carrying_out_a_plan_loads_nothing_that_makes_one() -> None:
    program = "import sys; sys.path[:0] = [sys.argv[1]]; import runner.launch.carry_out; print(*sys.modules)"
    argv = [sys.executable, "-I", "-S", "-c", program, str(ROOT)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert "sandbox.spawn.spawner" in loaded
    assert _slow(loaded) == set()
    assert {name for name in loaded if any(_matches(name, f"{each}.*") for each in MAKES_PLANS)} == set()
    modules = {name for package in PACKAGES for name, _ in _modules(ROOT, package)}
    assert set(MAKES_PLANS) <= modules  # or nothing is forbidden


def test_a_fork_server_loads_nothing_of_its_host() -> None:
    """Each session would pay for it with memory."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from runner.launch.remote import forkserver, shared_monitor\n"
        "forkserver._preload()\n"
        "print(*sys.modules)"
    )
    argv = [sys.executable, "-I", "-S", "-c", program, str(ROOT), sysconfig.get_path("purelib")]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert "sandbox.limits.disk" in loaded  # or nothing was preloaded
    assert not loaded & {"trio", "runner.library", "runner.session", "pydantic", "asyncio"}


# What a stored plan may need of these, with a disk limit and with a state directory.
NEEDED_WITH_LIMITS = ("sandbox.paths.mounts",)
# What a gate needs: no file can be opened once it is confined, so it loads all of it before. It is a fork of
# the launch, and its imports are among those that are shown.
NEEDED_BY_GATES = ("array", "collections", "enum", "re")


def _every_limit() -> str:
    io = () if whole_disks([os.stat("/usr").st_dev]) else ("io",)  # without a disk the policy is asked again
    return bench_policy({name: value for name, value in (FULL | STDERR).items() if name not in io})


def _named_hosts() -> str:
    closed, listed = 'ceiling = "none"\nhosts = []', 'ceiling = "allowlist"\nhosts = ["*:*"]'
    return bench_policy({}).replace(closed, listed)


@one_case(
    ("policy", "asked", "needed"),
    [
        pytest.param(lambda: bench_policy({}), "", (), id="no limits"),
        pytest.param(_every_limit, "", (), id="every limit"),
        pytest.param(
            _named_hosts,
            'network = "allowlist"\nnetwork_allowlist = ["api.example.com:443"]\n',
            NEEDED_BY_GATES,
            id="named hosts",
        ),
    ],
)
def test_a_launch_from_a_stored_plan_loads_nothing_slow(
    runner_as: Caller,
    plugin_dir: Path,
    write_file: Callable[..., Path],
    policy: Callable[[], str],
    asked: str,
    needed: Sequence[str],
) -> None:
    manifest = write_file(plugin_dir / "plugin/nexo-plugin.toml", MANIFEST + asked)
    chosen = write_file(plugin_dir / "policy.toml", policy())
    runner_as.give(plugin_dir)
    # Neither -m nor site, which import some of these themselves.
    program = "from runner.cli import entry; entry()"
    # The plans that are stored rest on files that were changed a moment ago.
    storing = f"import sandbox.look; sandbox.look.SETTLED_SECONDS = -3600.0; {program}"
    words = ("exec", "--policy", str(chosen), "--state-dir", str(plugin_dir / "state"), str(manifest))
    start = [*runner_as.prefix, *runner_as.python, "-S", "-X", "importtime", "-c"]
    where = "import os, pydantic; print(os.path.dirname(os.path.dirname(pydantic.__file__)))"
    packages = subprocess.check_output(
        [*runner_as.prefix, *runner_as.python, "-c", where], env=runner_as.environ, text=True
    ).strip()
    python_path = f"{runner_as.environ['PYTHONPATH']}:{packages}"  # for the launches that decide
    environ = {**runner_as.environ, "PYTHONPATH": python_path, "RUNNER_DEBUG": "1"}
    # The first launch makes the state directory, which is another machine for the next.
    for code in (storing, storing, program):
        done = subprocess.run([*start, code, *words], env=environ, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "runner: a stored plan is used" in done.stderr
    loaded = _loaded(done.stderr)
    assert ("sandbox.limits.disk" in loaded) == (policy is _every_limit)  # or something else was measured
    assert ("sandbox.gate.gate" in loaded) == bool(asked)
    assert _slow(loaded) <= set(needed) | {name for name in loaded if name.partition(".")[0] in needed}
    makers = {name for name in loaded if any(_matches(name, f"{each}.*") for each in MAKES_PLANS)}
    assert makers <= set(NEEDED_WITH_LIMITS)


def test_starting_a_gate_loads_nothing_slow() -> None:
    """In the process that launches the plugin, which waits for the gate. The gate itself loads more."""
    program = "import sys; sys.path[:0] = [sys.argv[1]]; import sandbox.cell.egress; print(*sys.modules)"
    argv = [sys.executable, "-I", "-S", "-c", program, str(ROOT)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert "sandbox.network.recipe" in loaded
    assert _slow(loaded) == set()
    assert not loaded & {"sandbox.network.rules", "sandbox.network.hosts", "ipaddress", "idna"}


# --- What `runner call` really loads -----------------------------------------------------------------------


def test_a_call_loads_nothing_of_the_launch(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """A fork of it launches the plugin, and imports the launch while this process imports trio."""
    server = plugin_dir / "server.py"
    write_file(server, (ROOT / "runner/contracts/mcp/example/server.py").read_text())
    server.chmod(0o755)
    manifest = write_file(
        plugin_dir / "mcp.json", '{"mcpServers": {"words": {"command": "./server.py", "args": []}}}'
    )
    words = ("call", manifest, "greet", "--input", '{"name": "you"}')
    first = runner_as(*words)  # reads, validates and remembers
    assert "Hello, you!" in first.stdout, first.stderr
    loaded = _loaded(runner_as(*words, env={"PYTHONPROFILEIMPORTTIME": "1"}).stderr)
    assert {"runner.session.session", "trio"} <= loaded  # or nothing was measured
    assert (
        _slow(loaded, ("cryptography", "h11", "jsonschema_rs", "pydantic", "psutil", "pyroute2", "yaml"))
        == set()
    )
    launching = {
        *("runner.launch.remote.monitor", "runner.launch.run", "runner.launch.acquire"),
        *("runner.launch.plan", "runner.launch.prepare", "runner.launch.report", "runner.launch.wait"),
        *("sandbox.cell.cell", "sandbox.cell.launch", "sandbox.plan.compile", "sandbox.spawn.spawner"),
        *("sandbox.plan.operations", "sandbox.plan.mentions", "sandbox.policy.policy"),
        *("sandbox.paths.source", "runner.approvals.record", "runner.launch.advice.scene"),
    }
    assert loaded & launching == set()
    # Its usual words need no argparse, and who has no secrets needs no rules about their disguises.
    assert loaded & {"argparse", "gettext", "runner.cli.shared.command"} == set()
    assert {name for name in loaded if name.startswith("runner.protocol.disguise")} == set()
    with_secret = runner_as(
        *words, "--secrets", "-", input='{"key": "a long secret"}', env={"PYTHONPROFILEIMPORTTIME": "1"}
    )
    assert {"argparse", "runner.protocol.secrets"} <= _loaded(with_secret.stderr)


_STARTS = """
import sys
started = []
sys.addaudithook(lambda event, args: started.append(event) if event == "subprocess.Popen" else None)
{0}
print(started)
"""


@pytest.mark.parametrize(
    ("code", "starts"),
    [
        ("from runner.cli.call import import_session; import_session(); import trio", False),
        ("import trio", True),  # it looks for a library with ldconfig
    ],
    ids=["call", "trio"],
)
def test_importing_a_session_for_a_call_starts_no_process(code: str, starts: bool) -> None:
    argv = [sys.executable, "-c", _STARTS.format(code)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == ("['subprocess.Popen']\n" if starts else "[]\n"), done.stderr


if __name__ == "__main__":
    write_picture()
