"""The two directions between a host and an inspected plugin. Each is a pump that reads the frames."""

from __future__ import annotations

from typing import Literal, Protocol

from runner.protocol.frames import Cut, Cutter, FrameFault
from runner.protocol.framing import Framing
from sandbox.speed.typed import Callable, Mapping
from sandbox.streams.feed import Feed
from sandbox.streams.pump import BUFFER, PipePump

# A longer frame of the host's is passed on unread. No contract limits the host's frames.
_HOST_FRAME_BYTES = 4 << 20

# stop: neither this frame nor another. Bytes: the host gets these in place of the frame.
Passage = Literal["pass", "drop", "stop"] | bytes


class HostListener(Protocol):
    """Receives the host's frames."""

    @property
    def framing(self) -> Framing: ...

    @property
    def awaiting(self) -> bool: ...

    def host_frame(self, raw: bytes | None) -> None: ...


class ToPlugin(Feed):
    """From our stdin, which the host writes to, to the plugin's."""

    def __init__(self, stdin: int, inspector: HostListener, forget: Callable[[int], None]) -> None:
        super().__init__(stdin, forget)
        self.frames = 0
        self.unread = 0  # frames that were too long to read
        self._inspector = inspector
        self._skimmer = inspector.framing.skimmer(_HOST_FRAME_BYTES)
        self._taken = 0
        self._question_end: int | None = None  # where in the stream the request for the handshake ends

    @property
    def has_asked(self) -> bool:
        """Whether the whole handshake request was sent to the plugin."""
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
    """From the plugin's stdout to ours, which the host reads. Only whole, checked frames are passed on.

    `check` says whether a frame may pass. The framer reports a fault for a line that is too long.
    """

    def __init__(
        self,
        stdout: int,
        framer: Cutter,
        check: Callable[[bytes | FrameFault], Passage],
        forget: Callable[[int], None],
    ) -> None:
        super().__init__(stdout)
        self.frames = 0  # passed on, or about to be
        self.abandoned = False  # the host has closed its end
        self.closed = False  # the plugin has closed its end
        self._end_passed_on = False  # our stdout was closed, because the plugin closed its own
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
        if self.closed and not self._end_passed_on and not self._buffer:
            # Let the host see the end, as if it had the plugin's pipe.
            self._end_passed_on = True
            self._sink.close()
            self._forget(self._stdout)
        return None

    def stop(self) -> None:
        """Read nothing more from the plugin."""
        self._stopped = True

    def finish(self, seconds: float) -> None:
        """Pass on what is left, as long as the host takes some of it within `seconds`."""
        self.release()
        self.drain(seconds)

    def close(self) -> None:
        self.release()
        super()._abandon()
        self._sink.close()

    def _may_read(self) -> bool:
        return self.listening and len(self._buffer) < BUFFER

    @property
    def pending(self) -> int:
        """Bytes held of a frame that is not complete."""
        return self._framer.pending

    def _accept(self, data: bytes) -> None:
        self._admit_all(self._framer.cut(data))

    def _see_closed(self) -> None:
        self._admit_rest()
        self.closed = True

    def _flush(self) -> None:
        if not self._stopped:
            self._admit_rest()

    def _admit_rest(self) -> None:
        """Check the last line, which may lack its newline."""
        self._admit_all(self._framer.finish_cut())

    def _admit_all(self, cuts: list[Cut]) -> None:
        for cut in cuts:
            passage = self._check(cut.frame)
            if passage == "drop":
                continue
            if passage == "stop":
                self.stop()
                return
            self.frames += 1
            frame = passage if isinstance(passage, bytes) else cut.frame
            for part in (cut.before, frame, cut.after):
                self._buffer += part
        if self._framer.fault is not None:
            self._check(self._framer.fault)
            self.stop()

    def _abandon(self) -> None:
        super()._abandon()
        self.abandoned = True
