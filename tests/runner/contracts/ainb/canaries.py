"""Folders with a canary in them: a manifest, and the program under the plugin's name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, Caller

PROGRAMS = ROOT / "tests/plugins/ainb_canaries"


def manifest(
    name: str,
    capabilities: Mapping[str, Any] | None = None,
    namespaces: Sequence[str] = (),
    subscribes: Sequence[str] = (),
    screens: Sequence[str] = (),
    spawn: str = "lazy",
) -> str:
    lines = ["[plugin]", f'name = "{name}"', 'version = "0.0.1"', "abi_version = 2", "[capabilities]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in (capabilities or {}).items()]
    lines += ["[provides]", f"cli_namespaces = {json.dumps(list(namespaces))}"]
    lines += [f"screens = {json.dumps(list(screens))}"]
    lines += ["[subscribes]", f"snapshots = {json.dumps(list(subscribes))}"]
    return "\n".join([*lines, "[lifecycle]", f'spawn = "{spawn}"']) + "\n"


def put_canary(root: Path, name: str, program: str = "canary.py", **declared: Any) -> Path:
    """Make a canary in a folder of plugins, readable for everybody. Returns its own folder."""
    folder = root / name
    folder.mkdir()
    (folder / "manifest.toml").write_text(manifest(name, **declared))
    shutil.copy(PROGRAMS / program, folder / name)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return folder


# Calls of the pair and their output: one publishes, and the other one is told. It runs before that.
PAIR: tuple[tuple[str, list[str], str], ...] = (
    ("a07", [], ""),
    ("a06", ["publish", "cts.chunks", "2", "9"], ""),
    ("a07", ["told"], '[["cts.chunks", "0:"], ["cts.chunks", "1:"]]'),
)


def put_pair(root: Path) -> None:
    for name in ("a06", "a07"):
        put_canary(root, name, capabilities={"event_bus": True}, namespaces=[name])


class Nest:
    """A root of plugins that belongs to a caller, and a policy that lets them ask their host."""

    def __init__(self, folder: Path, caller: Caller) -> None:
        self.root = folder / "plugins"
        self.policy = folder / "policy.toml"
        self.caller = caller
        self.root.mkdir()
        self.policy.write_text('version = 1\n[capabilities]\nhost = ["host/*"]\n')
        self._give(folder, self.root, self.policy)

    def put(self, name: str, program: str = "canary.py", **declared: Any) -> str:
        """Make a canary. Returns its folder."""
        folder = put_canary(self.root, name, program, **declared)
        self._give(folder, *folder.iterdir())
        return str(folder)

    def _give(self, *paths: Path) -> None:
        for path in paths:
            path.chmod(0o755)
            os.chown(path, self.caller.uid, self.caller.uid)
