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

    def _add(self, keys: KeyPath, rule: str, message: str, hint: str, severity: Severity) -> None:
        if len(self._found) >= MOST_SHOWN:
            self._left_out += 1
            return
        self._found.append(self.document.diagnostic(keys, rule, message, hint, severity))

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
