"""A TOML file of the operator's settings, and the files and secrets that it names.

The rules are those of a policy: a file that another user can write is not used, neither this one nor one that
it names. No message has anything of a secret.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from sandbox.document.diagnostic import Diagnostic, DocumentError, Severity, did_you_mean, quoted
from sandbox.document.read import parse, read_bounded
from sandbox.policy.load import trust_fault
from sandbox.spec import KeyPath, Limits
from sandbox.units import parse_limit


class SettingsFile:
    """One while it is read. Faults are collected, with their places."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        """Raises DocumentError if others can change the file, or it is not TOML."""
        self._folder = os.path.dirname(path)
        self._environ = environ
        self._faults: list[Diagnostic] = []
        self._watched = {self._folder: None}
        if (fault := trust_fault(path, "the settings file")) is not None:
            raise DocumentError(Diagnostic(path, 0, 0, "settings_untrusted", *fault))
        self._document = parse(path, read_bounded(path), "toml")

    def _secret(self, keys: KeyPath, source: Any) -> bytes:
        """The bytes that @FILE or env:NAME stands for. The source itself may be a secret, by mistake."""
        if isinstance(source, str) and source.startswith("@"):
            return self._file(keys, source[1:])
        if isinstance(source, str) and source.startswith("env:"):
            value = self._environ.get(source[4:])
            if not value:
                self._fault(keys, "settings_value", "the daemon's environment has no such variable")
            return os.fsencode(value or "")
        self._fault(keys, "settings_value", "write @FILE, or env:NAME for a variable of the daemon")
        return b""

    def _path(self, name: str) -> str:
        """Of a file or folder that the settings name."""
        return os.path.join(self._folder, name)

    def _file(self, keys: KeyPath, name: str) -> bytes:
        """The bytes of a file that others cannot change; none if it has a fault."""
        path = self._path(name)
        self._watched[os.path.dirname(path)] = None
        fault = trust_fault(path, "the file")
        if fault is not None:
            self._fault(keys, "settings_untrusted", f"{path} is not used: {fault[0]}", fault[1])
            return b""
        try:
            raw = read_bounded(path)
        except DocumentError as error:
            # What names no file may be a secret, by mistake.
            hidden = {"secrets", "tokens"} & {*keys} and not os.path.lexists(path)
            named = "the file that it names" if hidden else path
            self._fault(keys, "settings_file", f"{named}: {error.diagnostics[0].message}")
            return b""
        if not raw:
            self._fault(keys, "settings_file", f"{path}: the file is empty")
        return raw

    def _fault(
        self, keys: KeyPath, rule: str, message: str, hint: str = "", severity: Severity = "error"
    ) -> None:
        self._faults.append(self._document.diagnostic(keys, rule, message, hint, severity))


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
