"""`runner doctor --attack`: wrong options, machines without a cage, other sandboxes, Ctrl-C, and the page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from runner.cli.attacking.attack import text
from runner.cli.attacking.page import html_page
from sandbox.attacks.attacks import ATTACKS
from tests.conftest import Caller
from tests.tables import wait_for

HOSTILE = "<script>alert(1)</script>\"'&"


def document(verdict: str = "not_held", observed: str = HOSTILE) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": "x",
        "class": "network",
        "tries": "reach",
        "layer": "filter",
        "observed": observed,
    }
    row |= {"control": observed, "verdict": verdict, "note": "", "remedy": observed}
    row |= {"cves": ["CVE-1999-0001"]}
    count = {"held": 0, "not_held": 0, "not_counted": 0, verdict: 1}
    machine = {"name": observed, "kernel": observed, "uid": 0}
    facts = {"schema": "runner.attack.v1", "ok": False, "time": "now", "version": "1", "machine": machine}
    return {**facts, "against": [observed], "count": count, "rows": [row]}


# --- the page -----------------------------------------------------------------------------------------------


def test_the_page_escapes_what_comes_out_of_a_sandbox_and_loads_nothing() -> None:
    page = html_page(document())
    seen: list[tuple[str, dict[str, str | None]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append((tag, dict(attrs)))

    Reader().feed(page)
    tags = {tag for tag, _ in seen}
    assert "table" in tags and not tags & {"script", "link", "img", "iframe", "a"}
    assert {name for _, attrs in seen for name in attrs} <= {
        "class",
        "lang",
        "charset",
        "name",
        "content",
        "http-equiv",
    }
    assert "reach CVE-1999-0001<" in page
    assert HOSTILE not in page and "&lt;script&gt;" in page and "url(" not in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page


def test_the_table_names_the_remedy_of_what_was_not_held() -> None:
    told = text(document(observed="done"))
    assert "NOT HELD\n    -> done" in told and "reach CVE-1999-0001 " in told
    assert told.endswith("0 of 1 attacks that count were held. 0 do not count here.")


# --- options and machines -----------------------------------------------------------------------------------


def test_wrong_options_and_machines_are_told_in_a_line(runner_as_user: Caller, tmp_path: Path) -> None:
    policy = runner_as_user.home / "p.toml"
    policy.write_text("version = 2\n")
    for words, status, said in (
        (("--against", "true"), 2, "--against: it goes with --attack"),
        (("--attack", "--against"), 2, "a command follows it"),
        (("--attack", "--policy", "strict", "--against", "true"), 2, "leave --policy or --against out"),
        (("--format", "html"), 2, "it goes with --attack"),
        (("--attack", "--policy", "nothing"), 26, "no policy is called 'nothing'"),
        (("--attack", "--policy", str(policy)), 26, "version must be 1"),
    ):
        done = runner_as_user("doctor", *words)
        assert (done.returncode, done.stdout) == (status, ""), (words, done)
        assert said in done.stderr and "Traceback" not in done.stderr
    done = runner_as_user("doctor", "--attack", env={"RUNNER_BWRAP": "/nothing"})
    assert done.returncode == 22 and "/nothing does not exist" in done.stderr


# --- other sandboxes ----------------------------------------------------------------------------------------

FORGED = """printf '{"nonce": "x", "attempt": %d, "refused": "EPERM"}\\n' 0 1 2 3 4 5 6 7; """


@pytest.mark.launches
def test_a_command_that_is_no_sandbox_holds_nothing(runner_as_user: Caller, nothing_left: None) -> None:
    """It forges answers, and runs the probe from its file. The program itself arrives on stdin too."""
    line = ("--against", "sh", "-c", FORGED + "exec /usr/bin/python3 -I -S {probe}")
    done = runner_as_user("doctor", "--attack", "--format", "json", *line, timeout=600)
    found = json.loads(done.stdout)
    assert done.returncode == 22 and found["ok"] is False, done.stderr
    assert found["count"]["held"] == 0 and found["count"]["not_held"] > 50
    assert len(found["rows"]) == len(ATTACKS)
    limits = {row["id"] for row in found["rows"] if "another sandbox" in row["note"]}
    assert limits == {each.id for each in ATTACKS if each.limit}


@pytest.mark.launches
@pytest.mark.needs("user")
def test_bubblewrap_by_hand_holds_what_its_options_say(runner_as_user: Caller, nothing_left: None) -> None:
    bwrap = (
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/lib",
    )
    line = (*bwrap, "/lib", "--ro-bind-try", "/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--")
    done = runner_as_user("doctor", "--attack", "--format", "json", "--against", *line, timeout=600)
    verdicts = {row["id"]: row["verdict"] for row in json.loads(done.stdout)["rows"]}
    assert done.returncode == 22
    held = {"read-folder", "see-root", "process-see", "process-daemon", "reach-tcp", "reach-unix"}
    open_ones = {
        "call-chroot",
        "user-namespace-unshare",
        "process-trace-child",
        "secret-variable",
        "secret-descriptor",
    }
    assert {verdicts[name] for name in held} == {"held"}
    assert {verdicts[name] for name in open_ones} == {"not_held"}


def test_a_command_that_does_not_run_the_probe(runner_as_user: Caller, nothing_left: None) -> None:
    for line, said in (
        (("true",), "the command did not run the probe"),
        (("/nothing/here",), "/nothing/here cannot be started"),
        (("sh", "-c", FORGED + "echo no such image >&2; exit 1"), "it said: no such image"),
        (("sh", "-c", "yes {probe}"), "it printed more than 4 MiB"),
    ):
        done = runner_as_user("doctor", "--attack", "--against", *line)
        assert (done.returncode, done.stdout) == (22, ""), done
        assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.launches
@pytest.mark.needs("root")
@pytest.mark.parametrize("own", [False, True], ids=["another sandbox", "our own"])
def test_ctrl_c_leaves_nothing(runner_as_root: Caller, tmp_path: Path, own: bool, nothing_left: None) -> None:
    there = tmp_path / "there"
    words = () if own else ("--against", "sh", "-c", f"echo > {there}; exec sleep 1000")
    with runner_as_root.start("doctor", "--attack", *words) as doctor:
        assert wait_for(lambda: len(_decoys_of(doctor)) == 3 and (own or there.exists()))
        if own:  # until the cage is there
            assert wait_for(lambda: len(_children(doctor.pid)) > 1)
        made = _decoys_of(doctor)
        doctor.send_signal(signal.SIGINT)
        out, err = doctor.communicate(timeout=120)
    assert (doctor.returncode, out) == (130, b""), err
    assert [path for path in made if path.exists()] == []


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _decoys_of(doctor: subprocess.Popen[bytes]) -> set[Path]:
    """The folders that hold the nonce of the doctor's first child."""
    for pid in _children(doctor.pid)[:1]:
        try:
            nonce = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2].decode()
        except (OSError, IndexError):
            return set()
        places = (Path(each) for each in ("/tmp", "/var/tmp", "/dev/shm"))
        folders = (folder for place in places for folder in place.glob("runner-attack-*"))
        return {each for each in folders if _holds(each, nonce)}
    return set()


def _holds(folder: Path, nonce: str) -> bool:
    try:
        return (folder / "secret").read_text() == nonce and os.stat(folder).st_uid == 0
    except OSError:
        return False
