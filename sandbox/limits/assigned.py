"""The limits of a plugin, each with what enforces it. sandbox/limits/assign.py chooses."""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.limits.site import Site


class AssignedLimit(NamedTuple):
    name: str
    requested: float
    decided_by: str  # manifest, policy, command line
    enforced_by: str  # in a word or two; empty: not enforced
    effective: float | None
    degraded: bool = False
    detail: str = ""


class Shares(NamedTuple):
    """The most that one plugin may take of numbers that the whole machine shares (shares.py)."""

    part: float  # of each of them, as the policy says
    files: int | None  # open and mapped; None: the machine has no bound of its own
    socket_bytes: int
    orphans: int  # connections that were closed and still have data to send

    def told(self, number: str) -> str:
        return f"{self.part * 100:g}% of {number}"


class AssignedLimits(NamedTuple):
    all: tuple[AssignedLimit, ...] = ()
    sites: tuple[Site, ...] = ()  # where groups are made
    fallbacks: frozenset[str] = frozenset()  # enforced by an rlimit instead
    told: tuple[str, ...] = ()  # those that are weaker than they should be, and of which a launch says so
    shares: Shares | None = None

    def shortfall(self) -> str:
        """What a launch says about these, as one line. Empty: there is nothing to say."""
        weak = (f"{limit.name} by {limit.enforced_by or 'nothing'}" for limit in self.all)
        return ", ".join(text for limit, text in zip(self.all, weak, strict=True) if limit.name in self.told)

    @property
    def open_files(self) -> int | None:
        """Of each process, as this machine allows it."""
        for limit in self.all:
            if limit.name == "open_files" and limit.effective is not None:
                return int(limit.effective)
        return None

    def confirmed(self, effective: dict[str, float]) -> AssignedLimits:
        """With the numbers that the kernel has accepted."""
        return self._replace(
            all=tuple(
                limit._replace(effective=effective[limit.name]) if limit.name in effective else limit
                for limit in self.all
            )
        )

    def in_session(self) -> AssignedLimits:
        """Where the runner itself speaks the protocol: it then enforces what `exec` passes on."""
        return self._replace(all=tuple(_in_session(limit) for limit in self.all))

    def inspected(self) -> AssignedLimits:
        """Where the runner reads the stream that it passes on: it sees the first of the protocol's clocks."""
        return self._replace(all=tuple(_inspected(limit) for limit in self.all))


_SESSION_CLOCKS = ("handshake", "call", "idle")


_OUTPUT_LIMITS = ("output", "output_lines")


def _inspected(limit: AssignedLimit) -> AssignedLimit:
    if limit.name == "handshake":
        return limit._replace(enforced_by="clock", effective=limit.requested, detail="")
    if limit.name in _OUTPUT_LIMITS:
        return limit._replace(detail="of stdout and stderr together")
    return limit


def _in_session(limit: AssignedLimit) -> AssignedLimit:
    if limit.name in _SESSION_CLOCKS:
        return limit._replace(enforced_by="session", effective=limit.requested, detail="")
    if limit.name in _OUTPUT_LIMITS:
        return limit._replace(enforced_by="session", detail="of stdout and stderr together")
    return limit
