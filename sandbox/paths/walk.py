"""Opens a path one component at a time, from the root, and decides which symbolic links are followed.

Every directory on the way stays open, so the checked file is the one that is used. A user who can change a
link, or replace a directory by one, decides where a path leads. So links are followed only where nobody but
root (or, on request, the caller) could have made them. "all" is for callers that check the result instead.
"""

from __future__ import annotations

import errno
import os
import stat

from sandbox import look
from sandbox.speed.typed import Callable, Literal
from sandbox.speed.value import NamedTuple

LINK_LIMIT = 40  # as the kernel's MAXSYMLINKS

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

# Which links are followed. "system": root's, in directories that only root can change. "own": also the
# caller's own, unless it is root, for places that the user's environment names. "none": no link. "all": every
# link.
Follow = Literal["system", "own", "none", "all"]


class Link(NamedTuple):
    """A symbolic link and its target text."""

    path: str
    target: str


class Step(NamedTuple):
    name: str
    fd: int  # O_PATH
    status: os.stat_result
    system: bool  # only root can change this directory and those above it
    made: bool = False  # the walk has made it


class LinkRefused(Exception):
    """There is a link on the way that is not followed."""

    def __init__(self, link: str, target: str, rest: list[str]) -> None:
        super().__init__(f"{link} is a symbolic link to {target}, which users other than root could change")
        self.link = link
        self.target = target
        # For messages only: the owner of the link may have changed its target by then.
        self.leads_to = os.path.realpath("/".join((link, *rest)))


class TooManyLinks(Exception):
    """There are more than LINK_LIMIT links on the way."""

    def __init__(self) -> None:
        super().__init__(f"it leads through more than {LINK_LIMIT} links")


def walk(
    path: str,
    *,
    follow: Follow = "system",
    check: Callable[[list[Step], bool], None] | None = None,
    missing: list[str] | None = None,
    make: int | None = None,
    passed: list[Link] | None = None,
) -> list[Step]:
    """Open absolute `path` and every directory on the way, outermost first, with links resolved.

    `check`: called after each step with all steps so far, and with whether it was the last. `missing`:
    receives the components from the first missing one on. `make`: create missing directories with this mode;
    the last one gets 0700. `passed`: receives each link that was followed. Raises OSError, LinkRefused and
    TooManyLinks; the caller closes the steps.
    """
    look.note(path)
    steps: list[Step] = []
    todo = parts(path)
    links = 0
    try:
        steps.append(_step("/", None, system=True))
        while todo:
            name = todo.pop()
            if name == "..":
                if len(steps) > 1:
                    os.close(steps.pop().fd)
                continue
            try:
                step = _step(name, steps[-1].fd, system=steps[-1].system)
            except FileNotFoundError:
                if missing is not None and ".." not in todo:
                    missing += [name, *reversed(todo)]
                    return steps
                if make is None:
                    raise
                step = _make_step(name, steps[-1], make if todo else 0o700)
            if not stat.S_ISLNK(step.status.st_mode):
                steps.append(step)
                if check is not None:
                    check(steps, not todo)
                continue
            try:
                target = os.readlink("", dir_fd=step.fd)
            finally:
                os.close(step.fd)
            links += 1
            if links > LINK_LIMIT:
                raise TooManyLinks
            link = real_path(steps).rstrip("/") + "/" + name
            if not _is_followed(follow, step, steps[-1]):
                raise LinkRefused(link, target, todo[::-1])
            if passed is not None:
                passed.append(Link(link, target))
            if target.startswith("/"):
                while len(steps) > 1:
                    os.close(steps.pop().fd)
            todo += parts(target)
    except BaseException:
        unmake(steps)
        close(steps)
        raise
    return steps


def walk_below(folder: int, path: str, *, make: bool = False) -> list[Step]:
    """Open `path`, which is relative to the open `folder`, and each folder on the way, `folder` first.

    No link and no ".." is followed, because a plugin may change these folders at the same time. `make`:
    create missing folders, with mode 0700. Raises OSError; the caller closes the steps.
    """
    steps: list[Step] = []
    try:
        steps.append(_step(".", folder))
        for name in reversed(parts(path)):
            if name == "..":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
            steps.append(_make_step(name, steps[-1], 0o700) if make else _step(name, steps[-1].fd))
            if not stat.S_ISDIR(steps[-1].status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    except BaseException:
        unmake(steps)
        close(steps)
        raise
    return steps


def unmake(steps: list[Step]) -> None:
    """Remove the directories that the walk made, from the last one up, as long as they are empty and not
    replaced."""
    for above, step in zip(steps[-2::-1], steps[:0:-1], strict=True):
        if not step.made:
            return
        try:
            there = os.stat(step.name, dir_fd=above.fd, follow_symlinks=False)
            if (there.st_dev, there.st_ino) != (step.status.st_dev, step.status.st_ino):
                return
            os.rmdir(step.name, dir_fd=above.fd)
        except OSError:
            return


def resolve(path: str, *, follow: Follow = "system") -> str:
    """The real path of `path`. Components that do not exist yet stay as written.

    A relative path starts at the working directory. Raises as `walk` does.
    """
    missing: list[str] = []
    steps = walk(os.path.join(os.getcwd(), path), follow=follow, missing=missing)
    try:
        return "/" + "/".join([step.name for step in steps[1:]] + missing)
    finally:
        close(steps)


def close(steps: list[Step]) -> None:
    while steps:
        os.close(steps.pop().fd)


def parts(path: str) -> list[str]:
    """The components of a path, last first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def real_path(steps: list[Step]) -> str:
    return "/" + "/".join(step.name for step in steps[1:])


def _is_followed(follow: Follow, link: Step, above: Step) -> bool:
    owner = link.status.st_uid
    if follow == "all":
        return True
    if above.system and owner == 0:
        return follow != "none"
    # A link of root's in a directory that others can change may have been moved there.
    return follow == "own" and os.geteuid() != 0 and owner in (0, os.geteuid())


def _step(name: str, above: int | None, *, system: bool = False, made: bool = False) -> Step:
    """Open one component without following a link. `system`: whether only root can change the folder
    above."""
    fd = os.open(name, _STEP, dir_fd=above)
    try:
        status = os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and not status.st_mode & 0o022
    return Step(name, fd, status, ours and system, made)


def _make_step(name: str, above: Step, mode: int) -> Step:
    try:
        os.mkdir(name, 0o700, dir_fd=above.fd)
        made = True
    except FileExistsError:
        made = False  # another runner made it at the same moment
    step = _step(name, above.fd, system=above.system, made=made)
    if not made or mode == 0o700:
        return step
    try:
        # chmod, because mkdir applies the umask. By a descriptor, because the name may lead elsewhere now.
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=step.fd)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise OSError(errno.ESTALE, "it was replaced while it was being made", name)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
    except BaseException:
        os.close(step.fd)
        raise
    return step
