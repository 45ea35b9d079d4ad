"""Images that are removed or updated while they run, and installations that do not end well."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runner.contracts.mcp.verb_install import _named
from runner.install.image_reference import image_request
from runner.install.request import npm_request
from runner.install.roots import main_store_root
from runner.install.store import Installed, Store
from runner.oci.artifact import digest_of
from runner.oci.client import RegistryAccess, wait_for
from runner.oci.fetch_image import fetch_image
from runner.package.fault import PackageFault
from tests.conftest import ROOT
from tests.runner.install.test_images import Bench, bench, busybox_image
from tests.runner.oci.images import Member, build, busybox_members, layer, link
from tests.runner.oci.servers import FakeRegistry, Handler, fake_registry
from tests.runner.oci.test_fetch_image import left_in
from tests.tables import check_rows

__all__ = ["bench"]
pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]


_DIGEST = "sha256:" + "0" * 64

# --- while a cage of it runs --------------------------------------------------------------------------------

_WAITS = """
echo started; read line
cat /etc/own; ls /bin/touch; ls /usr/share/own; touch /usr/share/own/new; rm /etc/own; ls /etc/own
"""


@pytest.mark.needs("busybox")
@pytest.mark.both_callers
def test_a_running_image_is_removed_and_updated(bench: Bench) -> None:
    """The running one goes on with the files that it had, in a layer and read-only."""
    old, new = (
        build(
            layer([*busybox_members(), Member("etc/own", text), Member("usr/share/own/x")]), Env=["PATH=/bin"]
        )
        for text in (b"old\n", b"new\n")
    )
    reference = bench.install(old)
    other = bench.install(busybox_image(), "other")
    words = ("run", "--image", reference, "--", "sh", "-c", _WAITS)
    for change in (("--update", "--yes"), ("--remove", reference)):
        running = bench.caller.start(*words)
        assert running.stdin is not None and running.stdout is not None
        assert running.stdout.readline() == b"started\n"
        bench.server.publish_image(new)
        done = bench.caller("install", *change)
        assert done.returncode == 0, done
        out, err = running.communicate(b"\n", timeout=60)
        assert out.decode().splitlines() == [
            "old" if change[0] == "--update" else "new",
            "/bin/touch",
            "x",
        ], err
        assert err.decode().startswith("ls: /etc/own: No such file or directory\n")
    gone = bench.caller(*words)
    assert gone.returncode == 126 and f"runner install docker://{reference}" in gone.stderr
    assert bench.caller("install", "--verify").stdout == f"{other}: as it was fetched\n"
    assert bench.run("--image", other, "--", "echo", "fine") == "fine\n"
    # What only the running ones had goes with the next change.
    assert bench.caller("install", "--remove", other).returncode == 0
    own = bench.folder / "store" if bench.caller.uid == 0 else main_store_root(bench.caller.environ)
    assert left_in(Store(str(own))) == []


_OWN_MOUNT = """
import os, subprocess, sys
from runner.install.store import Store
root, shown = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", root], check=True)
store, name = Store(root), "0" * 40
os.makedirs(store.tree(name))
subprocess.run(["mount", "--bind", store.tree(name), shown], check=True)
for shown_still in (True, False):
    with store.changing(print):
        store.remove_unused()
    assert store.has(name) is shown_still
    shown_still and subprocess.run(["umount", shown], check=True)
"""


@pytest.mark.needs("root")
def test_a_store_that_is_a_mount_of_its_own(plugin_dir: Path) -> None:
    """Mounts are told by their paths in a filesystem: what a cage has of the store is known there, too."""
    for name in ("store", "shown"):
        (plugin_dir / name).mkdir(mode=0o755)
    alone = ("/usr/bin/unshare", "--mount", "--propagation", "private", sys.executable, "-c", _OWN_MOUNT)
    argv = [*alone, str(plugin_dir / "store"), str(plugin_dir / "shown")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.needs("busybox")
def test_two_installations_of_one_image(bench: Bench) -> None:
    image = busybox_image()
    bench.server.publish_image(image)
    both = threading.Barrier(2)

    def together(handler: Handler) -> None:
        both.wait(60)
        handler.answer(200, image.blobs[1])

    bench.server.faults = {digest_of(image.blobs[1]): together}
    reference = f"{bench.server.address}/acme/x:1"
    started = [bench.caller.start("install", "--yes", f"docker://{reference}") for _ in range(2)]
    for each in started:
        out, err = each.communicate(timeout=120)
        assert each.returncode == 0 and f"installed {reference}" in out.decode(), err
    assert bench.caller("install", "--verify").stdout == f"{reference}: as it was fetched\n"
    assert bench.run("--image", reference, "--", "echo", "fine") == "fine\n"


# --- installations that fail, or are killed -----------------------------------------------------------------

# 300 different files of 4 KiB, and as many links.
_LAYER = layer(
    [
        *(Member(f"files/{number}", b"%04d" % number * 1024) for number in range(300)),
        *(link(f"links/{number}", f"../files/{number}") for number in range(300)),
    ],
    packing="plain",
)
_FETCH = """
import json, os, signal, subprocess, sys
from pathlib import Path
from runner.install.image_reference import image_request
from runner.install.store import Store
from runner.oci.client import wait_for
from runner.oci.fetch_image import fetch_image
from runner.package.fault import PackageFault

def fetch(reference, root):
    try:
        return wait_for(lambda: fetch_image(image_request(reference), Store(root))).digest
    except PackageFault as fault:
        return f"{fault}; {fault.hint}"
"""
_FULL = (
    _FETCH
    + """
reference, root, place, small = sys.argv[1:]
os.environ["TMPDIR"] = os.path.join(os.path.dirname(root), "tmp")
subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=755,{small}", "none", place], check=True)
told = fetch(reference, root)
left = [str(path) for path in Path(root).rglob("*") if path.name != "lock" and not path.is_dir()]
left += [*os.listdir(os.environ["TMPDIR"]), *map(str, Path(root).glob("sets/*"))]
subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=9999", place], check=True)
print(json.dumps([told, left, fetch(reference, root)]))
"""
)


@pytest.mark.needs("root")
def test_a_full_disk_keeps_nothing(plugin_dir: Path) -> None:
    """In a mount namespace of the test's own: of the store, of its names, and of the temporary files."""
    for name in ("store", "tmp"):
        (plugin_dir / name).mkdir(mode=0o755)
    image = build(_LAYER)

    def is_told(row: tuple[str, str], said: str) -> None:
        name, small = row
        alone = ("/usr/bin/unshare", "--mount", "--propagation", "private", sys.executable, "-c", _FULL)
        argv = [
            *alone,
            f"{server.address}/acme/x:1",
            str(plugin_dir / "store"),
            str(plugin_dir / name),
            small,
        ]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        told, left, again = json.loads(done.stdout)
        assert said in told and "No space left" in told and "make room" in told
        assert left == [] and again == image.digest

    with fake_registry() as server:
        server.publish_image(image)
        rows = {
            ("store", "size=700k"): "cannot be stored in",
            ("store", "size=64m,nr_inodes=400"): "cannot be stored in",
            ("tmp", "size=700k"): "temporary file",
        }
        check_rows(rows.items(), is_told)


_KILLED = (
    _FETCH
    + """
reference, root, wanted, number = sys.argv[1:]
left = int(number)

def watch(event, args):
    global left
    left -= event == wanted
    if event == wanted and left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
print(fetch(reference, root))
"""
)


def test_an_installation_that_is_killed(plugin_dir: Path) -> None:
    """Wherever it is killed, the image is there whole or not at all, and the next change removes the rest."""
    (plugin_dir / "store").mkdir(mode=0o755)
    store = Store(str(plugin_dir / "store"))
    image, other = build(_LAYER), build(layer([Member("other", b"other")]))

    def ends_well(event: str, number: int) -> None:
        argv = [sys.executable, "-c", _KILLED, reference, store.root, event, str(number)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == -9, (done.stdout, done.stderr)
        assert store.find(image_request(reference)) is None
        server.publish_image(other, "2")
        second = image_request(f"{server.address}/acme/x:2")
        wait_for(lambda: fetch_image(second, store))
        with store.changing(lambda text: None):
            assert store.remove(second)
        assert left_in(store) == []

    with fake_registry() as server:
        server.publish_image(image)
        reference = f"{server.address}/acme/x:1"
        # In a file, in the tree, before the set has its name, and before the request has its record.
        rows = [
            ("os.rename", 150),
            ("os.link", 150),
            ("os.symlink", 150),
            ("os.rename", 301),
            ("os.rename", 302),
        ]
        check_rows(rows, ends_well)
        found = wait_for(lambda: fetch_image(image_request(reference), store))
        assert store.changed(found.installed.set_name) == []


@contextmanager
def stalling(server: FakeRegistry) -> Iterator[str]:
    """A registry that stops in the midst of a layer. Yields the reference of its image."""
    over = threading.Event()

    def stall(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(_LAYER)))
        handler.end_headers()
        handler.wfile.write(_LAYER[:5000])
        handler.wfile.flush()
        over.wait(60)

    server.publish_image(build(_LAYER))
    server.faults = {digest_of(_LAYER): stall}
    try:
        yield f"{server.address}/acme/x:1"
    finally:
        over.set()


def test_a_registry_that_stalls(plugin_dir: Path) -> None:
    (plugin_dir / "store").mkdir(mode=0o755)
    store = Store(str(plugin_dir / "store"))
    with fake_registry() as server, stalling(server) as reference:
        request, access = image_request(reference), RegistryAccess(deadline=2)
        with pytest.raises(PackageFault) as told:
            wait_for(lambda: fetch_image(request, store, access=access))
    assert told.value.rule == "registry_slow" and "--deadline" in told.value.hint
    assert left_in(store) == []


def test_an_installed_image_is_found_as_docker_writes_it(plugin_dir: Path) -> None:
    store = Store(str(plugin_dir / "store"))
    installed = [image_request("mcp/x:1"), image_request("mcp/x"), image_request("ghcr.io/acme/y@" + _DIGEST)]
    installed += [image_request("demo"), npm_request(("demo",), "")]
    with store.changing(print):
        for each in installed:
            store.record(Installed(each, "0" * 40, (), ()))

    def finds(name: str, wanted: list[int]) -> None:
        found = [each.request for all_of in _named([store], name).values() for each in all_of]
        assert sorted(installed.index(each) for each in found) == wanted

    rows = {
        "docker.io/mcp/x:1": [0],
        "docker.io/mcp/x": [0, 1],
        "docker://mcp/x": [0, 1],
        "mcp/x": [0, 1],
        "mcp/x:1": [0],
        "docker://mcp/x:latest": [1],
        "ghcr.io/acme/y": [2],
        f"docker://ghcr.io/acme/y@{_DIGEST}": [2],
        "demo": [4],  # a package has this name in full
        "docker://demo": [3],
        "": [0, 1, 2, 3, 4],
    }
    check_rows(rows, finds)
    for missing in ("mcp/x:2", "No Image", "docker://mcp"):
        with pytest.raises(ValueError, match=f"{missing} is not installed"):
            _named([store], missing)


def test_a_registry_that_stalls_for_a_configuration(bench: Bench) -> None:
    """The option counts for images of a file as for one that is named."""
    config = bench.folder / "mcp.json"
    with stalling(bench.server) as reference:
        config.write_text(
            json.dumps({"mcpServers": {"x": {"command": "docker", "args": ["run", reference]}}})
        )
        bench.caller.give(config)
        done = bench.caller("install", "--yes", "--deadline", "2s", config)
    unwritten = bench.caller("install", "--yes", "acme/x:1")
    assert unwritten.returncode == 20 and "an image is written docker://IMAGE" in unwritten.stderr
    assert done.returncode == 1 and "the limit is 2 s" in done.stderr, done
