"""What callers of a plugin may have to catch: it said "no", or there was no answer."""

from __future__ import annotations

from typing import Any

from runner.outcome import Code, Outcome
from runner.protocol.dialect import Refusal
from sandbox.document.diagnostic import printable

# Of a plugin's stderr, in the text of an exception that nobody caught.
_LAST_LINES, _LAST_WIDTH = 12, 500


class PluginError(Exception):
    """The plugin answered "no". It lives, and may be asked again. `report` and `stderr` are there if nobody
    caught this before the plugin was closed."""

    _code: Code = "plugin_error"

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.outcome = Outcome(self._code, "call", refusal.message, refusal.code)
        self.report: dict[str, Any] | None = None
        self.stderr = ""
        self.code = refusal.code
        self.message = refusal.message
        self.kind = refusal.kind
        self.data = refusal.data


class InvalidCall(PluginError):
    """The runner refused the call, and the plugin was not asked: what was given does not fit the contract or
    the tool's schema."""

    _code: Code = "invalid_call"


class PluginFailure(Exception):
    """There is no answer, for the reason `outcome` gives. `report` and `stderr` are there when it is over."""

    def __init__(self, outcome: Outcome, explanation: tuple[str, ...] = ()) -> None:
        super().__init__(f"{outcome.code}: {outcome.message}")
        self.outcome = outcome
        self.explanation = explanation  # lines for people, where there is more to say
        self.report: dict[str, Any] | None = None
        self.stderr = ""

    def __str__(self) -> str:
        """For who sees nothing but a traceback: what is wrong, where, what to do, and the plugin's own last
        words."""
        outcome = self.outcome
        listed = outcome.diagnostics or outcome.denials
        hint = f"; {outcome.hint}" if outcome.hint and not listed else ""
        lines = [f"{outcome.code}: {outcome.message}{hint}", *(self.explanation if listed else ())]
        if tail := self.stderr.splitlines()[-_LAST_LINES:]:
            lines += ["its stderr ends with:", *(f"| {printable(line[-_LAST_WIDTH:])}" for line in tail)]
        return "\n".join(lines)


class NotOnTrio(RuntimeError):
    """The library was called where no trio runs."""

    def __init__(self) -> None:
        super().__init__(
            "this library runs on trio: start your program with trio.run(main); from asyncio, run the part "
            "that uses plugins in a thread of its own: await asyncio.to_thread(trio.run, main)"
        )
