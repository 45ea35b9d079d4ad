"""What callers of a plugin may have to catch: it said "no", or there was no answer."""

from __future__ import annotations

from typing import Any

from runner.dialect import Refusal
from runner.report import Outcome


class PluginError(Exception):
    """The plugin answered "no". It lives, and may be asked again. `report` and `stderr` are there if nobody
    caught this before the plugin was closed."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.outcome = Outcome("plugin_error", "call", refusal.message, refusal.code)
        self.report: dict[str, Any] | None = None
        self.stderr = ""
        self.code = refusal.code
        self.message = refusal.message
        self.kind = refusal.kind
        self.data = refusal.data


class PluginFailure(Exception):
    """There is no answer, for the reason `outcome` gives. `report` and `stderr` are there when it is over."""

    def __init__(self, outcome: Outcome, explanation: tuple[str, ...] = ()) -> None:
        # Whoever sees nothing but a traceback is to see what is wrong, and where.
        places = explanation if outcome.diagnostics or outcome.denials else ()
        super().__init__("\n".join((f"{outcome.code}: {outcome.message}", *places)))
        self.outcome = outcome
        self.explanation = explanation  # lines for people, where there is more to say
        self.report: dict[str, Any] | None = None
        self.stderr = ""
