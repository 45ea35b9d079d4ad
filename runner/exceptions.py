"""The exceptions of the library.

Exception
├── PluginError         the plugin returned an error. It still runs and can be called again
│   └── InvalidCall     the runner refused the call, and the plugin was not asked
├── PluginFailure       there is no answer; `outcome.code` says why (runner/outcome.py draws that tree)
├── HostError           raised by a service of the host that refuses; the plugin gets it as an error
├── RuntimeError
│   ├── NotOnTrio       the library was called outside of trio.run
│   └── WouldBlock      `runner.call` was called in a thread that runs an event loop
└── ValueError          an argument of `open_plugin`, `run` or `call` is wrong
"""

from __future__ import annotations

from typing import Any

from runner.outcome import Advice, Code, Outcome
from runner.protocol.dialect import Refusal
from sandbox.document.diagnostic import printable

# How much of the plugin's stderr is in the text of an exception: lines, and characters of each.
_STDERR_LINES, _STDERR_WIDTH = 12, 500


class PluginError(Exception):
    """The plugin returned an error. It still runs and can be called again. `report` and `stderr` are set if
    this was not caught before the plugin was closed."""

    _code: Code = "plugin_error"

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.outcome = Outcome(self._code, "call", refusal.message, refusal.code)
        self.report: dict[str, Any] | None = None
        self.invocation: dict[str, Any] | None = None  # the contract's own record of the call, if it has one
        self.stderr = ""
        self.code = refusal.code
        self.message = refusal.message
        self.kind = refusal.kind
        self.data = refusal.data
        self.refusal = refusal

    @property
    def advice(self) -> tuple[Advice, ...]:
        """Hosts that the cage refused, which may have caused the error."""
        return _advice(self.report)

    def __reduce__(self) -> tuple[object, ...]:
        """Let it be pickled: another process may pass it to its parent."""
        return type(self), (self.refusal,), self.__dict__


class InvalidCall(PluginError):
    """The runner refused the call: it does not fit the contract or the tool's schema. The plugin was not
    asked."""

    _code: Code = "invalid_call"


class PluginFailure(Exception):
    """There is no answer; `outcome` says why. `stderr` is the end of what the plugin had written there.
    `report` is set when the plugin has ended."""

    def __init__(self, outcome: Outcome, explanation: tuple[str, ...] = ()) -> None:
        super().__init__(f"{outcome.code}: {outcome.message}")
        self.outcome = outcome
        self.explanation = explanation  # lines for people, where there is more to say
        self.report: dict[str, Any] | None = None
        self.invocation: dict[str, Any] | None = None  # the contract's own record of the call, if it has one
        self.stderr = ""
        self.early_advice: tuple[Advice, ...] = ()  # what is known before there is a report

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What the plugin lacked in its cage, each with the option that grants it. While the plugin runs,
        only hosts that it could not reach are known."""
        return self.early_advice if self.report is None else _advice(self.report)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.outcome, self.explanation), self.__dict__

    def __str__(self) -> str:
        """The message, its diagnostics and hint, the end of the plugin's stderr, and the advice about the
        cage: what a traceback shows."""
        outcome = self.outcome
        listed = outcome.diagnostics or outcome.denials
        hint = f"; {outcome.hint}" if outcome.hint and not listed else ""
        lines = [f"{outcome.code}: {outcome.message}{hint}", *(self.explanation if listed else ())]
        if tail := self.stderr.splitlines()[-_STDERR_LINES:]:
            lines += ["its stderr ends with:", *(f"| {printable(line[-_STDERR_WIDTH:])}" for line in tail)]
        lines += [each.text for each in self.advice]
        return "\n".join(lines)


def _advice(report: dict[str, Any] | None) -> tuple[Advice, ...]:
    return tuple(Advice(**each) for each in (report or {}).get("advice", ()))


class NotOnTrio(RuntimeError):
    """The library was called outside of trio.run."""

    def __init__(self) -> None:
        super().__init__(
            "this library runs on trio: start your program with trio.run(main); on asyncio, and in programs "
            "on anyio, use the same name of runner.aio: async with runner.aio.open_plugin(...); "
            "runner.call(...) makes one call without an event loop"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()


class WouldBlock(RuntimeError):
    """`runner.call` was called in a thread that runs an event loop, whose tasks would all stand still."""

    def __init__(self, loop: str, instead: str) -> None:
        super().__init__(
            f"runner.call blocks its thread, and this thread runs {loop}'s event loop; use {instead} here"
        )
        self.loop, self.instead = loop, instead

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.loop, self.instead)
