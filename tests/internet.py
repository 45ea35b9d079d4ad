"""Fixtures: the machine and the small internet of scripts/internet/, with the names that tests ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
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
)


@dataclasses.dataclass
class Internet(machine.Internet):
    authority: Path = Path()  # the certificate of the test authority

    def on_machine(self, caller: Caller) -> Caller:
        return dataclasses.replace(caller, prefix=(*self.entering(), *caller.prefix))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, templates: None) -> Iterator[Internet]:
    folder = tmp_path_factory.mktemp("internet")
    folder.chmod(0o755)
    authority = trustme.CA()
    certificate = authority.issue_cert(*NAMES)
    files = {"certificate": folder / "server.pem", "key": folder / "server.key"}
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    (folder / "authority.pem").chmod(0o644)
    certificate.cert_chain_pems[0].write_to_path(str(files["certificate"]))
    certificate.private_key_pem.write_to_path(str(files["key"]))
    addresses = [f"{API}/16", f"{OTHER}/16", f"{TWO}/16", f"{PRIVATE}/24", f"{API_IPV6}/64"]
    tls = {name: str(path) for name, path in files.items()}
    with machine.make_internet(folder, addresses, NAMES, SERVERS, tls) as made:
        internet = Internet(made.host, made.commands, made.seen, authority=folder / "authority.pem")
        with template.more(internet.entering()):
            yield internet


@pytest.fixture
def internet(world: Internet) -> Internet:
    """The same for all tests; what was seen before is forgotten."""
    world.look()
    return world
