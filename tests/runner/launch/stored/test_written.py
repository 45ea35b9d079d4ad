"""Stored plans of plugins that may write to folders of the host: these are judged again at each launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT, Caller
from tests.runner.launch.stored.stored_plugin import plans_in, unless_others_change
from tests.runner.launch.stored.test_both_ways import USED, twice
from tests.template import settled

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

Write = Callable[..., Path]
POLICY = """\
version = 1
deny = ["{vault}"]
[approvals]
read = ["{place}"]
write = ["{place}/work"]
"""
# It writes, and tries to leave code that git would run outside.
SCRIPT = """\
cd "$1" && echo more >> count && wc -l < count
if { mkdir -p .git/hooks && echo evil > .git/hooks/pre-commit; } 2>/dev/null; then echo planted; fi
"""


class Work:
    """A folder that a command may write, with a plan that is stored."""

    def __init__(self, caller: Caller, place: Path, write_file: Write) -> None:
        self.caller, self.place, self.folder = settled(caller), place, place / "work"
        self.vault = write_file(place / "vault/key", "secret\n")
        self.folder.mkdir()
        self.script = write_file(place / "tool/script", SCRIPT)
        self.policy = write_file(place / "policy.toml", POLICY.format(vault=self.vault.parent, place=place))
        caller.give(place)
        self.owner = caller.uid or 1000  # root's own folders are nobody's to write
        self.own(self.folder)

    def own(self, *paths: Path) -> None:
        for path in paths:
            os.chown(path, self.owner, self.owner, follow_symlinks=False)

    def words(self, *options: str) -> tuple[str, ...]:
        shown = ("--read", str(self.script.parent), "--write", str(self.folder))
        given = ("--policy", str(self.policy), *shown, *options)
        return (*given, "--", "/bin/sh", str(self.script), str(self.folder))

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.caller("run", *self.words(*options), env={"RUNNER_DEBUG": "1"}, cwd="/")

    def use(self) -> None:
        """Launch until the stored plan is used: the control of what follows."""
        for _ in range(4):
            if USED in (ended := self.run()).stderr:
                break
        assert USED in ended.stderr and ended.returncode == 0, ended.stderr
        assert "planted" not in ended.stdout
        (self.folder / "count").unlink()


@pytest.mark.both_callers
def test_what_may_be_written_is_judged_again(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    work = Work(runner_as, plugin_dir, write_file)
    work.use()
    # What people and the plugin itself do there costs no plan.
    (work.folder / "sub").mkdir()
    work.own(write_file(work.folder / "sub/notes.txt", "text\n"), work.folder / "sub")
    for least in (1, 2):
        ended = unless_others_change(work.place, work.run)
        assert USED in ended.stderr and int(ended.stdout) >= least

    def refused(rule: str) -> None:
        for _ in range(2):
            ended = work.run()
            assert ended.returncode == 126 and rule in ended.stderr.replace("_", " "), ended.stderr
        assert not (work.folder / "count").exists()

    work.use()
    os.link(work.vault, work.folder / "innocent")
    refused("hard link")
    (work.folder / "innocent").unlink()

    work.use()
    os.mkfifo(work.folder / "sub/pipe")
    refused("special file")
    (work.folder / "sub/pipe").unlink()

    work.use()
    tool = write_file(work.folder / "tool", "#!/bin/sh\n", 0o4755)
    work.own(tool)
    tool.chmod(0o4755)
    refused("set id")
    tool.unlink()

    # A repository: its hooks are guarded from now on, by plans that are decided and by stored ones.
    work.use()
    subprocess.run(["git", "init", "-q", str(work.folder / "sub/repo")], check=True)
    work.own(*(work.folder / "sub/repo").rglob("*"), work.folder / "sub/repo")
    hooks = work.folder / "sub/repo/.git/hooks"
    before = sorted(hooks.iterdir())
    inside = (*work.words()[:-1], str(work.folder / "sub/repo"))
    decided = work.run()
    assert "PlanOutdated('what is guarded" in decided.stderr and decided.stdout.split() == ["1"]
    for _ in range(9):
        ended = work.caller("run", *inside, env={"RUNNER_DEBUG": "1"}, cwd="/")
        assert "planted" not in ended.stdout
        if USED in ended.stderr:
            break
    assert USED in ended.stderr and sorted(hooks.iterdir()) == before

    # Another folder of the same name, and a link.
    work.use()
    work.folder.rename(work.place / "old")
    work.folder.mkdir()
    work.own(work.folder)
    ended = work.run()
    assert USED not in ended.stderr and ended.stdout.split() == ["1"]
    work.use()
    work.folder.rename(work.place / "older")
    work.folder.symlink_to(work.vault.parent)
    refused("policy")
    assert work.vault.read_text() == "secret\n"


@pytest.mark.both_callers
def test_a_command_that_writes_runs_the_same(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    work = Work(runner_as, plugin_dir, write_file)
    place = plugin_dir / "reports"
    place.mkdir()
    runner_as.give(place)
    work.own(write_file(work.folder / ".git/config", "[core]\n"), work.folder / ".git")
    shown = ("--read", str(work.script.parent), "--write", str(work.folder))
    words = ("--policy", str(work.policy), *shown)
    work.script.write_text('cd "$1"; echo "$2" > made; ls -ln made | cut -d" " -f3; echo x > .git/config\n')
    command = ("--", "/bin/sh", str(work.script), str(work.folder), "s3cret-word")
    ended, told_of = twice(work.caller, place, *words, *command, verb="run")
    assert ended.returncode == 2 and (work.folder / "made").read_text() == "s3cret-word\n"
    assert (work.folder / "made").stat().st_uid == work.owner
    assert [each["path"] for each in told_of["grant"]["owners"]] == (
        [] if runner_as.uid else [str(work.folder)]
    )
    folder = Path("/var/cache/runner") if runner_as.uid == 0 else runner_as.home / ".cache/runner"
    stored = plans_in(folder).values()
    assert any(os.fsencode(work.folder) in raw for raw in stored)
    assert not any(b"s3cret-word" in raw for raw in stored)
    if runner_as.uid == 0:
        # A file of another owner is told, and a launch from a stored plan would not know it.
        write_file(work.folder / "stranger", "")
        report = place / "again.json"
        again = work.caller(
            "run", "--report", str(report), *words, *command, env={"RUNNER_DEBUG": "1"}, cwd="/"
        )
        assert "PlanOutdated" in again.stderr and "files of other owners" in report.read_text()


def test_which_command_lines_have_a_plan(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    write_file(plugin_dir / "sub/file", "text\n")
    runner_as.give(plugin_dir)
    caller = settled(runner_as)

    def is_used(*words: str, env: dict[str, str] | None = None, cwd: Path = plugin_dir) -> bool:
        used = False
        for _ in range(3):
            ended = caller("run", *words, env={"RUNNER_DEBUG": "1", **(env or {})}, cwd=str(cwd))
            assert ended.returncode == 0, ended.stderr
            used = used or USED in ended.stderr
        return used

    assert is_used("--", "true")
    assert is_used(f"--read={plugin_dir}", "--cwd", str(plugin_dir / "sub"), "--", "cat", "file")
    assert is_used("--project", "--memory", "256M", "--limit=open_files=99", "--", "cat", "sub/file")
    assert is_used("--env", "WORD", "--", "/bin/sh", "-c", 'test "$WORD" = a', env={"WORD": "a"})
    # A value on the command line may be a secret, and so nothing of it is stored.
    assert not is_used("--env", "WORD=a", "--", "true")
    # Another folder to start in, another program and other options are other launches.
    ended = caller("run", "--project", "--", "ls", env={"RUNNER_DEBUG": "1"}, cwd=str(plugin_dir / "sub"))
    assert USED not in ended.stderr and ended.stdout == "file\n"
    assert is_used("--project", "--", "ls")
    ended = caller("run", "--project", "--", "ls", env={"RUNNER_DEBUG": "1"}, cwd=str(plugin_dir / "sub"))
    assert ended.stdout == "file\n"
    assert caller("run", "--", "true", "--memory", "1").returncode == 0
    assert caller("run", "--", "false").returncode == 1


def test_what_adds_to_the_runners_own_code_is_noted(tmp_path: Path) -> None:
    """Also where something else has needed `site` before: a module that is not there, say."""
    packages = tmp_path / "lib/site-packages"
    packages.mkdir(parents=True)
    (packages / "own.pth").write_text("/nowhere\n")
    code = f"""
import sys
sys.path += [{str(ROOT)!r}, {str(packages)!r}]
from sandbox.speed.late_site import LateSite, is_site_waiting
sys.meta_path.append(LateSite())
if sys.argv[1] == "first":
    try:
        import a_module_that_nobody_has
    except ImportError:
        pass
from runner.launch.denylist import _complete_search_path
from sandbox import look
before = is_site_waiting()
with look.recording() as asked:
    _complete_search_path()
print(before, {str(packages / "own.pth")!r} in asked.facts.places, {str(packages)!r} in asked.facts.listed)
"""
    said = [
        subprocess.run(
            [sys.executable, "-ISc", code, when], capture_output=True, text=True, check=True
        ).stdout
        for when in ("first", "later")
    ]
    assert said == ["False True True\n", "True True True\n"]


def test_what_is_hidden_in_one_folder_is_not_in_another(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """A server's own configuration, beside one of the same name that it may read."""
    work = Work(runner_as, plugin_dir, write_file)
    one, other = work.folder / "one", work.folder / "other"
    own = write_file(one / ".mcp.json", "")
    line = f"cat {own} {other}/.mcp.json; exit 0"
    asked = {"write": [str(one), str(other)]}
    server = {"command": "/bin/sh", "args": ["-c", line], "x-sandbox": asked}
    own.write_text(json.dumps({"mcpServers": {"x": server}}))
    work.own(own, write_file(other / ".mcp.json", "of another\n"), one, other)
    words = ("--policy", str(work.policy), str(own))
    allowed = work.caller("allow", *words, "--yes")
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    for _ in range(9):
        ended = work.caller("exec", *words, env={"RUNNER_DEBUG": "1"}, cwd="/")
        assert ended.stdout == "of another\n", ended.stderr
        if USED in ended.stderr:
            break
    assert USED in ended.stderr and "PlanOutdated" not in ended.stderr
