"""A program that the kernel does not execute was never launched, whatever its exit code would be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Caller
from tests.limits.altered import altered
from tests.manifests import nexo
from tests.tables import one_case

Write = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("nothing_left")

MANIFEST = nexo("unexecuted", "{command}")
# Between the look at the program and its start, somebody does this to it.
MEANWHILE = """
import os
from sandbox.cell import unsandboxed as bare; from sandbox.spawn import spawner
def meanwhile(path=None, spawn=spawner.spawn):
    def act(*words):
        path = {path!r}
        {act}
        return spawn(*words)
    return act
spawner.spawn = meanwhile()
bare.set_rlimits = meanwhile(spawn=bare.set_rlimits)
"""
ACTS = {
    "removed": ("os.unlink(path)", 127, "not_found", "No such file"),
    "a text": ("open(path, 'w').write('echo run by a shell\\n')", 126, "not_executable", "Exec format error"),
    "empty": ("open(path, 'w').close()", 126, "not_executable", "Exec format error"),
    "not executable": ("os.chmod(path, 0o644)", 126, "not_executable", "Permission denied"),
    "a folder": ("os.unlink(path); os.mkdir(path)", 126, "not_executable", "Permission denied"),
    "without its interpreter": (
        "open(path, 'w').write('#!/nonexistent/sh\\n')",
        126,
        "not_executable",
        "its interpreter or loader is not there",
    ),
}


def launch(caller: Caller, *options: str, manifest: Path) -> tuple[Any, dict[str, Any]]:
    report = caller.home / "report.json"
    done = caller("exec", "--report", report, *options, manifest)
    return done, json.loads(report.read_text())


@one_case("what", ACTS)
@one_case("cage", [True, False], ids=["caged", "bare"])
def test_a_program_that_changes_before_its_start(
    runner_as: Caller, plugin_dir: Path, write_file: Write, what: str, cage: bool
) -> None:
    act, status, cause, message = ACTS[what]
    program = write_file(plugin_dir / "plugin", "#!/bin/sh\necho ran\nexit 127\n", 0o755)
    text = MANIFEST.format(command="./plugin") + ("" if cage else "[plugin.sandbox]\nenabled = false\n")
    manifest = write_file(plugin_dir / "nexo-plugin.toml", text)
    policy = write_file(plugin_dir / "policy.toml", 'version = 1\nunsandboxed = "allow"\n')
    runner_as.give(plugin_dir)
    caller = altered(runner_as, MEANWHILE.format(path=str(program), act=act))
    done, report = launch(caller, *(() if cage else ("--policy", str(policy))), manifest=manifest)
    outcome = report["outcome"]
    assert (done.returncode, outcome["code"], outcome["cause"]) == (status, "launch_failed", cause)
    assert message in outcome["message"] and message in done.stderr and outcome["hint"]
    assert (report["exit"]["code"], report["exit"]["reached_exec"], done.stdout) == (None, False, "")
    assert "bwrap" not in done.stderr and "sh:" not in done.stderr


def test_exit_codes_of_a_plugin_are_its_own(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    manifest = write_file(plugin_dir / "nexo-plugin.toml", MANIFEST.format(command="./plugin"))
    for code in (125, 126, 127):
        write_file(plugin_dir / "plugin", f"#!/bin/sh\nexit {code}\n", 0o755)
        done, report = launch(runner_as, manifest=manifest)
        assert (done.returncode, report["outcome"]["cause"]) == (code, f"exit:{code}")
        assert (report["exit"]["code"], report["exit"]["reached_exec"]) == (code, True)


@one_case("command", ["/proc/self/exe", "/dev/fd/0", "/proc/1/exe", "./link"])
def test_a_program_by_another_process_is_none(
    runner_as: Caller, plugin_dir: Path, write_file: Write, command: str
) -> None:
    """What /proc/self/exe is depends on who looks: here the interpreter, in the cage it was bubblewrap."""
    manifest = write_file(plugin_dir / "nexo-plugin.toml", MANIFEST.format(command=command))
    (plugin_dir / "link").symlink_to("/proc/self/exe")
    done, report = launch(runner_as, manifest=manifest)
    assert (done.returncode, report["outcome"]["code"]) == (126, "launch_failed")
    assert report["outcome"]["cause"] == "not_executable" and "/proc" in report["outcome"]["message"]
    assert command.removeprefix(".") in report["outcome"]["message"]
    assert "bwrap" not in done.stderr
