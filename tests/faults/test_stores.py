"""Every system call fails in turn while something is stored: approvals, plans, packages, the ledger.

Afterwards it is stored whole, or it is not there, as the command said. What was there before still is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from runner.install.store import Store
from runner.ledger.file import open_file
from tests.conftest import ROOT, Caller
from tests.faults.inject import Fault, Place
from tests.faults.scenes import Ran, Scene, by_turns, each_of, select
from tests.runner.install.test_store import REQUEST
from tests.runner.ledger.test_crash import check_calls, check_deliveries, drain

pytestmark = pytest.mark.usefixtures("nothing_left")
MINUTES = 60.0
Sweep = Callable[[Scene], None]


def some(scene: Scene) -> None:
    kinds = "openat write fsync flock mkdirat mkdir renameat renameat2 rename unlinkat unlink"
    faults = select(scene, " ".join(f"runner/{kind}" for kind in kinds.split()))
    scene.sweep([*faults, Fault(faults[-1].place, signal=signal.SIGKILL)], at_once=1)


def each(scene: Scene) -> None:
    places = scene.places()
    killed = [Fault(place, signal=signal.SIGKILL) for place in by_turns(scene, places, 15)]
    scene.sweep([*each_of(by_turns(scene, places, 7)), *killed], at_once=1)


@pytest.fixture(params=[some, pytest.param(each, marks=[pytest.mark.broad, pytest.mark.bound(60 * MINUTES)])])
def sweep(request: pytest.FixtureRequest) -> Sweep:
    found: Sweep = request.param
    return found


@pytest.fixture
def manifest(plugin_dir: Path, write_file: Callable[..., Path]) -> Path:
    (plugin_dir / "data").mkdir()
    entry = {
        "command": "/bin/cat",
        "args": ["/proc/self/mountinfo"],
        "x-sandbox": {"read": [str(plugin_dir / "data")]},
    }
    return write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))


def test_an_approval(sweep: Sweep, runner_as_user: Caller, manifest: Path) -> None:
    runner_as = runner_as_user  # root's approvals belong to the whole machine
    folder = Path(runner_as.environ["XDG_CONFIG_HOME"]) / "runner"

    def listed() -> list[dict[str, object]]:
        done = runner_as("allow", "--list", "--json")
        assert done.returncode == 0, done.stderr
        found: list[dict[str, object]] = json.loads(done.stdout)["approvals"]
        return found

    def is_whole(ran: Ran, fault: Fault | None) -> Iterable[str]:
        found = listed()
        if ran.status == 0 and len(found) != 1:
            yield "it says that it is allowed, and it is not"
        if any(each.get("fault") for each in found):
            yield f"the approval is damaged: {found}"
        names = [path.name for path in folder.rglob("*") if path.is_file()]
        if len(names) > len(found) and fault and not (fault.signal or fault.place.call.startswith("unlink")):
            yield f"files are left: {names}"

    def forget() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    sweep(Scene(runner_as, ["allow", "--yes", str(manifest)], is_whole, before=forget))


@pytest.mark.launches
def test_a_plan(
    sweep: Sweep, runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """A stored plan that is damaged, or half written, is not used: the launch is the same."""
    runner_as = runner_as_user  # root's plans belong to the whole machine
    entry = {"command": "/bin/cat", "args": ["/proc/self/mountinfo"]}
    manifest = write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))
    os.utime(manifest, (1e9, 1e9))
    wanted = runner_as("exec", str(manifest)).stdout.count("\n")
    assert wanted > 10
    folder = Path(runner_as.environ["XDG_CACHE_HOME"])

    def launches(ran: Ran, fault: Fault | None) -> Iterable[str]:
        done = runner_as("exec", str(manifest))
        if (done.returncode, done.stdout.count("\n")) != (0, wanted):
            yield f"the next launch is another: {done}"

    def forget() -> None:
        shutil.rmtree(folder / "runner", ignore_errors=True)

    sweep(Scene(runner_as, ["plan", str(manifest)], launches, before=forget))


_PACKAGE = """\
import os, sys
from pathlib import Path
from runner.install.request import npm_request
from runner.install.store import Installed, Lock, Locked, Store, StoreRefused, copy_tree
store, place = Store(sys.argv[1]), Path(sys.argv[2])
lock = Lock("npm", "node", (Locked("demo", "1.0.0", "sha512-x"),))
installed = Installed(npm_request(("demo",), ""), lock.name, ("node", "tree/index.js"), (("demo", "1.0.0"),))
try:
    with store.changing(lambda text: None), store.fetching_into(str(place)), store.new_set() as new:
        (place / "a").mkdir()
        (place / "a/index.js").write_text("hello")
        copy_tree(str(place / "a"), f"{new}/tree")
        store.add(installed, lock, new)
    os.write(1, b"installed")
except (OSError, StoreRefused) as error:
    os.write(2, str(error).encode())
"""


def test_a_package(sweep: Sweep, runner_as_root: Caller, plugin_dir: Path) -> None:
    root, place = plugin_dir / "store", plugin_dir / "runner-install-1"
    store = Store(str(root))

    def is_whole(ran: Ran, fault: Fault | None) -> Iterable[str]:
        found = store.find(REQUEST)
        if found is None and ran.out == b"installed":
            yield "it says that it is installed, and it is not"
        if found is not None and store.changed(found.set_name):
            yield f"the set is not whole: {store.changed(found.set_name)}"
        with store.changing(lambda text: None):  # the next change removes what was not finished
            pass
        left = [str(path) for path in (place, *root.rglob(".*"), *root.glob("fetching*")) if path.exists()]
        if left and fault and not fault.place.call.startswith(("unlink", "rmdir")):
            yield f"files are left: {left}"

    def forget() -> None:
        for path in (root, place):
            shutil.rmtree(path, ignore_errors=True)

    words = [str(root), str(place)]
    sweep(Scene(runner_as_root, words, is_whole, program=_PACKAGE, before=forget))


ACTS = [("accept", 0), ("accept", 1), ("end", 0), ("enqueue", 0), ("claim", 0), ("settle", 0), ("end", 0)]
_WRITER = (ROOT / "tests/runner/ledger/writer.py").read_text().partition("def main")[0]
_WRITER = _WRITER.replace("from __future__ import annotations\n", "")
_WRITER += """
os.kill = lambda *_: None  # it ends by itself
try:
    _run(json.loads(sys.argv[1]), 1)
except LedgerUnusable as unusable:
    os.write(1, json.dumps(["unusable", str(unusable)]).encode() + b"\\n")
"""


def test_a_ledger(sweep: Sweep, runner_as_root: Caller, plugin_dir: Path) -> None:
    path = plugin_dir / "ledger" / "ledger.db"

    def has_one_outcome_each(ran: Ran, fault: Fault | None) -> Iterable[str]:
        if "Traceback" in ran.err and fault and fault.place.call != "write":  # which the test's program does
            yield f"an error that is not told: {ran.err[-300:]}"
        said = [json.loads(line) for line in ran.out.splitlines()]
        file = open_file(str(path), clock=lambda: 1e9 + 1000, chance=lambda: 0.0)
        try:
            check_calls(file, said)
            check_deliveries(file, said)
            drain(file)
        except AssertionError as wrong:
            yield f"{wrong} after {said}"
        finally:
            file.close()

    def forget() -> None:
        shutil.rmtree(path.parent, ignore_errors=True)

    order = {"path": str(path), "run": 0, "acts": ACTS, "crash_at": 0, "now": 1e9}
    scene = Scene(runner_as_root, [json.dumps(order)], has_one_outcome_each, program=_WRITER, before=forget)
    assert Place("runner", "pwrite64", 1) in scene.places(1)
    sweep(scene)
