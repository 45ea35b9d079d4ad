"""The users that are measured: the current one and, if that is root, an ordinary user as well."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sandbox.speed.value import NamedTuple

USER_UID = 54321  # no account has it
RUNNER = str(Path(sys.executable).with_name("runner"))


class Unable(Exception):
    """Something cannot be measured, because it does not work here."""


class Caller(NamedTuple):
    name: str
    uid: int
    folder: str  # for plugins and their files; every user may enter it
    home: str

    def start(
        self, argv: Sequence[str], variables: Mapping[str, str] = MappingProxyType({}), **popen: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process as this user. Without setpriv, whose own start would be measured too."""
        if self.uid != os.geteuid():
            popen.update(user=self.uid, group=self.uid, extra_groups=())
        return subprocess.Popen(argv, env={**self.environ(), **variables}, cwd="/", **popen)

    def environ(self) -> Mapping[str, str]:
        """A fresh environment: PYTHONDONTWRITEBYTECODE and similar variables change what is measured."""
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": self.home,
            "XDG_CACHE_HOME": f"{self.home}/cache",
            "XDG_STATE_HOME": f"{self.home}/state",
        }

    def output_of(self, argv: Sequence[str]) -> str:
        """The stdout of a command. Raises Unable if it fails."""
        with self.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate()
        if process.returncode:
            raise failed(argv, process.returncode, err)
        return out.decode()

    def own(self, name: str) -> str:
        """Make a folder below `folder` that belongs to this user. Returns its path."""
        path = Path(self.folder, name)
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(path, self.uid, self.uid)
        return str(path)

    def write(self, name: str, text: str) -> str:
        """Write a world-readable file below `folder`. Returns its path."""
        path = Path(self.folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(self.folder).parents[:-1]:
            Path(self.folder, parent).chmod(0o755)
        path.write_text(text)
        path.chmod(0o644)
        return str(path)


def reason(message: str) -> str:
    """The last line of the message, without the command and its traceback."""
    lines = [line.strip(" |+-") for line in message.splitlines()]  # drawn around a group of exceptions
    return next((line for line in reversed(lines) if line), message)


def failed(argv: Sequence[str], status: int, errors: bytes) -> Unable:
    return Unable(f"{' '.join(argv)} ended with {status}:\n{errors.decode(errors='replace')}")


@contextmanager
def callers() -> Iterator[list[Caller]]:
    # Not in TMPDIR: the plugin's uid must be able to reach its own folder.
    top = Path(tempfile.mkdtemp(prefix="runner-bench.", dir="/tmp"))
    try:
        top.chmod(0o755)
        mine = "root" if os.geteuid() == 0 else "ordinary user"
        found = [_caller(top, mine, os.geteuid())]
        if os.geteuid() == 0:
            other = _caller(top, "ordinary user", USER_UID)
            found[0].output_of([RUNNER, "--version"])  # writes the byte code, which the other user may not
            if _can_run(other):
                found.append(other)
            else:
                print(f"bench: an ordinary user cannot run {RUNNER}: only root is measured", file=sys.stderr)
        yield found
    finally:
        shutil.rmtree(top)


def _caller(top: Path, name: str, uid: int) -> Caller:
    folder, home = top / f"for-{uid}", top / f"home-{uid}"
    for path, mode in ((folder, 0o755), (home, 0o700)):
        path.mkdir()
        path.chmod(mode)
    os.chown(home, uid, uid if uid != os.geteuid() else os.getegid())
    return Caller(name, uid, str(folder), str(home))


def _can_run(caller: Caller) -> bool:
    try:
        caller.output_of([RUNNER, "--version"])
    except (OSError, subprocess.SubprocessError, Unable):
        return False
    return True
