"""The limits of a plugin, each with what enforces it. sandbox/limits/assign.py chooses."""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING, Collection
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.limits.site import Site


class AssignedLimit(NamedTuple):
    name: str
    requested: float
    decided_by: str  # manifest, policy, command line
    enforced_by: str  # such as "cgroup v2"; empty: not enforced
    effective: float | None
    degraded: bool = False
    detail: str = ""


class Shares(NamedTuple):
    """The most that one plugin may take of each machine-wide resource (shares.py)."""

    part: float  # the fraction that the policy allows
    files: int | None  # open and mapped; None: the machine has no bound of its own
    socket_bytes: int
    orphans: int  # connections that were closed and still have data to send

    def describe(self, number: str) -> str:
        return f"{self.part * 100:g}% of {number}"


class AssignedLimits(NamedTuple):
    all: tuple[AssignedLimit, ...] = ()
    sites: tuple[Site, ...] = ()  # where groups are made
    fallbacks: frozenset[str] = frozenset()  # enforced by an rlimit instead
    announced: tuple[str, ...] = ()  # limits that are not enforced in full, and that a launch warns about
    shares: Shares | None = None

    def shortfall(self) -> str:
        """The announced limits and what enforces them, as one line; '' if there are none."""
        weak = (f"{limit.name} by {limit.enforced_by or 'nothing'}" for limit in self.all)
        return ", ".join(
            text for limit, text in zip(self.all, weak, strict=True) if limit.name in self.announced
        )

    @property
    def open_files(self) -> int | None:
        """The effective limit for each process, or None."""
        for limit in self.all:
            if limit.name == "open_files" and limit.effective is not None:
                return int(limit.effective)
        return None

    def with_effective(self, effective: dict[str, float]) -> AssignedLimits:
        """A copy with the values that the kernel has accepted."""
        return self._replace(
            all=tuple(
                limit._replace(effective=effective[limit.name]) if limit.name in effective else limit
                for limit in self.all
            )
        )

    def without(self, names: Collection[str], reason: str) -> AssignedLimits:
        """A copy in which nothing enforces these limits."""
        return self._replace(
            all=tuple(
                limit._replace(enforced_by="", effective=None, degraded=True, detail=reason)
                if limit.name in names
                else limit
                for limit in self.all
            )
        )

    def for_session(self) -> AssignedLimits:
        """A copy for sessions: the runner speaks the protocol, and enforces its timeouts and the output
        limits."""
        return self._replace(all=tuple(_for_session(limit) for limit in self.all))

    def for_inspection(self) -> AssignedLimits:
        """A copy for `exec --inspect`: the runner reads the stream that it passes on, and enforces the
        handshake timeout."""
        return self._replace(all=tuple(_for_inspection(limit) for limit in self.all))


_SESSION_CLOCKS = ("handshake", "call", "idle")


_OUTPUT_LIMITS = ("output", "output_lines")


def _for_inspection(limit: AssignedLimit) -> AssignedLimit:
    if limit.name == "handshake":
        return limit._replace(enforced_by="clock", effective=limit.requested, detail="")
    if limit.name in _OUTPUT_LIMITS:
        return limit._replace(detail="of stdout and stderr together")
    return limit


def _for_session(limit: AssignedLimit) -> AssignedLimit:
    if limit.name in _SESSION_CLOCKS:
        return limit._replace(enforced_by="session", effective=limit.requested, detail="")
    if limit.name in _OUTPUT_LIMITS:
        return limit._replace(enforced_by="session", detail="of stdout and stderr together")
    return limit
