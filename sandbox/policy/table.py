"""One table of a policy's file, from which values are taken one by one."""

from __future__ import annotations

from sandbox.document.diagnostic import Diagnostic, did_you_mean, quoted
from sandbox.document.read import Document
from sandbox.spec import KeyPath
from sandbox.speed.typed import Callable, Sequence


class PolicyTable:
    """One table of the file. Values are taken from it; a key that is left over is a mistake."""

    def __init__(self, document: Document, faults: list[Diagnostic], value: object, keys: KeyPath) -> None:
        self.document = document
        self.faults = faults
        self.keys = keys
        self.known: list[str] = []
        self.values: dict[str, object] = {}
        if isinstance(value, dict):
            self.values = value
        elif value is not None:
            self.fault((), "policy_type", "must be a table")

    def fault(self, keys: KeyPath, rule: str, message: str, hint: str = "") -> None:
        full = (*self.keys, *keys)
        name = ".".join(str(key) if isinstance(key, str) else f"[{key}]" for key in full).replace(".[", "[")
        line, column = self.document.where(full)
        self.faults.append(
            Diagnostic(self.document.path, line, column, rule, f"{name} {message}".strip(), hint)
        )

    def take(self, key: str) -> object:
        self.known.append(key)
        return self.values.get(key)

    def table(self, key: str) -> PolicyTable:
        return PolicyTable(self.document, self.faults, self.take(key), (*self.keys, key))

    def text(self, key: str) -> str:
        value = self.take(key)
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        self.fault((key,), "policy_type", "must be a text")
        return ""

    def choice(self, key: str, choices: Sequence[str], default: str) -> str:
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        shown = quoted(value) if isinstance(value, str) else "this"
        narrower = [choice for choice in choices if choice != "host"]  # "hosts" is not meant to be the widest
        hint = did_you_mean(value, narrower) if isinstance(value, str) else ""
        if not hint and "host" in choices:
            hint = '"allowlist" reaches the hosts of a list; "host" is the whole network of this machine'
        self.fault((key,), "policy_value", f"must be one of {', '.join(choices)}, not {shown}", hint)
        return default

    def texts(
        self, key: str, check: Callable[[str], str | None], default: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """A list of texts that pass `check`, which returns a fault as half a sentence, or None."""
        value = self.take(key)
        if value is None:
            return tuple(default)
        if not isinstance(value, list):
            self.fault((key,), "policy_type", "must be a list of texts")
            return tuple(default)
        found = []
        for number, item in enumerate(value):
            fault = check(item) if isinstance(item, str) else "must be a text"
            if fault is None:
                found.append(item)
            else:
                self.fault((key, number), "policy_value", fault)
        return tuple(dict.fromkeys(found))

    def number(self, key: str, low: int, high: int, default: int) -> int:
        value = self.take(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.fault((key,), "policy_value", f"must be a whole number from {low} to {high}")
        return default

    def finish(self) -> None:
        for key in self.values:
            if key not in self.known:
                hint = did_you_mean(key, self.known) or f"known here: {', '.join(self.known)}"
                self.fault((key,), "policy_unknown_key", "is not a key of a policy", hint)
