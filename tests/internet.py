"""Fixtures: the machine and the small internet of scripts/internet/, with the names that tests ask for."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from scripts.internet import machine
from scripts.internet.machine import HOST as HOST
from tests import template
from tests.conftest import Caller

API, OTHER, TWO, PRIVATE = "45.33.1.10", "45.33.1.20", "45.33.1.30", "10.9.9.9"
API_IPV6 = "2600:1f00::10"
REGISTRY = "45.33.1.40"
GIT_HOST, REFS = "git.example.com", f"{'1' * 40}\trefs/heads/main\n"  # a repository with one branch
# Registries of the real internet, if a test passes on what comes (`forwarding`).
PUBLIC = {
    "45.33.1.50": "registry.npmjs.org",
    "45.33.1.51": "pypi.org",
    "45.33.1.52": "files.pythonhosted.org",
}

NAMES: Mapping[str, Mapping[str, Any]] = {
    "api.example.com": {"A": [API], "AAAA": [API_IPV6]},
    "ipv4.example.com": {"A": [API]},
    "ipv6.example.com": {"AAAA": [API_IPV6]},
    "example.com": {"A": [OTHER]},
    "deep.api.example.com": {"A": [OTHER]},
    "other.example.org": {"A": [OTHER]},
    "two.example.com": {"A": [TWO]},
    "alias.example.com": {"CNAME": "ipv4.example.com"},
    "inside.example.com": {"A": [PRIVATE]},
    "alias-inside.example.com": {"CNAME": "inside.example.com"},
    "loop.example.com": {"A": ["127.0.0.1"]},
    "metadata.example.com": {"A": ["169.254.169.254"]},
    "self.example.com": {"A": [HOST]},
    "mixed.example.com": {"A": [PRIVATE, API]},
    "rebinding.example.com": {"A": [[API], [PRIVATE], [PRIVATE]]},
    "many.example.com": {"A": [f"45.33.1.{n}" for n in range(10, 60)]},
    "dead.example.com": {"A": ["45.33.1.99"]},
    "registry.example.com": {"A": [REGISTRY]},
    **{name: {"A": [address]} for address, name in PUBLIC.items()},
}
SERVERS = (
    *(
        (kind, address, port)
        for address in (API, OTHER, PRIVATE)
        for kind, port in (("http", 80), ("tls", 443), ("line", 2525))
    ),
    *(("echo", API, 7), ("sink", API, 9), ("source", API, 19), ("late", API, 2526)),
    *(("http", API_IPV6, 80), ("line", API_IPV6, 2525)),
    ("http2", TWO, 443),
    ("files", REGISTRY, 80),
    *(("forward", address, 443) for address in PUBLIC),
)


@dataclasses.dataclass
class Internet(machine.Internet):
    authority: Path = Path()  # the certificate of the test authority
    registry: Path = Path()  # files of registry.example.com; "__" stands for a slash

    forward: Path = Path()  # the Unix socket that the names of PUBLIC lead to

    def on_machine(self, caller: Caller) -> Caller:
        return dataclasses.replace(caller, prefix=(*self.entering(), *caller.prefix))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, templates: None) -> Iterator[Internet]:
    with make_world(tmp_path_factory.mktemp("internet"), {f"{GIT_HOST}/x.git/info/refs": REFS}) as made:
        yield made


@contextmanager
def make_world(
    folder: Path,
    answers: Mapping[str, Any] | None = None,
    sockets: Mapping[str, tuple[str, int]] | None = None,
) -> Iterator[Internet]:
    """`answers`: of HTTP, by host and path. The hosts get names. `sockets`: Unix sockets in `folder`, and the
    name and the port that lead to each."""
    folder.chmod(0o755)
    services = {f"45.33.1.{60 + number}": each for number, each in enumerate(sorted(sockets or {}))}
    names = {
        **NAMES,
        **{address.partition("/")[0]: {"A": [API]} for address in answers or {}},
        **{(sockets or {})[each][0]: {"A": [address]} for address, each in services.items()},
    }
    authority = trustme.CA()
    certificate = authority.issue_cert(*names)
    files = {"certificate": folder / "server.pem", "key": folder / "server.key"}
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    (folder / "authority.pem").chmod(0o644)
    certificate.cert_chain_pems[0].write_to_path(str(files["certificate"]))
    certificate.private_key_pem.write_to_path(str(files["key"]))
    addresses = [f"{each}/16" for each in (API, OTHER, TWO, REGISTRY, *PUBLIC, *services)]
    addresses += [f"{PRIVATE}/24", f"{API_IPV6}/64"]
    (folder / "registry").mkdir()
    (folder / "answers.json").write_text(json.dumps(answers or {}))
    places = {
        **files,
        "files": folder / "registry",
        "forward": folder / "forward",
        "answers": folder / "answers.json",
        **{address: folder / each for address, each in services.items()},
    }
    tls = {**{name: str(path) for name, path in places.items()}, **PUBLIC}
    servers = [
        *SERVERS,
        *(("forward", address, (sockets or {})[each][1]) for address, each in services.items()),
    ]
    with machine.make_internet(folder, addresses, names, servers, tls) as made:
        internet = Internet(
            made.host,
            made.commands,
            made.seen,
            authority=folder / "authority.pem",
            registry=folder / "registry",
            forward=folder / "forward",
        )
        with template.more(internet.entering()):
            yield internet


@pytest.fixture
def internet(world: Internet) -> Internet:
    """The same for all tests; what was seen before is forgotten."""
    world.look()
    return world


@contextmanager
def forwarding(internet: Internet) -> Iterator[None]:
    """Connect the names of PUBLIC with the servers that have them on this machine's own network."""
    from scripts.internet.servers import pump

    def serve(accepted: socket.socket) -> None:
        with accepted, accepted.makefile("rb", buffering=0) as lines:
            name = lines.readline().decode().strip()
            with socket.create_connection((name, 443), timeout=60) as other:
                other.settimeout(None)
                threading.Thread(target=pump, args=(other, accepted), daemon=True).start()
                pump(accepted, other)

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:  # it was closed
                return
            threading.Thread(target=serve, args=(accepted,), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(internet.forward))
        listener.listen(64)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            internet.forward.unlink()
