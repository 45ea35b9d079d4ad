"""Words that name host paths which are not in the cage, and words that only look like paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.plan.mentions import NOTES_SHOWN, unshown_path_notes
from tests.conftest import Caller
from tests.sandbox.paths.installed import write

Write = Callable[..., Path]

LOST = "what is written there is lost"
CLOSED = "the plugin can neither read nor write it"


@pytest.fixture
def place(plugin_dir: Path, write_file: Write) -> Path:
    """A folder on the host, below /tmp."""
    for name in ("data.db", "home/notes", "sub/file"):
        write_file(plugin_dir / name, "")
    return plugin_dir


def told(
    place: Path,
    *args: str,
    env: tuple[tuple[str, str], ...] = (),
    shown: tuple[str, ...] = (),
    inside: str = "",
) -> list[str]:
    def visible(path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in ("/usr", "/bin", *shown))

    given = [arg.replace("HERE", str(place)) for arg in args]
    pairs = [(name, value.replace("HERE", str(place))) for name, value in env]
    directory, home = str(place), str(place / "home")
    found = unshown_path_notes(
        given, pairs, directory=directory, inside=inside or directory, home=home, visible=visible
    )
    assert all(note.rule == "outside" for note in found)
    return [note.message.replace(str(place), "HERE") for note in found]


@pytest.mark.parametrize(
    ("args", "label"),
    [
        (("--db-path", "HERE/data.db"), "--db-path HERE/data.db"),
        (("--db-path", "HERE/new.db"), "--db-path HERE/new.db"),
        (("--db=HERE/new.db",), "--db=HERE/new.db"),
        (("HERE/sub",), "HERE/sub"),
        (("file://HERE/sub/file",), "file://HERE/sub/file"),
        (("-v", "x", "HERE/sub"), "HERE/sub"),
        (("~/notes",), "~/notes"),
        (("~/.cache/new/a.db",), "~/.cache/new/a.db"),
        (("HERE/nowhere/file",), "HERE/nowhere/file"),
        (("/HERE/data.db",), "/HERE/data.db"),
        (("file:HERE/data.db",), "file:HERE/data.db"),
        (("./new.db",), "./new.db"),
        (("./sub/file",), "./sub/file"),
        (("sub/file",), "sub/file"),
        (("HERE/sub/../data.db",), "HERE/sub/../data.db"),
    ],
)
def test_words_that_name_a_host_path(place: Path, args: tuple[str, ...], label: str) -> None:
    assert told(place, *args) == [f"{label} names a host path that is not in the cage; {LOST}"]


def test_outside_of_tmp_the_path_does_not_exist_in_the_cage(place: Path) -> None:
    """Only /tmp and /dev/shm exist inside under the host's name, and are empty."""
    words = ("--config", "/etc/hostname")
    assert told(place, *words) == [f"{' '.join(words)} names a host path that is not in the cage; {CLOSED}"]
    assert told(place, *words, shown=("/etc",)) == []


@pytest.mark.parametrize(
    "word",
    [
        "",
        "/",
        "/tmp",
        "/v1/chat",
        "/no/such/folder/file",
        "https://example.com/tmp/x",
        "sub",  # a word: the folder's name is chance
        "--HERE/sub",
        "/usr/bin/env",
        "/bin/sh",
        "/dev/null",
        "/proc/self/status",
        "echo > HERE/sub/file",
        "HERE/sub\nfile",
        "HERE/sub\0",
        "~other/x",
        "x" * 5000,
    ],
)
def test_words_that_name_no_host_path(place: Path, word: str) -> None:
    assert told(place, word) == []


def test_shown_paths_are_not_mentioned(place: Path) -> None:
    assert told(place, "--db", "HERE/data.db", shown=(str(place),)) == []
    # But nobody expands a ~, and who does finds the HOME of the cage.
    assert told(place, "~/notes", shown=(str(place),)) != []


def test_a_relative_word_in_another_working_directory(place: Path) -> None:
    """The program is started in another folder than its words were written for."""
    shown = (str(place),)
    assert told(place, "./sub/file", shown=shown) == []
    assert told(place, "./sub/file", shown=shown, inside="/tmp") == [
        f"./sub/file names a host path that is not in the cage; {LOST}"
    ]
    assert told(place, ".", shown=shown) == []
    assert told(place, ".", shown=shown, inside="/tmp") == [
        f". (HERE) names a host path that is not in the cage; {LOST}"
    ]


def test_variables(place: Path) -> None:
    env = (("MEMORY_FILE_PATH", "HERE/memory.json"), ("PATH", "/usr/bin:HERE/sub"), ("N", "1"))
    fine = (("PATH", "/usr/bin:/bin:/usr/local/no"), ("URL", "https://a.b/c:/d"), ("TIME", "12:00"))
    assert told(place, env=(*env, *fine)) == [
        f"MEMORY_FILE_PATH=HERE/memory.json names a host path that is not in the cage; {LOST}",
        f"PATH=/usr/bin:HERE/sub names a host path that is not in the cage; {LOST}",
    ]


@pytest.mark.parametrize(
    "value", ["file:HERE/sub/x.db?key=hunter2", "hunter2:HERE/sub", "HERE/sub/x.db?key=hunter2"]
)
def test_the_value_of_a_variable_that_is_more_than_a_path_is_not_told(place: Path, value: str) -> None:
    [note] = told(place, env=(("DB", value),))
    assert note.startswith("DB names a host path") and "hunter2" not in note


def test_untrusted_words_are_escaped_and_limited(place: Path) -> None:
    [note] = told(place, "--x=HERE/sub/\x1b[2J")
    assert "\x1b" not in note and note.startswith("'--x=HERE/sub/\\x1b")
    many = told(place, *(f"HERE/sub/{number}" for number in range(100)))
    assert len(many) == NOTES_SHOWN + 1 and many[-1] == f"{100 - NOTES_SHOWN} more words name such paths"


def test_no_option_is_named_that_would_be_refused(place: Path) -> None:
    args = (f"{place}/sub/file", f"{place}/data.db")
    found = unshown_path_notes(
        args,
        (),
        directory=str(place),
        inside=str(place),
        home=str(place / "home"),
        visible=lambda _: False,
        denied=lambda path: path == f"{place}/sub/file",
        by_options=True,
    )
    assert [note.hint for note in found] == ["", "show it with --read PATH or --write PATH"]


def test_a_denied_path_on_the_command_line(runner_as: Caller) -> None:
    key = write(runner_as.home / ".ssh/id_demo", "")
    notes = write(runner_as.home / "notes/today.md", "")
    runner_as.give(runner_as.home)
    done = runner_as("run", "--", "cat", str(key))
    assert done.returncode != 0 and "--read" not in done.stderr, done.stderr
    done = runner_as("run", "--", "cat", str(notes))
    assert done.returncode != 0 and "--read" in done.stderr, done.stderr
