"""A launch that is decided and a launch from a stored plan are the same launch."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import elsewhere
from tests.conftest import ROOT, Caller
from tests.manifests import SANDBOX, nexo
from tests.tables import one_case
from tests.template import settled

Write = Callable[..., Path]

USED = "runner: a stored plan is used"
# Those with a manifest. Others are programs that tests write a manifest for.
PLUGINS = sorted(
    str(path.relative_to(ROOT / "tests/plugins"))
    for pattern in ("*plugin.toml", "*plugin.json", "*plugin.yaml", "mcp.json")
    for path in (ROOT / "tests/plugins").rglob(pattern)
)


def told(report: Path) -> dict[str, Any]:
    """What a report says, but for what two launches of the same plan never share."""
    document: dict[str, Any] = json.loads(report.read_text())
    for differs in ("timings", "usage"):
        document.pop(differs)
    for limit in document["limits"]:
        limit.pop("peak", None)
    if document["stderr"] is not None:  # how much was read when it was too much
        document["stderr"] = sorted(document["stderr"])
    for layer in document["layers"]:
        layer["detail"] = layer["detail"].rstrip("0123456789")  # the uid that was leased
    return document


def twice(
    caller: Caller, place: Path, *words: str, said: str = "", verb: str = "exec"
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """Launch until there is a stored plan, and then once more. What both gave, which has to be the same."""
    report = place / "report.json"
    command = (verb, "--report", str(report), *words)
    decided, was = None, None
    # The first launch may make the state directory, which is another machine for the next.
    for _ in range(6):
        stored = caller(*command, input=said, env={"RUNNER_DEBUG": "1"})
        if USED in stored.stderr:
            break
        decided, was = stored, told(report)
    assert decided is not None and USED in stored.stderr, stored.stderr
    lines = [line for line in stored.stderr.splitlines() if not line.startswith("runner: a stored")]
    before = [line for line in decided.stderr.splitlines() if "stored plan" not in line]
    assert (stored.returncode, stored.stdout, lines) == (decided.returncode, decided.stdout, before)
    assert told(report) == was
    return stored, was


@pytest.mark.launches
@one_case("manifest", PLUGINS)
def test_every_plugin_runs_the_same(
    runner_as: Caller, plugin_dir: Path, manifest: str, nothing_left: None
) -> None:
    source = ROOT / "tests/plugins" / Path(manifest).parts[0]
    folder = plugin_dir / "plugin"
    shutil.copytree(source, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.suffix in ("", ".py") else 0o644)
    place = plugin_dir / "reports"
    place.mkdir()
    runner_as.give(plugin_dir)
    file = folder / Path(*Path(manifest).parts[1:])
    server = next(iter(json.loads(file.read_text())["mcpServers"])) if file.name == "mcp.json" else None
    found: dict[str, Any] = elsewhere.run(runner_as, same_plan, str(file), server)
    assert found == {"why": "", "equal": True, "decided": True, "bwrap": True}


def same_plan(manifest: str, server: str | None) -> dict[str, Any]:
    """A plan through its file: is what comes out what went in?"""
    import os

    from runner.launch.rehearse import rehearse
    from runner.launch.stages import Invocation
    from runner.launch.stored.entry import read, request_of
    from runner.launch.stored.run import planned_of
    from runner.launch.stored.store import NotStored, encode_plan
    from runner.outcome import Failure
    from sandbox import look
    from sandbox.plan import bwrap
    from sandbox.plan.plan import Bind, Text

    arguments = ("--an-argument",)
    request = request_of(["exec", manifest], arguments, os.environ)
    try:
        with look.recording() as asked:
            planned = rehearse(
                Invocation(manifest, server=server, args=arguments), look.environment(os.environ)
            )
        entry = read(encode_plan(planned, asked, request))
    except (Failure, NotStored) as refused:
        return {"why": str(refused)}
    assert entry is not None
    copy = planned_of(entry, request)

    def options(which: Any) -> tuple[str, ...]:
        plan = which.plan
        files = [op.dest for op in plan.operations if isinstance(op, Bind | Text)]
        numbers = {dest: number for number, dest in enumerate(files, 10)}
        folders = {op.dest: f"/sys/{op.dest}" for op in plan.folders}
        return bwrap.options(plan, bwrap.Slots(numbers, numbers, folders, (7, 8), 9))

    return {
        "why": "",
        "equal": tuple(copy)[1:-1] == tuple(planned)[1:-1],  # all but `decided` and the timings
        "decided": copy.decided.grant == planned.decided.grant
        and copy.decided.loaded == planned.decided.loaded
        and copy.decided.policy == planned.decided.policy,
        "bwrap": options(copy) == options(planned)
        and copy.plan.filters == planned.plan.filters
        and copy.bwrap == planned.bwrap,
    }


MANIFEST = nexo("ends", "./plugin") + SANDBOX + "fs_write_paths = {writes}\n[plugin.limits]\n{limits}\n"
ENDINGS = {
    "ok": ("", "cat; echo said; echo heard >&2"),
    "status": ("", "exit 7"),
    "signal": ("", "kill -SEGV $$"),
    "killed": ("", "kill -KILL $$"),
    "deadline": ('deadline = "2s"', "sleep 60"),
    "output": ('output = "1K"', "while :; do echo too much >&2; done"),
    "file size": ('file_size = "4K"', "head -c 9999 /dev/zero > /tmp/file"),
    "open files": ("open_files = 20", "exec 15</dev/null 2>&1; exec sh -c 'ulimit -n'"),
    "processes": ("pids = 8", "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done; wait"),
    "system call": ("", "unshare --user true"),
    "not a program": ("", None),
}


@pytest.mark.launches
@one_case("ending", ENDINGS)
def test_every_end_is_told_the_same(
    runner_as: Caller, plugin_dir: Path, write_file: Write, ending: str, nothing_left: None
) -> None:
    limits, script = ENDINGS[ending]
    folder = plugin_dir / "plugin"
    write_file(folder / "nexo-plugin.toml", MANIFEST.format(limits=limits, writes="[]"))
    text = f"#!/bin/sh\n{script}\n" if script is not None else "\x7fELF nothing that runs"
    write_file(folder / "plugin", text, 0o755)
    place = plugin_dir / "reports"
    place.mkdir()
    runner_as.give(plugin_dir)
    caller = settled(runner_as)
    if script is None:  # it is refused, by the plan: and what is refused is never stored
        for _ in range(2):
            ended = caller("exec", str(folder), env={"RUNNER_DEBUG": "1"})
            assert USED not in ended.stderr and ended.returncode == 126
        return
    twice(caller, place, str(folder), said="asked\n")


@pytest.mark.launches
@pytest.mark.parametrize("chosen", [False, True], ids=["managed", "chosen"])
def test_a_plugin_with_state_keeps_it(
    runner_as: Caller, plugin_dir: Path, write_file: Write, chosen: bool, nothing_left: None
) -> None:
    folder = plugin_dir / "plugin"
    manifest = MANIFEST.format(limits="", writes='["${state_dir}"]')
    write_file(folder / "nexo-plugin.toml", manifest)
    write_file(
        folder / "plugin",
        "#!/bin/sh\necho more >> $RUNNER_STATE_DIR/count\nwc -l < $RUNNER_STATE_DIR/count\n",
        0o755,
    )
    runner_as.give(plugin_dir)
    counts, used = [], []
    for _ in range(4):
        place = ("--state-dir", str(plugin_dir / "state")) if chosen else ()
        ended = settled(runner_as)("exec", *place, str(folder), env={"RUNNER_DEBUG": "1"})
        counts.append(ended.stdout.strip())
        used.append(USED in ended.stderr)
    assert counts == ["1", "2", "3", "4"]
    assert used[0] is False and used[-1] is True
    removed = runner_as("state", "remove", "--orphaned")
    assert removed.returncode == 0


@pytest.mark.launches
def test_a_plugin_with_hosts_runs_the_same(
    runner_as: Caller, plugin_dir: Path, write_file: Write, nothing_left: None
) -> None:
    """Its plan has what most plans have not: what the gate lets through."""
    folder, place = plugin_dir / "plugin", plugin_dir / "reports"
    hosts = '[]\nnetwork = "allowlist"\nnetwork_allowlist = ["nowhere.example.com:443"]'
    write_file(folder / "nexo-plugin.toml", MANIFEST.format(limits="", writes=hosts))
    write_file(folder / "plugin", "#!/bin/sh\nls /sys/class/net 2>/dev/null; cat /etc/resolv.conf\n", 0o755)
    text = 'version = 1\n[network]\nceiling = "allowlist"\nhosts = ["*:*"]\n'
    policy = write_file(plugin_dir / "policy.toml", text)
    place.mkdir()
    runner_as.give(plugin_dir)
    ended, told_of = twice(settled(runner_as), place, "--policy", str(policy), str(folder))
    assert "nameserver" in ended.stdout and told_of["network"] is not None


@pytest.mark.launches
def test_no_part_of_a_word_is_written(runner_as: Caller) -> None:
    """As `docker run -e NAME=VALUE` makes a variable of one, and others are filled in, or quoted in hints."""
    rows = [
        (["-e", "SET=pin7"], "the value of a variable is in an argument"),
        (["--env=SET=pin7"], "the value of a variable is in an argument"),
        (["-eSET=pin7"], "the value of a variable is in an argument"),
        (["--db=sqlite://${plugin_dir}/db?s3cret-key"], "part of another text"),
        (["it's a s3cret-key"], "part of another text"),
        (["-e", "SET=other", "${plugin_dir}/db", "s3cret-key"], ""),  # the control
    ]
    found: list[str] = elsewhere.run(runner_as, encoded_with, [words for words, _ in rows])
    for said, (words, why) in zip(found, rows, strict=True):
        assert (why in said) if why else ("pin7" in said and "s3cret-key" not in said), (words, said[:99])


def encoded_with(lines: list[list[str]]) -> list[str]:
    """Each line's plan with a variable and a note of its words, as text; or why it is not stored."""
    import os
    import shlex

    from runner.launch.command import Command
    from runner.launch.rehearse import rehearse
    from runner.launch.stages import Invocation
    from runner.launch.stored.entry import request_of
    from runner.launch.stored.store import NotStored, encode_plan
    from sandbox import look
    from sandbox.spec import EnvRequest, Note, SandboxSpec

    spec = SandboxSpec(env=(EnvRequest("SET", "pin7"),))
    found = []
    for words in lines:
        command = Command(("/bin/echo", *words), "/", spec=spec)
        try:
            with look.recording() as asked:
                planned = rehearse(Invocation("", command=command), look.environment(os.environ))
            hint = " ".join(shlex.quote(word) for word in words if "'" in word)
            planned = planned._replace(decided=planned.decided._replace(notes=(Note("any", "one", hint),)))
            raw = encode_plan(planned, asked, request_of(["run", "/bin/echo"], words, os.environ))
            found.append(raw.decode("latin-1"))
        except NotStored as refused:
            found.append(str(refused))
    return found
