"""The two directions between a host and an inspected plugin. Each is a pump that reads frames on the way."""

from __future__ import annotations

from typing import Protocol

from runner.protocol.frames import Cut, Cutter, FrameFault
from runner.protocol.framing import Framing
from sandbox.speed.typed import Callable, Mapping
from sandbox.streams.feed import Feed
from sandbox.streams.pump import BUFFER, PipePump

# A longer frame of the host's is passed on unread. It is the host's own, and no contract limits it.
_HOST_FRAME_BYTES = 4 << 20


class HostListener(Protocol):
    """What an inspection does with the host's frames."""

    @property
    def framing(self) -> Framing: ...

    @property
    def awaiting(self) -> bool: ...

    def host_frame(self, raw: bytes | None) -> None: ...


class ToPlugin(Feed):
    """From our stdin, which the host writes, to the plugin's."""

    def __init__(self, stdin: int, inspector: HostListener, forget: Callable[[int], None]) -> None:
        super().__init__(stdin, forget)
        self.frames = 0
        self.unread = 0  # of these, too long for us to read
        self._inspector = inspector
        self._skimmer = inspector.framing.skimmer(_HOST_FRAME_BYTES)
        self._taken = 0
        self._question_end: int | None = None  # where in the stream the request for the handshake ends

    @property
    def has_asked(self) -> bool:
        """Whether the plugin has been sent all of the request for its handshake."""
        return self._question_end is not None and self.passed >= self._question_end

    def _see_input(self, data: bytes) -> None:
        self._taken += len(data)
        for frame, end in self._skimmer.feed(data) if data else self._skimmer.finish():
            self._note(frame, end)

    def _note(self, frame: bytes | None, end: int) -> None:
        self.frames += 1
        self.unread += frame is None
        self._inspector.host_frame(frame)
        if not self._inspector.awaiting:
            self._question_end = None
        elif self._question_end is None:
            self._question_end = end


class ToHost(PipePump):
    """From the plugin's stdout to ours, which the host reads: only whole frames that were checked.

    `check` says whether a frame may pass. A fault is what the framer cannot cut: a line that is too long.
    """

    def __init__(
        self,
        stdout: int,
        framer: Cutter,
        check: Callable[[bytes | FrameFault], bool],
        forget: Callable[[int], None],
    ) -> None:
        super().__init__(stdout)
        self.frames = 0  # passed on, or about to be
        self.abandoned = False  # by the host, which reads no more
        self.closed = False  # by the plugin
        self._end_told = False  # to the host, that the plugin has closed it
        self._check = check
        self._stdout = stdout
        self._forget = forget
        self._framer = framer
        self._stopped = False

    @property
    def listening(self) -> bool:
        return self._read >= 0 and not self._stopped

    def look(self, ready: Mapping[int, int], now: float) -> str | None:
        super().look(ready, now)
        if self.closed and not self._end_told and not self._buffer:
            # The host sees the end as if we were not between them.
            self._end_told = True
            self._sink.close()
            self._forget(self._stdout)
        return None

    def stop(self) -> None:
        """Take nothing more from the plugin."""
        self._stopped = True

    def finish(self, seconds: float) -> None:
        """Pass on what is still on its way, as long as the host takes some of it within `seconds`."""
        self.release()
        self.drain(seconds)

    def close(self) -> None:
        self.release()
        super()._abandon()
        self._sink.close()

    def _may_read(self) -> bool:
        return self.listening and len(self._buffer) < BUFFER

    def _accept(self, data: bytes) -> None:
        self._admit_all(self._framer.cut(data))

    def _see_closed(self) -> None:
        self._admit_rest()
        self.closed = True

    def _flush(self) -> None:
        if not self._stopped:
            self._admit_rest()

    def _admit_rest(self) -> None:
        """The last line may lack its newline."""
        self._admit_all(self._framer.finish_cut())

    def _admit_all(self, cuts: list[Cut]) -> None:
        for cut in cuts:
            if not self._check(cut.frame):
                self.stop()
                return
            self.frames += 1
            for part in (cut.before, cut.frame, cut.after):
                self._buffer += part
        if self._framer.fault is not None:
            self._check(self._framer.fault)
            self.stop()

    def _abandon(self) -> None:
        super()._abandon()
        self.abandoned = True
