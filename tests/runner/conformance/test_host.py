"""Hosts on trial: a small host of each contract keeps all rules, and each fault breaks some."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.conformance import host
from runner.conformance.host import HostCommandFault, load_stand_in, run_host
from runner.conformance.host_checks import RUNS, HostRun, PluginLog, ToldEntry, ends_it, nothing_left
from runner.conformance.report import ConformanceReport, as_text
from runner.conformance.told import ToldListener, ToldProcess, make_channels
from runner.contracts.registry import contract_names
from tests.conftest import Caller, vanished

SMALL_HOST = Path(__file__).parent / "small_host.py"

# fault -> the run that shows it, and for each contract the rules that it breaks.
FAULTS: dict[str, tuple[str, str]] = {
    "framing": ("", "rune-H01 nexo-H01 vai-H01 kaged-H01 ainb-H01 mcp-H01"),
    "pieces": ("pieces", "rune-H02 nexo-H02 vai-H02 kaged-H02 ainb-H02 mcp-H02"),
    "large": ("large", "rune-H03 nexo-H03 vai-H03 kaged-H03 ainb-H03 mcp-H03"),
    "extra": ("extra", "rune-H04 nexo-H04 vai-H04 kaged-H04 ainb-H04 mcp-H04"),
    "stderr": ("stderr", "rune-H05 nexo-H05 vai-H05 kaged-H05 ainb-H05 mcp-H05"),
    "descriptors": ("", "rune-H06 nexo-H06 vai-H06 kaged-H06 ainb-H06 mcp-H06"),
    "leaves": ("stubborn", "rune-H07+H19 nexo-H07+H23 vai-H07+H22 kaged-H07+H26 ainb-H07+H25 mcp-H07+H24"),
    "early": ("pieces", "rune-H08 nexo-H08 vai-H08 kaged-H08 ainb-H08 mcp-H08"),
    "version": ("", "nexo-H09 vai-H09 kaged-H09 ainb-H09 mcp-H09"),
    "order": ("", "rune-H09 nexo-H10 vai-H11+H16 kaged-H10+H12 ainb-H10 mcp-H10+H12"),
    "opening": ("", "rune-H10 nexo-H11 vai-H12 kaged-H11 ainb-H11+H12 mcp-H11"),
    "call": ("", "rune-H13 nexo-H13 vai-H14+H15 kaged-H16 ainb-H16 mcp-H16"),
    "same_id": ("", "nexo-H12 kaged-H15 ainb-H14 mcp-H15"),
    "twice": ("stubborn", "rune-H12 vai-H16"),
    "unknown": ("", "rune-H11 vai-H10 kaged-H14 ainb-H13"),
    "no_initialized": ("", "kaged-H12 mcp-H12"),
    "mute": ("asks", "nexo-H15 kaged-H18 ainb-H19 mcp-H17"),
    "credulous": ("impostor", "rune-H14 nexo-H17 vai-H13 kaged-H19 mcp-H14"),
    "old": ("modern", "mcp-H20"),
    "initialized": ("", "kaged-H13 mcp-H13"),
    "others": ("", "nexo-H14 kaged-H17 ainb-H15+H17+H18 mcp-H19"),
    "gives_up": ("error", "nexo-H16 vai-H19 kaged-H20 ainb-H20"),
    "cancel": ("silent", "vai-H17 mcp-H18"),
    "no_reason": ("silent", "vai-H18"),
    "arguments": ("", "rune-H15 nexo-H18 vai-H20 kaged-H21 ainb-H21 mcp-H21"),
    "folder": ("", "rune-H15 vai-H20 kaged-H21"),
    "variables": ("", "rune-H16 nexo-H19 kaged-H22 mcp-H22"),
    "inherits": ("", "rune-H16"),
    "no_goodbye": ("", "nexo-H20 vai-H21 kaged-H23 ainb-H22"),
    "goodbye": ("", "nexo-H21 kaged-H24 ainb-H23"),
    "kills": ("stubborn", "rune-H18 nexo-H22 kaged-H25 ainb-H24"),
    "stdin": ("stubborn", "rune-H17 mcp-H23"),
    "no_term": ("stubborn", "mcp-H24"),
}
# The words that make `runner` a host of each contract.
CALLS = {
    "ainb": ("{folder}", "stand_in", "--", "a"),
    "kaged": ("{manifest}", "echo"),
    "mcp": ("{manifest}", "echo"),
    "nexo": ("{manifest}", "stand_in_echo"),
    "rune": ("{manifest}", "echo"),
    "vai": ("{folder}", "echo"),
}


def try_small_host(contract: str, fault: str, *runs: str, command: str = "{command}") -> ConformanceReport:
    words = [sys.executable, str(SMALL_HOST), contract, fault, "{folder}", *command.split()]
    return run_host(contract, words, runs=runs)


def words_of(caller: Caller, *words: str) -> list[str]:
    """A command line of `runner` with the caller's own environment: a host has that of the tests."""
    return [
        "env",
        "-i",
        *(f"{key}={value}" for key, value in caller.environ.items()),
        *caller.command(*words),
    ]


def broken(report: ConformanceReport) -> list[str]:
    return [each.rule.id for each in report.verdicts if each.result == "fail"]


def cases_of(fault: str) -> dict[str, list[str]]:
    """Contract -> ids of the rules that the fault breaks."""
    cases = (case.partition("-") for case in FAULTS[fault][1].split())
    return {contract: [f"{contract}-{rule}" for rule in rules.split("+")] for contract, _, rules in cases}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("contract", ["rune", "vai"])  # one of each framing
def test_a_wrong_call_is_told_and_a_right_one_is_not(contract: str) -> None:
    assert broken(try_small_host(contract, "", "")) == []
    report = try_small_host(contract, "call", "")
    assert broken(report) == cases_of("call")[contract]
    shown = "\n".join(as_text(report))
    assert "run plain: " in shown and "  <- {" in shown and "  -> {" in shown


@pytest.mark.broad
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_by_its_rule(fault: str) -> None:
    for contract, rules in cases_of(fault).items():
        report = try_small_host(contract, fault, FAULTS[fault][0])
        # A process that is killed at once may not have seen that its stdin was closed.
        unsure = ("kills", "rune-H17")
        found = [rule for rule in broken(report) if (fault, rule) != unsure]
        assert found == rules, "\n".join(as_text(report))


def test_every_rule_has_a_host_that_breaks_it() -> None:
    told = {rule for fault in FAULTS for rules in cases_of(fault).values() for rule in rules}
    every = {each.rule.id for contract in contract_names() for each in load_stand_in(contract).rules}
    assert told == every


@pytest.mark.broad
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("contract", contract_names())
def test_a_host_that_keeps_all_rules(contract: str) -> None:
    report = try_small_host(contract, "", *RUNS)
    assert broken(report) == [], "\n".join(as_text(report))


@pytest.mark.launches
@pytest.mark.needs("user")
@pytest.mark.usefixtures("nothing_left")
def test_the_runner_is_seen_from_inside_its_cage(runner_as_user: Caller) -> None:
    """Its own folder is read-only there, without sockets or FIFOs. A host may start it caged, too."""
    command = words_of(runner_as_user, "call", *CALLS["rune"])
    report = run_host("rune", command, runs=("impostor",))
    assert broken(report) == [], "\n".join(as_text(report))
    assert report.count("pass") == 11


@pytest.mark.broad
@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("contract", contract_names())
def test_the_runner_keeps_the_rules_of_hosts(runner_as: Caller, contract: str) -> None:
    report = run_host(contract, words_of(runner_as, "call", *CALLS[contract]))
    assert broken(report) == [], "\n".join(as_text(report))
    report = try_small_host(contract, "", command=" ".join(words_of(runner_as, "exec", "{folder}")))
    assert broken(report) == [], "\n".join(as_text(report))


@pytest.mark.broad
def test_the_official_client_keeps_the_rules_of_its_protocol() -> None:
    client = str(SMALL_HOST.parent / "sdk_client.py")
    report = run_host("mcp", [sys.executable, client, "{command}"])
    assert broken(report) == [], "\n".join(as_text(report))
    assert report.count("n/a") == 2  # what the manifest says: it was given the program


@pytest.mark.parametrize(
    ("command", "message", "deadline"),
    [
        (("true",), "write {manifest}, {folder} or {command}", 60.0),
        (("/nowhere", "{folder}"), "/nowhere cannot be started: No such file or directory", 60.0),
        # More than 24 days: more milliseconds than an int has.
        (("sh", "-c", "echo what; exit 3", "{folder}"), "ended with 3, and no process .*: what$", 1e9),
        # More than a pipe holds, and more than is kept.
        (("sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x; exit 3", "{folder}"), ": x{2000}$", 60.0),
        (("sh", "-c", "sleep 1000", "{folder}"), r"did not end in 0.2 s \(--deadline\)", 0.2),
    ],
)
@pytest.mark.usefixtures("nothing_left")
def test_a_command_that_cannot_be_tried(command: tuple[str, ...], message: str, deadline: float) -> None:
    with pytest.raises(HostCommandFault, match=f"(?i){message}"):
        run_host("rune", command, deadline=deadline)


@pytest.mark.usefixtures("nothing_left")
def test_what_a_host_has_left_may_print_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_LEFT_SECONDS", 60.0)
    make_channels(str(tmp_path / "told"))
    more_than_a_pipe_holds = f"exec 9<{tmp_path}/told/0/alive; head -c 300000 /dev/zero & exit 3"
    with closing(ToldListener(str(tmp_path / "told"))) as heard, closing(host._Printed()) as output:
        status = host._watch("plain", ["sh", "-c", more_than_a_pipe_holds], heard, 60.0, output)
        assert (status, len(heard.processes), heard.alive) == (3, 1, False)


def test_a_machine_that_lacks_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what, and what to do."""
    command = ("true", "{folder}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(HostCommandFault, match=r"lacks what a trial needs: .*No such file"):
        run_host("rune", command)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(inotify_init1=lambda _: -1))
    ctypes.set_errno(errno.EMFILE)
    with pytest.raises(
        HostCommandFault, match=r"Too many open files .*raise fs\.inotify\.max_user_instances"
    ):
        run_host("rune", command)
    assert not os.listdir(tmp_path)


@pytest.mark.usefixtures("nothing_left")
def test_the_command_line(runner_as_user: Caller) -> None:
    words = (sys.executable, str(SMALL_HOST), "rune", "inherits", "{folder}", "{command}")
    done = runner_as_user("conformance", "rune", "--host", "--format", "json", "--", *words)
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["side"] == "host"
    assert [each["id"] for each in document["rules"] if each["result"] == "fail"] == ["rune-H16"]
    for without in (("plugin",), ("sh", "-c", "plugin"), ()):
        done = runner_as_user("conformance", "rune", "--host", *without)
        assert done.returncode == 2 and "write the host's command behind --" in done.stderr


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_host_too(runner_as_user: Caller, number: int) -> None:
    pipe = runner_as_user.home / "pid"
    os.mkfifo(pipe)
    os.chown(pipe, runner_as_user.uid, -1)
    host = ("sh", "-c", f"echo $$ $1 > {pipe}; exec sleep 1000", "sh", "{folder}")
    words = runner_as_user.command("conformance", "rune", "--host", "--", *host)
    with (
        open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as told_pid,
        subprocess.Popen(words, env=runner_as_user.environ, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert select.select([told_pid], [], [], 60.0)[0]
        pid, folder = told_pid.readline().split()
        process.send_signal(number)
        said = process.communicate()[1]
        assert (process.returncode, said) == (128 + number, "")
    assert vanished({int(pid)})
    assert not Path(folder).exists()


@pytest.mark.parametrize(("status", "result"), [(None, "n/a"), (0, "fail")])
def test_a_host_that_is_ended_at_its_deadline_has_left_no_process(status: int | None, result: str) -> None:
    log = PluginLog((ToldEntry("start", 1.0, START),), None)
    trial = {"plain": HostRun(status, (log,)), "stubborn": HostRun(status, (log,))}
    assert nothing_left()(trial).result == result
    assert ends_it()(trial).result == "fail"  # a host that waits for the plugin without end
    assert log.exchange[-1].text == "the process was still there"


# --- what the stand-in tells --------------------------------------------------------------------------------

START = {"argv": [], "cwd": "/", "folder": "/", "descriptors": [0, 1, 2], "environ": [], "variable": ""}


def told(*lines: str) -> list[str]:
    process = ToldProcess()
    for byte in "\n".join(("", json.dumps({"what": "start", "t": 1.0, **START}), *lines, "")).encode():
        process.hear(byte)
    return [each.what for each in process.entries]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        '{"what": "eof"}',
        '{"what": ["eof"], "t": 1.0}',
        '{"what": "eof", "t": "now"}',
        '{"what": "unheard_of", "t": 1.0}',
        '{"what": "frame", "t": 1.0, "text": 7, "size": 1, "fault": ""}',
        '{"what": "start", "t": 1.0}',
        "[" * 100_000,
    ],
)
def test_what_is_no_record_is_dropped(line: str) -> None:
    assert told(line, '{"what": "eof", "t": 1.0}') == ["start", "eof"]


def test_what_is_told_has_a_bound() -> None:
    assert told("x" * (1 << 20), '{"what": "eof", "t": 1.0}') == ["start"]


def test_the_channels_of_two_processes(tmp_path: Path) -> None:
    folder = str(tmp_path / "told")
    make_channels(folder)
    (tmp_path / "told/0/xyz").touch()  # a host's own file
    listener = ToldListener(folder)
    try:
        # The first has no process.
        for name in ("0/000", "0/alive", "0/07b", "0/xyz", "1/alive", "1/10a"):
            os.close(os.open(os.path.join(folder, name), os.O_RDONLY))
        with open(os.path.join(folder, "0/alive")):
            listener.receive()
            assert [each.closed is None for each in listener.processes] == [False, False, True]
            assert (listener.alive, listener.lost) == (True, False)
        listener.receive()
        assert (listener.alive, listener.logs) == (False, ())
    finally:
        listener.close()
