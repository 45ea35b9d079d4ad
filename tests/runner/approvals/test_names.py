"""The record of names: who has one, for which configuration, and what is not believed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.approvals import names as module
from runner.approvals.names import NamePlace, NameRecord, place_at
from runner.approvals.record import ApprovalsUnusable
from tests.tables import check_rows


@pytest.fixture
def folder(plugin_dir: Path) -> Path:
    (plugin_dir / "record").mkdir(mode=0o700)
    for name in ("one", "two"):
        (plugin_dir / name).mkdir()
    return plugin_dir


def record(folder: Path, *configured: str) -> NameRecord:
    """As another process opens it."""
    return NameRecord(str(folder / "record/names.json"), [str(folder / each) for each in configured])


def at(folder: Path, **places: str) -> dict[str, NamePlace]:
    return {name: place_at(str(folder / place)) for name, place in places.items()}


def held(folder: Path, *configured: str) -> dict[str, list[str]]:
    found = record(folder, *configured).holders()
    return {name: sorted(each.path.removeprefix(f"{folder}/") for each in found[name]) for name in found}


def test_one_file_serves_several_configurations(folder: Path) -> None:
    record(folder, "one").keep(at(folder, mail="one/mail", git="one/git"), ())
    record(folder, "two").keep(at(folder, mail="two/mail"), ())
    assert held(folder, "one") == {"mail": ["one/mail"], "git": ["one/git"]}
    assert held(folder, "two") == {"mail": ["two/mail"]} and held(folder, "three") == {}
    assert held(folder, "one", "two")["mail"] == ["one/mail", "two/mail"]
    assert held(folder, "one/mail") == {"mail": ["one/mail"]}  # a path that is given itself
    # Who was first stays, whatever a second process believes; settings decide otherwise.
    late = record(folder, "one")
    late.keep(at(folder, mail="one/aaa"), ())
    assert held(folder, "one")["mail"] == ["one/mail"]
    record(folder, "one").keep(at(folder, mail="one/aaa"), ("mail",))
    assert held(folder, "one")["mail"] == ["one/aaa"] and held(folder, "two")["mail"] == ["two/mail"]
    # What another configuration had is forgotten with its whole folder, and not before.
    (folder / "two").rmdir()
    assert held(folder, "two") == {"mail": ["two/mail"]}
    record(folder, "one").keep(at(folder, new="one/new"), ())
    assert held(folder, "two") == {} and held(folder, "one").keys() == {"mail", "git", "new"}


def test_a_name_that_moves_is_known_as_such(folder: Path) -> None:
    for path in (str(folder / "record/names.json"), None):  # None: as long as it lives

        def same(known: NameRecord | None, path: str | None = path) -> NameRecord:
            return known if known is not None and path is None else NameRecord(path, [str(folder / "one")])

        one = same(None)
        one.keep(at(folder, mail="one/mail", git="one/git"), ())
        assert not one.moved("mail") and not one.moved("other")
        one = same(one)
        one.keep(at(folder, post="one/mail"), ())  # it has another name now
        assert one.moved("post")
        one.keep(at(folder, post="one/mail"), ())  # and still, later
        assert one.moved("post")
        one = same(one)
        one.keep(at(folder, git="one/aaa"), ("git",))
        one = same(one)
        one.keep(at(folder, git="one/aaa", post="one/mail", fresh="one/fresh"), ("git",))
        assert [one.moved(name) for name in ("git", "post", "fresh")] == [True, True, False]


def test_a_file_that_is_damaged_or_full_is_not_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "record/names.json"
    place = ["mail", str(folder / "one/mail"), "", False]
    rows: Mapping[str, bool] = {
        json.dumps({"version": 1, "names": [place]}): True,
        json.dumps({"version": 2, "names": [place]}): False,
        json.dumps({"version": 1, "names": [place[:3]]}): False,
        json.dumps({"version": 1, "names": [[*place[:3], 1]]}): False,
        json.dumps({"version": 1, "names": {"mail": "x"}}): False,
        json.dumps({"version": 1, "names": 5}): False,
        json.dumps([1]): False,
        "[" * 100_000: False,
        "": False,
        "{": False,
    }

    def check(text: str, sound: bool) -> None:
        path.write_text(text)
        path.chmod(0o600)
        one = record(folder, "one")
        if sound:
            assert held(folder, "one") == {"mail": ["one/mail"]}
            return
        for act in (one.holders, lambda: one.keep(at(folder, mail="one/mail"), ())):
            with pytest.raises(ApprovalsUnusable, match="is damaged") as caught:
                act()
            assert f"rm {path}" in caught.value.hint
        assert path.read_text() == text  # a person looks at it

    check_rows(rows, check)
    path.write_text(json.dumps({"version": 1, "names": [place]}))
    path.chmod(0o666)
    with pytest.raises(ApprovalsUnusable):
        record(folder, "one").holders()
    path.chmod(0o600)
    monkeypatch.setattr(module, "_MOST_NAMES", 2)
    record(folder, "one").keep(at(folder, second="one/b"), ())
    one = record(folder, "one")
    with pytest.raises(ApprovalsUnusable, match="more than 2 names"):
        one.keep(at(folder, third="one/c"), ())
    assert one.holders().keys() == {"mail", "second", "third"} and "third" not in held(folder, "one")
