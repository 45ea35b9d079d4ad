"""Published MCP servers, as people have them: wrapped, allowed, and used by the official client.

Each stands in a host's configuration as its README says, with the installed program in the place of npx or
uvx. `runner wrap` changes the configuration, `runner allow` says what the server may have, and the client of
the official SDK starts the command that the configuration then has.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio

from tests.conftest import Caller
from tests.internet import Internet
from tests.published.places import Desk, make_desk
from tests.published.servers import NEEDED, SERVERS
from tests.published.use import AT_ONCE, allow, use_all, use_gateway, wrap

pytestmark = [
    pytest.mark.needs("registry", "node", "root", "redis"),
    pytest.mark.bound(1200),
    pytest.mark.broad,
]


@pytest.fixture
def desk(
    account_as: Caller, programs: Path, services: Internet, plugin_dir: Path, nothing_left: None
) -> Desk:
    return make_desk(account_as, programs, plugin_dir, services)


def test_published_servers_are_wrapped_allowed_listed_and_called(
    desk: Desk, services: Internet, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    assert len(SERVERS) >= 40
    files = desk.configure(SERVERS)
    for file in sorted(set(files.values())):
        wrap(desk, file)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda server: allow(desk, server, files[server.name]), SERVERS))
    services.look()
    wrapped = trio.run(use_all, desk, SERVERS, files, tmp_path)
    sent = [_sent(each["headers"]) for each in services.look() if each["seen"] == "request"]
    hidden = [each for each in SERVERS if each.hidden_key]
    assert len(hidden) >= 6
    assert [each.name for each in hidden if not any(each.hidden_key in text for text in sent)] == []
    behind_gateways = []
    for file in sorted(set(files.values())):
        wrap(desk, file, "--gateway")
        these = [each for each in SERVERS if each.call is not None and files[each.name] == file]
        behind_gateways += trio.run(use_gateway, desk, these, file, tmp_path)
    lines, enough = [], True
    for how, tried in (("wrapped", wrapped), ("through the gateway", behind_gateways)):
        called = [each for each in tried if not each.fault and each.server.call is not None]
        enough = enough and len(called) >= NEEDED
        lines.append(f"{desk.caller.name}: {len(called)} of {len(SERVERS)} published servers called {how}")
    said = "\n".join([*lines, *(f"  {each}" for each in sorted(map(str, wrapped)))])
    record_property("published", said)
    faults = [str(each) for each in (*wrapped, *behind_gateways) if each.fault]
    assert enough and not faults, "\n".join([*lines, *faults])


def _sent(headers: Mapping[str, str]) -> str:
    """What a service reads in them."""
    scheme, _, word = headers.get("authorization", "").partition(" ")
    return " ".join((*headers.values(), b64decode(word).decode() if scheme == "Basic" else ""))


def test_without_the_yes_a_wrapped_server_has_nothing_of_the_host(desk: Desk, tmp_path: Path) -> None:
    """The control: it is `runner allow` that made the others work."""
    server = next(each for each in SERVERS if each.name == "my_sqlite_db")
    files = desk.configure([server])
    wrap(desk, files[server.name])
    [tried] = trio.run(use_all, desk, [server], files, tmp_path)
    assert "unable to open database file" in tried.fault
    assert not (desk.work / server.leaves).exists()
