"""Published servers by their README's own npx or uvx entry: fetched, wrapped, allowed, and called by the SDK.

The registries are the real ones, in the versions of today. The runner dials only public addresses, and a
mirror may have another: so the names lead through the test internet to what they mean on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests.conftest import Caller
from tests.internet import Internet, forwarding
from tests.published.places import Desk, make_work, trust_services
from tests.published.servers import SERVERS
from tests.published.use import AT_ONCE, allow, use_all

pytestmark = [pytest.mark.needs("registry", "node", "root"), pytest.mark.bound(3000), pytest.mark.broad]

# To the store one client of a service is like another: three of those, and all that need no service.
ENTRIES = [
    each
    for each in SERVERS
    if each.entry.command in ("npx", "uvx")
    and ("--net" not in each.allowed or each.name in ("github", "context7", "fetch"))
]
# Not all: versions change under this test, and three packages do not start with today's second version of the
# library mcp, which they do not exclude.
AT_LEAST, NEEDED = 20, 15
ROOT_STORE = Path("/var/lib/runner/store")


@pytest.fixture
def desk(
    account_as: Caller,
    internet: Internet,
    plugin_dir: Path,
    nothing_left: None,
) -> Iterator[Desk]:
    caller = internet.on_machine(account_as)
    made = account_as.name == "root" and not ROOT_STORE.exists()
    if account_as.name == "root":  # an empty store in its usual place
        ROOT_STORE.mkdir(parents=True, exist_ok=True)
        (plugin_dir / "store").mkdir()
        script = f'mount --bind "$0" {ROOT_STORE} && exec "$@"'
        alone = ("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script)
        caller = replace(caller, prefix=(*caller.prefix, *alone, str(plugin_dir / "store")))
    with forwarding(internet):
        work = make_work(account_as, plugin_dir)
        yield Desk(caller, None, work, trust_services(internet, work))
    if made:
        ROOT_STORE.rmdir()


def test_entries_of_npx_and_uvx_are_fetched_wrapped_and_called(
    desk: Desk, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    assert len(ENTRIES) >= AT_LEAST
    files = desk.configure(ENTRIES)
    one = next(each for each in ENTRIES if each.name == "everything")
    alone = desk.caller.home / ".codeium/windsurf/mcp_config.json"
    alone.parent.mkdir(parents=True)
    alone.write_text(f'{{"mcpServers": {{"everything": {desk.entry_text(one)}}}}}')
    desk.caller.give(desk.caller.home / ".codeium")

    began = time.monotonic()
    told = _wrap(desk, alone)
    [first] = trio.run(use_all, desk, [one], {one.name: alone}, tmp_path)
    seconds = time.monotonic() - began
    assert not first.fault, f"{first}\n{told}"

    began = time.monotonic()
    told = "\n".join(_wrap(desk, file) for file in sorted(set(files.values())))
    wrapped = [each for each in ENTRIES if "--wrapped" in desk.wrapped(files[each.name], each.name)["args"]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda server: allow(desk, server, files[server.name]), wrapped))
    tried = trio.run(use_all, desk, wrapped, files, tmp_path)
    all_seconds = time.monotonic() - began
    commands = len(set(files.values())) + len(wrapped)
    works = [each for each in tried if not each.fault]
    line = (
        f"{desk.caller.name}: {len(works)} of {len(ENTRIES)} published servers by their own npx or uvx entry;"
        f" from a configuration to the first answered call: 1 command, {seconds:.1f} s;"
        f" from {len(set(files.values()))} configurations to the answers of all:"
        f" {commands} commands, {all_seconds:.0f} s"
    )
    missing = [f"  {each.name}: not installed" for each in ENTRIES if each not in wrapped]
    record_property(
        "published", "\n".join([line, *(f"  {each}" for each in sorted(map(str, tried))), *missing])
    )
    faults = [str(each) for each in tried if each.fault]
    assert len(works) >= NEEDED, "\n".join([line, *faults, *missing, told])


def _wrap(desk: Desk, file: Path) -> str:
    """What it says; what cannot be fetched stays as it is."""
    done = desk.caller("wrap", file, "--install", "--yes", timeout=2000)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr
