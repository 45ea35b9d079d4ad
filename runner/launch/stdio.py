"""Connect a plugin's stdin, stdout and stderr: to the caller's own, or to pipes that the runner passes on.

    direct      the caller's own: a pipe, a file, a socket; with `--tty` also a terminal
    relayed     a pipe: the caller's stream is a terminal, bytes on stderr are counted, or the last lines of
                stderr are needed for messages (`runner run`)
    inspected   a pipe: the runner checks every frame (`--inspect`)
    session     a pipe to a session, which speaks the plugin's protocol

A plugin does not get a terminal: through stdout and stderr, too, it could read what is typed and change the
terminal's modes.
"""

from __future__ import annotations

import os
import stat

from sandbox.limits.meter import Meter
from sandbox.spec import Limits
from sandbox.speed.scopes import ExitStack, contextmanager
from sandbox.speed.signals import signal
from sandbox.speed.typed import TYPE_CHECKING, Callable, Collection, Iterator, Literal, Protocol
from sandbox.speed.value import NamedTuple
from sandbox.streams.handover import forget, hand_over

if TYPE_CHECKING:
    from runner.launch.inspect.inspection import Inspection
    from sandbox.streams.feed import Feed
    from sandbox.streams.relay import Relay

NAMES = ("stdin", "stdout", "stderr")
Way = Literal["direct", "relayed", "inspected", "session"]
MakeInspection = Callable[["Relay | None", Callable[[int], None]], "Inspection"]

# How long a reader of our streams may take to read what is left after the plugin has ended.
_READER_SECONDS = 2.0
# These signals stop a background job that reads from its terminal, or writes to it after `stty tostop`. The
# runner has to watch clocks, so it ignores them and gets an error instead.
_STOPPING = (signal.SIGTTIN, signal.SIGTTOU)


class Ends(Protocol):
    """Our copies of the plugin's ends of its streams."""

    def give_away(self) -> None: ...


class Plumbing(NamedTuple):
    ends: tuple[int, int, int]  # what the plugin gets
    ways: tuple[Way, Way, Way]
    feed: Feed | None = None  # from a terminal
    stdout: Relay | None = None  # to a terminal; it may carry stderr as well
    stderr: Relay | None = None
    counted: bool = False  # bytes on stderr count towards a limit
    inspection: Inspection | None = None
    handover: Ends | None = None

    @property
    def meters(self) -> tuple[Meter, ...]:
        # The inspection comes after the relay of stderr, because it adds up the counts of both.
        found = (self.feed, self.stdout, self.stderr, self.inspection)
        return tuple(meter for meter in found if meter is not None)

    @property
    def counter(self) -> Relay | None:
        return self.stderr if self.counted else None

    def give_away(self) -> None:
        """Close our copies of the plugin's ends. The plugin runs and has its own; while we hold one, its
        pipes do not end."""
        for relay in (self.feed, self.stdout, self.stderr, self.inspection):
            if relay is not None:
                relay.release()
        if self.handover is not None:
            self.handover.give_away()

    def finish(self, terminal_seconds: float = _READER_SECONDS, stop: Collection[int] = ()) -> bool:
        """Pass on what is left after the plugin's last process has ended. False if the reader of our own
        stderr is stuck, so that nothing more can be written there.

        A stopped terminal (^S) is waited for, until one of `stop` is readable.
        """
        results = [
            relay.finish(terminal_seconds if relay.is_terminal else _READER_SECONDS, stop)
            for relay in (self.stdout, self.stderr)
            if relay is not None
        ]
        return all(results)


def expected_streams(limits: Limits, *, keep_tail: bool) -> dict[str, str]:
    """Describe how `runner exec` will connect the streams, for `runner explain`. `keep_tail`: how `runner
    run` will."""
    by_kind = "direct; a terminal is relayed (exec --tty hands it over)"
    counted = limits.output is not None or limits.output_lines is not None
    stderr = "relayed, and counted" if counted else "relayed; direct if it is also stdin or stdout"
    return {**dict.fromkeys(NAMES, by_kind), **({"stderr": stderr} if counted or keep_tail else {})}


@contextmanager
def connect_session(ends: tuple[int, int, int], handover: Ends) -> Iterator[Plumbing]:
    """Connect a session's pipes. The session counts what it reads, so nothing is relayed here."""
    yield Plumbing(ends, ("session", "session", "session"), handover=handover)


@contextmanager
def connect_caller(
    limits: Limits,
    *,
    inspect: MakeInspection | None = None,
    tty: bool = False,
    keep_tail: bool = False,
) -> Iterator[Plumbing]:
    """Connect the runner's own streams.

    `inspect`: makes the inspection, from the relay of stderr. `tty`: the plugin gets a terminal itself.
    `keep_tail`: stderr is relayed, so that its last lines are known if the program fails.
    """
    with ExitStack() as stack:
        relayed = [not tty and os.isatty(fd) for fd in range(3)]
        counted = limits.output is not None or limits.output_lines is not None
        terminals = any(relayed) or (inspect is not None and (os.isatty(0) or os.isatty(1)))
        if terminals:
            stack.enter_context(_ignore_stops())
        kept = keep_tail and _is_apart(2)
        stderr = _relay(stack, 2, limits) if counted or relayed[2] or kept else None
        inspection = None if inspect is None else inspect(stderr if counted else None, forget)
        if inspection is not None:
            stack.callback(inspection.close)
            relayed[:2] = False, False
        feed = _feed(stack) if relayed[0] else None
        stdout = None
        if relayed[1]:
            # One pipe for both: with two, the order of the output would be lost.
            both = stderr is not None and not counted and _terminal(1) == _terminal(2)
            stdout = stderr if both else _relay(stack, 1, Limits())
        passed: list[tuple[int, Way] | None] = [
            None if feed is None else (feed.end, "relayed"),
            None if stdout is None else (stdout.end, "relayed"),
            None if stderr is None else (stderr.end, "relayed"),
        ]
        if inspection is not None:
            passed[:2] = ((end, "inspected") for end in inspection.ends)
        direct = [fd for fd in range(3) if passed[fd] is None]
        handover = stack.enter_context(hand_over(direct, keep=(2,)))
        stdin_end, stdout_end, stderr_end = (passed[fd] or (handover.end(fd), "direct") for fd in range(3))
        yield Plumbing(
            (stdin_end[0], stdout_end[0], stderr_end[0]),
            (stdin_end[1], stdout_end[1], stderr_end[1]),
            feed,
            None if stdout is stderr else stdout,
            stderr,
            counted,
            inspection,
            handover,
        )


def _relay(stack: ExitStack, sink: int, limits: Limits) -> Relay:
    from sandbox.streams.relay import Relay

    relay = Relay(sink, size=limits.output, lines=limits.output_lines)
    stack.callback(relay.finish, _READER_SECONDS)  # does nothing if it was finished before
    return relay


def _feed(stack: ExitStack) -> Feed:
    from sandbox.streams.feed import Feed

    feed = Feed(0)
    stack.callback(feed.close)
    return feed


def _is_apart(fd: int) -> bool:
    """Whether this stream can be relayed without a visible difference: it is not the same file as another
    stream, whose order would be lost, and not a terminal or another device."""
    status = os.fstat(fd)
    others = [os.fstat(other) for other in range(3) if other != fd]
    return not stat.S_ISCHR(status.st_mode) and not any(
        (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino) for other in others
    )


def _terminal(fd: int) -> tuple[int, int]:
    """Identify a terminal by device and number: two instances of devpts use the same numbers."""
    status = os.fstat(fd)
    return status.st_dev, status.st_rdev


@contextmanager
def _ignore_stops() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
