"""A TOML file of the operator's settings, and the files and secrets that it names.

The rules are those of a policy: a file that another user can write is not used, neither this one nor one that
it names. No message has anything of a secret.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from sandbox.document.diagnostic import Diagnostic, DocumentError, did_you_mean, quoted
from sandbox.document.model import WrongValue
from sandbox.document.read import parse, read_bounded
from sandbox.policy.load import trust_fault
from sandbox.spec import Limits
from sandbox.units import parse_limit


class SettingsFile:
    """One while it is read: what it names, and where. `secret` and `file` raise WrongValue."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        """Raises DocumentError if others can change the file, or it is not TOML."""
        self.folder = os.path.dirname(path)
        self._environ = environ
        self.watched = {self.folder: None}  # folders in which a change may mean other settings
        if (fault := trust_fault(path, "the settings file")) is not None:
            raise DocumentError(Diagnostic(path, 0, 0, "settings_untrusted", *fault))
        self.document = parse(path, read_bounded(path), "toml")

    def secret(self, source: object) -> bytes:
        """The bytes that @FILE or env:NAME stands for. The source itself may be a secret, by mistake."""
        if isinstance(source, str) and source.startswith("@"):
            return self.file(source[1:], hidden=True)
        if not isinstance(source, str) or not source.startswith("env:"):
            message = "write @FILE, or env:NAME for a variable of the daemon"
            raise WrongValue(message, "settings_value", whole=True)
        if value := self._environ.get(source[4:]):
            return os.fsencode(value)
        message = "the daemon's environment has no such variable"
        raise WrongValue(message, "settings_value", whole=True)

    def path(self, name: str) -> str:
        """Of a file or folder that the settings name."""
        return os.path.join(self.folder, name)

    def watch(self, path: str) -> None:
        self.watched[os.path.dirname(path)] = None

    def file(self, name: str, *, hidden: bool = False) -> bytes:
        """The bytes of a file that others cannot change. `hidden`: what names no file may be a secret, by
        mistake."""
        path = self.path(name)
        self.watch(path)
        fault = trust_fault(path, "the file")
        if fault is not None:
            message = f"{path} is not used: {fault[0]}"
            raise WrongValue(message, "settings_untrusted", fault[1], whole=True)
        try:
            raw = read_bounded(path)
        except DocumentError as error:
            named = "the file that it names" if hidden and not os.path.lexists(path) else path
            message = f"{named}: {error.diagnostics[0].message}"
            raise WrongValue(message, "settings_file", whole=True) from None
        if not raw:
            raise WrongValue(f"{path}: the file is empty", "settings_file", whole=True)
        return raw


def without_line_end(raw: bytes) -> bytes:
    """A line end behind a token in a file is not part of it."""
    return raw.removesuffix(b"\n").removesuffix(b"\r")


def as_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def limit_faults(given: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The name, the fault and a hint of each wrong limit in the settings of a plugin."""
    for name, value in given.items():
        if name not in Limits._fields:
            hint = did_you_mean(name, Limits._fields) or f"there are {', '.join(Limits._fields)}"
            yield name, f"no limit is called {quoted(name)}", hint
            continue
        try:
            parse_limit(name, value)
        except ValueError as error:
            yield name, f"{name}: {error}", ""
