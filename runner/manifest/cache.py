"""A cache of parsed manifests: the Plugin by the bytes of its manifest, so that a launch parses nothing.

An entry depends only on the bytes (and the user's home).
"""

from __future__ import annotations

import os

from runner import __version__
from runner.contracts.registry import contract_names
from runner.plugin import Entrypoint, Plugin, Template
from sandbox import cache
from sandbox.cache import CodeMark, fingerprint
from sandbox.document.diagnostic import Diagnostic
from sandbox.spec import (
    EnvRequest,
    ImageRoot,
    Limits,
    MemoryFile,
    Network,
    PathRequest,
    Project,
    SandboxSpec,
    Scratch,
)
from sandbox.speed import codec
from sandbox.speed.value import NamedTuple


class ManifestEntry(NamedTuple):
    plugin: Plugin
    diagnostics: tuple[Diagnostic, ...]  # warnings only: a manifest with an error has no entry
    code: tuple[CodeMark, ...]  # our own files that parsed it


# All classes a Plugin is made of, for code that serialises one.
PLUGIN_CLASSES = (
    Plugin,
    Entrypoint,
    SandboxSpec,
    PathRequest,
    EnvRequest,
    Network,
    Limits,
    Project,
    Scratch,
    MemoryFile,
    ImageRoot,
    Template,
    Diagnostic,
)


def key(path: str, raw: bytes, contract: str | None, server: str | None, home: str) -> str:
    """The name of an entry: everything a Plugin depends on besides our own code."""
    # A new contract may recognise a manifest that no contract recognised before.
    options = (__version__, path, home, _optional(contract), _optional(server), *contract_names())
    return fingerprint(*(os.fsencode(text) for text in options), raw)


def _optional(text: str | None) -> str:
    return "-" if text is None else f"+{text}"


def load(name: str) -> tuple[Plugin, tuple[Diagnostic, ...]] | None:
    """Returns the entry, or None if there is none that can be trusted."""
    raw = cache.load(name)
    if raw is None:
        return None
    try:
        entry = codec.unpack(raw, (ManifestEntry, CodeMark, *PLUGIN_CLASSES))
    except ValueError:
        return None
    if not isinstance(entry, ManifestEntry) or not cache.is_current(entry.code):
        return None
    return entry.plugin, entry.diagnostics


def store(name: str, plugin: Plugin, diagnostics: tuple[Diagnostic, ...]) -> None:
    """Store an entry, if possible."""
    code = cache.code_marks(
        "runner.manifest.load",
        f"runner.contracts.{plugin.contract}.manifest",
        # Each contract recognises its manifests in its own `__init__`, which imports the rest when needed.
        alone=[f"runner.contracts.{name}" for name in contract_names()],
    )
    cache.store(name, codec.pack(ManifestEntry(plugin, diagnostics, code)))
