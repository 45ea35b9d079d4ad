"""Lines on the stderr of a daemon or a worker about what somebody should look at. Each kind has a bound per
minute: beyond it, lines are counted, and one line tells how many there were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import trio

AlertKind = Literal["quarantine", "dead letter", "full share", "ledger"]
MOST_LINES = 10  # of one kind in a window
WINDOW_SECONDS = 60.0
_MOST_TEXT = 600  # characters: parts of it may be a plugin's or a stranger's


class _Window:
    def __init__(self, since: float) -> None:
        self.since = since
        self.told = 0
        self.untold = 0


class Alerts:
    def __init__(
        self,
        say: Callable[[str], None] = lambda text: None,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self._say, self._now = say, now
        self._windows: dict[AlertKind, _Window] = {}

    def tell(self, kind: AlertKind, text: str) -> None:
        self.flush()
        window = self._windows.setdefault(kind, _Window(self._now()))
        if window.told >= MOST_LINES:
            window.untold += 1
            return
        window.told += 1
        self._say(text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} …")

    def flush(self) -> None:
        """Tell what was counted, of windows that are over. To be called now and then."""
        for kind, window in list(self._windows.items()):
            if self._now() - window.since >= WINDOW_SECONDS:
                del self._windows[kind]
                if window.untold:
                    self._say(f"{window.untold} more of the kind '{kind}' in {WINDOW_SECONDS:g} seconds")
