"""What people were told about the last starts of one server: `runner advice` shows it.

A host keeps what the runner tells about a server in a log of its own, which is hard to find. So every start
of a wrapped entry, and a gateway, keeps its last lines here too. A plugin chooses parts of these lines: they
are escaped and bounded, and the values of its variables are left out. If nothing can be kept, the start goes
on without.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from runner.approvals.files import locked_folder, open_folder, read_bytes
from runner.approvals.record import ApprovalsUnusable
from runner.protocol.secrets import MARK, Secrets
from sandbox.cache import fingerprint
from sandbox.document.diagnostic import cut, printable
from sandbox.files import replace_file
from sandbox.identity.state import users_state
from sandbox.speed.value import NamedTuple

_FOLDER = "advice"  # beside the caller's other state; no plugin is given that folder
_ENDING = ".json"
_WHAT, _FOLDER_WHAT = "the advice", "the folder of advice"
_VERSION = 1
_LOCK_SECONDS = 0.2  # a plugin's clocks run meanwhile. What is not written now is written with the next line
_STDERR_LINES, _STDERR_WIDTH = 8, 300
_SHORTEST = 4

MOST_STARTS = 5  # of one server
MOST_LINES = 30  # of one start, the last ones
MOST_CHARACTERS = 1000  # of one line
MOST_FILES = 200  # servers; those that were told nothing for longest go first
_MOST_BYTES = 1 << 20  # ASCII: six bytes for a character at most

# Values that advice has to name: a path, and a host with its port. Some tokens begin with a slash, too, or
# have dots: a part that looks drawn at random is no folder's name, and the last part of a host's is a word.
_PLACE = re.compile(
    r"[/~][^\n]*"
    r"|(?:localhost|(?:[a-z0-9-]{1,63}\.)+[a-z]{2,24}|(?:[0-9]{1,3}\.){3}[0-9]{1,3})(?::[0-9]{1,5})?"
)
_RANDOM = re.compile(r"(?:/|\A~)(?=[^/]*[a-z])(?=[^/]*[A-Z])(?=[^/]*[0-9])[^/]{16}")
_PASSWORD = re.compile(r"://[^/@\s:]*:([^/@\s]+)@")


class ToldStart(NamedTuple):
    """What was told about one start."""

    time: float  # of the last line, in seconds since 1970
    process: int  # the runner's
    lines: tuple[str, ...]


class AdviceFile:
    """The file of one server, and this start of it."""

    def __init__(self, identity: str, environ: Mapping[str, str]) -> None:
        """`identity`: of runner/approvals/tools.py."""
        self._folder = os.path.join(users_state(environ), _FOLDER)
        self._name = fingerprint(identity.encode("utf-8", "surrogatepass"))[:32] + _ENDING
        self._lines: list[str] = []
        self._values: frozenset[str] = frozenset()
        self._secrets = Secrets()
        self._short: re.Pattern[str] | None = None  # values that are too short for Secrets
        self._written: ToldStart | None = None  # this start, as it was written last

    @property
    def path(self) -> str:
        return os.path.join(self._folder, self._name)

    def read(self) -> tuple[ToldStart, ...]:
        """The last starts, the latest last. Raises ApprovalsUnusable if the file cannot be used."""
        if not os.path.lexists(self.path):
            return ()
        remedy = f"remove it (rm {self.path})"
        raw = read_bytes(self.path, _WHAT, _MOST_BYTES, remedy)
        try:
            data = json.loads(raw)
            if data["version"] != _VERSION:
                raise ValueError
            return tuple(
                ToldStart(float(each["time"]), int(each["process"]), tuple(map(str, each["lines"])))
                for each in data["starts"]
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ApprovalsUnusable(f"{_WHAT} {self.path} is damaged", remedy) from None

    def conceal(self, values: Iterable[str]) -> None:
        """Leave these values out of the lines that follow. Those of less than four characters stay: they are
        words like "1"."""
        found = {each for value in values for each in (value, *_PASSWORD.findall(value))}
        found = {each for each in found if len(each) >= _SHORTEST and not _is_place(each)}
        if found <= self._values:
            return
        self._values |= found
        self._secrets = Secrets({str(at): each for at, each in enumerate(sorted(self._values))})
        if short := [re.escape(each) for each in sorted(self._values) if len(each) < len(MARK)]:
            self._short = re.compile(rf"(?<!\w)(?:{'|'.join(short)})(?!\w)")

    def add(self, lines: Iterable[str], stderr: str = "") -> None:
        self.take(lines, stderr)
        self.write()

    def take(self, lines: Iterable[str], stderr: str = "") -> list[str]:
        """Lines to keep of this start, and the last ones of the plugin's stderr. Returns them as they are
        kept. A line that is repeated moves to the end."""
        told = [each for text in lines for each in self._secrets.hide(text).split("\n")]
        told = [cut(printable(line), MOST_CHARACTERS) for line in (*told, *self._stderr_lines(stderr))]
        self._lines = [*(each for each in self._lines if each not in told), *dict.fromkeys(told)][
            -MOST_LINES:
        ]
        return told

    def write(self) -> None:
        if self._lines and os.path.isabs(self._folder):  # else HOME is no path
            with suppress(OSError, ApprovalsUnusable):
                self._write()

    def _stderr_lines(self, text: str) -> list[str]:
        """Marked as the plugin's. Nothing is cut before it was searched for values."""
        text = self._secrets.hide(text)
        text = text if self._short is None else self._short.sub(MARK, text)
        lines = [line for line in text.splitlines() if line.strip()]
        return [f"| {line[-_STDERR_WIDTH:]}" for line in lines[-_STDERR_LINES:]]

    def _write(self) -> None:
        with locked_folder(self._folder, _FOLDER_WHAT, seconds=_LOCK_SECONDS):
            is_new = not os.path.lexists(self.path)
            try:
                others = [each for each in self.read() if each != self._written]
            except ApprovalsUnusable:
                others = []
            start = ToldStart(time.time(), os.getpid(), tuple(self._lines))
            starts = [each._asdict() for each in (*others, start)[-MOST_STARTS:]]
            raw = json.dumps({"version": _VERSION, "starts": starts}).encode()
            with open_folder(self._folder) as directory:
                replace_file(directory, self._name, raw)
                self._written = start
                if is_new:
                    _remove_oldest(directory)


def _is_place(value: str) -> bool:
    return _PLACE.fullmatch(value) is not None and (not _RANDOM.search(value) or os.path.lexists(value))


def _remove_oldest(directory: int) -> None:
    """Keep the newest files of the folder."""
    with os.scandir(directory) as entries:
        found = [
            (each.stat(follow_symlinks=False).st_mtime, each.name)
            for each in entries
            if each.name.endswith(_ENDING)
        ]
    for _, name in sorted(found)[:-MOST_FILES]:
        os.unlink(name, dir_fd=directory)
