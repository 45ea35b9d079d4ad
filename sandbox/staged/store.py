"""The store of changesets: for each launch with staged writes, what it changed, until a person decides.

    STORE/ID/record     what ran, when, and over which folders
    STORE/ID/lock       held, shared, as long as a process of its cage lives; exclusively while it is applied
    STORE/ID/N/upper    what was changed in folder N, as overlayfs keeps it; it belongs to the plugin
    STORE/ID/N/work     what overlayfs needs while it is mounted
    STORE/ID/folders    which folders they were, at the end of the launch
    STORE/ID/journal    of an application: what a crash would leave in the folder (journal.py)

STORE is among the runner's own folders, which no plugin is shown. A changeset in which nothing was changed is
removed when its launch ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from sandbox.files import replace_file
from sandbox.identity.removal import remove_tree
from sandbox.identity.state import state_root
from sandbox.paths.walk import LinkRefused, TooManyLinks, close, walk

UPPER, WORK = "upper", "work"
MOST_KEPT = 100  # changesets that wait. Each is bounded by the disk limit of its launch
_RECORD, _LOCK, _FOLDERS = "record", "lock", "folders"
_NEW, _GONE = ".new-", ".removed-"  # before an id: not yet complete, and being removed
_ID_BYTES = 4
_MAKING_SECONDS = 60
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST_RECORD, _LONGEST_FOLDERS = 1 << 20, 64 << 20
_LONGEST_TITLE = 200


class StagingRefused(Exception):
    """A changeset cannot be made, found or used; the message says why, the hint what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class ChangesetInUse(StagingRefused):
    def __init__(self, name: str) -> None:
        told = f"{name} is still being written, or another program applies it"
        super().__init__(told, "stop what runs first: its changes are complete when it has ended")


class StagedFolder(NamedTuple):
    """A folder of the host that a launch could change in its layer."""

    real: str
    device: int
    inode: int
    owner: tuple[int, int]  # of what is new in the folder: who the plugin's uid stands for


class Changeset(NamedTuple):
    """The changes of one launch."""

    id: str
    path: str
    title: str  # what ran
    began: int  # nanoseconds since 1970, by the clock of files' change times
    uid: int  # of the plugin, whom its files belong to
    folders: tuple[StagedFolder, ...]

    def layer(self, number: int) -> str:
        return os.path.join(self.path, str(number), UPPER)

    @property
    def journal(self) -> str:
        return os.path.join(self.path, "journal")


class OpenLayer(NamedTuple):
    """Where overlayfs keeps the changes of one folder: descriptors and names of one launch."""

    path: str  # of `folder`
    folder: int  # has the two below
    upper: int
    work: str
    lock: int


class OpenChangeset:
    """A changeset while its launch runs."""

    def __init__(self, changeset: Changeset, layers: tuple[OpenLayer, ...]) -> None:
        self.changeset, self.layers = changeset, layers
        self.is_kept = False  # whether something was changed; known when the launch has ended


def store_path(environ: Mapping[str, str]) -> str:
    return os.path.join(os.path.dirname(state_root(environ)), "staged")


# --- of a launch --------------------------------------------------------------------------------------------


@contextmanager
def open_changeset(
    store: str, title: str, folders: Sequence[StagedFolder], uid: int, gid: int
) -> Iterator[OpenChangeset]:
    """Make a changeset for a plugin with this uid. It is complete when the context ends. Raises
    StagingRefused."""
    with ExitStack() as held:
        try:
            above = _open_store(store, held)
            opened = _make(above, store, title[:_LONGEST_TITLE], folders, (uid, gid), held)
        except (OSError, LinkRefused, TooManyLinks) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            told = f"changes cannot be kept in {store}: {why}"
            raise StagingRefused(told, "let the runner write there, on a disk with room") from None
        try:
            yield opened
        finally:
            opened.is_kept = _close(above, opened)


def _make(
    above: int,
    store: str,
    title: str,
    folders: Sequence[StagedFolder],
    plugin: tuple[int, int],
    held: ExitStack,
) -> OpenChangeset:
    _sweep(above)
    waiting = sum(map(_is_id, _names(above)))
    if waiting >= MOST_KEPT:
        told = f"{waiting} changesets wait, and at most {MOST_KEPT} are kept"
        raise StagingRefused(told, "`runner changes` lists them: apply or discard some")
    name = os.urandom(_ID_BYTES).hex()
    draft = _NEW + name
    here = _make_folder(draft, above, held)
    try:
        # The cell's init goes through it with the plugin's uid. Nobody else can: nobody enters the store.
        os.chmod(draft, 0o711, dir_fd=above)
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=here)
        held.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
        layers = []
        for number in range(len(folders)):
            folder = _make_folder(str(number), here, held)
            os.chmod(str(number), 0o711, dir_fd=here)
            upper = _make_folder(UPPER, folder, held, plugin)
            _require_attributes(upper, store)
            _make_folder(WORK, folder, held, plugin)
            path = os.path.join(store, name, str(number))
            layers.append(OpenLayer(path, folder, upper, WORK, lock))
            # The top of the layer stands for the folder's own top.
            os.chmod(f"/proc/self/fd/{upper}", os.stat(folders[number].real).st_mode & 0o777 | 0o700)
        began = os.fstat(lock).st_ctime_ns
        changeset = Changeset(name, os.path.join(store, name), title, began, plugin[0], tuple(folders))
        document = {"title": title, "began": began, "uid": plugin[0], "folders": folders}
        replace_file(here, _RECORD, json.dumps(document).encode())
        os.rename(draft, name, src_dir_fd=above, dst_dir_fd=above)
    except BaseException:
        with suppress(OSError):
            remove_tree(draft, above, os.geteuid())
        raise
    return OpenChangeset(changeset, tuple(layers))


def _make_folder(name: str, above: int, held: ExitStack, owner: tuple[int, int] | None = None) -> int:
    os.mkdir(name, 0o700, dir_fd=above)
    fd = os.open(name, _FOLDER, dir_fd=above)
    held.callback(os.close, fd)
    if owner is not None and owner[0] != os.geteuid():
        os.chown(name, *owner, dir_fd=above, follow_symlinks=False)
    return fd


def _require_attributes(folder: int, store: str) -> None:
    """Without attributes of users overlayfs mounts, and fails when a folder is replaced. Raises
    StagingRefused."""
    path, name = f"/proc/self/fd/{folder}", "user.runner"
    try:
        os.setxattr(path, name, b"1")
        os.removexattr(path, name)
    except OSError as error:
        told = f"changes cannot be kept in {store}: its filesystem keeps no attributes of users"
        hint = "ext4, xfs and btrfs do, and tmpfs since Linux 6.6: XDG_STATE_HOME names another place"
        raise StagingRefused(f"{told} ({error.strerror})", hint) from None


def _close(above: int, opened: OpenChangeset) -> bool:
    """Remove what is not needed any more, and everything if nothing was changed. Returns whether something
    is kept."""
    changeset, changed = opened.changeset, False
    for layer in opened.layers:
        with suppress(OSError):
            remove_tree(layer.work, layer.folder, changeset.uid)
        try:
            changed |= bool(os.listdir(f"/proc/self/fd/{layer.upper}"))
        except OSError:  # it took its own permission away: somebody has to look
            changed = True
    if not changed:
        with suppress(OSError):
            _remove(changeset.id, above)
    return changed


def write_folders(changeset: Changeset, found: Sequence[Mapping[str, int]]) -> None:
    """Note which folders they are that a layer has too, by the number of the staged folder: somebody may put
    others in their place. Raises OSError."""
    here = os.open(changeset.path, _FOLDER)
    try:
        replace_file(here, _FOLDERS, json.dumps(found).encode())
    finally:
        os.close(here)


def read_folders(changeset: Changeset) -> Mapping[int, Mapping[str, int]]:
    """What was noted at the end of the launch, by the number of the folder; nothing if it was killed."""
    try:
        with open(os.path.join(changeset.path, _FOLDERS), "rb") as file:
            return dict(enumerate(json.loads(file.read(_LONGEST_FOLDERS))))
    except (OSError, ValueError, TypeError):
        return {}


def _remove(name: str, above: int) -> None:
    """At once for everybody who looks, however long it takes."""
    gone = f"{_GONE}{name}"
    os.rename(name, gone, src_dir_fd=above, dst_dir_fd=above)
    with suppress(FileNotFoundError):  # a launch that sweeps was faster
        remove_tree(gone, above, os.geteuid())


def _sweep(above: int) -> None:
    """Remove what was killed while it was made or removed."""
    for name in _names(above):
        with suppress(OSError):
            if name.startswith(_GONE):
                remove_tree(name, above, os.geteuid())
            elif name.startswith(_NEW) and _is_abandoned(name, above):
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                lock = os.open(f"{name}/{_LOCK}", flags, 0o600, dir_fd=above)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(name, above, os.geteuid())
                finally:
                    os.close(lock)


# --- afterwards ---------------------------------------------------------------------------------------------


def _is_abandoned(name: str, above: int) -> bool:
    """A launch takes the lock a moment after it has made the folder."""
    return os.stat(name, dir_fd=above).st_mtime < time.time() - _MAKING_SECONDS


def list_changesets(store: str) -> list[Changeset]:
    """Those that are kept, the oldest first. One whose record is incomplete, because its launch was killed
    before it began, is left out."""
    found = []
    with ExitStack() as held:
        try:
            above = _open_store(store, held, make=False)
        except (OSError, LinkRefused, TooManyLinks):
            return []
        for name in filter(_is_id, _names(above)):
            with suppress(OSError, ValueError, TypeError, KeyError):
                found.append(_read(store, name))
    return sorted(found, key=lambda each: each.began)


def find_changeset(known: Sequence[Changeset], start: str) -> Changeset | None:
    """The changeset whose id begins with `start`. Raises StagingRefused if there are several."""
    found = [each for each in known if each.id.startswith(start)]
    if len(found) > 1:
        ids = ", ".join(each.id for each in found)
        raise StagingRefused(f"{start} could be {ids}", "write more of the id")
    return found[0] if found else None


@contextmanager
def locked(changeset: Changeset) -> Iterator[None]:
    """Keep others from applying or removing it meanwhile. Raises ChangesetInUse if a cage writes to it."""
    try:
        lock = os.open(os.path.join(changeset.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StagingRefused(f"{changeset.id} cannot be used: {error.strerror}", "is it gone?") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ChangesetInUse(changeset.id) from None
        if os.fstat(lock).st_nlink == 0:
            raise StagingRefused(
                f"{changeset.id} was removed a moment ago", "`runner changes` lists the others"
            )
        yield
    finally:
        os.close(lock)


def in_use(changeset: Changeset) -> bool:
    try:
        with locked(changeset):
            return False
    except ChangesetInUse:
        return True
    except StagingRefused:
        return False


def remove_changeset(changeset: Changeset) -> None:
    """Remove it with everything in it. Within `locked`. Raises OSError."""
    above = os.open(os.path.dirname(changeset.path), _FOLDER)
    try:
        _remove(changeset.id, above)
    finally:
        os.close(above)


def _read(store: str, name: str) -> Changeset:
    """Raises OSError, ValueError, TypeError and KeyError."""
    path = os.path.join(store, name)
    fd = os.open(os.path.join(path, _RECORD), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        document = json.loads(file.read(_LONGEST_RECORD))
    folders = tuple(
        StagedFolder(real, device, inode, (owner[0], owner[1]))
        for real, device, inode, owner in document["folders"]
    )
    return Changeset(name, path, document["title"], document["began"], document["uid"], folders)


def _open_store(store: str, held: ExitStack, *, make: bool = True) -> int:
    """Raises OSError, LinkRefused and TooManyLinks."""
    steps = walk(store, follow="own", make=0o755 if make else None)
    held.callback(close, steps)
    return steps[-1].fd


def _names(folder: int) -> list[str]:
    return os.listdir(f"/proc/self/fd/{folder}")


def _is_id(name: str) -> bool:
    return len(name) == 2 * _ID_BYTES and not set(name) - set("0123456789abcdef")
