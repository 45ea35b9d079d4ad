"""The control plane's database: what it refuses, and what it keeps of much."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.ledger.file import open_file
from runner.ledger.sqlite_file import DatabaseUnusable
from runner.serve.control import database
from runner.serve.control.database import (
    BindingRow,
    ControlFile,
    ControlFull,
    PackageRow,
    RecordConflict,
    RecordRow,
    StaleRevision,
    open_control_file,
)

PACKAGE = PackageRow("acme~a@1", "acme/a", "1", "c", digest="sha256:1", folder="/f")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ControlFile]:
    opened = open_control_file(str(tmp_path / "control.db"))
    opened.do(ControlFile.import_package, PACKAGE, "me")
    yield opened
    opened.close()


def binding(name: str, org: str = "alpha", record: str = "{}", export: str = "") -> BindingRow:
    return BindingRow(name, org, "", PACKAGE.id, export or name, "tools", 1, 100, record)


def put(file: ControlFile, row: BindingRow, revision: int | None = 0) -> BindingRow:
    return file.do(ControlFile.put_binding, row, revision, "me", "put")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    open_file(str(tmp_path / "ledger.db")).close()
    with pytest.raises(DatabaseUnusable, match="is the database of another program"):
        open_control_file(str(tmp_path / "ledger.db"))
    first = open_control_file(str(tmp_path / "control.db"))
    with pytest.raises(DatabaseUnusable, match="another process uses the control plane's database"):
        open_control_file(str(tmp_path / "control.db"))
    first.close()
    (tmp_path / "control.db").chmod(0o640)
    with pytest.raises(DatabaseUnusable, match="others than its owner"):
        open_control_file(str(tmp_path / "control.db"))


def test_numbers_are_bounded(file: ControlFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MOST_PACKAGES", 2)
    monkeypatch.setattr(database, "MOST_BINDINGS", 2)
    file.do(ControlFile.import_package, PACKAGE._replace(id="acme~b@1"), "me")
    with pytest.raises(ControlFull):
        file.do(ControlFile.import_package, PACKAGE._replace(id="acme~c@1"), "me")
    for name in ("a", "b"):
        put(file, binding(name))
    with pytest.raises(ControlFull):
        put(file, binding("c"))
    put(file, binding("d", org="beta"))  # the bound is each org's own
    assert put(file, binding("a", record="{ }"), 1).revision == 2  # and stops no change


def test_a_change_names_what_it_changes(file: ControlFile) -> None:
    put(file, binding("a"))
    for revision, refusal in ((0, RecordConflict), (2, StaleRevision), (-1, StaleRevision)):
        with pytest.raises(refusal):
            put(file, binding("a", record="[]"), revision)
    with pytest.raises(RecordConflict, match="'a' is for the same export"):
        put(file, binding("b", export="a"))
    with pytest.raises(RecordConflict, match="other bytes"):
        file.do(ControlFile.import_package, PACKAGE._replace(digest="sha256:2"), "me")
    assert [row.record for row in file.do(ControlFile.bindings)] == ["{}"]
    (found,) = file.write([lambda file: file.change_package("none", None, "me", "x", withdrawn=1)])
    assert found is None


def test_the_oldest_history_goes_first(file: ControlFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MOST_REVISIONS", 3)
    put(file, binding("a"))
    for number in range(1, 6):
        put(file, binding("a", record=f"[{number}]"), number)
    kept = file.do(ControlFile.history, "binding", "a")
    assert [row.revision for row in kept] == [6, 5, 4]
    assert file.do(ControlFile.at_revision, "binding", "a", 3) is None
    assert file.do(ControlFile.at_revision, "binding", "a", 4) == kept[-1]
    # An org that writes much pushes out its own history only.
    put(file, binding("b", org="beta"))
    monkeypatch.setattr(database, "MOST_HISTORY_BYTES", 1000)
    put(file, binding("a", record="x" * 900), 6)
    put(file, binding("a", record="y" * 900), 7)
    assert [row.revision for row in file.do(ControlFile.history, "binding", "a")] == [8]
    assert len(file.do(ControlFile.history, "binding", "b")) == 1
    assert len(file.do(ControlFile.history, "package", PACKAGE.id)) == 1


def test_records_are_found_and_the_oldest_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    file = open_control_file(str(tmp_path / "control.db"), clock=lambda: now[0])
    place = ("p", "tools", "search", PACKAGE.id)
    for number in range(10):
        status, org = ("failed", "beta") if number % 2 else ("succeeded", "alpha")
        row = RecordRow(
            f"inv{number}", 1e9 + number, 1e9 + number, status, f"b{number % 2}", org, *place, "{}"
        )
        file.do(ControlFile.add_record, row)

    def names(*args: object, **named: object) -> list[str]:
        return [row.invocation[3:] for row in file.do(ControlFile.records, *args, **named)]  # type: ignore[arg-type]

    assert names(most=3) == ["9", "8", "7"]
    assert names(before=file.do(ControlFile.records)[2].number, most=2) == ["6", "5"]
    assert names("alpha") == names(None, "b0") == names(None, None, "succeeded") == ["8", "6", "4", "2", "0"]
    assert names(None, None, None, 1e9 + 3, 1e9 + 5) == ["4", "3"]
    # What one org asks does not take as long as others have records.
    asked: list[str] = []
    file._connection.set_trace_callback(asked.append)
    names("alpha", None, "failed", 1e9, 2e9)
    names()
    file._connection.set_trace_callback(None)
    plans = [
        str(file._connection.execute(f"EXPLAIN QUERY PLAN {each}").fetchall())
        for each in asked
        if each.startswith("SELECT")
    ]
    assert ["records_org (org=?" in each for each in plans] == [True, False]
    file.do(ControlFile.add_record, file.do(ControlFile.records)[0]._replace(status="cancelled"))
    assert names(None, None, "cancelled") == ["9"] and len(names()) == 10
    now[0] += 30 * 86400 + 5
    file.do(ControlFile.prune)
    assert names() == ["9", "8", "7", "6", "5"]
    # The org that has most loses its own.
    long = RecordRow("inv10", now[0], now[0], "failed", "b", "gamma", *place, "x" * 300_000)
    file.do(ControlFile.add_record, long)
    with monkeypatch.context() as patch:
        patch.setattr(database, "MOST_LIST_BYTES", 300_000)
        assert (names(), database.is_long(file.do(ControlFile.records))) == (["10"], True)
        assert names(before=file.do(ControlFile.records)[0].number) == ["9", "8", "7", "6", "5"]
    assert len(names()) == 6 and not database.is_long(file.do(ControlFile.records))
    monkeypatch.setattr(database, "MOST_BYTES", 250_000)
    file.do(ControlFile.prune)
    assert names() == ["9", "8", "7", "6", "5"]
    monkeypatch.setattr(database, "MOST_BYTES", 1)
    monkeypatch.setattr(database, "_RECORDS_AT_ONCE", 2)
    file.do(ControlFile.prune)
    assert names() == []
    file.close()
