"""Inherited descriptors and the working directory (attacks like CVE-2024-21626)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.escape.cage import AttackResult, ProbeCage, parse_result
from tests.tables import one_case


def test_an_open_directory_is_not_inherited(cage: ProbeCage) -> None:
    fd = os.open("/etc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.set_inheritable(fd, True)
        attack = ("through_descriptors", "self", "hostname")
        tried = cage.attacks(attack, ("through_descriptors", "1", "hostname"), pass_fds=[fd])
        assert [result.refused for result in tried] == ["ENOENT", "ENOENT"]
        leak = cage.under_plain_bwrap(*attack, bwrap=["--ro-bind", "/", "/", "--dev", "/dev"], pass_fds=[fd])
        assert leak.done.strip() == Path("/etc/hostname").read_text().strip()
    finally:
        os.close(fd)


def test_only_three_descriptors_are_open(cage: ProbeCage) -> None:
    with open("/dev/zero", "rb") as one, open("/dev/full", "rb") as two:
        fds = [one.fileno(), two.fileno()]
        own, init = cage.attacks(("descriptors", "self"), ("descriptors", "1"), pass_fds=fds)
        assert set(own.done) == {"0", "1", "2"}
        assert own.done["0"] == "/dev/null"
        assert own.done["1"].startswith("pipe:") and own.done["2"].startswith("pipe:")
        # bubblewrap's init has two more. test_the_exit_status_cannot_be_forged shows that opening them fails.
        others = {target for name, target in init.done.items() if name not in ("0", "1", "2")}
        assert others <= {"anon_inode:[eventfd]", "/run/runner/uids"}
        assert {str(fd) for fd in fds} <= set(cage.outside("descriptors", "self", pass_fds=fds).done)


CLOSED: tuple[Sequence[int], ...] = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))


@one_case("closed", CLOSED, ids=str)
def test_a_closed_standard_stream_exposes_nothing(cage: ProbeCage, closed: Sequence[int]) -> None:
    """The next file opened gets the lowest free number: in bubblewrap that file is the host's /proc."""
    state = Path(f"{cage.folder}.state")
    cage.manifest(_STATE)
    options = ["--state-dir", str(state)]
    words = 'many \'[["descriptors", "self"], ["descriptors", "1"], ["listing", "/proc/1/fd/0/"]]\''
    script = f'"$0" {words} >"$RUNNER_STATE_DIR/answer"'
    cage.manifest(_STATE, command="/bin/sh", args=["-c", script, str(cage.folder / "probe.py")])
    try:
        _with_closed(cage.caller.command("exec", *options, cage.folder), closed, dict(cage.caller.environ))
        own, init, host = parse_result(
            subprocess.CompletedProcess([], 0, (state / "answer").read_text(), "")
        ).done
        assert set(own["done"]) == {"0", "1", "2"}
        assert all(own["done"][str(fd)] == "/dev/null" for fd in closed if fd != 1)
        assert set(init["done"]) >= {"0", "1", "2"}
        assert "/proc" not in init["done"].values()
        assert host == {"refused": "ENOTDIR"}
    finally:
        subprocess.run(["rm", "-rf", str(state)], check=True)


_STATE = '[plugin.sandbox]\nenabled = true\nfs_write_paths = ["${state_dir}"]\n'


def test_bubblewrap_alone_exposes_proc_as_a_closed_stdin(cage: ProbeCage) -> None:
    """The control: bubblewrap alone, started with stdin closed, has the host's /proc as fd 0."""
    bwrap = ["--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    argv = [*cage.caller.prefix, "bwrap", *bwrap, "--", str(cage.folder / "probe.py"), "descriptors", "1"]
    leak = _with_closed(argv, (0,), {"PATH": "/usr/bin"})
    assert leak.done["0"] == "/proc"


def _with_closed(argv: Sequence[str], closed: Sequence[int], env: dict[str, str]) -> AttackResult:
    redirections = " ".join(f"{fd}>&-" for fd in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *argv],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return parse_result(done)


@one_case("fd", [0, 1, 2])
def test_a_directory_as_a_standard_stream_is_refused(cage: ProbeCage, fd: int) -> None:
    cage.manifest()
    words = cage.caller.command("exec", cage.folder, "--", "through_descriptors", "self", "hostname")
    if fd == 0:  # the control, once
        plain = subprocess.run(
            words, env=dict(cage.caller.environ), stdin=subprocess.DEVNULL, capture_output=True
        )
        assert plain.returncode == 0
    opened = os.open("/etc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        streams[("stdin", "stdout", "stderr")[fd]] = opened
        done = subprocess.run(words, env=dict(cage.caller.environ), timeout=60, **streams)  # type: ignore[call-overload]
    finally:
        os.close(opened)
    # Python itself exits with 1. With an interpreter that starts anyway, the runner exits with 125.
    assert done.returncode in (1, 125)
    assert b"done" not in (done.stdout or b"") and b"refused" not in (done.stdout or b"")


def test_the_working_directory_is_the_plugin_folder(cage: ProbeCage) -> None:
    inside = cage.attack("working_directory", cwd="/etc")
    assert inside.done == str(cage.folder)
    control = cage.outside("working_directory", cwd="/etc")
    assert control.done == "/etc"


def test_the_plugin_does_not_inherit_the_descriptors_of_report_and_events(cage: ProbeCage) -> None:
    (read, write), (told, tell) = os.pipe(), os.pipe()
    with open(read, "rb") as reader, open(told, "rb") as events:
        words = ["--report", str(write), "--events", str(tell)]
        answer = cage.attack("descriptors", "self", options=words, pass_fds=[write, tell])
        os.close(write)
        os.close(tell)
        assert set(answer.done) == {"0", "1", "2"}
        assert b'"runner.report.v1"' in reader.read() and events.read() == b""
