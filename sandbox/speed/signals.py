"""The module `signal`, without the enumerations that it makes of its numbers: 6 ms, with enum.

For type checkers it *is* signal.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as signal
else:
    import _signal as signal

__all__ = ["signal"]
