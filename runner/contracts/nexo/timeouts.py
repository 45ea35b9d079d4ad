"""The time limit of each method, and the operator's variables that change it."""

from __future__ import annotations

from collections.abc import Mapping

from sandbox.speed.value import NamedTuple

# Method -> seconds, and the middle of NEXO_PLUGIN_…_TIMEOUT_MS. A stream of llm.chat has its own limit.
STREAM = "llm.chat stream"
_METHODS: Mapping[str, tuple[float, str]] = {
    "initialize": (5.0, "INIT"),
    "channel.start": (30.0, "CHANNEL"),
    "channel.stop": (30.0, "CHANNEL"),
    "channel.send_outbound": (60.0, "CHANNEL"),
    "llm.chat": (60.0, "LLM"),
    STREAM: (300.0, "LLM"),
    "hook.on_hook": (5.0, "HOOK"),
    "memory.vector_upsert": (30.0, "MEMORY"),
    "memory.vector_search": (10.0, "MEMORY"),
    "memory.vector_delete": (30.0, "MEMORY"),
    "tool.invoke": (60.0, "TOOL"),
    "outbound_tool.invoke": (60.0, "TOOL"),
    "plugin.configure": (5.0, ""),
    "plugin.credentials.list": (5.0, ""),
    "plugin.credentials.reload": (5.0, ""),
    "plugin.credentials.issue": (1.0, ""),
    "plugin.credentials.resolve_bytes": (1.0, ""),
    "shutdown": (5.0, ""),
}
_OTHER_SECONDS = 60.0
_MOST_MS = 2**64 - 1  # the largest number that the reference host can read


class Timeouts(NamedTuple):
    overrides: Mapping[str, float] = {}

    def seconds(self, method: str) -> float:
        seconds, word = _METHODS.get(method, (_OTHER_SECONDS, ""))
        return self.overrides.get(word, seconds)


def read_timeouts(environ: Mapping[str, str]) -> Timeouts:
    """Read the variables as they are now. A variable that is not a number is ignored."""
    words = sorted({word for _, word in _METHODS.values() if word})
    found = {word: _milliseconds(environ.get(f"NEXO_PLUGIN_{word}_TIMEOUT_MS", "")) for word in words}
    return Timeouts({word: seconds for word, seconds in found.items() if seconds is not None})


def _milliseconds(text: str) -> float | None:
    digits = text.removeprefix("+")
    if not (digits.isascii() and digits.isdigit()) or len(digits.lstrip("0")) > 20:
        return None
    amount = int(digits)
    return amount / 1000 if amount <= _MOST_MS else None
