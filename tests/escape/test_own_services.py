"""A program that hosts plugins with services of its own, which a plugin asks for what it was not given.

Each attack is asked by a plugin in its cage, of services that refuse nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import runner
from tests.conftest import SYSTEM_PATH
from tests.runner.contracts.ainb.canaries import PROGRAMS, manifest

pytestmark = [pytest.mark.trio, pytest.mark.launches, pytest.mark.needs("root")]

READ, LIST, FETCH = "host/fs/read_file", "host/fs/read_dir", "host/network/fetch"
GOOD = "https://api.example.com/x"


class Eager:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # the plugin's id, and what it wanted

    def _note(self, wanted: str) -> None:
        self.asked.append((runner.Granted.current().plugin.id, wanted))

    async def read_file(self, path: str) -> bytes:
        self._note(path)
        return await trio.Path(path).read_bytes()

    async def read_dir(self, path: str) -> Sequence[runner.DirectoryEntry]:
        self._note(path)
        return [runner.DirectoryEntry(each.name, False, 0) for each in await trio.Path(path).iterdir()]

    async def fetch(
        self, url: str, method: str, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> runner.Fetched:
        self._note(url)
        away = [("Location", "https://169.254.169.254/")] if url.endswith("/away") else []
        return runner.Fetched(302 if away else 200, away, b"fetched")


@pytest.fixture
def shelf(plugin_dir: Path, sessions: None) -> Path:
    data = plugin_dir / "data"
    (data / "deep").mkdir(parents=True)
    (data / "file").write_text("inside")
    (data / "out").symlink_to("/etc/shadow")
    (data / "up").symlink_to("..")
    hosts = '[network]\nceiling = "allowlist"\nhosts = ["*.example.com:443"]\n'
    policy = f'version = 1\n[capabilities]\nhost = ["host/*"]\n[read]\nceiling = ["{data}"]\n{hosts}'
    (plugin_dir / "policy.toml").write_text(policy)
    for name, capabilities in (
        ("none", {}),
        ("some", {"read_paths": [str(data)], "network": ["api.example.com"]}),
    ):
        folder = plugin_dir / name
        folder.mkdir()
        (folder / "manifest.toml").write_text(manifest(name, capabilities, [name]))
        (folder / name).write_text((PROGRAMS / "canary.py").read_text())
    for path in plugin_dir.rglob("*"):
        if not path.is_symlink():  # chmod would follow the one to /etc/shadow
            path.chmod(0o755)
    return plugin_dir


async def test_a_service_of_the_hosts_own_stands_behind_the_grant(shelf: Path) -> None:
    own, data = Eager(), shelf / "data"
    services = runner.Services(files=own, fetcher=own)
    attacks: list[tuple[str, dict[str, Any]]] = [
        *(
            (method, {"path": path})
            for method in (READ, LIST)
            for path in ("/etc/shadow", "/etc", f"{data}/..")
        ),
        *((READ, {"path": f"{data}/{name}"}) for name in ("out", "up/policy.toml", "../policy.toml")),
        *((FETCH, {"url": url}) for url in (GOOD.replace("api", "other"), GOOD.replace("https", "http"))),
        *((FETCH, {"url": url}) for url in (GOOD.replace(".com", ".com:8443"), "https://127.0.0.1/")),
    ]
    granted: list[tuple[str, dict[str, Any]]] = [
        (READ, {"path": f"{data}/deep/../file"}),
        (LIST, {"path": str(data)}),
        (FETCH, {"url": GOOD.replace("api", "API")}),
    ]
    found: dict[str, list[int | None]] = {}
    environ = {"PATH": SYSTEM_PATH, "HOME": "/", "RUNNER_CACHE": "off"}
    for name in ("none", "some"):
        opened = runner.open_plugin(
            shelf / name, policy=shelf / "policy.toml", services=services, environ=environ
        )
        async with opened as plugin:
            for method, params in [*attacks, *granted, (FETCH, {"url": GOOD.replace("/x", "/away")})]:
                answer = await plugin.call(name, {"argv": ["ask", method, json.dumps(params)]}, seconds=60)
                said = json.loads(answer["stdout"])
                found.setdefault(name, []).append(said.get("error", {}).get("code"))
    count = len(attacks) + len(granted) + 1
    assert found["none"] == [-32001] * count
    # The control: what was granted is served. The redirect was followed by the runner, which refused it.
    assert found["some"] == [-32001] * len(attacks) + [None] * len(granted) + [-32001]
    wanted = [f"{data}/file", str(data), GOOD, GOOD.replace("/x", "/away")]
    assert own.asked == [("some", each) for each in wanted]
