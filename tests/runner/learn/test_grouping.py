"""Paths that were missed, grouped into few folders."""

from __future__ import annotations

from collections.abc import Iterable

from runner.learn.grouping import MissedPath, group_paths, uncovered


def groups(*missed: MissedPath, wide: Iterable[str] = ("/", "/srv")) -> dict[str, int]:
    found = group_paths(missed, lambda folder: folder not in wide)
    return {group.path: group.times for group in found}


def files(*paths: str) -> list[MissedPath]:
    return [MissedPath(path, 1) for path in paths]


def test_four_hundred_files_become_their_folder() -> None:
    names = [f"/srv/data/{number % 7}/{number}" for number in range(400)]
    assert groups(*files(*names)) == {"/srv/data": 400}


def test_the_folder_is_the_lowest_that_holds_them_all() -> None:
    assert groups(*files(*(f"/srv/a/b/c/{number}" for number in range(9)))) == {"/srv/a/b/c": 9}


def test_two_folders_stay_two() -> None:
    names = [f"/srv/x/{folder}/{number}" for folder in "ab" for number in range(9)]
    assert groups(*files(*names, "/srv/x/c")) == {"/srv/x/a": 9, "/srv/x/b": 9, "/srv/x/c": 1}


def test_few_files_are_named_one_by_one() -> None:
    assert groups(*files("/srv/a/1", "/srv/a/2", "/srv/a/3")) == {
        "/srv/a/1": 1,
        "/srv/a/2": 1,
        "/srv/a/3": 1,
    }


def test_a_folder_that_is_too_wide_is_never_named() -> None:
    found = groups(*files(*(f"/srv/{number}/x" for number in range(9))))
    assert found == {f"/srv/{number}/x": 1 for number in range(9)}
    found = groups(*files(*(f"/srv/a/{number}" for number in range(9))), wide=("/", "/srv", "/srv/a"))
    assert found == {f"/srv/a/{number}": 1 for number in range(9)}


def test_a_listed_folder_takes_all_that_is_below() -> None:
    listed = MissedPath("/srv/a", 2, whole=True, folder=True)
    assert groups(listed, *files("/srv/a/b/1", "/srv/ab")) == {"/srv/a": 3, "/srv/ab": 1}


def test_folders_on_the_way_do_not_count() -> None:
    steps = [MissedPath(path, 5, folder=True) for path in ("/srv", "/srv/a", "/srv/a/b")]
    assert groups(*steps, *files("/srv/a/b/1")) == {"/srv/a/b/1": 1}
    assert groups(*steps) == {"/srv/a/b": 5}  # the last one was the goal


def test_two_spellings_of_a_path_are_one() -> None:
    assert groups(MissedPath("/srv/a", 1, asked="/srv/link"), MissedPath("/srv/a", 2)) == {"/srv/a": 3}


def test_what_another_folder_holds_is_left_out() -> None:
    found = group_paths(files("/srv/a/1", "/srv/b/1"), lambda _: True)
    assert [each.path for each in uncovered(found, ("/srv/a",))] == ["/srv/b/1"]
