"""Registries for tests: Debian's docker-registry, and one on loopback that does whatever a test wants."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from runner.oci.artifact import MANIFEST, SIGNATURE, Descriptor, digest_of, write_package, write_signature
from runner.oci.reference import Reference, parse_reference
from tests.conftest import SYSTEM_PATH
from tests.conftest import docker_registry as program
from tests.ports import free_port
from tests.runner.oci.images import BuiltImage

_START_SECONDS = 60.0


@contextlib.contextmanager
def docker_registry(folder: Path, *more: str) -> Iterator[str]:
    """Debian's registry, with its files in `folder`; HOST:PORT. `more`: lines of its configuration; one that
    begins with a blank is about its HTTP."""
    port = free_port()
    lines = [
        "version: 0.1",
        "log: {level: error, accesslog: {disabled: true}}",
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}",
        *(line for line in more if not line.startswith(" ")),
        "http:",
        f"  addr: 127.0.0.1:{port}",
        *(line for line in more if line.startswith(" ")),
    ]
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    command = [program(), "serve", str(folder / "config.yml")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"PATH": SYSTEM_PATH})
    try:
        until = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.02)
        yield f"localhost:{port}"
    finally:
        process.terminate()
        process.wait()


class Seen(NamedTuple):
    """A request that a server got."""

    method: str
    path: str
    authorization: str


Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeRegistry

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the name in the base class
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        self.body = self.rfile.read(length)
        path = self.path.partition("?")[0]
        server = self.server
        server.seen.append(Seen(self.command, self.path, self.headers.get("Authorization", "")))
        for ending, fault in list(server.faults.items()):
            if path.endswith(ending):
                with contextlib.suppress(OSError):  # the client has gone
                    fault(self)
                return
        kind, _, name = path.rpartition("/")
        if self.command == "PUT" and "/manifests/" in path:
            server.manifests[name] = server.manifests[digest_of(self.body)] = self.body
            self.answer(201)
        elif self.command == "POST":
            self.answer(202, Location="/v2/acme/x/blobs/uploads/1")
        elif self.command == "PUT":
            server.blobs[digest_of(self.body)] = self.body
            self.answer(201)
        else:
            stored = server.manifests if kind.endswith("/manifests") else server.blobs
            if kind.endswith("/referrers"):
                stored = server.referrers
            found = stored.get(name)
            self.answer(404) if found is None else self.answer(200, found)

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815 -- the names in the base class


class FakeRegistry(ThreadingHTTPServer):
    """`faults`: the end of a path, and what is done in place of the right answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.referrers: dict[str, bytes] = {}
        self.faults: dict[str, Answer] = {}
        self.seen: list[Seen] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that break off are what is tested

    @property
    def address(self) -> str:
        return f"localhost:{self.server_address[1]}"

    def reference(self, version: str = ":1") -> Reference:
        return parse_reference(f"oci://{self.address}/acme/x{version}")

    def publish_image(self, image: BuiltImage, tag: str = "1") -> None:
        self.blobs.update({digest_of(blob): blob for blob in image.blobs})
        self.manifests[tag] = self.manifests[image.digest] = image.manifest

    def publish(self, tar: bytes, tag: str = "1", **changes: Any) -> str:
        """A package with this tar. `changes`: of its manifest. Returns its digest."""
        document = json.loads(write_package(digest_of(tar), len(tar), "greeter", "0.1.0", "rune"))
        manifest = json.dumps({**document, **changes}).encode()
        self.blobs[digest_of(tar)] = tar
        self.manifests[tag] = self.manifests[digest_of(manifest)] = manifest
        return digest_of(manifest)

    def sign(self, subject: str, signature: bytes, claimed: str = "") -> None:
        """Add a signature to the referrers of a package. `claimed`: another subject in its manifest."""
        of = Descriptor(MANIFEST, claimed or subject, 1)
        manifest = write_signature(signature, of)
        self.blobs[digest_of(signature)] = signature
        self.manifests[digest_of(manifest)] = manifest
        listed = json.loads(self.referrers.get(subject, b'{"manifests": []}'))
        entry = Descriptor(MANIFEST, digest_of(manifest), len(manifest)).written()
        listed["manifests"].append({**entry, "artifactType": SIGNATURE})
        self.referrers[subject] = json.dumps(listed).encode()


@contextlib.contextmanager
def fake_registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def tar_of(files: dict[str, bytes], mode: str = "w") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755
            tar.addfile(member, io.BytesIO(data))
    return made.getvalue()
