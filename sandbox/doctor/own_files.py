"""Files of the runner itself: the place of its plugins' state, and its own code."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping

from sandbox import CODE_ROOT
from sandbox.doctor.finding import Finding
from sandbox.identity.state import state_root, unwritable
from sandbox.paths.mounts import ancestry
from sandbox.policy.load import trust_fault, weak_spot


def state_directory(environ: Mapping[str, str]) -> Finding:
    """Whether state directories can be made, found by making a folder there. It is removed again."""
    root = state_root(environ)
    place = next((each for each in ancestry(root) if os.path.isdir(each)), "/")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".doctor-", dir=place))
    except OSError as error:
        known = unwritable(root, error)
        told, remedy = (str(known), known.hint) if known else (f"{root}: {error.strerror}", "")
        told = f"{told}: plugins that ask for state are not started"
        return Finding("state_directory", "degraded", told, remedy=remedy, cause="state_dir")
    return Finding("state_directory", "ok", f"{root} can be written")


def own_code(uid: int) -> list[Finding]:
    """For root: whether others can change the code that root runs here."""
    if uid != 0:
        return []
    packages = [os.path.join(CODE_ROOT, package) for package in ("runner", "sandbox")]
    doubtful = (module for package in packages for module in _doubtful_modules(package))
    for path in (*_starts(), *packages, *doubtful):
        if (fault := trust_fault(path, "it")) is not None:
            told = f"root runs a runner that others can change: {path}: {fault[0]}"
            remedy = f"install it where only root writes, for example pipx install --global; or {fault[1]}"
            return [Finding("own_code", "degraded", told, remedy=remedy, cause="own_code")]
    return [Finding("own_code", "ok", f"only root can change {CODE_ROOT} and its Python")]


def _starts() -> Iterator[str]:
    yield sys.executable
    yield from {sys.prefix, sys.base_prefix, *filter(os.path.isdir, sys.path)}
    if "/" in sys.argv[0] and os.path.isfile(sys.argv[0]):
        yield os.path.abspath(sys.argv[0])


def _doubtful_modules(folder: str, is_doubtful: bool = False) -> Iterator[str]:
    """Modules below a folder that somebody else may be able to change. Each folder and each file is looked at
    once: there are over a thousand, and trust_fault asks about all that is above each. `is_doubtful`: the
    folder is one of them."""
    for entry in _entries(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:  # Python removes what it compiles into, once it has its name
            continue
        doubt = is_doubtful or weak_spot(entry.path, status, "it") is not None
        if stat.S_ISDIR(status.st_mode):
            yield from _doubtful_modules(entry.path, doubt)
        elif entry.name.endswith((".py", ".so", ".pyc")) and (doubt or stat.S_ISLNK(status.st_mode)):
            yield entry.path


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
