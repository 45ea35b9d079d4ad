"""All faults of one document, collected and then shown together."""

from __future__ import annotations

from sandbox.document.diagnostic import Diagnostic, Severity
from sandbox.document.read import Document
from sandbox.spec import KeyPath

MOST_SHOWN = 200  # a manifest can have ten thousand unknown keys; the first are enough


class Faults:
    """Collects diagnostics; `failed` as soon as one of them is an error."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.failed = False
        self._found: list[Diagnostic] = []
        self._left_out = 0

    def error(self, keys: KeyPath, rule: str, message: str, hint: str = "") -> None:
        self.failed = True
        self._add(keys, rule, message, hint, "error")

    def warn(self, keys: KeyPath, rule: str, message: str, hint: str = "") -> None:
        self._add(keys, rule, message, hint, "warning")

    def option(self, option: str, rule: str, message: str, hint: str = "") -> None:
        """A fault of the value of an option, not of the document."""
        self.failed = True
        self._keep(Diagnostic(option, 0, 0, rule, message, hint))

    def _add(self, keys: KeyPath, rule: str, message: str, hint: str, severity: Severity) -> None:
        if self.full:  # the position takes time
            self._left_out += 1
        else:
            self._keep(self.document.diagnostic(keys, rule, message, hint, severity))

    def _keep(self, diagnostic: Diagnostic) -> None:
        if self.full:
            self._left_out += 1
        else:
            self._found.append(diagnostic)

    @property
    def full(self) -> bool:
        """Whether further faults are only counted. Then no hints need to be made."""
        return len(self._found) >= MOST_SHOWN

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All diagnostics in the order of the text, without duplicates."""
        ordered = sorted(dict.fromkeys(self._found), key=lambda d: (d.line, d.column))
        if self._left_out:
            severity: Severity = "error" if self.failed else "warning"
            message = f"{self._left_out} more faults are not shown"
            ordered.append(Diagnostic(self.document.path, 0, 0, "too_many_faults", message, "", severity))
        return tuple(ordered)
