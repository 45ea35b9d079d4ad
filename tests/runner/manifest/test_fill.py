"""A file that a manifest names is read only where that is allowed, also if names change meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.manifest.fill import NamedFileRefused, read_named


class Names:
    """A project with a link, a file that plugins may read, one that they may not."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "project"
        self.allowed = folder / "allowed" / "text"
        self.other = folder / "allowed" / "other"
        self.secret = folder / "secret" / "text"
        self.own = self.base / "text"
        for path in (self.allowed, self.other, self.secret, self.own):
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{path.parent.name} {path.name}")
        self.link = self.base / "link"
        self.link.symlink_to(self.allowed)

    def lead(self, target: Path) -> None:
        fresh = self.base / "fresh"
        fresh.symlink_to(target)
        os.replace(fresh, self.link)

    def may_read(self, path: str) -> bool:
        return path.startswith(f"{self.allowed.parent}/")

    def read(self, path: Path, may_read: Callable[[str], bool], *, own: bool = False) -> str:
        return read_named(str(path), str(self.base), (), own=own, may_read=may_read)


@pytest.fixture
def names(tmp_path: Path) -> Names:
    return Names(tmp_path)


def _swapping(names: Names, target: Path) -> Callable[[str], bool]:
    """What the policy says, and right after the first answer the link leads to `target`."""
    asked: list[str] = []

    def may_read(path: str) -> bool:
        asked.append(path)
        answer = names.may_read(path)
        if len(asked) == 1:
            names.lead(target)
        return answer

    return may_read


def test_a_link_that_is_swapped_after_the_question_reads_nothing(names: Names) -> None:
    with pytest.raises(NamedFileRefused, match="a link leads out of"):
        names.read(names.link, _swapping(names, names.secret))


def test_the_controls_of_the_swap(names: Names) -> None:
    assert names.read(names.link, names.may_read) == "allowed text"
    # Swapped for something that may be read as well.
    assert names.read(names.link, _swapping(names, names.other)) == "allowed other"
    names.lead(names.allowed)
    assert names.read(names.link, _swapping(names, names.own)) == "project text"
    # The user's own configuration may name any file.
    names.lead(names.secret)
    assert names.read(names.link, names.may_read, own=True) == "secret text"


def test_a_link_out_of_the_project_reads_nothing(names: Names) -> None:
    names.lead(names.secret)
    with pytest.raises(NamedFileRefused, match="a link leads out of"):
        names.read(names.link, names.may_read)
    with pytest.raises(NamedFileRefused, match="it is outside of"):
        names.read(names.secret, names.may_read)
    assert names.read(names.allowed, names.may_read) == "allowed text"  # the controls
    assert names.read(names.own, names.may_read) == "project text"


def test_a_hard_link_in_the_project_reads_nothing(names: Names) -> None:
    hard = names.base / "hard"
    os.link(names.secret, hard)
    with pytest.raises(NamedFileRefused, match="several names"):
        names.read(hard, names.may_read)
    assert names.read(hard, names.may_read, own=True) == "secret text"
    names.secret.unlink()
    assert names.read(hard, names.may_read) == "secret text"  # now it has one name
