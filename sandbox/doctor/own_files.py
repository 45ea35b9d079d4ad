"""Files of the runner itself: the place of its plugins' state, and its own code."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from sandbox import CODE_ROOT
from sandbox.cell.overlay import OverlaidFolder, add_parts, overlay_orders
from sandbox.doctor.finding import Finding
from sandbox.doctor.rehearsal import describe_run
from sandbox.doctor.trial import Note, Run, in_child, run_spawned
from sandbox.identity import removal
from sandbox.identity.state import state_root, unwritable
from sandbox.paths.mounts import ancestry
from sandbox.policy.load import trust_fault, weak_spot
from sandbox.spawn.order import OVERLAY, SpawnError, folder_path


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


def package_overlays(environ: Mapping[str, str], uid: int | None) -> Finding:
    """Whether a plugin can change its stored package in an overlay, found by mounting one where states are.
    `uid`: that root changes to; None for an ordinary user."""
    place = next((each for each in ancestry(state_root(environ)) if os.path.isdir(each)), "/")
    try:
        made = tempfile.mkdtemp(prefix=".doctor-", dir=place)
    except OSError:
        return Finding("package_overlays", "info", f"not tried: {place} cannot be written", cause="state_dir")
    above = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        run = _try_overlay(made, uid)
    finally:
        removal.remove_tree(os.path.basename(made), above, os.geteuid())
        os.close(above)
    if run.worked:
        told = "a program wrote into a read-only folder, by an overlay of its own"
        return Finding("package_overlays", "ok", told)
    why = describe_run(run) if run.stage != OVERLAY else f"the kernel says: {os.strerror(run.number)}"
    told = f"programs of npx and uvx servers see their packages read-only: no overlay can be mounted: {why}"
    remedy = (
        "have them write to ${state_dir}, by a variable or an option of theirs; or use Linux 5.11 with state "
    )
    remedy += "directories on ext4, xfs or btrfs"
    return Finding("package_overlays", "info", told, remedy=remedy, cause="overlay")


def _try_overlay(made: str, uid: int | None) -> Run:
    lower, changes = os.path.join(made, "lower"), os.path.join(made, "changes")
    for folder, mode in (
        (lower, 0o755),
        (changes, 0o711),
        (f"{changes}/upper", 0o755),
        (f"{changes}/work", 0o755),
    ):
        os.mkdir(folder)
        os.chmod(folder, mode)
        if uid is not None and folder.startswith(f"{changes}/"):
            os.chown(folder, uid, uid)
    mounts: dict[str, tuple[int, bool]] = {}
    binds: dict[str, tuple[int, str]] = {}
    with ExitStack() as stack:
        opened = []
        for path in (lower, changes):
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            opened.append((fd, path))
        tried = OverlaidFolder("/trial", opened[0], opened[1], "work")
        plugin = None if uid is None else (uid, uid)

        def rehearse(note: Note) -> None:
            with ExitStack() as inner:
                add_parts(inner, [tried], plugin, {}, {})

        if ended := in_child(rehearse).signal:  # a seccomp filter may kill who makes a user namespace
            return Run(signal=ended)
        try:
            add_parts(stack, [tried], plugin, mounts, binds)
        except SpawnError as refused:
            return Run(stage=refused.stage, number=refused.errno)
        numbers = [*mounts, *binds]
        return run_spawned(
            ("/bin/sh", "-c", f": > {folder_path(len(numbers))}/new"),
            uid=uid,
            mounts=tuple(mounts.values()),
            binds=tuple(binds.values()),
            overlays=overlay_orders([tried], numbers),
        )


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
