"""Folders with layers over them, made by hand."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.contracts.registry import all_host_places
from sandbox.paths.guarded import guarded_table
from sandbox.staged.layer import Judge, changes_of
from sandbox.staged.store import OpenChangeset, StagedFolder, open_changeset

JUDGE = Judge(
    guarded_table(all_host_places().project), lambda path: "denied" if path.endswith("/.ssh") else ""
)


class Staged:
    """A folder with a layer over it."""

    def __init__(self, opened: OpenChangeset) -> None:
        self.changeset = opened.changeset
        self.folder = Path(opened.changeset.folders[0].real)
        self.layer = Path(opened.changeset.layer(0))

    def changes(self) -> list[tuple[str, str, str]]:
        return [(each.act, each.path, each.rule) for each in changes_of(self.changeset, JUDGE)]

    def removes(self, path: str) -> None:
        os.mknod(self.layer / path, stat.S_IFCHR | 0o000, 0)


@contextmanager
def stage(home: Path, owner: int | None = None, roots: tuple[str, ...] = ()) -> Iterator[Staged]:
    """A folder with some files, and an empty layer. The store is not root's, which all of the machine has.
    `owner`: of the folder; `roots`: files in it that are root's all the same."""
    folder = home / "folder"
    for name in ("sub/deep/x", "sub/y", "a", "b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"old {name}\n")
    (folder / "to_a").symlink_to("a")
    if owner is not None:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)
    for name in roots:
        os.chown(folder / name, 0, 0)
    _let_the_clock_go_on(folder)
    ids = (os.geteuid(), os.getegid()) if owner is None else (owner, owner)
    status = folder.stat()
    known = StagedFolder(str(folder), status.st_dev, status.st_ino, ids)
    with open_changeset(str(home / "store"), "demo", [known], os.geteuid(), os.getegid()) as opened:
        yield Staged(opened)


def _let_the_clock_go_on(folder: Path) -> None:
    """What is there was changed before the changeset begins, also by a clock that ticks every 10 ms."""
    newest = max(path.lstat().st_ctime_ns for path in (folder, *folder.rglob("*")))
    clock = folder.with_name("clock")
    while True:
        clock.touch()
        if clock.stat().st_ctime_ns > newest:
            break
    clock.unlink()


def file(path: str, text: str = "new\n", mode: int = 0o644) -> Callable[[Staged], None]:
    def act(staged: Staged) -> None:
        place = staged.layer / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    return act


def removed(*paths: str) -> Callable[[Staged], None]:
    def act(staged: Staged) -> None:
        for path in paths:
            (staged.layer / path).parent.mkdir(parents=True, exist_ok=True)
            staged.removes(path)

    return act


def folder(path: str, mode: int = 0o755, **attributes: bytes) -> Callable[[Staged], None]:
    def act(staged: Staged) -> None:
        place = staged.layer / path
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(mode)
        for name, value in attributes.items():
            os.setxattr(place, f"user.overlay.{name}", value)

    return act


def link(path: str, target: str) -> Callable[[Staged], None]:
    def act(staged: Staged) -> None:
        (staged.layer / path).parent.mkdir(parents=True, exist_ok=True)
        (staged.layer / path).symlink_to(target)

    return act
