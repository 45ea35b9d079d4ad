"""A plan that an earlier launch stored, and the facts it rests on.

The file is in the user's own cache (sandbox/cache.py): nobody else can write or read it, and a digest shows
damage. Its name depends on everything that the runner is told: its own place, the interpreter, the words of
the command line, the working directory, the ids, and the variables that are for the runner itself. What it
found on the machine is in the facts (sandbox/facts.py), and each of them is asked again. If one has changed,
or anything else is unusual, there is no plan, and the launch is decided anew.

No value of a variable of the caller's, and no word behind `--`, is in the file: a `Blank` stands for
each, and the launch at hand fills it in. What stands in a manifest or a policy is in the file as it is there.
"""

from __future__ import annotations

import os
import resource
import sys

from runner import __version__
from sandbox import CODE_ROOT, cache
from sandbox.facts import HOST_VARIABLE
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


# Kinds of blanks beside "variable" and "word": a name of the systemd unit that the runner is in, and a text
# that is known by now (runner/launch/stored/unit.py).
UNIT, TEXT = "unit", "text"


class Blank(NamedTuple):
    """A text that is not stored."""

    kind: str  # "variable" or "word"
    name: str  # of the variable; the number of the word


class PlanEntry(NamedTuple):
    """The content of the file."""

    format: int
    facts: tuple[dict[Any, Any], ...]  # the fields of Facts
    blanks: tuple[tuple[str, str], ...]  # the fields of each Blank
    tells: bool  # whether the operator reads something before the plugin starts
    plan: Any  # sandbox/speed/codec.py, as_plain: a Planned but for what is in `rest`
    rest: bytes  # marshalled: what only messages and reports need


class LaunchRequest(NamedTuple):
    """What the caller of `runner exec` asks for."""

    words: Sequence[str]  # of the command line, from the verb to `--`
    arguments: Sequence[str]  # for the plugin: behind `--`
    environ: Mapping[str, str]
    name: str | None  # of the file; None: no plan is stored for such a caller
    # Of an entry that `runner wrap` wrote: the variables that its host gave, which the runner has dropped.
    host: Mapping[str, str] | None = None

    @property
    def variables(self) -> Mapping[str, str]:
        """All, by the names that facts have for them."""
        if self.host is None:
            return self.environ
        return {**self.environ, **{HOST_VARIABLE + name: value for name, value in self.host.items()}}


def request_of(
    words: Sequence[str],
    arguments: Sequence[str],
    environ: Mapping[str, str],
    host: Mapping[str, str] | None = None,
) -> LaunchRequest:
    """Call it before other imports: they may change sys.path, which is part of the name."""
    asked = (*words, *(() if host is None else (repr(sorted(host)),)))
    return LaunchRequest(words, arguments, environ, _name(asked, arguments, environ), host)


def _name(words: Sequence[str], arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    if not environ.get("HOME", "").startswith("/"):  # looking it up is slow and can hang
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
    """Print to stderr if RUNNER_DEBUG is set: why a plan is made again."""
    if os.environ.get(_DEBUG):
        try:
            os.write(2, f"runner: {text}\n".encode("utf-8", "backslashreplace"))
        except OSError:
            pass  # stderr is closed


def read(raw: bytes) -> PlanEntry | None:
    """Returns the entry, or None if the bytes are not one. The cache has checked who wrote them."""
    import marshal

    try:
        entry = PlanEntry(*marshal.loads(raw))
    except (EOFError, ValueError, TypeError):
        return None
    return entry if entry.format == FORMAT else None


def fillings(blanks: Sequence[tuple[str, str]], request: LaunchRequest) -> tuple[str, ...]:
    """Returns the text of this launch for each blank."""
    texts, variables = [], request.variables
    for kind, name in blanks:
        if kind == TEXT:
            texts.append(name)
        else:
            texts.append(variables[name] if kind == "variable" else request.arguments[int(name)])
    return tuple(texts)


class LazyValue:
    """A value that is decoded on first use. Only messages and reports use it, and importing its classes takes
    longer than a launch."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Any) -> None:
        self._make = make
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)


def forget(request: LaunchRequest) -> None:
    """Remove the stored plan, so that the next launch is decided anew."""
    if request.name is not None:
        cache.remove(request.name)
