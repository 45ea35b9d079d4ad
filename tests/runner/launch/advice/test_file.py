"""The file of what people were told about a server: bounded, without values, and for several writers."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from runner.approvals.record import ApprovalsUnusable
from runner.launch.advice import file as module
from runner.launch.advice.file import MOST_CHARACTERS, MOST_FILES, MOST_LINES, MOST_STARTS, AdviceFile
from tests.tables import one_case


def make(home: Path, identity: str = "one") -> AdviceFile:
    return AdviceFile(identity, {"HOME": str(home)})


def lines(home: Path) -> list[tuple[str, ...]]:
    return [each.lines for each in make(home).read()]


def test_lines_starts_and_files_are_bounded(tmp_path: Path) -> None:
    start = make(tmp_path)
    start.add(["x" * 5000, "two\nlines", "\x1b[2J\u202e"])
    start.add(["first"])
    start.add(["second", "first"], "\n".join(f"{'y' * 400}{number}" for number in range(100)))
    [kept] = lines(tmp_path)
    assert kept[:6] == (
        *("x" * (MOST_CHARACTERS - 1) + "…", "two", "lines", "\\x1b[2J\\u202e"),
        *("second", "first"),  # what is told again is not there twice
    )
    assert kept[6] == "| " + "y" * 298 + "92" and len(kept) == 14
    start.add(map(str, range(100)))
    assert lines(tmp_path) == [tuple(map(str, range(100 - MOST_LINES, 100)))]
    for number in range(MOST_STARTS + 2):
        make(tmp_path).add([f"start {number}"])
    assert lines(tmp_path) == [(f"start {number}",) for number in range(2, MOST_STARTS + 2)]
    start.add(["again"])  # it still runs
    assert lines(tmp_path)[-1][-1] == "again" and len(lines(tmp_path)) == MOST_STARTS
    for number in range(MOST_FILES + 10):
        make(tmp_path, f"other {number}").add(["told"])
    assert len([*Path(start.path).parent.glob("*.json")]) == MOST_FILES
    make(tmp_path, "silent").add([])
    assert make(tmp_path, "silent").read() == ()


VALUES = (
    "long-token-1",
    "s3cr",
    "1",
    "/data/db.sqlite",
    "db.example.com:5432",
    "postgres://u:pass-word@h/db",
    "/8Kx0qWbT3vLm9ZrYc5Nd+Hs7Ue2Fa",
    "1000.8f0e4d1c.77aa93b0c5d2",
    "10.0.0.7:5432",
)
CUT = "c" * 295


@one_case(
    ("line", "stderr", "kept"),
    [
        ("long-token-1 in it", "long-token-1\n", ("[secret] in it", "| [secret]")),
        ("in base64: bG9uZy10b2tlbi0x", "", ("in base64: [secret]",)),
        # A short one, as a word of the plugin's: our own words may be the same.
        ("for s3cr", "is s3cr, or xs3crx", ("for s3cr", "| is [secret], or xs3crx")),
        ("exit 1", "pass-word", ("exit 1", "| [secret]")),
        # What advice has to name.
        ("--write /data/db.sqlite --net db.example.com:5432", "", None),
        ("--net 10.0.0.7:5432", "", None),
        # Tokens that begin as a path does, or have dots.
        ("/8Kx0qWbT3vLm9ZrYc5Nd+Hs7Ue2Fa", "", ("[secret]",)),
        ("1000.8f0e4d1c.77aa93b0c5d2", "", ("[secret]",)),
        # Nothing is cut before it was searched.
        (None, f"long-token-1{CUT}", (f"| cret]{CUT}",)),
    ],
)
def test_values_are_left_out(
    tmp_path: Path, line: str | None, stderr: str, kept: tuple[str, ...] | None
) -> None:
    start = make(tmp_path)
    start.conceal(VALUES)
    start.add([] if line is None else [line], stderr)
    assert lines(tmp_path) == [(line,) if kept is None else kept]


def test_a_value_that_is_made_for_it_is_searched_in_time(tmp_path: Path) -> None:
    start = make(tmp_path)
    start.conceal(["://" + ":" * 100_000, "a." * 50_000, "://" * 30_000, "~" * 100_000, "/aA" * 50_000])
    start.add(["told"], "x")
    assert lines(tmp_path) == [("told", "| x")]


def test_two_sessions_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOCK_SECONDS", 60.0)
    barrier = multiprocessing.get_context("fork").Barrier(3)

    def tell(name: str) -> None:
        start = make(tmp_path)
        barrier.wait()
        for number in range(20):
            start.add([f"{name}{number}"])

    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=tell, args=(name,)) for name in "ab"]
    for each in others:
        each.start()
    tell("c")
    for each in others:
        each.join()
    assert sorted(lines(tmp_path)) == [tuple(f"{name}{number}" for number in range(20)) for name in "abc"]


def test_what_cannot_be_used_is_told_and_written_anew(tmp_path: Path) -> None:
    start = make(tmp_path)
    start.add(["told"])
    for text in ("", "[]", "{}", "[" * 100_000, '{"version": 1, "starts": [{"time": 1e999, "process": 1}]}'):
        Path(start.path).write_text(text)
        with pytest.raises(ApprovalsUnusable, match="is damaged"):
            start.read()
        start.add(["told"])
        assert lines(tmp_path) == [("told",)], text
    # A folder in the place of the file, and of the folder: nothing is kept, and nothing fails.
    Path(start.path).unlink()
    Path(start.path).mkdir()
    start.add(["more"])
    file = tmp_path / "file"
    file.write_text("")
    make(file).add(["told"])
    make(Path("relative")).add(["told"])
    assert make(Path("relative")).read() == () and not Path("relative").exists()
