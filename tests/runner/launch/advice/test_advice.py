"""When a plugin fails, what the cage has to do with it is told: the line, the option in it, and that the
option helps. Each failure has its control: the same launch with the option says no such thing."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from runner.launch.advice.advice import MOST_SHOWN, advise
from runner.launch.advice.scene import Mention, ProcessLimit, RefusedHost, Scene
from runner.outcome import Advice, advice_of_calls
from sandbox.network.egress import SYNTHETIC_IPV4, SYNTHETIC_IPV6
from sandbox.paths.mounts import parse_mountinfo
from sandbox.policy.policy import ApprovalRule
from tests.conftest import Caller
from tests.tables import check_rows

Write = Callable[..., Path]
EVERYTHING = ApprovalRule(read=("*",), write=("*",), network="host", env=("*",), steering=("*",))


def told(stderr: str) -> list[str]:
    """The lines of advice."""
    marks = ("; to show it: ", "; to let it ", "; to pass it on: ", "no option ", "lets nobody allow it")
    return [line for line in stderr.splitlines() if line.startswith("runner: ") and _any(marks, line)]


def _any(marks: tuple[str, ...], line: str) -> bool:
    return any(mark in line for mark in marks)


def option_of(line: str) -> list[str]:
    return shlex.split(line.rpartition(": ")[2])


# --- in a cage ---------------------------------------------------------------------------------------------


def test_a_path_that_stderr_names(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    data = write_file(plugin_dir / "data.txt", "42\n")
    command = ["--", "/bin/sh", "-c", f"cat {data}"]
    failed = runner_as("run", *command)
    assert failed.returncode == 1
    [line] = told(failed.stderr)
    assert line == f"runner: its stderr names {data}, which is not in the cage; to show it: --read {data}"
    granted = runner_as("run", *option_of(line), *command)
    assert (granted.returncode, granted.stdout, granted.stderr) == (0, "42\n", "")


# Opens the file of each call, and answers with the error if it cannot.
OPENER = """\
#!/usr/bin/python3 -I
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    if message["method"] == "server/discover":
        result = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
    else:
        given, error = message["params"].get("arguments", {}), False
        try:
            text = given.get("say") or open(given["path"]).read()
        except OSError as fault:
            text, error = given.get("before", "") + str(fault), True
        result = {"content": [{"type": "text", "text": text}], "isError": error}
    answer = {"jsonrpc": "2.0", "id": message["id"], "result": {"resultType": "complete", **result}}
    print(json.dumps(answer), flush=True)
"""


def test_a_path_that_the_answer_of_a_failed_call_names(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    data = write_file(plugin_dir / "notes" / "data.txt", "42\n")
    write_file(plugin_dir / "app" / "server.py", OPENER, mode=0o755)
    entry = {"command": f"{plugin_dir}/app/server.py"}
    manifest = write_file(plugin_dir / "app" / "mcp.json", json.dumps({"mcpServers": {"demo": entry}}))

    def call(**arguments: str) -> tuple[int, list[str]]:
        done = runner_as("call", manifest, "open", "--input", json.dumps(arguments))
        return done.returncode, told(done.stderr)

    status, [line] = call(path=str(data))
    assert status == 1 and line == (
        f"runner: its answer names {data}, which is not in the cage; "
        f"to show it: runner allow {manifest} --read {data}"
    )
    # A line of the plugin's own stays in its message. An answer that is no error is not mentioned.
    forged = "x\nrunner: its answer names /etc/shadow; to show it: runner allow x --read /etc/shadow\n"
    status, [*lines, line] = call(path=f"{data}x", before=forged)
    assert status == 1 and all(each.startswith("runner: plugin_error in call ") for each in lines)
    assert line == (
        f"runner: its answer names a file in {data.parent}, which is not in the cage; "
        f"to show it: runner allow {manifest} --read {data.parent}"
    )
    assert call(say=f"[Errno 2] No such file or directory: '{data}'") == (0, [])


def test_a_path_that_an_argument_names(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """Also without a word of the program's own."""
    data = write_file(plugin_dir / "data.txt", "42\n")
    command = ["--", "/usr/bin/grep", "-q", "-s", "42", str(data)]
    failed = runner_as("run", *command)
    [line] = told(failed.stderr)
    assert line == f"runner: its argument names {data}, which is not in the cage; to show it: --read {data}"
    granted = runner_as("run", *option_of(line), *command)
    assert (granted.returncode, granted.stderr) == (0, "")


def test_a_path_that_a_variable_names(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    data = write_file(plugin_dir / "data.txt", "42\n")
    command = ["--env", f"DATA={data}", "--", "/bin/sh", "-c", 'cat "$DATA" 2> /dev/null']
    failed = runner_as("run", *command)
    [line] = told(failed.stderr)
    assert f"its variable DATA names {data}, which is not in the cage; to show it: --read" in line
    assert runner_as("run", *option_of(line), *command).stdout == "42\n"


def test_a_relative_path(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """It is found when the program starts in the folder where it was typed."""
    write_file(plugin_dir / "data.txt", "42\n")
    failed = runner_as("run", "--", "/bin/cat", "data.txt", cwd=plugin_dir)
    [line] = told(failed.stderr)
    assert option_of(line) == ["--read", str(plugin_dir)]
    granted = runner_as("run", *option_of(line), "--", "/bin/cat", "data.txt", cwd=plugin_dir)
    assert (granted.stdout, granted.stderr) == ("42\n", "")


def test_a_folder_that_is_read_only(runner_as: Caller, plugin_dir: Path) -> None:
    folder = plugin_dir / "out"
    folder.mkdir()
    folder.chmod(0o777)
    runner_as.give(folder)
    command = ["--", "/bin/sh", "-c", f"echo 42 > {folder}/new"]
    failed = runner_as("run", "--read", folder, *command)
    [line] = told(failed.stderr)
    assert f"it wanted to write in {folder}, which is read-only in the cage; to let it write there:" in line
    assert runner_as("run", *option_of(line), *command).returncode == 0
    assert (folder / "new").read_text() == "42\n"


def test_the_folder_of_the_program_is_never_advised_to_be_written(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    script = f"#!/bin/sh\necho x > {plugin_dir}/log\n"
    program = write_file(plugin_dir / "server", script, 0o755)
    [line] = told(runner_as("run", "--read", plugin_dir, "--", program).stderr)
    assert f"it wanted to write in {plugin_dir}, which is read-only in the cage, and which holds" in line
    assert "no option lets it write there" in line
    # The control: the launch refuses what was not advised.
    refused = runner_as("run", "--write", plugin_dir, "--", program)
    assert refused.returncode == 126 and "self_grant" in refused.stderr


def test_a_variable(runner_as: Caller) -> None:
    script = 'test -n "$DEMO_TOKEN" || { echo "Error: DEMO_TOKEN environment variable not set" >&2; exit 3; }'
    command = ["--", "/bin/sh", "-c", script]
    env = {"DEMO_TOKEN": "hush-hush"}
    failed = runner_as("run", *command, env=env)
    [line] = told(failed.stderr)
    assert line == (
        "runner: the variable DEMO_TOKEN of this environment was not passed on; "
        "to pass it on: --env DEMO_TOKEN"
    )
    granted = runner_as("run", *option_of(line), *command, env=env)
    assert (granted.returncode, granted.stderr) == (0, "")
    # Where the environment does not have it either, the cage has nothing to do with it.
    assert told(runner_as("run", *command).stderr) == []


LOOKUP = """
import socket, sys
try:
    socket.getaddrinfo("api.example.com", 443)
except OSError as error:
    sys.exit(f"Could not resolve host: api.example.com ({error})")
"""


def test_a_host_without_a_network(runner_as: Caller) -> None:
    failed = runner_as("run", "--", "/usr/bin/python3", "-c", LOOKUP)
    [line] = told(failed.stderr)
    assert line == (
        "runner: the plugin asked for the host api.example.com, and it has no network; "
        "to let it reach that host: --net api.example.com:443"
    )
    # With it, the name has an address of the gate's.
    granted = runner_as("run", *option_of(line), "--", "/usr/bin/python3", "-c", LOOKUP)
    assert (granted.returncode, granted.stderr) == (0, "")


def test_a_host_that_the_gate_refused(runner_as: Caller) -> None:
    command = ["--", "/usr/bin/python3", "-c", LOOKUP]
    failed = runner_as("run", "--net", "other.example.com:443", *command)
    [line] = told(failed.stderr)
    assert line == (
        "runner: the plugin asked for the host api.example.com, which is not in its list; "
        "to let it reach that host: --net api.example.com:443"
    )
    assert runner_as("run", *option_of(line), *command).returncode == 0


def test_a_denied_path_has_no_option(runner_as: Caller) -> None:
    key = runner_as.home / ".ssh"
    key.mkdir()
    [line] = told(runner_as("run", "--", "/bin/ls", key).stderr)
    assert f"names {key}, which is not in the cage, and no option grants it: it is " in line
    refused = runner_as("run", "--read", key, "--", "/bin/ls", key)  # the control
    assert refused.returncode == 126 and "denylist" in refused.stderr


def test_a_policy_that_lets_nobody_allow_it(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    data = write_file(plugin_dir / "data.txt", "42\n")
    policy = write_file(runner_as.home / "closed.toml", "version = 1\n", 0o600)
    runner_as.give(policy)
    [line] = told(runner_as("run", "--policy", policy, "--", "/bin/cat", data).stderr)
    assert f"policy {policy} lets nobody allow it: the operator can add" in line
    assert f'"{data}" to read under [approvals]' in line


def test_who_did_not_fail_is_told_nothing(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    data = write_file(plugin_dir / "data.txt", "42\n")
    place = runner_as.home / "report.json"
    script = f"echo cannot open {data} >&2; exit "
    for status, count in ((0, 0), (1, 1)):
        done = runner_as("run", "--report", place, "--", "/bin/sh", "-c", f"{script}{status}")
        assert len(told(done.stderr)) == count == len(json.loads(place.read_text())["advice"])
    # Refused before the launch: that message says all.
    refused = runner_as("run", "--read", plugin_dir / "nothing", "--", "/bin/cat", data)
    assert refused.returncode == 126 and told(refused.stderr) == []
    # Ended by a signal to the runner.
    waiting = runner_as.start("run", "--", "/bin/sh", "-c", f"echo {data} >&2; echo up; sleep 60")
    with waiting:
        assert waiting.stdout is not None and waiting.stderr is not None
        assert waiting.stdout.readline() == b"up\n"
        waiting.send_signal(signal.SIGTERM)
        assert told(waiting.stderr.read().decode()) == []


def test_nobody_wants_to_write_a_script_that_is_missing(runner_as: Caller, plugin_dir: Path) -> None:
    gone = plugin_dir / "gone.py"
    [line] = told(runner_as("run", "--", "/bin/cat", gone).stderr)  # the control: it may want to make a file
    assert f"--write {plugin_dir}" in line
    done = runner_as("run", "--", "/usr/bin/python3", gone)
    assert done.returncode == 2 and told(done.stderr) == []
    assert str(gone) in done.stderr  # its own words


def test_a_deadline(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    data = write_file(plugin_dir / "data.txt", "42\n")
    script = f"until cat {data}; do sleep 0.1; done"
    done = runner_as("run", "--deadline", "5s", "--", "/bin/sh", "-c", script)
    assert done.returncode == 124 and len(told(done.stderr)) == 1
    granted = runner_as("run", "--read", data, "--deadline", "50s", "--", "/bin/sh", "-c", script)
    assert (granted.returncode, granted.stdout, granted.stderr) == (0, "42\n", "")


# --- manifests and sessions --------------------------------------------------------------------------------


def entry(folder: Path, write_file: Write, script: str, **words: Any) -> Path:
    server = {"command": "/bin/sh", "args": ["-c", script], **words}
    return write_file(folder / "mcp.json", json.dumps({"mcpServers": {"notes": server}}))


def test_a_manifest_is_allowed_more_by_a_command(
    runner_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    data = write_file(plugin_dir / "data.txt", "42\n")
    manifest = entry(plugin_dir, write_file, 'cat "$DATA"', env={"DATA": str(data)})
    place = runner_as.home / "report.json"
    failed = runner_as("exec", "--report", place, "--server", "notes", manifest)
    [line] = told(failed.stderr)
    command = f"runner allow {manifest} --server notes --read {data}"
    assert line.endswith(f"; to show it: {command}")
    assert json.loads(place.read_text())["advice"] == [
        {
            "kind": "read",
            "what": f"its variable DATA names {data}, which is not in the cage",
            "option": f"--read {data}",
            "command": command,
        }
    ]
    # What is to be typed helps.
    typed = shlex.split(command)[1:]
    allowed = runner_as(*typed, "--yes")
    assert allowed.returncode == 0, allowed.stderr
    granted = runner_as("exec", "--server", "notes", manifest)
    assert (granted.returncode, granted.stdout, granted.stderr) == (0, "42\n", "")


@pytest.mark.needs("root")
def test_a_wrapped_server_is_allowed_more_in_its_configuration(
    account_as: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """Its command line is written by `runner wrap`, and not for people to change."""
    data = write_file(plugin_dir / "data.txt", "42\n")
    config = entry(plugin_dir, write_file, f"cat {data}")
    account_as.give(plugin_dir)
    wrapped = account_as("wrap", config, "--yes")
    assert wrapped.returncode == 0, wrapped.stderr
    server = json.loads(config.read_text())["mcpServers"]["notes"]
    words = server["args"][server["args"].index("run") :]
    failed = account_as(*words)
    [line] = told(failed.stderr)
    assert option_of(line)[:5] == ["runner", "allow", str(config), "--server", "notes"]
    allowed = account_as(*option_of(line)[1:], "--yes")
    assert allowed.returncode == 0, allowed.stderr
    granted = account_as(*words)
    assert (granted.returncode, granted.stdout, granted.stderr) == (0, "42\n", "")


def test_a_session(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """The session has the stderr, and the monitor knows the cage."""
    data = write_file(plugin_dir / "data.txt", "42\n")
    manifest = entry(plugin_dir, write_file, f"cat {data}; exit 3")
    failed = runner_as("tools", manifest)
    command = f"runner allow {manifest} --read {data}"
    [line] = told(failed.stderr)
    assert line == f"runner: its stderr names {data}, which is not in the cage; to show it: {command}"
    place = runner_as.home / "report.json"
    failed = runner_as("call", "--json", "--report", place, manifest, "anything")
    [document] = [json.loads(text) for text in failed.stderr.splitlines() if text.startswith("{")]
    [advice] = document["advice"]
    assert (advice["kind"], advice["option"], advice["command"]) == ("read", f"--read {data}", command)
    assert json.loads(place.read_text())["advice"] == [advice]


def test_a_call_that_takes_too_long(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """The failure is printed at once, and the advice when the plugin has ended."""
    data = write_file(plugin_dir / "data.txt", "42\n")
    script = f"""
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        info = {{"name": "slow", "version": "1"}}
        result = {{"protocolVersion": "2025-06-18", "capabilities": {{"tools": {{}}}}, "serverInfo": info}}
        print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": result}}), flush=True)
    elif asked.get("method") == "tools/call":
        print("waiting for {data}", file=sys.stderr, flush=True)
    elif "id" in asked:
        error = {{"code": -32601, "message": "no such method"}}
        print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "error": error}}), flush=True)
"""
    words = {"command": "/usr/bin/python3", "args": ["-c", script]}
    manifest = write_file(plugin_dir / "mcp.json", json.dumps({"mcpServers": {"slow": words}}))
    failed = runner_as("call", "--timeout", "3s", manifest, "anything", "--input", "{}")
    assert failed.returncode == 12, failed.stderr
    lines = failed.stderr.splitlines()
    [line] = told(failed.stderr)
    assert lines[0].startswith("runner: timeout in call") and lines.index(line) == len(lines) - 1


LIBRARY = """
import sys, trio
from runner import PluginFailure, open_plugin

async def main():
    try:
        async with open_plugin(sys.argv[1]) as plugin:
            pass
    except PluginFailure as failure:
        [advice] = failure.advice
        assert advice.text in str(failure).splitlines() and failure.report["advice"] == [advice._asdict()]
        print(advice.option)

trio.run(main)
"""


def test_the_library(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    data = write_file(plugin_dir / "data.txt", "42\n")
    manifest = entry(plugin_dir, write_file, f"cat {data}; exit 3")
    argv = [*runner_as.prefix, *runner_as.python, "-c", LIBRARY, str(manifest)]
    done = subprocess.run(argv, env=runner_as.environ, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stdout == f"--read {data}\n", done.stderr


def test_a_secret_is_not_shown(runner_as: Caller, plugin_dir: Path, write_file: Write) -> None:
    """Not even where it is the name of a path."""
    data = write_file(plugin_dir / "hush-hush-hush", "42\n")
    script = f"cat {data}; exit 3"
    manifest = entry(plugin_dir, write_file, script)
    shown = runner_as("exec", manifest)
    assert any("hush-hush-hush" in line for line in told(shown.stderr)) is False  # stderr was not relayed
    limited = ("--limit", "output=1M")
    assert any("hush-hush-hush" in line for line in told(runner_as("exec", *limited, manifest).stderr))
    hidden = runner_as("exec", *limited, "--secret", "--key=env:KEY", manifest, env={"KEY": "hush-hush-hush"})
    assert not any("hush-hush-hush" in line for line in told(hidden.stderr))


# --- stderr through the runner -----------------------------------------------------------------------------


def ways(caller: Caller, **popen: Any) -> str:
    place = caller.home / "report.json"
    place.unlink(missing_ok=True)
    with caller.start("run", "--report", place, "--", "/bin/true", **popen) as process:
        process.wait(60)
    way: str = json.loads(place.read_text())["streams"]["stderr"]
    return way


def test_when_stderr_goes_through_the_runner(runner_as: Caller, plugin_dir: Path) -> None:
    assert ways(runner_as) == "relayed"
    assert ways(runner_as, stderr=subprocess.STDOUT) == "direct"  # the order would be lost
    assert ways(runner_as, stderr=subprocess.DEVNULL) == "direct"
    with open(plugin_dir / "log", "wb") as log:
        assert ways(runner_as, stderr=log) == "relayed"
        assert ways(runner_as, stdout=log, stderr=log) == "direct"


def test_stderr_arrives_byte_for_byte(runner_as: Caller) -> None:
    script = "import os,sys\nfor n in range(3000): os.write(2, bytes(range(256)) * 3 + b'%d' % n)"
    done = runner_as.start("run", "--", "/usr/bin/python3", "-c", script)
    with done:
        _, err = done.communicate(timeout=60)
    assert err == b"".join(bytes(range(256)) * 3 + b"%d" % n for n in range(3000))


def test_a_reader_of_stderr_that_has_gone(runner_as: Caller) -> None:
    """The program gets SIGPIPE, as if it wrote there itself."""
    script = "while :; do echo x >&2 || exit 9; done"
    read, write = os.pipe()
    with runner_as.start("run", "--", "/bin/sh", "-c", script, stderr=write) as process:
        os.close(write)
        assert os.read(read, 1) == b"x"
        os.close(read)
        assert process.wait(60) in (128 + signal.SIGPIPE, 9)


# --- without a cage ----------------------------------------------------------------------------------------


def scene(folder: Path, **changes: Any) -> Scene:
    plain = Scene(
        policy="default",
        approvals=EVERYTHING,
        ceilings=ApprovalRule(),
        denied=(),
        homes=(),
        home="/nowhere",
        directory=str(folder),
        inside="/tmp",
        shown=("/usr", "/etc/passwd"),
        writable=("/tmp",),
        guarded=(),
        own=(),
        network="none",
        given=("LANG",),
        withheld=("DEMO_TOKEN", "PATH", "HOME"),
        denied_names=(),
        mentions=(),
    )
    return plain._replace(**changes)


def given(network: str) -> str:
    """An address that a name may have in a cage."""
    return str(ip_network(network)[300])


def options(found: tuple[Advice, ...]) -> list[str]:
    return [each.option for each in found]


def test_not_more_than_five_and_not_all_of_a_kind(tmp_path: Path) -> None:
    files = [tmp_path / f"f{number}" for number in range(9)]
    for file in files:
        file.touch()
    words = tuple(Mention("its argument", str(file)) for file in files)
    found = advise(scene(tmp_path, mentions=words))
    assert options(found) == [f"--read {file}" for file in files[:MOST_SHOWN]]
    hosts = tuple(RefusedHost(f"it asked for n{number}", f"n{number}.example:443") for number in range(5))
    found = advise(scene(tmp_path, mentions=words, hosts=hosts), "DEMO_TOKEN is not set")
    assert [each.kind for each in found] == ["host", "host", "host", "read", "read"]
    found = advise(scene(tmp_path, mentions=words[:1], hosts=hosts), "DEMO_TOKEN is not set")
    assert [each.kind for each in found] == ["host", "host", "host", "read", "variable"]


@pytest.mark.parametrize(
    ("stderr", "names"),
    [
        ("Traceback (most recent call last):\nMemoryError", ["memory"]),
        ("terminate called after throwing an instance of 'std::bad_alloc'", ["memory"]),
        ("fork: Cannot allocate memory", ["memory"]),
        ("RuntimeError: can't start new thread", ["pids"]),
        ("sh: 0: Cannot fork\nOSError: [Errno 11] Resource temporarily unavailable", ["pids"]),
        ("it remembers its pid", []),
    ],
)
def test_limits_that_only_the_plugin_notices(tmp_path: Path, stderr: str, names: list[str]) -> None:
    limits = tuple(ProcessLimit(name, "64 units", f"raise {name}") for name in ("memory", "pids"))
    found = advise(scene(tmp_path, process_limits=limits), stderr)
    assert [each.kind for each in found] == ["limit" for _ in names]
    for name, each in zip(names, found, strict=True):
        assert each.text.startswith("its stderr says that ")
        assert each.text.endswith(f"the {name} limit is 64 units, counted without a cgroup: raise {name}")
    assert advise(scene(tmp_path), stderr) == ()  # a cgroup would have told


def test_an_image_that_changes_its_user(tmp_path: Path) -> None:
    lines = {
        'error: failed switching to "app": operation not permitted': True,
        "su-exec: setgroups(1000): Operation not permitted": True,
        "chown: /data: Invalid argument": True,
        "chown: changing ownership of '/data': Operation not permitted": True,
        "setpriv: setresuid failed: Invalid argument": True,
        "open /data: Operation not permitted": False,
        "chowning nothing, and Invalid argument": False,
    }

    def is_told(stderr: str, told: bool) -> None:
        in_image = scene(tmp_path, image="docker.io/x/y:1")
        found = [each for each in advise(in_image, stderr) if each.kind == "user"]
        assert bool(found) is told and all("--user USER" in each.text for each in found)
        assert not [each for each in advise(scene(tmp_path), stderr) if each.kind == "user"]

    check_rows(lines, is_told)


def test_a_word_that_is_repeated_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    words = tuple(Mention("its argument", str(file)) for _ in range(3))
    assert options(advise(scene(tmp_path, mentions=words), f"open '{file}'\n" * 1000)) == [f"--read {file}"]
    # A folder stands for what is in it.
    assert options(advise(scene(tmp_path), f"open '{file}'\nin '{tmp_path}'")) == [f"--read {tmp_path}"]


def test_what_does_not_exist_or_is_shown_is_not_told(tmp_path: Path) -> None:
    for words in (
        f"open '{tmp_path}/nothing'",
        "open '/usr/bin'",
        "open '/etc/passwd'",
        "/proc/1",
        "/tmp",
        "/",
    ):
        assert advise(scene(tmp_path), words) == ()
    assert advise(scene(tmp_path), f"open '{tmp_path}'") != ()  # the control


def test_a_folder_that_does_not_exist_has_to_be_made(tmp_path: Path) -> None:
    """A server's `mkdir -p` begins with the home, which no option grants. Its argument says what it wants."""
    (tmp_path / ".aws").mkdir()
    words = (Mention("its argument --db-path", f"{tmp_path}/missing/a.db"),)
    found = scene(tmp_path, mentions=words, homes=(str(tmp_path),), inside=str(tmp_path))
    for stderr in (
        f"OSError: [Errno 30] Read-only file system: '{tmp_path}'",
        f"OSError: [Errno 30] Read-only file system: '{tmp_path}/missing'",
        "unable to open database file",
    ):
        [advice] = advise(found, stderr)
        assert advice.option == f"--write {tmp_path}/missing", stderr
        assert f"which does not exist: make it first (mkdir {tmp_path}/missing)" in advice.what
    [denied] = advise(found._replace(mentions=()), f"Read-only file system: '{tmp_path}'")  # the control
    assert ".aws" in denied.what and not denied.option


def test_a_guarded_name_in_a_writable_folder(tmp_path: Path) -> None:
    """What git copies from is not what could not be written."""
    seen = scene(
        tmp_path,
        shown=("/usr", str(tmp_path)),
        writable=("/tmp", str(tmp_path)),
        guarded=(f"{tmp_path}/.git",),
    )
    git = "cannot copy '/usr/share/git-core/templates/description' to '{}': Read-only file system"
    [advice] = advise(seen, git.format(f"{tmp_path}/.git/description"))
    assert advice.what.startswith(f"it wanted to write {tmp_path}/.git, which stays read-only")
    assert not advice.option
    assert advise(seen, git.format(f"{tmp_path}/other")) == ()  # the control: it can be written


def test_the_answers_of_a_plugin_are_read_too(tmp_path: Path) -> None:
    said = "request failed: getaddrinfo ENOTFOUND api.example.com"
    [advice] = advise(scene(tmp_path), answers=said)
    assert advice.what == "its answer names the host api.example.com, and it has no network"
    assert advise(scene(tmp_path, network="allowlist"), answers=said) == ()
    asked = RefusedHost("the plugin asked for the host api.example.com", "api.example.com:443")
    assert len(advise(scene(tmp_path, hosts=(asked,)), answers=said)) == 1
    assert len(advise(scene(tmp_path, hosts=(asked,)), answers="fetch failed")) == 1


def test_a_port_of_its_own_loopback_that_refused_it(tmp_path: Path) -> None:
    """A database of this machine, most often. The line has the option, or what the operator has to write."""
    said = "Redis Client Error: connect ECONNREFUSED 127.0.0.1:6379"
    allow = ("runner", "allow", "mcp.json", "--server", "redis")
    plain = scene(tmp_path, policy_file="/p.toml", allow=allow)
    what = "says that localhost:6379 refused a connection, and in the cage that is its own"
    for network in ("none", "allowlist"):
        asked = plain._replace(network=network)
        for stderr, answers, who in ((said, "", "its stderr"), ("", said, "its answer")):
            [advice] = advise(asked, stderr, answers=answers)
            assert advice.what == (
                f"{who} {what}; policy default opens no such port of this machine: the operator can write "
                "loopback = [6379] under [network] in /p.toml, and then: "
                "runner allow mcp.json --server redis --net localhost:6379"
            )
            assert not advice.option and advice_of_calls((advice,))
        [advice] = advise(asked._replace(loopback=(6379,)), said, answers=said)
        assert (advice.what, advice.option) == (f"its answer {what}", "--net localhost:6379")
        assert advice.command == "runner allow mcp.json --server redis --net localhost:6379"
        nobody = asked._replace(loopback=(6379,), approvals=ApprovalRule())
        [advice] = advise(nobody, said)
        assert not advice.option and "lets nobody allow it" in advice.what
    assert advise(plain._replace(network="host"), said) == ()
    seen = RefusedHost("the plugin asked for localhost:6379", "localhost:6379")
    assert len(advise(plain._replace(hosts=(seen,)), said)) == 1
    assert advise(plain, "listening on 127.0.0.1:6379") == ()


def test_paths_in_answers_need_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = advise(scene(tmp_path), answers=f"ENOENT: no such file or directory, open '{file}'")
    assert [each.what for each in found] == [f"its answer names {file}, which is not in the cage"]
    assert options(found) == [f"--read {file}"] and advice_of_calls(found) == found
    denied = f"PermissionError: [Errno 13] Permission denied: '{file}'"
    assert options(advise(scene(tmp_path), denied, answers=denied)) == [f"--read {file}"]
    for answer in (
        f"give a file such as '{file}'",
        f"Access denied - path outside allowed directories: {file}",  # by the server's own list
        "ENOENT: no such file or directory, open '/usr/none'",  # its folder is in the cage
        "ENOENT: no such file or directory, open '/srv/none'",  # too wide to propose
        f"ENOENT: no such file or directory, open '{file}/none/x'",
    ):
        assert advise(scene(tmp_path), answers=answer) == ()
    guard = tmp_path / "work" / ".git"
    guard.mkdir(parents=True)
    inside = scene(tmp_path, shown=("/usr", f"{tmp_path}/work"), guarded=(str(guard),), own=("/opt/app/run",))
    for answer, what in (
        ("ENOENT: no such file or directory, open '/etc/shadow'", "/etc/shadow, which is not"),
        (f"EROFS: read-only file system, open '{guard}/config'", f"{guard}, which stays read-only"),
        (f"EBUSY: resource busy, rename '{guard}.x' -> '{guard}'", f"{guard}, which stays read-only"),
        ("EROFS: read-only file system, open '/etc/none'", "a file in /etc, which is not"),
        ("EROFS: read-only file system, mkdir '/opt/none'", "a file in /opt, which is not"),
    ):
        (line,) = found = advise(inside, answers=answer)
        assert (
            line.what.startswith(f"its answer names {what}") and "no option" in line.what and not line.option
        )
        assert advice_of_calls(found) == found
    # Beside its program no option helps, and a variable may.
    beside = scene(tmp_path, shown=("/usr", str(guard.parent)), own=(f"{guard.parent}/server.js",))
    for name, what in (
        ("memory.jsonl.1f.tmp", "set MEMORY_FILE_PATH=${state_dir}/memory.jsonl"),
        ("x", "may move it"),
    ):
        (line,) = advise(beside, answers=f"EROFS: read-only file system, open '{guard.parent}/{name}'")
        assert what in line.what and not line.option
    (line,) = advise(scene(tmp_path), answers=f"ENOENT: no such file or directory, open '{file}x'")
    assert (line.what, line.option) == (
        f"its answer names a file in {tmp_path}, which is not in the cage",
        f"--read {tmp_path}",
    )
    # The end of stderr says nothing about a call that failed.
    assert advice_of_calls(advise(scene(tmp_path), f"cannot open '{file}'")) == ()


def test_hostile_names_stay_on_their_line(tmp_path: Path) -> None:
    file = tmp_path / "a\x1b[31m b; rm -rf ~\u202e"
    file.touch()
    [advice] = advise(scene(tmp_path), f"cannot open '{file}'")
    assert advice.text.isprintable() and "\\x1b" in advice.text and "\\u202e" in advice.text
    assert shlex.split(advice.option) == ["--read", str(file)]


@pytest.mark.parametrize(("kind", "count"), [("autofs", 0), ("nfs4", 0), ("fuse.sshfs", 0), ("ext4", 1)])
def test_a_plugin_cannot_have_the_runner_ask_a_server(tmp_path: Path, kind: str, count: int) -> None:
    """To look up a path may mount something, or wait for a server that the plugin has chosen."""
    (tmp_path / "file").touch()
    table = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:50 / {tmp_path} rw - {kind} server:/x rw\n"
    found = advise(scene(tmp_path), f"open '{tmp_path}/file'", parse_mountinfo(table.encode()))
    assert len(found) == count


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/nowhere/at/all")
    assert options(advise(scene(tmp_path), f"cannot open '{link}'")) == [f"--read {link}"]


def test_variables_that_everybody_has_are_not_told(tmp_path: Path) -> None:
    assert options(advise(scene(tmp_path), "PATH not set, HOME not set, LANG is missing")) == []
    assert options(advise(scene(tmp_path, denied_names=("ASKED",)))) == ["--env ASKED"]


def test_a_failure_to_find_a_host_that_is_not_named(tmp_path: Path) -> None:
    [advice] = advise(scene(tmp_path), "httpx.ConnectError: [Errno -2] Name or service not known")
    assert advice.option == "--net HOST:443"
    assert advise(scene(tmp_path, network="host"), "[Errno -2] Name or service not known") == ()


@pytest.mark.parametrize("address", [given(SYNTHETIC_IPV4), given(SYNTHETIC_IPV6)])
def test_a_plugin_that_refuses_the_addresses_of_its_cage(tmp_path: Path, address: str) -> None:
    said = f"Error: the URL leads to {address}, which is a private address"
    for found in (
        advise(scene(tmp_path, network="allowlist"), said),
        advise(scene(tmp_path, network="open"), answers=said),
    ):
        assert f"names the address {address}: in the cage" in found[0].what and found[0].option == ""
        assert advice_of_calls(found) == found
    assert advise(scene(tmp_path, network="host"), said) == ()  # that network is the machine's
    for other in (f"connect ECONNREFUSED {address}:443", "10.0.0.1 is a private address"):
        assert advise(scene(tmp_path, network="allowlist"), other) == ()


def test_a_ceiling_that_the_manifest_could_ask_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    rules = {"approvals": ApprovalRule(), "ceilings": ApprovalRule(read=(str(tmp_path),))}
    [advice] = advise(scene(tmp_path, **rules, allow=("runner", "allow", "x")), f"open '{file}'")
    assert advice.option == "" and "gives it to a manifest that asks for it" in advice.what
    [advice] = advise(scene(tmp_path, **rules), f"open '{file}'")  # a command asks by its options
    assert advice.option == f"--read {file}"
