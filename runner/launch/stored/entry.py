"""A plan that an earlier launch kept, and the facts it rests on.

The file is in the user's own cache (sandbox/cache.py): nobody else can write or read it, and a digest shows
damage. Its name depends on everything that the runner is told: its own place, the interpreter, the words of
the command line, the working directory, the ids, and the variables that are for the runner itself. What it
found on the machine is in the facts (sandbox/facts.py), and each of them is asked again. If one has changed,
or anything else is unusual, there is no plan, and the launch is decided anew.

No value of a variable of the caller's, and no word behind `--`, is in the file: a `Gap` is, and the launch at
hand fills it with its own. What stands in a manifest or a policy is in the file as it is there.
"""

from __future__ import annotations

import os
import resource
import sys

from runner import __version__
from sandbox import CODE_ROOT, cache
from sandbox.speed.typed import TYPE_CHECKING, Any
from sandbox.speed.value import NamedTuple

if TYPE_CHECKING:
    from sandbox.speed.typed import Mapping, Sequence

FORMAT = 1
# Variables that tell the runner itself something. Others are among the facts, if they were looked at.
OWN_VARIABLES = ("RUNNER_", "XDG_")

_DEBUG = "RUNNER_DEBUG"
# The number of a login is another each time. If a plugin is given it, it is among the facts.
_DECIDE_NOTHING = (_DEBUG, "XDG_SESSION_ID")
_LIMITS = (
    *(resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE),
    *(resource.RLIMIT_DATA, resource.RLIMIT_NPROC, resource.RLIMIT_CPU),
)


# Kinds of gaps beside "variable" and "word": a name of the systemd unit that the runner is in, and a text
# that is known by now (runner/launch/stored/unit.py).
UNIT, TEXT = "unit", "text"


class Gap(NamedTuple):
    """A text that is not kept."""

    kind: str  # "variable" or "word"
    name: str  # of the variable; the number of the word


class PlanEntry(NamedTuple):
    """As it is in the file."""

    format: int
    facts: tuple[dict[Any, Any], ...]  # the fields of Facts
    gaps: tuple[tuple[str, str], ...]  # the fields of each Gap
    tells: bool  # whether the operator reads something before the plugin starts
    plan: Any  # sandbox/speed/codec.py, as_plain: a Planned but for what is in `rest`
    rest: bytes  # marshalled: what only messages and reports need


class Told(NamedTuple):
    """What the runner is told by its caller."""

    words: Sequence[str]  # of the command line, from the verb to `--`
    arguments: Sequence[str]  # for the plugin: behind `--`
    environ: Mapping[str, str]
    name: str | None  # of the file; None: nothing is kept for such a caller


def told_by(words: Sequence[str], arguments: Sequence[str], environ: Mapping[str, str]) -> Told:
    """Called first of all: what is imported later may change where modules are looked for, which is part of
    the name."""
    return Told(words, arguments, environ, _name(words, arguments, environ))


def _name(words: Sequence[str], arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    if not environ.get("HOME", "").startswith("/"):  # who has none is looked up, which is slow and can hang
        return None
    try:
        cwd = os.getcwd()
    except OSError:
        return None
    own = sorted(
        (name, value)
        for name, value in environ.items()
        if name.startswith(OWN_VARIABLES) and name not in _DECIDE_NOTHING
    )
    # A plugin gets no higher limit than the runner has.
    limits = [resource.getrlimit(kind)[1] for kind in _LIMITS]
    system = os.uname()
    parts = (
        *(f"plan {FORMAT}", __version__, CODE_ROOT, sys.executable, sys.prefix, "\0".join(sys.path)),
        *(system.release, system.machine, cwd, environ["HOME"]),
        *(repr(os.getresuid()), repr(os.getresgid()), repr(sorted(os.getgroups()))),
        *(repr(own), repr(limits), repr(list(words)), repr(list(arguments))),
    )
    return "plan-" + cache.fingerprint(*(part.encode("utf-8", "surrogateescape") for part in parts))


def say(text: str) -> None:
    """For who wonders why a plan is made again: RUNNER_DEBUG=1 shows it."""
    if os.environ.get(_DEBUG):
        try:
            os.write(2, f"runner: {text}\n".encode("utf-8", "backslashreplace"))
        except OSError:
            pass  # nobody reads it


def read(raw: bytes) -> PlanEntry | None:
    """None if this is not an entry of ours. `raw` came out of the cache, so nobody else wrote it."""
    import marshal

    try:
        entry = PlanEntry(*marshal.loads(raw))
    except (EOFError, ValueError, TypeError):
        return None
    return entry if entry.format == FORMAT else None


def fillings(gaps: Sequence[tuple[str, str]], told: Told) -> tuple[str, ...]:
    """What belongs into each gap of this launch."""
    texts = []
    for kind, name in gaps:
        if kind == TEXT:
            texts.append(name)
        else:
            texts.append(told.environ[name] if kind == "variable" else told.arguments[int(name)])
    return tuple(texts)


class Later:
    """Stands for a value that was kept, and reads it when something of it is asked for: only messages and
    reports do, and the classes of these values take longer to import than a launch."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Any) -> None:
        self._make = make
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)


def forget(told: Told) -> None:
    """A launch of this plan failed: the next one is decided anew."""
    if told.name is not None:
        cache.remove(told.name)
