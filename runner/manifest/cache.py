"""Manifests already read: the Plugin by the bytes it came from, so that a launch parses nothing.

Only what the bytes (and the user's home) decide is kept.
"""

from __future__ import annotations

import os

from runner import __version__
from runner.contracts.registry import contract_names
from runner.plugin import Entrypoint, Plugin
from sandbox import cache, codec
from sandbox.cache import CodeMark, fingerprint
from sandbox.document.diagnostic import Diagnostic
from sandbox.spec import EnvRequest, Limits, Network, PathRequest, Project, SandboxSpec
from sandbox.value import NamedTuple


class ManifestEntry(NamedTuple):
    plugin: Plugin
    diagnostics: tuple[Diagnostic, ...]  # warnings: a manifest with an error has no entry
    code: tuple[CodeMark, ...]  # our own files that read it


# Everything a Plugin is made of, for whoever takes one through bytes.
PLUGIN_CLASSES = (
    Plugin,
    Entrypoint,
    SandboxSpec,
    PathRequest,
    EnvRequest,
    Network,
    Limits,
    Project,
    Diagnostic,
)


def key(path: str, raw: bytes, contract: str | None, server: str | None, home: str) -> str:
    """Everything a Plugin depends on besides our own code, in one name."""
    # A new contract may recognise what nobody did before.
    options = (__version__, path, home, _optional(contract), _optional(server), *contract_names())
    return fingerprint(*(os.fsencode(text) for text in options), raw)


def _optional(text: str | None) -> str:
    return "-" if text is None else f"+{text}"


def load(name: str) -> tuple[Plugin, tuple[Diagnostic, ...]] | None:
    """The entry of that name, or None if there is none to be trusted."""
    raw = cache.load(name)
    if raw is None:
        return None
    try:
        entry = codec.decode(raw, (ManifestEntry, CodeMark, *PLUGIN_CLASSES))
    except ValueError:
        return None
    if not isinstance(entry, ManifestEntry) or not cache.is_current(entry.code):
        return None
    return entry.plugin, entry.diagnostics


def store(name: str, plugin: Plugin, diagnostics: tuple[Diagnostic, ...]) -> None:
    """Keep an entry, if that is possible."""
    code = cache.code_marks(
        "runner.manifest.load",
        f"runner.contracts.{plugin.contract}.manifest",
        # Each contract recognises its manifests in its own `__init__`, which imports the rest when needed.
        alone=[f"runner.contracts.{name}" for name in contract_names()],
    )
    cache.store(name, codec.encode(ManifestEntry(plugin, diagnostics, code)))
