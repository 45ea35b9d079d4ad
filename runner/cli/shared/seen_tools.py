"""The names of tools that `runner tools` saw last, for the completion of a shell.

Some plugins tell their tools only while they run, and a completion must not start them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable

from runner.plugin import Plugin
from sandbox import cache

_NAME = re.compile(r"[A-Za-z0-9_./:-]{1,128}")  # others would have to be quoted for the shell
_MOST_NAMES = 500


def remember_tools(plugin: Plugin, names: Iterable[str]) -> None:
    usable = [name for name in names if _NAME.fullmatch(name) and not name.startswith("-")]
    cache.store(_entry_name(plugin), json.dumps(usable[:_MOST_NAMES]).encode())


def known_tools(plugin: Plugin) -> tuple[str, ...]:
    """The tools that the manifest declares, or else those that were seen last."""
    if declared := dict(plugin.exports).get("tools", ()):
        return tuple(name for name in declared if _NAME.fullmatch(name))
    try:
        found = json.loads(cache.load(_entry_name(plugin)) or b"[]")
    except ValueError:
        return ()
    return tuple(name for name in found if isinstance(name, str) and _NAME.fullmatch(name))


def _entry_name(plugin: Plugin) -> str:
    parts = (plugin.contract, plugin.id, os.path.realpath(plugin.manifest), plugin.scope)
    return f"tools-{cache.fingerprint(*map(os.fsencode, parts))}"
