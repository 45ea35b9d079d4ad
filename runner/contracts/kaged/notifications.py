"""Notifications of the plugin: declared names only, and at most 100 in any second.

Nothing here ends a plugin. What is too much is dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from runner.protocol.dialect import Events, Notice
from sandbox.document.diagnostic import cut

PER_SECOND = 100
WINDOW_SECONDS = 1.0
# A plugin that is over the limit in so many windows in a row is degraded.
DEGRADED_WINDOWS = 10

# Undeclared names that get a notice of their own, and the characters of each that are kept.
_MOST_NAMES, _NAME_CHARACTERS = 64, 200


class Notifications:
    def __init__(self, declared: Collection[str]) -> None:
        self._declared = frozenset(declared)
        self._accepted: deque[float] = deque(maxlen=PER_SECOND)  # when the last ones came
        self._strangers: set[str] = set()
        self._over_since = 0.0  # when the last window began in which something was dropped
        self._windows = 0  # of these in a row
        self._counters: dict[str, int] = {}

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counters

    def admits(self, now: float) -> bool:
        """Whether one more notification is within the limit. Then it counts towards it."""
        if len(self._accepted) == PER_SECOND and now - self._accepted[0] < WINDOW_SECONDS:
            return False
        self._accepted.append(now)
        return True

    def take(self, name: str, params: Any, now: float) -> Events:
        if not self.admits(now):
            return self._drop(now)
        if name in self._declared:
            self._count("notifications")
            return (Notice("notification", {"method": name, "params": params}),)
        self._count("notifications_undeclared")
        shown = cut(name, _NAME_CHARACTERS)
        if shown in self._strangers or len(self._strangers) >= _MOST_NAMES:
            return ()
        self._strangers.add(shown)
        why = "it is not in the manifest's notifications"
        return (Notice("dropped", {"reason": "undeclared", "method": shown, "why": why}),)

    def _drop(self, now: float) -> Events:
        self._count("notifications_dropped")
        if self._windows and now - self._over_since < WINDOW_SECONDS:
            return ()  # this window has its warning
        in_a_row = self._windows and now - self._over_since < 2 * WINDOW_SECONDS
        self._windows = self._windows + 1 if in_a_row else 1
        self._over_since = now
        why = f"a plugin may send {PER_SECOND} notifications a second"
        said = Notice("dropped", {"reason": "rate", "why": why})
        if self._windows != DEGRADED_WINDOWS:
            return (said,)
        self._count("degraded")
        why = f"it sent more than {PER_SECOND} notifications a second for {DEGRADED_WINDOWS} seconds"
        return (said, Notice("degraded", {"why": why}))

    def _count(self, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1
