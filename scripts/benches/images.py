"""Starts of a small image: by the runner, and by Debian's podman. Both have fetched the same one before."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from runner.oci.artifact import MANIFEST, Descriptor, digest_of
from runner.oci.image import this_architecture
from sandbox.speed.value import NamedTuple
from scripts.benches import launch
from scripts.benches.caller import RUNNER, Caller, Unable, reason
from scripts.benches.launch import Command
from scripts.benches.machine import version_of
from scripts.benches.rows import Against, Table

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGE, PLAIN, PODMAN = "runner run --image", "runner run, this machine's files", "podman run"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KIND = "application/vnd.oci.image"
# Beside what people usually have: no network, as the runner; limits that it may set in a container, too.
_RUN = ("run", "--rm", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000")


class SmallImage(NamedTuple):
    """Static busybox alone."""

    manifest: bytes
    blobs: tuple[bytes, ...]


def bench(caller: Caller, rounds: int) -> list[Table]:
    image = _make_image()
    with ExitStack() as stack:
        reference = stack.enter_context(_installed(caller, image))
        commands = {
            IMAGE: Command([RUNNER, "run", "--image", reference, "--", "/bin/true"], {}),
            PLAIN: Command([RUNNER, "run", "--", "/usr/bin/true"], {}),
        }
        try:
            commands[PODMAN], note = stack.enter_context(_podman(caller, image))
        except Unable as fault:
            note = f"podman is not measured: {reason(str(fault))}"
        taken = launch.interleave(caller, commands, rounds)
    over = {IMAGE: (Against(PODMAN, (PODMAN,)), Against("without an image", (PLAIN,)))}
    about = f"{rounds} starts of busybox's true each, interleaved"
    headlines = {IMAGE: f"`{IMAGE}`"}
    return launch.tables("images", "a small image", caller, about, taken, over, headlines, (note,))


def _make_image() -> SmallImage:
    """Raises Unable."""
    busybox = shutil.which("busybox", path=f"{ROOT}/.venv/busybox/bin:{_PATH}")
    if busybox is None:
        raise Unable("there is no busybox-static here: scripts/setup test unpacks it")
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        program = tarfile.TarInfo("bin/busybox")
        program.size, program.mode = os.path.getsize(busybox), 0o755
        with open(busybox, "rb") as file:
            tar.addfile(program, file)
        link = tarfile.TarInfo("bin/true")
        link.type, link.linkname = tarfile.SYMTYPE, "busybox"
        tar.addfile(link)
    layer = made.getvalue()
    about = {
        "architecture": this_architecture(),
        "os": "linux",
        "config": {"Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]},
    }
    config = json.dumps(about).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": Descriptor(f"{_KIND}.config.v1+json", digest_of(config), len(config)).written(),
        "layers": [Descriptor(f"{_KIND}.layer.v1.tar", digest_of(layer), len(layer)).written()],
    }
    return SmallImage(json.dumps(manifest).encode(), (config, layer))


@contextmanager
def _installed(caller: Caller, image: SmallImage) -> Iterator[str]:
    """Its reference, while the runner has it in the caller's store."""
    blobs = {digest_of(each): each for each in image.blobs}

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = image.manifest if "/manifests/" in self.path else blobs.get(self.path.rpartition("/")[2])
            body = found or b""  # nothing else is there, such as a list of signatures
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            reference = f"localhost:{server.server_address[1]}/bench/busybox:1"
            caller.output_of([RUNNER, "install", "--yes", f"docker://{reference}"])
        finally:
            server.shutdown()
            thread.join()
    try:
        yield reference
    finally:
        caller.output_of([RUNNER, "install", "--remove", reference])


@contextmanager
def _podman(caller: Caller, image: SmallImage) -> Iterator[tuple[Command, str]]:
    """The command that starts it with podman, which has it in a store of its own, and how that is configured.
    Raises Unable."""
    podman = shutil.which("podman", path=_PATH)
    if podman is None:
        raise Unable("it is not installed: apt-get install podman")
    layout, own = Path(caller.folder, "layout"), caller.own("podman")
    named = {"org.opencontainers.image.ref.name": "bench"}
    entry = {
        **Descriptor(MANIFEST, digest_of(image.manifest), len(image.manifest)).written(),
        "annotations": named,
    }
    caller.write("layout/oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}))
    caller.write("layout/index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    caller.write("layout/blobs/sha256/x", "")  # makes folders that everybody may enter
    for blob in (image.manifest, *image.blobs):
        (layout / "blobs/sha256" / digest_of(blob).partition(":")[2]).write_bytes(blob)
    variables = ["/usr/bin/env", f"XDG_RUNTIME_DIR={own}", f"PATH={_PATH}"]
    head = [*variables, podman, "--root", f"{own}/root", "--runroot", f"{own}/run", "--log-level=fatal"]
    head += ["--cgroup-manager=cgroupfs", "--events-backend=none"]
    if caller.uid:  # it may have no ranges of ids
        head += ["--storage-driver=overlay", "--storage-opt=ignore_chown_errors=true"]
    try:
        name = caller.output_of([*head, "pull", "--quiet", f"oci:{layout}:bench"]).strip()
        yield (
            _first_that_starts(caller, head, name),
            f"podman {version_of([podman, '--version'])}, its image fetched before",
        )
    finally:
        # What it mounted for itself would keep its folders.
        caller.output_of([*head, "system", "reset", "--force"])


def _first_that_starts(caller: Caller, head: list[str], name: str) -> Command:
    """Not every runtime starts with every kind of cgroups. Raises Unable."""
    fault = Unable("there is neither crun nor runc")
    for runtime in ("crun", "runc"):
        if shutil.which(runtime, path=_PATH):
            command = Command([*head, f"--runtime={runtime}", *_RUN, name, "/bin/true"], {})
            try:
                launch.measure(caller, command)
            except Unable as failed:
                fault = failed
            else:
                return command
    raise fault
