"""The help of a verb, stored between starts.

To make it, argparse and every module of the verb are imported: up to 13 times what an empty interpreter
takes. The text follows from our code, from how wide the terminal is, and from a few variables. So it is
stored in the user's own cache (sandbox/cache.py). It is used as long as each file of ours that was imported
for it is as it was, and no contract was added or removed. Nothing has to be written down twice.
"""

from __future__ import annotations

import marshal
import os
import sys

from runner import __version__
from runner.launch.stored.entry import OWN_VARIABLES, say
from sandbox import CODE_ROOT, cache
from sandbox.facts import Facts
from sandbox.speed.typed import Callable

_FORMAT = 1
# What else decides how argparse words and colours its text.
_DECIDING = tuple("NO_COLOR FORCE_COLOR PYTHON_COLORS TERM LANGUAGE LC_ALL LC_MESSAGES LANG".split())


def help_of(verb: str, width: int, make: Callable[[], str]) -> str:
    """The stored text, or what `make` returns, which is stored then."""
    name = _name(verb, width)
    raw = cache.load(name)
    if raw is not None and (text := _read(raw)):
        return text
    if cache.directory() is None:
        return make()
    from runner.launch.stored.store import note_code
    from sandbox import look

    with look.recording() as asked:
        text = make()
        note_code(asked)
    if why := asked.storing_fault():
        say(f"the help is not stored: {why}")
    else:
        cache.store(name, marshal.dumps((_FORMAT, tuple(asked.facts), text)))
    return text


def _name(verb: str, width: int) -> str:
    own = {name: value for name, value in os.environ.items() if name.startswith(OWN_VARIABLES)}
    own |= {name: os.environ[name] for name in _DECIDING if name in os.environ}
    settings = (os.geteuid(), sorted(own.items()), width, sys.stdout.isatty())
    parts = ("help", verb, __version__, CODE_ROOT, sys.version, *map(repr, settings))
    return "help-" + cache.fingerprint(*(part.encode("utf-8", "surrogateescape") for part in parts))


def _read(raw: bytes) -> str:
    """The text, or '' if it is not known to be right."""
    try:
        found, facts, text = marshal.loads(raw)
        if found != _FORMAT or Facts(*facts).changed(os.environ):
            return ""
    except (EOFError, ValueError, TypeError):
        return ""
    return text if isinstance(text, str) else ""
