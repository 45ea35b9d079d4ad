"""Regression tests: holes that were found by attacking the runner, each with the attack that found it."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SYSTEM_PATH, Caller
from tests.manifests import SANDBOX, nexo
from tests.tables import one_case
from tests.template import prepared

Write = Callable[..., Path]

NEXO = nexo("found") + SANDBOX


@pytest.fixture
def plugin(plugin_dir: Path, write_file: Write, nothing_left: None) -> Path:
    write_file(plugin_dir / "plugin/nexo-plugin.toml", NEXO)
    write_file(plugin_dir / "plugin/run", "#!/bin/sh\ngrep Seccomp: /proc/self/status\n", 0o755)
    return plugin_dir / "plugin"


def with_state(plugin: Path, write_file: Write, script: str) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO + 'fs_write_paths = ["${state_dir}"]\n')
    write_file(plugin / "run", f"#!/bin/sh\n{script}\n", 0o755)


def run_with_prlimit(limit: str, caller: Caller, plugin: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["prlimit", limit, *caller.command("exec", plugin)],
        env={**caller.environ},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_small_rlimit_fsize_removes_no_layer(runner_as: Caller, plugin: Path) -> None:
    """RLIMIT_FSIZE applies to memfds too. A truncated option list would leave out the cage's last layers."""

    def limited(size: int) -> subprocess.CompletedProcess[str]:
        code = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
        return prepared(runner_as, code)("exec", plugin)

    whole = limited(100_000_000)
    assert (whole.returncode, whole.stdout) == (0, "Seccomp:\t2\n")  # the control
    ran = 0
    for size in (0, 1, 50, 200, 400, 700, 1000, 1200, 1250, 1300, 1350, 1400, 1500, 1600, 1800, 2000, 4000):
        done = limited(size)
        assert "Traceback" not in done.stderr
        if done.stdout:
            ran += 1
            assert done.stdout == "Seccomp:\t2\n" and done.returncode == 0
        else:
            assert done.returncode == 125
    assert ran  # the largest size is enough to run


@one_case("files", [8, 12, 16, 20, 24, 28])
def test_too_few_descriptors_end_in_an_orderly_failure(runner_as: Caller, plugin: Path, files: int) -> None:
    done = run_with_prlimit(f"--nofile={files}", runner_as, plugin)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 125) and (done.returncode == 0) == (done.stdout == "Seccomp:\t2\n")


# --- mounts made after the launch --------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_a_later_mount_of_the_host_does_not_appear_inside(
    runner_as_root: Caller, plugin: Path, plugin_dir: Path, write_file: Write
) -> None:
    """On most hosts / is shared: a later mount below a granted folder would appear inside, writable."""
    (plugin / "later").mkdir(mode=0o755)
    state = plugin_dir / "state"
    with_state(
        plugin,
        write_file,
        "cd $RUNNER_STATE_DIR; mkfifo go; echo > ready; read x < go; ls " + str(plugin / "later"),
    )
    command = shlex.join(runner_as_root.command("exec", "--state-dir", state, plugin))
    script = f"""
mount --make-rshared /
{command} > {plugin_dir}/out 2>&1 < /dev/null &
runner=$!
while ! [ -p {state}/go ]; do :; done
mount -t tmpfs -o mode=777 none {plugin}/later
echo secret > {plugin}/later/file
seen=$(ls {plugin}/later)
echo go > {state}/go
wait $runner
umount {plugin}/later
echo "$seen"
"""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        env={**runner_as_root.environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["file"], done  # the control: the host sees the file
    assert (plugin_dir / "out").read_text() == ""


# --- the state directory -----------------------------------------------------------------------------------


def test_a_refusal_neither_makes_nor_changes_a_state_directory(
    runner_as: Caller, plugin: Path, write_file: Write
) -> None:
    with_state(plugin, write_file, "true")
    runner_as.give(plugin.parent)
    place = plugin.parent / "precious"
    place.mkdir()
    place.chmod(0o1777)
    write_file(place / "thesis.tex", "years")
    os.chown(place, 1000 if os.geteuid() == 0 else os.geteuid(), -1)
    before = place.stat()
    done = runner_as("exec", "--state-dir", place, plugin)
    assert done.returncode == 126 and str(place) in done.stderr
    after = place.stat()
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)
    state = plugin.parent / "state"
    (plugin / "run").unlink()
    assert runner_as("exec", "--state-dir", state, plugin).returncode == 127
    assert not state.exists()


def test_a_lock_on_the_state_directory_does_not_block_a_launch(
    runner_as: Caller, plugin: Path, write_file: Write
) -> None:
    """The first plugin locks its own state directory. A second launch with it must not hang."""
    with_state(plugin, write_file, 'exec flock "$RUNNER_STATE_DIR" sh -c "echo held; read x"')
    runner_as.give(plugin.parent)
    state = plugin.parent / "state"
    with runner_as.start("exec", "--state-dir", state, plugin) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        second = runner_as("exec", "--deadline", "1", "--state-dir", state, plugin)
        assert second.returncode == 124 and second.stdout == ""
        first.communicate(b"done\n", timeout=60)


def test_a_folder_below_the_state_directory_is_created(
    runner_as: Caller, plugin: Path, write_file: Write
) -> None:
    with_state(plugin, write_file, 'echo x > "$RUNNER_STATE_DIR/deep/er/file" && echo made')
    write_file(plugin / "nexo-plugin.toml", NEXO + 'fs_write_paths = ["${state_dir}/deep/er"]\n')
    runner_as.give(plugin.parent)
    state = plugin.parent / "state"
    for _ in range(2):
        done = runner_as("exec", "--state-dir", state, plugin)
        assert (done.returncode, done.stdout) == (0, "made\n"), done.stderr
    # A link that an earlier run planted there is refused.
    (state / "deep/er/file").unlink()
    (state / "deep/er").rmdir()
    (state / "deep/er").symlink_to("/etc")
    done = runner_as("exec", "--state-dir", state, plugin)
    assert done.returncode == 126 and done.stdout == ""


# --- the report --------------------------------------------------------------------------------------------


@pytest.mark.needs("root")
def test_a_report_does_not_replace_a_device_or_fifo(runner_as_root: Caller, plugin: Path) -> None:
    device = plugin.parent / "null"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    assert runner_as_root("exec", "--report", device, plugin).returncode == 0
    assert stat.S_ISCHR(device.stat().st_mode)
    fifo = plugin.parent / "fifo"
    os.mkfifo(fifo)
    done = runner_as_root("exec", "--report", fifo, plugin)
    assert done.returncode == 2 and done.stdout == ""  # nobody reads it
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    with subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE) as reader:
        held = os.open(fifo, os.O_WRONLY)  # returns when the reader is there
        assert runner_as_root("exec", "--report", fifo, plugin).returncode == 0
        os.close(held)
        assert json.loads(reader.communicate(timeout=60)[0])["outcome"]["code"] == "ok"
    # /dev/stdout is a link to a link to "pipe:[…]", which is not a path. The pipe belongs to this process.
    done = runner_as_root("exec", "--report", "/dev/stdout", plugin)
    assert json.loads(done.stdout.splitlines()[-1])["schema"] == "runner.report.v1", done.stderr


def test_a_plugin_cannot_redirect_the_report(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    """The report goes to a folder that the plugin can write, and replaces with a link while it runs."""
    victim = plugin.parent / "victim"
    victim.mkdir()
    with_state(plugin, write_file, f'cd "$RUNNER_STATE_DIR"; rm -rf out; ln -s {victim} out')
    runner_as.give(plugin.parent)
    state = plugin.parent / "state"
    assert runner_as("exec", "--state-dir", state, plugin).returncode == 0
    (state / "out").unlink()
    (state / "out").mkdir()
    os.chmod(state / "out", 0o777)
    runner_as("exec", "--state-dir", state, "--report", state / "out/report.json", plugin)
    assert (state / "out").is_symlink()  # the control: the folder was replaced
    assert os.listdir(victim) == []


# --- plugins that try to change a later launch -------------------------------------------------------------


def test_a_plugin_cannot_replace_the_link_to_its_manifest(
    runner_as: Caller, plugin_dir: Path, write_file: Write, nothing_left: None
) -> None:
    """A plugin that could replace the link would choose its own grants for the next launch."""
    project, elsewhere = plugin_dir / "project", plugin_dir / "conf"
    entry = {"command": "/usr/bin/true", "x-sandbox": {"write": [str(project)]}}
    write_file(elsewhere / "mcp.json", json.dumps({"mcpServers": {"s": entry}}))
    project.mkdir()
    project.chmod(0o777)
    assert runner_as("exec", "--policy", "dev", elsewhere / "mcp.json").returncode == 0  # the control
    (project / ".mcp.json").symlink_to("../conf/mcp.json")
    done = runner_as("exec", "--policy", "dev", project / ".mcp.json")
    assert done.returncode == 126 and ".mcp.json is a symbolic link" in done.stderr


def test_write_access_to_the_runners_libraries_or_a_link_to_the_manifest_is_refused(
    runner_as: Caller, plugin: Path, write_file: Write
) -> None:
    """A .pth file there would run without a cage when the next runner starts."""
    library = plugin.parent / "lib/site-packages"
    library.mkdir(parents=True)
    library.chmod(0o777)
    write_file(plugin / "nexo-plugin.toml", NEXO + f'fs_write_paths = ["{library}"]\n')
    assert runner_as("exec", "--policy", "dev", plugin).returncode == 0  # the control
    path = f"{runner_as.environ['PYTHONPATH']}:{library}"
    done = runner_as("exec", "--policy", "dev", plugin, env={"PYTHONPATH": path})
    assert done.returncode == 126 and str(library) in done.stderr
    os.link(plugin / "nexo-plugin.toml", library / "other.toml")
    done = runner_as("exec", "--policy", "dev", plugin)
    assert done.returncode == 126 and "hard link" in done.stderr


@one_case("command", ["./evil.sh", "/usr/bin/cat", "./python3"])
def test_a_script_argument_does_not_grant_its_folder_to_other_programs(
    runner_as: Caller, plugin_dir: Path, write_file: Write, nothing_left: None, command: str
) -> None:
    theirs = write_file(plugin_dir / "theirs/app.py", "print('theirs')\n")
    write_file(plugin_dir / "theirs/.env", "TOKEN=canary")
    project = plugin_dir / "project"
    for name in ("evil.sh", "python3"):
        write_file(project / name, '#!/bin/sh\ncat "$(dirname "$1")/.env"\n', 0o755)
    arguments = [str(theirs), *([f"{theirs.parent}/.env"] if "cat" in command else [])]
    entry = {"command": command, "args": arguments}
    write_file(project / ".mcp.json", json.dumps({"mcpServers": {"s": entry}}))
    assert "canary" not in runner_as("exec", project).stdout
    # The control: a script that its interpreter runs may read its own folder.
    write_file(
        project / ".mcp.json",
        json.dumps({"mcpServers": {"s": {"command": "python3", "args": arguments[:1]}}}),
    )
    assert runner_as("exec", project).stdout == "theirs\n"


# --- unusual callers ---------------------------------------------------------------------------------------


@one_case("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_the_exit_status_is_the_plugins_with_closed_streams(
    runner_as: Caller, plugin: Path, write_file: Write, closed: str
) -> None:
    for code in (0, 7):
        write_file(plugin / "run", f"#!/bin/sh\nexit {code}\n", 0o755)
        line = " ".join(f"'{word}'" for word in runner_as.command("exec", plugin)) + " " + closed
        done = subprocess.run(["sh", "-c", line], env={**runner_as.environ}, cwd="/", timeout=60)
        assert done.returncode == code


def test_a_refusal_with_stderr_closed_keeps_its_exit_status(runner_as_user: Caller, plugin_dir: Path) -> None:
    line = " ".join(f"'{word}'" for word in runner_as_user.command("exec", plugin_dir / "nothing")) + " 2>&-"
    done = subprocess.run(
        ["sh", "-c", line], env={**runner_as_user.environ}, cwd="/", timeout=60, stdout=subprocess.PIPE
    )
    assert (done.returncode, done.stdout) == (126, b"")


@one_case("words", [("exec", "nothing"), ("check", "."), ("explain", ".")])
def test_a_deleted_working_directory_causes_no_traceback(
    runner_as_user: Caller, plugin_dir: Path, words: tuple[str, ...]
) -> None:
    gone = plugin_dir / "gone"
    line = " ".join(f"'{word}'" for word in runner_as_user.command(*words))
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", f"cd {gone} && rmdir {gone} && exec {line}"],
        env={**runner_as_user.environ, "PATH": SYSTEM_PATH},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr and done.returncode not in (0, 1)


def test_a_full_stdout_or_an_ascii_stdout_causes_no_traceback(runner_as_user: Caller, plugin: Path) -> None:
    for words in (("check", plugin), ("explain", plugin), ("doctor",), ("--help",)):
        line = " ".join(f"'{word}'" for word in runner_as_user.command(*words))
        for env in ({}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONUNBUFFERED": "1"}):
            done = subprocess.run(
                ["sh", "-c", f"{line} >/dev/full"],
                env={**runner_as_user.environ, **env},
                cwd="/",
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert "Traceback" not in done.stderr and "internal" not in done.stderr
            assert done.returncode == 1
        done = runner_as_user(*words, env={"PYTHONIOENCODING": "ascii"})
        assert "Traceback" not in done.stderr and done.stdout


def test_nothing_is_imported_from_the_working_directory(
    runner_as: Caller, plugin: Path, write_file: Write
) -> None:
    """`python -m` puts the working directory on sys.path: a module planted there ran outside the cage."""
    project = plugin.parent / "project"
    project.mkdir()
    project.chmod(0o777)
    planted = plugin.parent / "planted"
    planted.mkdir()
    planted.chmod(0o777)
    names = "hashlib json runner_cli signal stat select struct"
    lines = f"for m in {names}; do echo \"open('{planted}/$m', 'w')\" > {project}/$m.py; done; exit 3"
    write_file(plugin / "run", f"#!/bin/sh\n{lines}\n", 0o755)
    write_file(plugin / "nexo-plugin.toml", NEXO + f'fs_write_paths = ["{project}"]\n')
    for _ in range(2):
        report = runner_as.home / "report.json"
        done = runner_as("exec", "--policy", "dev", "--report", report, plugin, cwd=project)
        assert done.returncode == 3, done.stderr
    assert (project / "hashlib.py").exists()  # the control: the plugin could write there
    assert os.listdir(planted) == []


@one_case("stderr", ["2>/dev/full", "2>&1 >/dev/null | true"])
def test_a_broken_stderr_changes_neither_status_nor_report(
    runner_as: Caller, plugin: Path, write_file: Write, stderr: str
) -> None:
    write_file(plugin / "run", "#!/bin/sh\nsleep 1000\n", 0o755)
    report = runner_as.home / "report.json"
    words = runner_as.command("exec", "--deadline", "0.3", "--report", report, plugin)
    line = " ".join(f"'{word}'" for word in words)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} {stderr}"],
        env={**runner_as.environ},
        cwd="/",
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 124
    assert json.loads(report.read_text())["outcome"]["code"] == "timeout"


@one_case("option", ["--policy", "--state-dir", "--contract", "--server"])
def test_an_empty_option_value_is_refused(runner_as_user: Caller, plugin: Path, option: str) -> None:
    done = runner_as_user("exec", option, "", plugin)
    assert done.returncode == 2 and option in done.stderr and done.stdout == ""
