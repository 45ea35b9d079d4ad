"""Every question that decides a plan is noted, and a noted answer that has changed is seen."""

from __future__ import annotations

import ast
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox import look
from sandbox.facts import Facts
from tests.conftest import ROOT
from tests.sandbox.limits.own_cgroups import make_parent_cgroup
from tests.tables import one_case

# --- no question is asked past `look` -----------------------------------------------------------------------

# The modules that decide a plan. What is asked later, when the plan is carried out, is asked at every launch.
DECIDING = (
    *(
        "runner/launch/plan.py",
        "runner/launch/prepare.py",
        "runner/launch/own_folders.py",
        "runner/launch/approve.py",
        "runner/launch/denylist.py",
    ),
    *("runner/launch/command.py", "runner/launch/read.py", "runner/approvals/*.py", "runner/manifest/*.py"),
    *("runner/contracts/*.py", "runner/contracts/*/__init__.py", "runner/contracts/*/hosts/*.py"),
    *("runner/contracts/mcp/wrap/claim.py", "runner/contracts/mcp/wrap/configuration.py"),
    *("runner/contracts/mcp/docker_run.py", "runner/contracts/mcp/installed.py"),
    *("runner/install/images.py", "runner/install/roots.py", "runner/cli/shared/command.py"),
    *("runner/contracts/*/package/*.py",),
    *(
        f"runner/contracts/*/{name}.py"
        for name in ("manifest", "declared", "tables", "cage", "binding", "launchers", "rules", "knobs")
    ),
    *("sandbox/policy/*.py", "sandbox/plan/*.py", "sandbox/paths/*.py", "sandbox/document/*.py"),
    *("sandbox/files.py", "sandbox/identity/accounts.py", "sandbox/identity/uid_range.py"),
    *("sandbox/limits/assign.py", "sandbox/limits/cgroup_survey.py", "sandbox/seccomp/*.py"),
)
OF_OS = {
    "stat",
    "lstat",
    "access",
    "readlink",
    "listdir",
    "scandir",
    "statvfs",
    "getxattr",
    "walk",
    "open",
}
OF_OS_PATH = {"realpath", "exists", "lexists", "isdir", "isfile", "islink", "ismount", "samefile", "getsize"}

# Functions that ask by themselves and note nothing, and why that is right.
EXEMPT = {
    "runner/approvals/files.py:write_record": "the verb `allow`, which launches nothing",
    "runner/approvals/files.py:open_folder": "it is for writing: no decision does",
    "runner/approvals/files.py:locked_folder": "it is for writing: no decision does",
    "runner/approvals/confirmations.py:all": "before which calls a person is asked, a session decides",
    "runner/approvals/confirmations.py:read": "before which calls a person is asked, a session decides",
    "runner/approvals/names.py:*": "whose a name is, a daemon decides, and not a launch",
    "runner/approvals/tools.py:urls_of": "the verb `allow`, which launches nothing",
    "runner/manifest/fill.py:_open_file": "read_named has said that nothing may be kept",
    "runner/manifest/fill.py:_text": "read_named has said that nothing may be kept",
    "runner/manifest/unpack.py:_open_tar": "`unpack` has said that nothing may be kept",
    "runner/manifest/unpack.py:_extract_file": "`unpack` has said that nothing may be kept",
    "runner/manifest/unpack.py:_flush": "`unpack` has said that nothing may be kept",
    "sandbox/files.py:kernel_text": "who calls it asks, and is found",
    "sandbox/files.py:write_once": "it writes",
    "sandbox/files.py:make_draft": "it writes",
    "sandbox/files.py:text_at": "look.stat has noted the file, with the time of its last change",
    "sandbox/identity/uid_range.py:in_use": "asked when a uid is leased, at every launch",
    "sandbox/identity/uid_range.py:_running": "asked when a uid is leased, at every launch",
    "runner/approvals/store.py:was_notified": "it makes a mark; look.lexists has noted whether it was there",
    "sandbox/limits/cgroup_survey.py:_read": "its callers note the content, or who is in the group",
    "sandbox/limits/cgroup_survey.py:_process_names": "for a message",
    "sandbox/paths/beneath.py:walk_beneath": "its callers note the whole path",
    "sandbox/paths/denylist.py:find_linked": "only after _entries_below, which says that nothing may be kept",
    "sandbox/paths/executable.py:read_head": "look.stat has noted the file, with the time of its last change",
    "sandbox/paths/mounts.py:fd_path": "about an open descriptor",
    "sandbox/paths/mounts.py:mount_id": "about an open descriptor",
    "sandbox/paths/scan.py:_entries": "`directory` has noted the listing",
    "sandbox/paths/scan.py:_unlisted": "`directory` has noted the folder, with the time of its last change",
    "sandbox/paths/walk.py:__init__": "for a message",
    "sandbox/paths/walk.py:_make_step": "it makes a folder: no decision does",
    "sandbox/paths/walk.py:_step": "`walk` has noted the whole path",
    "sandbox/paths/walk.py:unmake": "it removes folders: no decision does",
    "sandbox/plan/image.py:_layer_fault": "it is tried; a launch that cannot do it forgets its plan",
    "sandbox/plan/owners.py:_maps_state": "a plan whose state is mapped is never kept",
    "sandbox/seccomp/profile.py:*": "makes filters, when the runner itself is built",
}
# Made when the plan is carried out, also from a stored plan.
EXEMPT_MODULES = ("sandbox/paths/stand_in.py", "sandbox/paths/end_search.py", "sandbox/plan/guards.py")


def unnoted(text: str, module: str) -> Iterator[str]:
    """Each question in a module that is asked of `os` in a function that notes nothing."""
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if any(ast.unparse(call.func).startswith(("look.note", "look.doubt")) for call in calls):
            continue
        for call in calls:
            match ast.unparse(call.func).split("."):
                case ["os", name] if name in OF_OS:
                    yield f"{module}:{function.name}"
                case ["os", "path", name] if name in OF_OS_PATH:
                    yield f"{module}:{function.name}"
                case ["open" | "kernel_text" | "glob" | "iglob"]:
                    yield f"{module}:{function.name}"


def test_no_module_of_the_decision_asks_past_look() -> None:
    files = sorted({path for pattern in DECIDING for path in ROOT.glob(pattern)})
    assert len(files) > 60  # the patterns match
    found = {
        each
        for path in files
        if (module := str(path.relative_to(ROOT))) not in EXEMPT_MODULES
        for each in unnoted(path.read_text(), module)
    }
    assert {
        each for each in found if each not in EXEMPT and f"{each.rpartition(':')[0]}:*" not in EXEMPT
    } == set()


@pytest.mark.parametrize(
    "question", ["os.stat(p)", "os.path.exists(p)", "open(p)", "os.open(p, 0)", "kernel_text(p)", "iglob(p)"]
)
def test_a_question_past_look_is_found(question: str) -> None:
    assert list(unnoted(f"def f(p):\n    return {question}\n", "m.py")) == ["m.py:f"]
    assert list(unnoted(f"def f(p):\n    look.note(p)\n    return {question}\n", "m.py")) == []


# --- what is noted, is seen to change -----------------------------------------------------------------------


def _noted(ask: Callable[[], object]) -> Facts:
    with look.recording() as asked:
        ask()
    return asked.facts


def _replace_by_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def _same_bytes_again(path: Path) -> None:
    """Another file with the same content, size and mtime."""
    held = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(held.st_atime_ns, held.st_mtime_ns))
    copy.rename(path)


QUESTIONS: dict[str, Callable[[str], object]] = {
    "lstat": look.lstat,
    "stat": look.stat,
    "exists": look.exists,
    "lexists": look.lexists,
    "isfile": look.isfile,
    "islink": look.islink,
    "isdir": look.isdir,
    "realpath": look.realpath,
    "access": lambda path: look.access(path, os.R_OK),
    "note": look.note,
    "note_content": look.note_content,
}
CHANGES: dict[str, Callable[[Path], object]] = {
    "removed": lambda path: path.unlink(),
    "written": lambda path: path.write_text("other"),
    "another file": _same_bytes_again,
    "mode": lambda path: path.chmod(0o600),
    "a link": _replace_by_link,
    "parent moved": lambda path: path.parent.rename(path.parent.with_name("moved")),
    "parent closed": lambda path: path.parent.chmod(0o700),
}


@one_case("change", CHANGES)
@one_case("question", QUESTIONS)
def test_a_file_that_changes_is_seen(tmp_path: Path, question: str, change: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    file = folder / "file"
    file.write_text("text")
    facts = _noted(lambda: QUESTIONS[question](str(file)))
    assert facts.changed({}) == ""
    time.sleep(0.02)  # the kernel's clock for files ticks every 10 ms
    CHANGES[change](file)
    assert facts.changed({}) != ""


@pytest.mark.parametrize("ask", [look.note_identity, look.note_listing, look.exists])
def test_of_a_question_that_is_asked_again_the_first_answer_counts(
    tmp_path: Path, ask: Callable[[str], object]
) -> None:
    """What was decided by the first may not hold any more."""
    folder = tmp_path / "folder"
    folder.mkdir()

    def decide(change: Callable[[], object]) -> None:
        ask(str(folder))
        time.sleep(0.02)
        change()
        ask(str(folder))

    assert _noted(lambda: decide(lambda: None)).changed({}) == ""

    def replace() -> None:
        folder.rename(tmp_path / "before")
        folder.mkdir()

    assert _noted(lambda: decide(replace)).changed({}) == str(folder)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_file_that_appears_is_seen(tmp_path: Path, question: str) -> None:
    file = tmp_path / "file"

    def ask() -> None:
        try:
            QUESTIONS[question](str(file))
        except FileNotFoundError:
            pass

    facts = _noted(ask)
    assert facts.changed({}) == ""
    file.write_text("")
    assert facts.changed({}) == str(file)


def test_every_link_on_the_way_counts(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    (tmp_path / "second").symlink_to("real")
    (tmp_path / "first").symlink_to("second")
    facts = _noted(lambda: look.realpath(str(tmp_path / "first/file")))
    assert facts.changed({}) == ""
    assert str(tmp_path / "real") in facts.places
    (tmp_path / "second").unlink()
    (tmp_path / "second").symlink_to("other")
    assert facts.changed({}) in (str(tmp_path / "second"), str(tmp_path / "first/file"))
    assert str(tmp_path / "second") in facts.places


def test_links_in_a_circle_are_noted_and_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    facts = _noted(lambda: look.exists(str(tmp_path / "a")))
    assert facts.changed({}) == ""


@pytest.mark.parametrize("ask", [look.listdir, lambda path: list(look.scandir(path)), look.note_listing])
def test_a_name_in_a_folder_that_was_listed_is_seen(tmp_path: Path, ask: Callable[[str], object]) -> None:
    facts = _noted(lambda: ask(str(tmp_path)))
    assert facts.changed({}) == ""
    time.sleep(0.02)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    assert facts.changed({}) == str(tmp_path)


def test_a_folder_whose_content_does_not_count_may_change(tmp_path: Path) -> None:
    facts = _noted(lambda: look.isdir(str(tmp_path)))
    (tmp_path / "file").write_text("")
    assert facts.changed({}) == ""


def test_a_cgroup_that_was_made_again_is_the_same() -> None:
    """All that counts about a cgroup is in its files, which are asked about themselves."""
    with make_parent_cgroup() as parent:
        group = parent / "unit.scope"
        group.mkdir()
        before = group.stat().st_ino
        facts = _noted(lambda: look.isdir(str(group)))
        group.rmdir()
        assert facts.changed({}) == str(group)
        group.mkdir()
        assert group.stat().st_ino != before
        assert facts.changed({}) == ""
        group.chmod(0o700)
        assert facts.changed({}) == str(group)


def test_another_folder_that_was_made_again_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "unit.scope"
    folder.mkdir()
    facts = _noted(lambda: look.isdir(str(folder)))
    folder.rename(tmp_path / "aside")
    folder.mkdir()
    assert facts.changed({}) == str(folder)


def test_a_relative_path_is_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = _noted(lambda: look.exists("file"))
    assert str(tmp_path / "file") in facts.places


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    facts = _noted(lambda: look.note_content(str(file)))
    facts.places.clear()  # else the path alone tells
    file.unlink()
    os.mkfifo(file)
    assert facts.changed({}) == str(file)


def test_files_of_the_kernel_count_by_their_content() -> None:
    file = "/proc/self/uid_map"  # unlike the mounts, it stays as it is
    facts = _noted(lambda: look.note_content(file))
    assert facts.changed({}) == ""
    facts.contents[file] = b"other"
    assert facts.changed({}) == file


def test_a_way_out_of_sys_is_never_stored(tmp_path: Path) -> None:
    """Of what is below /sys less is noted: neither times nor inodes."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(f"/sys/..{tmp_path}/file")
    with look.recording() as asked:
        look.exists(str(tmp_path / "link"))
    assert "leads out of /sys" in asked.doubt
    with look.recording() as asked:  # the control
        look.exists("/sys/kernel")
    assert not asked.doubt


@pytest.mark.parametrize(
    "path",
    [*("/proc/self/fd/3/plugin", "/proc/self/cwd", "/proc/1/root", "/proc/thread-self/cwd"), "/proc/net/tcp"],
)
def test_a_place_of_a_process_is_never_stored(path: str, tmp_path: Path) -> None:
    """It means another file to the next process."""
    with look.recording() as asked:
        look.exists(path)
    assert "another file to each process" in asked.storing_fault()
    (tmp_path / "link").symlink_to(path)
    with look.recording() as asked:
        look.exists(str(tmp_path / "link"))
    assert "another file to each process" in asked.doubt
    with look.recording() as asked:  # the control
        look.exists("/proc/sys/kernel/overflowuid")
        look.exists("/proc/kcore")
    assert asked.storing_fault() == ""


def test_which_file_it_is_counts_and_not_its_content(tmp_path: Path) -> None:
    file = tmp_path / "history"
    file.write_text("one\n")
    facts = _noted(lambda: look.note_identity(str(file)))
    file.write_text("one\ntwo\n")
    assert facts.changed({}) == ""
    _same_bytes_again(file)
    assert facts.changed({}) == str(file)


def test_a_link_is_followed_where_only_the_file_counts(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")
    (tmp_path / "link").symlink_to("one")
    facts = _noted(lambda: look.note_identity(str(tmp_path / "link")))
    (tmp_path / "one").unlink()
    assert facts.changed({}) == str(tmp_path / "one")


def test_a_path_with_a_nul_is_no_path() -> None:
    facts = _noted(lambda: look.exists("/a\0b"))
    assert facts.changed({}) == ""


def test_nothing_is_noted_outside_of_a_recording(tmp_path: Path) -> None:
    look.exists(str(tmp_path))
    with look.recording() as asked:
        pass
    look.exists(str(tmp_path))
    assert not any(asked.facts)


# --- variables ----------------------------------------------------------------------------------------------


def test_a_variable_that_was_looked_at_counts_and_others_do_not() -> None:
    environ = {"A": "1", "B": "2"}
    with look.recording() as asked:
        noted = look.environment(environ)
        assert noted.get("A") == "1" and noted["A"] == "1" and "C" not in noted
    assert asked.facts.changed(environ) == ""
    assert asked.facts.changed({**environ, "B": "3"}) == ""
    assert asked.facts.changed({**environ, "A": "2"}) == "$A"
    assert asked.facts.changed({**environ, "C": ""}) == "$C"
    assert b"1" not in asked.facts.variables["A"][:1] or len(asked.facts.variables["A"]) == 32


@pytest.mark.parametrize("ask", [list, len, lambda e: e.keys(), lambda e: e.items(), lambda e: e.values()])
def test_who_looks_at_all_variables_keeps_nothing(ask: Callable[[object], object]) -> None:
    with look.recording() as asked:
        ask(look.environment({"A": "1"}))
    assert "all variables" in asked.storing_fault()


# --- what may be kept ---------------------------------------------------------------------------------------


def test_what_changed_a_moment_ago_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "SETTLED_SECONDS", 3600.0)  # this test may be slow
    file = tmp_path / "file"
    file.write_text("")
    with look.recording() as asked:
        look.stat(str(file))
    assert asked.storing_fault() == f"{file} was changed a moment ago"
    asked.began += 3660
    assert asked.storing_fault() == ""


def test_a_folder_that_was_listed_and_changed_a_moment_ago_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "SETTLED_SECONDS", 3600.0)
    with look.recording() as asked:
        look.listdir(str(tmp_path))
    assert asked.storing_fault() == f"{tmp_path} was changed a moment ago"


def test_the_first_doubt_is_the_reason() -> None:
    with look.recording() as asked:
        look.doubt("one")
        look.doubt("two")
    assert asked.storing_fault() == "one"
