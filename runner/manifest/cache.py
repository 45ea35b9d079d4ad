"""Manifests already read: the Plugin by the bytes it came from, so that a launch parses nothing.

Only what the bytes (and the user's home) decide is kept.
"""

from __future__ import annotations

import os

from runner import __version__
from runner.manifest.plugin_codec import decode, encode
from runner.plugin import Plugin
from sandbox import CODE_ROOT, cache
from sandbox.document.diagnostic import Diagnostic
from sandbox.fingerprint import fingerprint

SCHEMA = 3

# Besides the contracts' own. Paths below CODE_ROOT.
_MODULES = (
    "runner/manifest/sandbox_request.py",
    "runner/manifest/model.py",
    "runner/manifest/table.py",
    "runner/manifest/faults.py",
    "runner/plugin.py",
    "runner/manifest/plugin_codec.py",
    "sandbox/document/read.py",
    "sandbox/document/json.py",
    "sandbox/document/toml.py",
    "sandbox/document/positions.py",
    "sandbox/paths/denylist.py",
    "sandbox/units.py",
    "sandbox/policy/policy.py",
    "sandbox/spec.py",
)


def key(path: str, raw: bytes, contract: str | None, server: str | None, home: str) -> str:
    """Everything a Plugin depends on, in one name."""
    options = (__version__, str(SCHEMA), path, home, _optional(contract), _optional(server), _code())
    return fingerprint(*(os.fsencode(text) for text in options), raw)


def _optional(text: str | None) -> str:
    return "-" if text is None else f"+{text}"


def _code() -> str:
    """The modules that read manifests, as they are now."""
    files = [os.path.join(CODE_ROOT, name) for name in _MODULES]
    contracts = os.path.join(CODE_ROOT, "runner", "contracts")
    for name in sorted(os.listdir(contracts)):
        folder = os.path.join(contracts, name)
        if os.path.isdir(folder):
            files += [
                os.path.join(folder, file) for file in sorted(os.listdir(folder)) if file.endswith(".py")
            ]
    return cache.code_mark(*files)


def load(name: str) -> tuple[Plugin, tuple[Diagnostic, ...]] | None:
    """The entry of that name, or None if there is none to be trusted."""
    entry = cache.load(name)
    if entry is None:
        return None
    try:
        return decode(entry)
    except (ValueError, RecursionError):
        return None


def store(name: str, plugin: Plugin, diagnostics: tuple[Diagnostic, ...]) -> None:
    """Keeps an entry, if that is possible."""
    cache.store(name, encode(plugin, diagnostics))
