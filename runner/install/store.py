"""Store: the packages that `runner install` fetched, each set of versions once. Nothing changes a set: cages
show it read-only, or in an overlay that takes the changes (sandbox/identity/overlay.py).

    ROOT/requests/KEY.json      a request, and the set and the program that it became; signatures of an image
    ROOT/sets/NAME/lock.json    every package of the set with its version and the digest of its archive
    ROOT/sets/NAME/files        the SHA-256 of every file
    ROOT/sets/NAME/tree/        the files; of an image they are hard links to those of ROOT/files
    ROOT/sets/NAME/image.json   of an image: how it is started
    ROOT/files/                 the contents of images (files.py)
    ROOT/lock                   held by the one process that changes the store
    ROOT/fetching               the path of the folder that the holder fetches into

NAME is the digest of the lock: requests that become the same versions share one set. A set is complete when
it has this name: it is written under another, and renamed. The store is the caller's own, and is refused if
others could change it, or a folder or link on the way to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from runner.install.content import BadContent
from runner.install.files import prune
from runner.install.request import Request
from sandbox import look
from sandbox.document.diagnostic import printable
from sandbox.files import write_all
from sandbox.identity import removal
from sandbox.identity.accounts import only_private_group_writes
from sandbox.paths.walk import LinkRefused, Step, TooManyLinks, close, real_path, walk
from sandbox.speed.value import NamedTuple

MOST_FILES = 300_000
MOST_BYTES = 4 << 30
DEEPEST = 200  # folders; of each, a descriptor is open while it is copied
_LONGEST_RECORD = 1 << 20
_NEW = "new-"  # begins the name of what is not complete
_TREE = "tree"
_SET_NAME = re.compile(r"[0-9a-f]{40}")
_SHOWN_SET = re.compile(r"/sets/([0-9a-f]{40})/tree")  # the store may be a mount of its own
_FETCHING = "fetching"
FETCH_PREFIX = "runner-install-"
SCRIPTS = " scripts"  # ends the runtime of a set whose install scripts have run


class StoreRefused(Exception):
    """The store cannot be used; the message says why, the hint what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Locked(NamedTuple):
    """A package of a set."""

    name: str  # with the packages it is inside of: "a/node_modules/b"
    version: str
    integrity: str  # of its archive: "sha512-…" (npm), "sha256:…" (Python)


class Lock(NamedTuple):
    registry: str
    runtime: str  # what the files are made for: "python3.11 aarch64"; empty: any
    packages: tuple[Locked, ...]

    @property
    def ran_scripts(self) -> bool:
        return self.runtime.endswith(SCRIPTS)

    @property
    def text(self) -> bytes:
        return json.dumps({**self._asdict(), "packages": sorted(map(list, self.packages))}, indent=1).encode()

    @property
    def name(self) -> str:
        return hashlib.sha256(self.text).hexdigest()[:40]


class Installed(NamedTuple):
    """A request, and what it became."""

    request: Request
    set_name: str
    program: tuple[str, ...]  # words that start it; those that begin with "tree/" are in the set
    versions: tuple[tuple[str, str], ...]  # of the packages that the request names
    # Of an image: what its registry had of signatures. Not checked: each launch that needs one does that.
    signatures: tuple[str, ...] = ()


class Store:
    def __init__(self, root: str) -> None:
        self.root = root

    # --- reading ------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Installed | None:
        """What was installed for exactly this request. None if there is nothing, or its set is gone. Raises
        StoreRefused."""
        if not require_own(os.path.join(self.root, "requests")):
            return None
        found = self._read(f"{request.key}.json")
        return found if found is not None and found.request == request and self.has(found.set_name) else None

    def all(self) -> list[Installed]:
        """Raises StoreRefused."""
        folder = os.path.join(self.root, "requests")
        if not require_own(folder):
            return []
        names = sorted(look.listdir(folder))
        return [found for name in names if name.endswith(".json") and (found := self._read(name)) is not None]

    def has(self, set_name: str) -> bool:
        """Raises StoreRefused."""
        return require_own(self.tree(set_name))

    def tree(self, set_name: str) -> str:
        """The folder with the files of a set."""
        return os.path.join(self.root, "sets", set_name, _TREE)

    def words(self, installed: Installed) -> tuple[str, ...]:
        """The words that start the program, with absolute paths."""
        tree = self.tree(installed.set_name)
        return tuple(
            os.path.join(tree, word.removeprefix("tree/")) if word.startswith("tree/") else word
            for word in installed.program
        )

    def lock_of(self, set_name: str) -> Lock | None:
        """None: it cannot be read."""
        try:
            with open(os.path.join(self.root, "sets", set_name, "lock.json"), "rb") as file:
                data = json.load(file)
            return Lock(data["registry"], data["runtime"], tuple(Locked(*each) for each in data["packages"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def changed(self, set_name: str) -> list[str]:
        """The files of a set that are not as they were fetched, or are missing or new."""
        folder = os.path.join(self.root, "sets", set_name)
        try:
            with open(os.path.join(folder, "files"), encoding="utf-8") as file:
                wanted = dict(line.rstrip("\n").split("  ", 1)[::-1] for line in file)
        except (OSError, ValueError):
            return ["the list of files"]
        lock = self.lock_of(set_name)
        damaged = [] if lock is not None and lock.name == set_name else ["lock.json"]
        now = dict(_listing(os.path.join(folder, _TREE)))
        return damaged + sorted(
            path for path in wanted.keys() | now.keys() if wanted.get(path) != now.get(path)
        )

    def _read(self, name: str) -> Installed | None:
        path = os.path.join(self.root, "requests", name)
        look.note_content(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                _require_own_status(path, os.fstat(fd))
                data = json.loads(file.read(_LONGEST_RECORD))
            asked = data["request"]
            request = Request(asked["registry"], tuple(asked["packages"]), asked["program"], asked["python"])
            versions = tuple((str(name), str(version)) for name, version in data["versions"])
            signatures = tuple(map(str, data.get("signatures", ())))
            found = Installed(
                request, str(data["set"]), tuple(map(str, data["program"])), versions, signatures
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None  # missing, or cut short by a full disk: it is installed again
        inside = all(os.path.normpath(word) == word for word in found.program if word.startswith("tree/"))
        return found if inside and _SET_NAME.fullmatch(found.set_name) else None

    # --- changing -----------------------------------------------------------------------------------------

    @contextmanager
    def changing(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Hold the store alone, and remove what an interrupted installation left. `tell`: called if another
        process holds it. Raises StoreRefused and OSError."""
        mask = os.umask(0o022)  # others must not be able to write what is made here
        try:
            self._make()
            fd = os.open(
                os.path.join(self.root, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            try:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    tell("Another installation is under way; waiting for it to end.")
                    fcntl.flock(fd, fcntl.LOCK_EX)
                if self._remove_unfinished():
                    prune(self.root)
                yield
            finally:
                os.close(fd)
        finally:
            os.umask(mask)

    def _make(self) -> None:
        for folder in (self.root, os.path.join(self.root, "requests"), os.path.join(self.root, "sets")):
            require_own(folder)  # what is there already, before something is made in it
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise StoreRefused(f"{printable(folder)} cannot be made: {error.strerror}") from None
            require_own(folder)

    def _remove_unfinished(self) -> bool:
        """Returns whether there was a set that is not complete."""
        unfinished = [name for name in os.listdir(os.path.join(self.root, "sets")) if name.startswith(_NEW)]
        for name in unfinished:
            remove_tree(os.path.join(self.root, "sets", name))
        self._remove_fetching()
        return bool(unfinished)

    def _remove_fetching(self) -> None:
        try:
            with open(os.path.join(self.root, _FETCHING), encoding="utf-8") as file:
                place = file.read(4096)
        except FileNotFoundError:
            return
        if os.path.basename(place).startswith(FETCH_PREFIX):
            remove_tree(place)
            if os.path.lexists(place):
                return  # the next one tries again
        os.unlink(os.path.join(self.root, _FETCHING))

    @contextmanager
    def fetching_into(self, place: str) -> Iterator[None]:
        """Make a folder `place` that is removed at the end; if this process is killed, by the next one that
        changes the store."""
        record = os.path.join(self.root, _FETCHING)
        _write(record, os.fsencode(place))
        try:
            os.mkdir(place, 0o700)
            yield
        finally:
            remove_tree(place)
            if not os.path.lexists(place):  # else the next process that changes the store removes it
                os.unlink(record)

    @contextmanager
    def new_set(self) -> Iterator[str]:
        """An empty folder for a set, which `add` takes. It is removed at the end if that did not."""
        new = os.path.join(self.root, "sets", f"{_NEW}{os.getpid()}")
        try:
            os.mkdir(new)
            yield new
        finally:
            remove_tree(new)

    def add(
        self,
        installed: Installed,
        lock: Lock,
        new: str,
        *,
        read_only: bool = False,
        listing: Iterable[tuple[str, str]] | None = None,
    ) -> None:
        """Take the set that was made in `new` into the store. `read_only`: its folders, also for their owner;
        a set that is shown in an overlay cannot be. `listing`: its files with their digests, if they are
        known. Raises OSError."""
        if not self.has(lock.name):
            tree = os.path.join(new, _TREE)
            _write(os.path.join(new, "lock.json"), lock.text)
            lines = "".join(f"{digest}  {path}\n" for path, digest in listing or _listing(tree))
            _write(os.path.join(new, "files"), lines.encode())
            if read_only:
                _make_read_only(tree)
            os.sync()  # a set that has its name is complete, also after a power cut
            os.rename(new, os.path.join(self.root, "sets", lock.name))
        self.record(installed)

    def record(self, installed: Installed) -> None:
        """Raises OSError."""
        data = {
            "request": installed.request._asdict(),
            "set": installed.set_name,
            "program": installed.program,
            "versions": installed.versions,
            "signatures": installed.signatures,
        }
        path = os.path.join(self.root, "requests", f"{installed.request.key}.json")
        _write(path + ".new", json.dumps(data, indent=1).encode())
        os.rename(path + ".new", path)

    def remove(self, request: Request) -> bool:
        """Forget a request, and remove its set if no other request has it. False: there was none."""
        found = self._read(f"{request.key}.json")
        if found is None:
            return False
        os.unlink(os.path.join(self.root, "requests", f"{request.key}.json"))
        self.remove_unused()
        return True

    def remove_unused(self) -> None:
        """Remove sets that no request has, apart from those that a running server has, and the files that
        only they had."""
        used = {each.set_name for each in self.all()}
        folder = os.path.join(self.root, "sets")
        unused = [name for name in os.listdir(folder) if name not in used]
        shown = _shown_sets() if unused else set()
        for name in unused:
            if name not in shown:
                gone = os.path.join(folder, f"{_NEW}gone-{os.getpid()}")
                os.rename(os.path.join(folder, name), gone)  # at once: a launch sees all of it or nothing
                remove_tree(gone)
        prune(self.root)


def _shown_sets() -> set[str]:
    """The sets that are mounted in a cage. Of processes of others nothing can be read, and they have none."""
    found: set[str] = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/mountinfo", encoding="utf-8", errors="replace") as file:
                    found.update(_SHOWN_SET.findall(file.read()))
            except OSError:
                continue
    return found


def require_own(path: str) -> bool:
    """Whether there is a folder at `path`. Raises StoreRefused if others than the caller and root could
    change it, or a folder or link on the way."""
    missing: list[str] = []

    def check(steps: list[Step], last: bool) -> None:
        status = steps[-1].status
        is_shared = bool(status.st_mode & stat.S_ISVTX) and not last  # as /tmp: others cannot replace ours
        _require_own_status(real_path(steps), status, is_shared=is_shared)

    try:
        steps = walk(path, follow="own", check=check, missing=missing)
    except (LinkRefused, TooManyLinks) as refused:
        raise StoreRefused(f"the store is not used: {refused}", "replace the link by a folder") from None
    except OSError as error:
        raise StoreRefused(f"{printable(path)} cannot be opened: {error.strerror}") from None
    is_folder = not missing and stat.S_ISDIR(steps[-1].status.st_mode)
    close(steps)
    return is_folder


def _require_own_status(path: str, status: os.stat_result, *, is_shared: bool = False) -> None:
    """Raises StoreRefused."""
    if status.st_uid not in (0, os.geteuid()):
        raise StoreRefused(
            f"{printable(path)} belongs to uid {status.st_uid}, who could change what is started from it",
            f"chown -h {os.geteuid()} {printable(path)}",
        )
    writers = status.st_mode & 0o022
    if writers == 0o020 and only_private_group_writes(path, status.st_gid):  # a home with umask 002
        return
    if writers and not is_shared:
        raise StoreRefused(
            f"{printable(path)} can be written by its group or by everybody, who could change what is started"
            " from it",
            f"chmod go-w {printable(path)}",
        )


def copy_tree(source: str, target: str) -> None:
    """Copy regular files, folders, and links that stay inside. Raises BadContent."""
    budget = [MOST_FILES, MOST_BYTES]
    links: list[str] = []
    try:
        root = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise BadContent("the client left no folder of packages") from None
    try:
        os.makedirs(target)
        _copy_folder(root, target, "", budget, links)
    finally:
        os.close(root)
    # In the copy, which nobody else can change. Not by the text of a link: it may lead through another link.
    inside = os.path.realpath(target) + "/"
    for path in links:
        if not os.path.realpath(os.path.join(target, path)).startswith(inside):
            text = os.readlink(os.path.join(target, path))
            raise BadContent(f"it has a link out of its folder: {printable(path)} -> {printable(text)}")


def _copy_folder(fd: int, target: str, below: str, budget: list[int], links: list[str]) -> None:
    with os.scandir(fd) as entries:
        found = sorted(entries, key=lambda each: each.name)
    for entry in found:
        path = f"{below}{entry.name}"
        if not entry.name.isprintable() or len(os.fsencode(path)) > 3000:
            raise BadContent(f"it has a file with an unusual name: {printable(path)[:200]}")
        budget[0] -= 1
        if budget[0] < 0:
            raise BadContent(f"it has more than {MOST_FILES} files")
        to = os.path.join(target, entry.name)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.name, dir_fd=fd), to)
            links.append(path)
        elif entry.is_dir(follow_symlinks=False):
            if path.count("/") >= DEEPEST:
                raise BadContent(f"its folders are more than {DEEPEST} deep")
            inner = os.open(
                entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd
            )
            try:
                os.mkdir(to)
                _copy_folder(inner, to, path + "/", budget, links)
            finally:
                os.close(inner)
        elif entry.is_file(follow_symlinks=False):
            _copy_file(fd, entry.name, to, budget, path)
        else:
            raise BadContent(f"it has a file that is no file: {printable(path)}")


def _copy_file(fd: int, name: str, to: str, budget: list[int], path: str) -> None:
    source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    try:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise BadContent(f"it has a file that is no file: {printable(path)}")
        # Writable by its owner, who is nobody's plugin: a server may change what it sees of them in its cage.
        mode = 0o755 if status.st_mode & 0o111 else 0o644
        new = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            while data := os.read(source, 1 << 18):
                budget[1] -= len(data)
                if budget[1] < 0:
                    raise BadContent(f"its files have more than {MOST_BYTES >> 30} GiB")
                write_all(new, data)
            os.fchmod(new, mode)
        finally:
            os.close(new)
    finally:
        os.close(source)


def _listing(tree: str) -> Iterator[tuple[str, str]]:
    """Every file and link with its digest. A link has that of its text."""
    for folder, names, files in os.walk(tree, onerror=_fail):
        names.sort()
        for name in sorted((*files, *(each for each in names if os.path.islink(os.path.join(folder, each))))):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                digest = link_digest(os.readlink(path))
            else:
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield os.path.relpath(path, tree), digest


def link_digest(target: str) -> str:
    return "link:" + hashlib.sha256(os.fsencode(target)).hexdigest()


def _fail(error: OSError) -> None:
    """A folder that cannot be listed is no empty one."""
    raise error


def _make_read_only(tree: str) -> None:
    for folder, _, _ in os.walk(tree, onerror=_fail):
        os.chmod(folder, 0o555)


def remove_tree(path: str) -> None:
    """Remove a file or a tree, its read-only folders too, however deep it is. It is no error if there is
    none."""
    folder, name = os.path.split(path)
    with suppress(OSError):
        parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                removal.remove_tree(name, parent, status.st_uid)
            else:
                os.unlink(name, dir_fd=parent)
        finally:
            os.close(parent)


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
