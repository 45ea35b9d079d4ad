"""ainb plugins on the command line: commands, screens, and folders of plugins. In the cage, both callers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.registry import example_folder
from sandbox.cell.cell import descendants
from tests.conftest import Caller
from tests.runner.contracts.ainb.canaries import put_canary
from tests.tables import one_case, wait_for

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]
DATA = "~/.agents-in-a-box/plugins"


@pytest.fixture
def root(plugin_dir: Path) -> Path:
    """A folder of two plugins, one of which has a faulty manifest."""
    folder = plugin_dir / "plugins"
    shutil.copytree(example_folder("ainb"), folder / "greeter")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.name == "greeter" else 0o644)
    (folder / "broken").mkdir(mode=0o755)
    (folder / "broken" / "manifest.toml").write_text("[plugin]\n")
    return folder


def test_a_command_has_its_output_and_its_exit_code(runner_as: Caller, root: Path) -> None:
    done = runner_as("call", root / "greeter", "greeter", "--", "hello", "--world")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello, --world!\n", "")
    done = runner_as("call", root / "greeter", "greeter")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "usage: hello NAME\n")
    done = runner_as("call", "--json", root / "greeter", "greeter", "--", "hello", "you")
    assert json.loads(done.stdout) == {"stdout": "Hello, you!\n", "stderr": "", "exit_code": 0}


def test_input_and_arguments_exclude_each_other(runner_as_user: Caller, root: Path) -> None:
    done = runner_as_user("call", root / "greeter", "greeter", "--input", "{}", "--", "hello")
    assert done.returncode == 2 and "--input" in done.stderr


def test_bytes_pass_unchanged_and_a_terminal_gets_no_control_sequences(
    runner_as_user: Caller, root: Path
) -> None:
    hostile = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[2J"
    piped = runner_as_user("call", root / "greeter", "greeter", "--", "hello", hostile)
    assert piped.stdout == f"Hello, {hostile}!\n"
    ours, theirs = pty.openpty()
    words = ("call", root / "greeter", "greeter", "--", "hello", hostile)
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        with runner_as_user.start(*words, stdout=theirs, **quiet) as process:
            os.close(theirs)
            told = b""
            with contextlib.suppress(OSError):  # EIO: everybody has closed it
                while piece := os.read(ours, 65536):
                    told += piece
            process.wait(60)
    finally:
        os.close(ours)
    shown = told.decode()
    assert "\x1b[31mred\x1b[0m" in shown  # colours stay
    assert shown.rstrip().endswith("\x1b[0m")  # and end with the output
    assert "\x1b]" not in shown and "\x1b[2J" not in shown and "\x07" not in shown


def test_a_screen_as_text_and_as_json(runner_as: Caller, root: Path) -> None:
    done = runner_as("render", root / "greeter", "--size", "30x2", "--keys", "j enter ctrl+c")
    assert (done.returncode, done.stdout) == (0, "greeted: nobody yet\n\n"), done.stderr
    done = runner_as("render", "--json", root / "greeter", "--size", "7x1")
    document = json.loads(done.stdout)
    assert document["lines"] == ["greeted"] and document["width"] == 7


@one_case(
    ("options", "words"),
    [
        (("--size", "80"), "80x24"),
        (("--size", "0x5"), "80x24"),
        (("--size", "99999x1"), "80x24"),
        (("--keys", "hyper+x"), "unknown modifier"),
        (("--keys", "entre"), "enter"),
    ],
)
def test_wrong_options(runner_as_user: Caller, root: Path, options: tuple[str, ...], words: str) -> None:
    done = runner_as_user("render", root / "greeter", *options)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_screen_that_is_not_there(runner_as_user: Caller, root: Path) -> None:
    done = runner_as_user("render", root / "greeter", "--screen", "gretter")
    assert done.returncode == 15 and "greeter" in done.stderr


def test_a_folder_of_plugins_is_listed_without_the_faulty_one(runner_as: Caller, root: Path) -> None:
    done = runner_as("tools", root)
    assert done.returncode == 0
    assert re.search(r"^greeter 0\.1\.0 \(ainb\)$", done.stdout, re.MULTILINE)
    assert "broken/manifest.toml" in done.stderr and "missing_key" in done.stderr
    shutil.rmtree(root / "greeter")
    assert runner_as("tools", root).returncode == 20
    whole = runner_as("exec", root)
    assert whole.returncode == 126 and "plugin_root" in whole.stderr


def test_flags_show_folders_below_home(runner_as_user: Caller, root: Path) -> None:
    """What a plugin opens by itself: below HOME, and nothing else of it."""
    home = runner_as_user.home
    logs = home / ".claude/projects"
    logs.mkdir(parents=True)
    (logs / "log.jsonl").write_text("{}\n")
    (home / "diary.txt").write_text("private")
    runner_as_user.give(home)
    plugin = root / "lister"
    plugin.mkdir(mode=0o755)
    manifest = '[plugin]\nname = "lister"\nversion = "1.0.0"\nabi_version = 2\n[capabilities]\n'
    (plugin / "manifest.toml").write_text(manifest + "read_claude_logs = true\n")
    program = plugin / "lister"
    program.write_text("#!/bin/sh\ncd ~; find . -type f\n")
    program.chmod(0o755)
    policy = root / "policy.toml"
    policy.write_text(f'version = 1\n[read]\nceiling = ["{logs}"]\n')
    policy.chmod(0o644)
    done = runner_as_user("exec", "--policy", policy, plugin)
    assert (done.stdout, done.stderr) == ("./.claude/projects/log.jsonl\n", "")
    denied = runner_as_user("exec", plugin)
    assert denied.returncode == 126 and "read_ceiling" in denied.stderr


@pytest.mark.both_callers
def test_its_data_is_kept_at_the_path_of_the_contract(runner_as: Caller, plugin_dir: Path) -> None:
    """~/.agents-in-a-box/plugins/NAME/, of one plugin and no other, whichever HOME it has."""
    root = plugin_dir / "nest"
    root.mkdir(mode=0o755)
    logs = runner_as.home / ".claude/projects"
    data = {"write_plugin_data": True}
    put_canary(root, "keeper", capabilities=data, namespaces=["keeper"])
    put_canary(root, "reader", capabilities=data, namespaces=["reader"])
    put_canary(root, "without", namespaces=["without"])
    kept = {"keeper": True, "reader": True, "without": False}
    if runner_as.uid:  # nobody is shown the folders of root's home
        logs.mkdir(parents=True)
        runner_as.give(runner_as.home)
        put_canary(root, "own", capabilities={**data, "read_claude_logs": True}, namespaces=["own"])
        kept["own"] = True
    policy = root / "policy.toml"
    policy.write_text(f'version = 1\n[read]\nceiling = ["{logs}"]\n[write]\nceiling = ["${{state_dir}}"]\n')
    policy.chmod(0o644)

    def run(name: str, *argv: str) -> str:
        done = runner_as("call", "--policy", policy, root / name, name, "--", *argv)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout

    for name in kept:
        assert run(name, "save", f"{DATA}/{name}/notes", f"of {name}") == ""
    missing = "No such file or directory"
    for name, stays in kept.items():
        assert run(name, "cat", f"{DATA}/{name}/notes") == (f"of {name}" if stays else missing)
    assert run("reader", "cat", f"{DATA}/keeper/notes") == missing
    assert not (runner_as.home / ".agents-in-a-box").exists()


def test_explain_names_what_the_host_does_for_a_plugin(runner_as_user: Caller, root: Path) -> None:
    """A policy does not name a manifest's sockets and hosts one by one: here an operator sees them."""
    manifest = root / "greeter" / "manifest.toml"
    asked = '[capabilities]\nunix_socket_dial = ["/run/a.sock"]\nnetwork = ["api.example.com"]\n'
    text = manifest.read_text().replace("[capabilities]\n", asked)
    manifest.write_text(text)
    told = runner_as_user("explain", root / "greeter").stdout
    assert "unix_socket_dial" in told and "/run/a.sock" in told and "api.example.com" in told
    document = json.loads(runner_as_user("explain", "--format", "json", root / "greeter").stdout)
    assert document["rights"]["network"] == "api.example.com"


def test_a_screen_that_is_too_large_is_not_asked_for(runner_as_user: Caller, root: Path) -> None:
    given = json.dumps({"width": 65_535, "height": 3000})
    done = runner_as_user("call", root / "greeter", "greeter", "--kind", "render", "--input", given)
    assert done.returncode == 2 and "cells" in done.stderr


def test_a_signal_ends_the_listing_of_a_whole_folder(runner_as_user: Caller, root: Path) -> None:
    """And not only that of the plugin which is being started."""
    for name in ("aaa", "bbb"):
        folder = root / name
        folder.mkdir(mode=0o755)
        text = f'[plugin]\nname = "{name}"\nversion = "1.0.0"\nabi_version = 2\n'
        (folder / "manifest.toml").write_text(text)
        (folder / name).write_text("#!/bin/sh\nread header\nexec sleep 1000\n")
        (folder / name).chmod(0o755)
    with runner_as_user.start("tools", root, stdin=subprocess.DEVNULL) as process:
        # The first plugin has got the handshake, and never answers.
        assert wait_for(lambda: sleepers(process.pid))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (24, b""), err  # greeter would have been listed after bbb


def sleepers(pid: int) -> list[int]:
    found = []
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{each}/cmdline").read_bytes().startswith(b"sleep\0"):
                found.append(each)
    return found
