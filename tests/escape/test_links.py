"""Symbolic links planted by another user: --state-dir and --report do not follow them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import elsewhere
from tests.conftest import TEMP_PREFIX, USER_UID, Caller
from tests.manifests import SANDBOX, nexo

Write = Callable[..., Path]

NEXO = nexo("linked") + SANDBOX + 'fs_write_paths = ["${state_dir}"]\n'

OTHER = USER_UID + 1


@pytest.fixture
def plugin(plugin_dir: Path, write_file: Write, nothing_left: None) -> Path:
    write_file(plugin_dir / "plugin/nexo-plugin.toml", NEXO)
    write_file(plugin_dir / "plugin/run", "#!/bin/sh\necho ran\n", 0o755)
    return plugin_dir / "plugin"


@pytest.fixture
def public(plugin_dir: Path) -> Path:
    """A world-writable folder with the sticky bit, like /tmp."""
    path = plugin_dir / "public"
    path.mkdir()
    path.chmod(0o1777)
    return path


def plant(link: Path, target: Path | str) -> None:
    """Make a link that belongs to another user."""
    link.symlink_to(target)
    if os.geteuid() == 0:
        os.chown(link, OTHER, OTHER, follow_symlinks=False)


def look(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_uid, stat.S_IMODE(status.st_mode), status.st_ino


@pytest.fixture
def root_dir() -> Iterator[Path]:
    """A directory that only root can change, like all its parents."""
    path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/var/lib"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


# --- --state-dir -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_planted_link_does_not_redirect_the_state_directory(
    runner_as: Caller, plugin: Path, public: Path, below: str
) -> None:
    victim = plugin.parent / "victim"
    victim.mkdir(mode=0o755)
    runner_as.give(victim)
    before = look(victim)
    plant(public / "state", victim)
    done = runner_as("exec", "--state-dir", public / "state" / below, plugin)
    assert (done.returncode, done.stdout) == (126, "")
    assert f"{public}/state is a symbolic link to {victim}" in done.stderr
    assert f"use the path it leads to: {victim / below}" in done.stderr
    assert (look(victim), os.listdir(victim)) == (before, [])
    # The control: without the link the same directory is accepted.
    done = runner_as("exec", "--state-dir", victim / below, plugin)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert look(victim / below)[:2] != before[:2] or below


@pytest.mark.needs("root")
def test_roots_link_in_a_directory_of_root_is_followed(
    runner_as_root: Caller, plugin: Path, root_dir: Path
) -> None:
    (root_dir / "real").mkdir(mode=0o755)
    (root_dir / "link").symlink_to("real")
    state, report = root_dir / "link/state", root_dir / "link/report.json"
    done = runner_as_root("exec", "--state-dir", state, "--report", report, plugin)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert sorted(os.listdir(root_dir / "real")) == ["report.json", "state"]
    # The control: when others can change the directory, root's link in it is not trusted.
    root_dir.chmod(0o777)
    assert runner_as_root("exec", "--state-dir", state, plugin).returncode == 126
    assert runner_as_root("exec", "--report", report, plugin).returncode == 2


@pytest.mark.needs("user")
def test_links_in_a_users_home_are_followed_unless_on_the_command_line(
    runner_as_user: Caller, plugin: Path
) -> None:
    """A plugin cannot plant links in directories that the environment names, such as ~/.local/state."""
    home = runner_as_user.home
    (home / "elsewhere").mkdir()
    (home / "state").symlink_to("elsewhere")
    runner_as_user.give(home)
    done = runner_as_user("exec", plugin, env={"XDG_STATE_HOME": str(home / "state")})
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert os.listdir(home / "elsewhere/runner/plugins")
    # A path on the command line may be anywhere, and a plugin of the user has the user's uid.
    done = runner_as_user("exec", "--state-dir", home / "state/chosen", plugin)
    assert done.returncode == 126 and str(home / "elsewhere/chosen") in done.stderr
    assert not (home / "elsewhere/chosen").exists()


# --- --report ----------------------------------------------------------------------------------------------


def test_a_planted_link_does_not_redirect_the_report(runner_as: Caller, plugin: Path, public: Path) -> None:
    victim = plugin.parent / "victim"
    victim.write_text("secret")
    victim.chmod(0o600)
    runner_as.give(victim)
    before = look(victim)
    plant(public / "report.json", victim)
    plant(public / "folder", victim.parent)
    plant(public / "nowhere", victim.parent / "new")
    state = runner_as.home / "state"
    for target in (public / "report.json", public / "folder/victim", public / "nowhere"):
        done = runner_as("exec", "--state-dir", state, "--report", target, plugin)
        assert (done.returncode, done.stdout) == (2, "")
        assert "symbolic link" in done.stderr and "use the path it leads to" in done.stderr
    assert (look(victim), victim.read_text()) == (before, "secret")
    assert not (victim.parent / "new").exists()
    assert sorted(os.listdir(public)) == ["folder", "nowhere", "report.json"]
    # The control: without links the report is written to the same directory and over the same file.
    runner_as.give(victim.parent)
    for target in (public / "mine.json", victim):
        runner_as("exec", "--state-dir", "/proc/nowhere", "--report", target, plugin)
        assert json.loads(target.read_text())["schema"] == "runner.report.v1"
        assert look(target)[:2] == (runner_as.uid, 0o600)


@pytest.mark.needs("root")
def test_a_fifo_of_another_user_gets_no_report(runner_as_root: Caller, plugin: Path, public: Path) -> None:
    """The user who made the fifo reads the report, and could stop reading half-way."""
    fifo = public / "report.json"
    os.mkfifo(fifo)
    os.chown(fifo, OTHER, OTHER)
    with subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE) as reader:
        held = os.open(fifo, os.O_WRONLY)  # returns when the reader is there
        done = runner_as_root("exec", "--report", fifo, plugin)
        os.close(held)
        assert reader.communicate(timeout=60)[0] == b""
    assert done.returncode == 2 and f"belongs to uid {OTHER}" in done.stderr


def test_a_report_to_a_descriptor_of_the_caller(runner_as: Caller, plugin: Path) -> None:
    """A descriptor's file has no path, or one that others could change: the path is not checked."""
    state = runner_as.home / "state"
    words = ("exec", "--policy", "/nonexistent", "--state-dir", state, "--report")  # reported, not launched
    read, write = os.pipe()
    os.set_blocking(write, False)  # the caller may have set this
    log = plugin.parent / "log"
    file = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(file, b"before\n")
    try:
        for target in (str(write), f"/dev/fd/{write}", f"/proc/self/fd/{write}"):
            runner_as(*words, target, plugin, pass_fds=[write])
            assert json.loads(os.read(read, 1 << 16))["schema"] == "runner.report.v1"
        runner_as(*words, f"/dev/fd/{file}", plugin, pass_fds=[file])
        done = runner_as(*words, f"/dev/fd/{read}", plugin, pass_fds=[read])
        assert done.returncode == 2 and "open for reading only" in done.stderr
    finally:
        for fd in (read, write, file):
            os.close(fd)
    first, second = log.read_text().splitlines()
    assert first == "before" and json.loads(second)["schema"] == "runner.report.v1"
    done = runner_as(*words, "/dev/stderr", plugin)
    assert any(line.startswith('{"schema"') for line in done.stderr.splitlines())
    done = runner_as(*words, "/dev/stdout", plugin)
    assert json.loads(done.stdout)["schema"] == "runner.report.v1"
    for target in ("/dev/stdin", "/dev/fd/77", "/proc/1/fd/2"):
        assert runner_as(*words, target, plugin).returncode == 2


# --- races -------------------------------------------------------------------------------------------------


def launch_with_swapped_state(manifest: str, state: str, swap: str) -> list[str]:
    """Prepare a launch, and replace the state directory just after the runner has prepared it."""
    import os
    from contextlib import contextmanager

    from runner.launch.acquire import acquire
    from runner.launch.failures import as_failure
    from runner.launch.plan import plan
    from runner.launch.prepare import decide
    from runner.launch.read import load
    from runner.launch.sources import Sources
    from runner.launch.stages import Invocation, Stopwatch
    from runner.outcome import Failure
    from sandbox.identity import state as state_module

    @contextmanager
    def owned_state(*args, **more):  # type: ignore[no-untyped-def]
        with real_owned_state(*args, **more) as owner:
            if swap:
                os.rename(swap, f"{state}.moved")
                os.makedirs(f"{state}/part", exist_ok=True)
                os.chown(swap, owner.uid, owner.gid)
            yield owner

    real_owned_state = vars(state_module)["owned_state"]
    vars(state_module)["owned_state"] = owned_state
    watch = Stopwatch()
    try:
        decided = decide(load(Invocation(manifest, state_dir=state), watch), os.environ, watch)
        with Sources() as sources:
            planned = plan(decided, os.environ, watch, sources)
            with as_failure(planned), acquire(planned, os.environ, sources):
                return ["ready", ""]
    except Failure as failure:
        return [failure.outcome.code, failure.outcome.message]


@pytest.mark.parametrize("asked", ["", "/part"])
def test_a_state_directory_replaced_before_the_mount_is_refused(
    runner_as: Caller, plugin: Path, write_file: Write, asked: str
) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO.replace("${state_dir}", "${state_dir}" + asked))
    runner_as.give(plugin.parent)
    state = f"{plugin.parent}/state"
    act = launch_with_swapped_state
    assert elsewhere.run(runner_as, act, str(plugin), state, "") == ["ready", ""]  # the control
    code, message = elsewhere.run(runner_as, act, str(plugin), state, state + asked)
    assert (code, message) == (
        "policy_denied",
        f"state directory {state}{asked} was replaced while it was being opened",
    )
