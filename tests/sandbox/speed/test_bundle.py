"""The compiled modules of a launch in one file: made as by imports, and not used if something has changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import pytest

from runner.contracts.registry import contract_names
from sandbox.identity.state import state_root
from sandbox.speed.bundle_parts import PARTS
from tests.conftest import ROOT, Caller
from tests.manifests import nexo
from tests.tables import one_case
from tests.test_layers import _loaded

pytestmark = pytest.mark.fresh

# Loads the bundle of the checkout argv[1]. Tells what the import statement was asked for meanwhile, and what
# all modules of the launch are like. (`__cached__` is deprecated, and `__spec__` has the same. The module
# `__future__`, which has `annotations`, and docstrings are left out of a bundle.)
_LOADS = """
import sys
sys.path.append(sys.argv[1])
sys.path += sys.argv[2].split(":")
import sandbox.speed.bundle as bundle
from sandbox.speed.bundle_parts import PARTS
asked = []
class Spy:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)
sys.meta_path.insert(0, Spy())
listed = [name for part in sys.argv[3:] or ("launch", "decide") for name in PARTS[part]]
for part in sys.argv[3:]:
    bundle.load(part)
loaded = [name for part in sys.argv[3:] for name in PARTS[part] if name in sys.modules]
early = list(asked)
bundle.renew()
from importlib import import_module
import json
told = {}
modules = {name: import_module(name) for name in listed}
def kind(loader):
    return [type(loader).__qualname__, loader.name, loader.path]
for name, module in modules.items():
    spec = module.__spec__
    told[name] = [module.__name__, module.__file__, module.__package__, kind(module.__loader__),
        list(getattr(module, "__path__", ())), spec.name, spec.origin, spec.parent, spec.has_location,
        spec.cached, spec.submodule_search_locations, kind(spec.loader),
        sorted(set(vars(module)) - {"__cached__", "annotations"}), module is sys.modules[name]]
print(json.dumps({"loaded": loaded, "asked": early, "told": told}))
"""


class Checkout:
    """A copy of our code, with bundles of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *options: str, parts: Sequence[str] = ("launch",)) -> dict[str, Any]:
        # trio, for sessions, and without the finders of an editable install.
        places = [sysconfig.get_path("purelib")]
        argv = [sys.executable, *(options or ("-I",)), "-S", "-c", _LOADS, str(self.root), *places, *parts]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd="/")
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def uses(self, *options: str, parts: Sequence[str] = ("launch",)) -> bool:
        """Whether all modules of these parts come from the bundles. If not, none does."""
        told = self.run(*options, parts=parts)
        listed = [name for part in parts for name in PARTS[part]]
        # In their order, or one would be looked for by another.
        assert not set(listed) & set(told["asked"])
        assert told["loaded"] in ([], listed)
        return bool(told["loaded"])

    @property
    def file(self) -> Path:
        [file] = (self.root / "sandbox/speed/__pycache__").glob("launch.*bundle")
        return file


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our code, compiled, with a bundle that is used. The tests change it and put it back."""
    root = tmp_path_factory.mktemp("code") / "checkout"
    for name in ("runner", "sandbox"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    hour_ago = time.time() - 3600  # sources that were just written are not put into a bundle
    for path in root.rglob("*.py"):
        os.utime(path, (hour_ago, hour_ago))
    made = Checkout(root)
    made.run("-s", parts=())
    assert not made.uses()  # and writes the bundle
    assert made.uses()
    shutil.copytree(root, root.with_name("pristine"))
    return root


@pytest.fixture
def checkout(pristine: Path) -> Iterator[Checkout]:
    yield Checkout(pristine)
    _put_back(pristine, pristine.with_name("pristine"))


def _put_back(root: Path, original: Path) -> None:
    """Make `root` like `original` again. Only what differs is copied."""
    there, wanted = _files(root), _files(original)
    for name, _ in there.items() - wanted.items():
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for name, _ in sorted(wanted.items() - _files(root).items()):
        if (original / name).is_dir():
            (root / name).mkdir()
        else:
            shutil.copy2(original / name, root / name)


def _files(root: Path) -> dict[str, tuple[int, int, int]]:
    """Mode, size and time of each file; the mode of each folder."""
    found: dict[str, tuple[int, int, int]] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            stat = os.lstat(path)
            is_folder = S_ISDIR(stat.st_mode)
            found[os.path.relpath(path, root)] = (
                stat.st_mode,
                0 if is_folder else stat.st_size,
                0 if is_folder else stat.st_mtime_ns,
            )
    return found


@pytest.mark.parametrize(
    "parts",
    [
        *(("launch", "decide"), ("launch", "state"), ("launch", "run", "write"), ("launch", "hosts", "gate")),
        *(("call", "session"), ("explain",)),
    ],
    ids=["launch", "state", "write", "hosts", "call", "explain"],
)
def test_modules_are_as_if_imported(checkout: Checkout, parts: tuple[str, ...]) -> None:
    checkout.run(parts=parts)
    assert checkout.uses(parts=parts)
    assert checkout.run(parts=parts)["told"] == checkout.run("-I", "-X", "importtime", parts=parts)["told"]


def test_a_part_alone(checkout: Checkout) -> None:
    """A source of the other part has changed: its modules are imported as usual."""
    parts = ("launch", "decide")
    checkout.run(parts=parts)
    source = checkout.root / "sandbox/spawn/init.py"
    _append(source, "# more\n", source.stat().st_mtime + 1)
    told = checkout.run(parts=parts)
    assert "sandbox.speed.typed" in told["asked"] and "sandbox.plan.compile" not in told["asked"]
    assert "sandbox.plan.compile" in told["loaded"]


def _append(path: Path, text: str, changed: float) -> None:
    path.write_text(path.read_text() + text)
    os.utime(path, (changed, changed))


@one_case("name", ["sandbox/spawn/init.py", "runner/launch/stored/__init__.py"])
def test_a_source_that_changed(checkout: Checkout, name: str) -> None:
    source = checkout.root / name
    before = source.stat().st_mtime
    _append(source, "", before + 1)
    assert not checkout.uses()
    assert checkout.uses()  # a new one was written
    _append(source, "# more\n", before + 1)
    assert not checkout.uses()


def test_a_source_that_is_gone(checkout: Checkout) -> None:
    (checkout.root / "sandbox/spawn/init.py").rename(checkout.root / "sandbox/spawn/other.py")
    with pytest.raises(subprocess.CalledProcessError):  # as without a bundle: an ImportError
        checkout.run()


def test_a_source_that_just_changed_is_not_stored(checkout: Checkout) -> None:
    # A machine may be slow: an hour from now it will still be new.
    _append(checkout.root / "sandbox/spawn/init.py", "", time.time() + 3600)
    old = checkout.file.read_bytes()
    assert not checkout.uses()
    assert checkout.file.read_bytes() == old


def test_a_copy_does_not_use_the_bundle_of_the_original(checkout: Checkout, tmp_path: Path) -> None:
    shutil.copytree(checkout.root, tmp_path / "copy")  # its bundle too
    other = Checkout(tmp_path / "copy")
    assert not other.uses()
    assert other.run()["told"]["runner"][1] == str(other.root / "runner/__init__.py")
    assert other.uses()


@one_case(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: raw[:10] + b"X" + raw[11:],
        lambda raw: raw[:16] + bytes([raw[16] ^ 1]) + raw[17:],  # of another Python
        lambda raw: raw[:20] + b"N",  # None
        lambda raw: raw[:20] + b"\xff" * 100,
    ],
    ids=["cut by one", "half", "empty", "other format", "other Python", "none", "garbage"],
)
def test_a_damaged_bundle(checkout: Checkout, damage: Callable[[bytes], bytes]) -> None:
    checkout.file.write_bytes(damage(checkout.file.read_bytes()))
    assert not checkout.uses()
    assert checkout.uses()  # it was replaced


def test_who_tells_python_how_to_import_gets_no_bundle(checkout: Checkout) -> None:
    for options in (["-s"], ["-I", "-X", "importtime"]):
        assert not checkout.uses(*options)
    assert checkout.uses("-I")


def test_nothing_is_written_where_python_may_not(checkout: Checkout) -> None:
    checkout.file.unlink()
    assert not checkout.uses("-I", "-B")
    assert not list((checkout.root / "sandbox/speed/__pycache__").glob("launch.*"))


def test_nobody_else_may_write_it(checkout: Checkout) -> None:
    """Whatever the umask of the launch is. What somebody else can write is not believed."""
    checkout.file.unlink()
    before = os.umask(0)
    try:
        assert not checkout.uses()
    finally:
        os.umask(before)
    assert checkout.file.stat().st_mode & 0o777 == 0o644
    assert checkout.uses()
    for mode in (0o664, 0o646):
        checkout.file.chmod(mode)
        assert not checkout.uses()
        assert checkout.file.stat().st_mode & 0o777 == 0o644  # it was replaced


_RENEWS = """
import sys
sys.path.append(sys.argv[1])
import sandbox.speed.bundle as bundle
bundle.load("launch")
bundle.renew()
print("compiled" if "importlib.util" in sys.modules else "did nothing")
"""


def renewed(checkout: Checkout, said: str = "compiled", **env: str) -> list[str]:
    argv = [sys.executable, "-I", "-S", "-c", _RENEWS, str(checkout.root)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd="/", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{said}\n", "")
    return sorted(path.name for path in (checkout.root / "sandbox/speed/__pycache__").glob("launch.*"))


def test_a_bundle_that_cannot_be_made_costs_nothing(checkout: Checkout) -> None:
    """The exit status of the plugin is still to be passed on."""
    source = checkout.root / "sandbox/speed/libc.py"
    _append(source, "\n(", source.stat().st_mtime + 1)
    old = checkout.file.read_bytes()
    assert len(renewed(checkout)) == 1  # the old one, and nothing half-made
    assert checkout.file.read_bytes() == old


def test_nothing_is_written_without_a_cache(checkout: Checkout) -> None:
    checkout.file.unlink()
    assert renewed(checkout, "did nothing", RUNNER_CACHE="off") == []
    assert len(renewed(checkout)) == 1


def test_who_may_not_write_it_does_not_make_it(checkout: Checkout) -> None:
    """The installation may be root's: no launch of a user may take longer because there is no bundle."""
    folder = checkout.root / "sandbox/speed/__pycache__"
    shutil.rmtree(folder)
    folder.touch()  # nobody can write below it, root neither
    assert renewed(checkout, "did nothing") == []


def test_a_module_that_fails_is_left_to_the_import_statement(checkout: Checkout) -> None:
    source = checkout.root / "sandbox/speed/libc.py"
    _append(source, '\nraise RuntimeError("ours")\n', source.stat().st_mtime + 1)
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError) as failed:
            checkout.run()
        assert "RuntimeError: ours" in failed.value.stderr


# --- What a launch loads ----------------------------------------------------------------------------------

# Root leases a uid. And -X importtime does not tell what importlib.import_module imports.
_NOT_TOLD = {
    *("sandbox.identity.leases", "sandbox.identity.uid_range"),
    *("sandbox.speed.late_site", "runner.cli.exec"),
}
# What loads a bundle is in none.
_BEFORE = {"sandbox", "sandbox.speed", "sandbox.speed.bundle"}
# What is decided only about a plugin with a state directory.
_WITH_STATE = {"sandbox.plan.sources"}
# Meters of a plugin that has run for a moment, as a short one does on a busy machine.
_LATER = {
    *("sandbox.cell.neighbours", "sandbox.limits.uncounted", "sandbox.limits.shares"),
    *("sandbox.limits.socket_meter", "sandbox.limits.socket_tables", "sandbox.limits.socket_diag"),
}
# A plan that rests on what has just changed is stored as well.
_STORES_AT_ONCE = "import sandbox.look; sandbox.look.SETTLED_SECONDS = -3600.0"
_STATE = '[plugin.sandbox]\nenabled = true\nfs_write_paths = ["${state_dir}"]\n'


@pytest.mark.parametrize("asked", [pytest.param("", id="no state"), pytest.param(_STATE, id="state")])
def test_the_bundles_have_what_a_launch_loads(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path], asked: str
) -> None:
    manifest = write_file(plugin_dir / "plugin/nexo-plugin.toml", nexo("quick", "/bin/true") + asked)
    runner_as.give(plugin_dir)
    words = ("exec", "--state-dir", str(plugin_dir / "state"), str(manifest))
    assert runner_as(*words).returncode == 0  # reads, validates and remembers
    # Neither -m nor site, which import more.
    start = (*runner_as.prefix, *runner_as.python, "-S", "-X", "importtime", "-c")
    env = {**runner_as.environ, "PYTHONPATH": str(ROOT), "RUNNER_DEBUG": "1"}

    def launch(is_kept: bool) -> set[str]:
        entry = "from runner.cli import entry; entry()"
        # To decide takes sandbox.look anyway.
        program = entry if is_kept else f"{_STORES_AT_ONCE}; {entry}"
        argv = [*start, program, *words]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, cwd="/")
        assert done.returncode == 0, done.stderr
        assert ("a stored plan is used" in done.stderr) is is_kept, done.stderr
        names = {name for name in _loaded(done.stderr) if name.partition(".")[0] in ("runner", "sandbox")}
        # The modules of a contract are in no bundle: no list names contracts.
        return {name for name in names if not name.startswith("runner.contracts.mcp")} - _BEFORE

    decided, kept = launch(is_kept=False), launch(is_kept=True)
    first, both = set(PARTS["launch"]), {*PARTS["launch"], *PARTS["decide"]}
    if asked:
        first |= set(PARTS["state"])
    else:
        both -= _WITH_STATE
    assert (kept - first - _LATER, first - kept - _NOT_TOLD) == (set(), set())
    assert (decided - both - _LATER, both - first - decided - _NOT_TOLD) == (set(), set())


@pytest.mark.parametrize(
    "parts", [("run", "write"), ("run", "hosts", "gate")], ids=["writes", "reaches hosts"]
)
def test_the_bundles_have_what_a_command_loads(
    runner_as: Caller, plugin_dir: Path, parts: tuple[str, ...]
) -> None:
    folder = plugin_dir / "work"
    folder.mkdir()
    os.chown(folder, runner_as.uid or 1000, runner_as.uid or 1000)
    options = ("--write", str(folder)) if "write" in parts else ("--net", "nowhere.example.com")
    assert runner_as("run", *options, "--", "/bin/true").returncode == 0  # reads the policy and remembers it
    start = (*runner_as.prefix, *runner_as.python, "-S", "-X", "importtime", "-c")
    program = f"{_STORES_AT_ONCE}; from runner.cli import entry; entry()"
    env = {**runner_as.environ, "PYTHONPATH": str(ROOT), "RUNNER_DEBUG": "1"}
    for _ in range(3):
        argv = [*start, program, "run", *options, "--", "/bin/true"]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, cwd="/")
        assert done.returncode == 0, done.stderr
    assert "a stored plan is used" in done.stderr
    names = {name for name in _loaded(done.stderr) if name.partition(".")[0] in ("runner", "sandbox")}
    owners = ("owners",) if "write" in parts and not runner_as.uid else ()  # these take root
    listed = {name for part in ("launch", *parts, *owners) for name in PARTS[part]}
    assert (names - listed - _LATER - _BEFORE, listed - names - _NOT_TOLD) == (set(), set())


_STARTS = """
import sys
sys.path += sys.argv[1:3]
del sys.argv[1:3]
import sandbox.look
sandbox.look.SETTLED_SECONDS = -3600.0
from runner.cli import entry
entry()
"""


@pytest.mark.launches
def test_a_plugin_with_a_state_directory_has_a_bundle_of_its_own(
    checkout: Checkout, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """Written by the first launch from a stored plan, which is the first that looks for it."""
    shutil.copytree(ROOT / "policies", checkout.root / "policies")
    manifest = write_file(plugin_dir / "plugin/nexo-plugin.toml", nexo("quick", "/bin/true") + _STATE)
    start = (sys.executable, "-I", "-S", "-c", _STARTS, str(checkout.root), sysconfig.get_path("purelib"))
    words = ("exec", "--state-dir", str(plugin_dir / "state"), str(manifest))
    env = {"HOME": str(plugin_dir), "PATH": os.environ["PATH"], "RUNNER_DEBUG": "1"}
    # The denylist has it, so a plan rests on whether it is there: another test may make root's meanwhile.
    Path(state_root(env)).mkdir(parents=True, exist_ok=True)
    for is_kept in (False, False, True):  # the first makes the state directory, which the plan rests on
        assert not list((checkout.root / "sandbox/speed/__pycache__").glob("state.*bundle"))
        done = subprocess.run((*start, *words), env=env, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("a stored plan is used" in done.stderr) is is_kept, done.stderr
    assert len(list((checkout.root / "sandbox/speed/__pycache__").glob("state.*bundle"))) == 1


@one_case("is_there", [True, False])
def test_what_is_there_already_is_not_read_again(checkout: Checkout, is_there: bool) -> None:
    """A fork server has all of it, and each of its monitors starts plugins."""
    program = (
        "import sys; sys.path.append(sys.argv[1]); import sandbox.speed.bundle as bundle\n"
        "if len(sys.argv) > 2: __import__(sys.argv[2])\n"
        "read = []; bundle._read = lambda part: read.append(part)\n"
        "bundle.load('state'); bundle.load('state')\n"
        "import gc; print(read, gc.isenabled())"  # a monitor that lives for months collects its garbage
    )
    last = PARTS["state"][-1:] if is_there else ()
    argv = [sys.executable, "-I", "-S", "-c", program, str(checkout.root), *last]
    assert subprocess.check_output(argv, text=True, cwd="/") == f"{[] if is_there else ['state']} True\n"


def test_the_bundles_have_what_a_call_loads(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    server = plugin_dir / "server.py"
    write_file(server, (ROOT / "runner/contracts/mcp/example/server.py").read_text(), 0o755)
    manifest = write_file(
        plugin_dir / "mcp.json", '{"mcpServers": {"words": {"command": "./server.py", "args": []}}}'
    )
    words = ("call", manifest, "greet", "--input", '{"name": "you"}')
    first = runner_as(*words)  # reads, validates and remembers
    assert "Hello, you!" in first.stdout, first.stderr
    told = runner_as(*words, env={"PYTHONPROFILEIMPORTTIME": "1"}).stderr
    loaded = {name for name in _loaded(told) if name.partition(".")[0] in ("runner", "sandbox")}
    listed = {*PARTS["call"], *PARTS["session"]}
    more = {name for name in loaded - listed if not name.startswith("runner.contracts.mcp")}
    assert more - _BEFORE - {"runner.__main__"} == set()
    assert listed - loaded - {"sandbox.speed.late_site", "runner.cli.call"} == set()


def test_the_bundle_has_what_explain_loads(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    manifest = write_file(plugin_dir / "plugin/nexo-plugin.toml", nexo("quick", "/bin/true"))
    runner_as.give(plugin_dir)
    first = runner_as("explain", manifest)  # reads, validates and remembers
    assert first.returncode == 0, first.stderr
    start = (*runner_as.prefix, *runner_as.python, "-S", "-X", "importtime", "-c")
    env = {**runner_as.environ, "PYTHONPATH": str(ROOT)}
    argv = [*start, "from runner.cli import entry; entry()", "explain", str(manifest)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd="/")
    assert (done.returncode, done.stdout) == (0, first.stdout), done.stderr
    loaded = {name for name in _loaded(done.stderr) if name.partition(".")[0] in ("runner", "sandbox")}
    listed = set(PARTS["explain"])
    # The modules of a contract are in no bundle: no list names contracts.
    of_contracts = tuple(f"runner.contracts.{name}" for name in contract_names())
    assert {name for name in loaded - listed if not name.startswith(of_contracts)} - _BEFORE == set()
    assert listed - loaded - {"sandbox.speed.late_site", "runner.cli.explain"} == set()
