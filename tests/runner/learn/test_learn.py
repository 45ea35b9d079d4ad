"""runner learn, with real plugins in real cages: it sees what they miss, and they gain nothing by it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from runner.contracts.registry import example_folder
from tests.conftest import Caller
from tests.tables import wait_for

Write = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of the host that everybody may enter, outside of what a cage has for itself."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


NEEDY = """
import os, socket, sys
place = sys.stdin.readline().strip()
found = []
try:
    found += [open(f"{place}/data/{n}").read() for n in range(9)]
except OSError as error:
    found.append(error.strerror)
    for n in range(9):
        os.path.exists(f"{place}/data/{n}")
try:
    os.lstat(f"{place}/link")
except OSError:
    pass
try:
    os.chdir("/usr")
    open("../etc/" + "shadow")
except OSError:
    pass
try:
    socket.create_connection(("learned.example", 8443), 1)
except OSError as error:
    found.append(error.strerror)
if "WANTED_TOKEN" not in os.environ:
    print("WANTED_TOKEN is not set", file=sys.stderr)
print(found)
"""


@pytest.mark.both_callers
def test_what_was_missed_is_found_with_the_proposal(
    runner_as: Caller, place: Path, write_file: Write
) -> None:
    for number in range(9):
        write_file(place / "data" / str(number), "text")
    (place / "link").symlink_to("/etc/shadow")
    command = ["--", "/usr/bin/python3", "-c", NEEDY]
    said, env = f"{place}\n", {"WANTED_TOKEN": "x"}
    learned = runner_as("learn", "--emit", "options", *command, input=said, env=env)
    assert learned.returncode == 0
    assert learned.stdout == "['No such file or directory', 'Network is unreachable']\n"  # the cage was shut
    options = shlex.split(learned.stderr.splitlines()[-1])
    assert options == [
        *("--read", f"{place}/data"),
        *("--net", "learned.example:8443", "--env", "WANTED_TOKEN"),
    ]
    text = runner_as("learn", *command, input=said, env=env).stderr
    assert "asked for 9 paths below it" in text
    assert f"{place}/link (once): no option grants it: it is /etc/shadow" in text
    assert "! variable  WANTED_TOKEN" in text
    assert "/etc/shadow (once): no option grants it" in text

    files = options[:2]
    again = runner_as(
        "learn", "--emit", "options", *files, "--env", "WANTED_TOKEN", *command, input=said, env=env
    )
    assert again.stdout.count("'text'") == 9
    assert shlex.split(again.stderr.splitlines()[-1]) == ["--net", "learned.example:8443"]


HOSTILE = """
import ctypes, errno, os, signal, struct, sys
place = sys.stdin.readline().strip()
libc = ctypes.CDLL(None, use_errno=True)
# A filter of its own, and one with a listener.
allow = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(allow)
program = struct.pack("@HP", 1, ctypes.addressof(code))
number = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
libc.prctl(38, 1, 0, 0, 0)
print("plain filter", libc.syscall(number, 1, 0, program))
print("listener", libc.syscall(number, 1, 8, program) >= 0 or errno.errorcode[ctypes.get_errno()])
for n in range(4):
    child = os.fork()
    if child == 0:
        os.path.exists(f"{place}/child")
        os.path.exists(f"{place}/a\\x1b[2J\\n  read  etc")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
for n in range(700):  # more bytes than are noted
    os.path.lexists(f"/nowhere/{n}/" + "x/" * 1990)
os.kill(0, signal.SIGTERM)
"""


@pytest.mark.both_callers
def test_a_plugin_cannot_blind_fill_or_deceive_it(runner_as: Caller, place: Path, write_file: Write) -> None:
    write_file(place / "child", "")
    write_file(place / "a\x1b[2J\n  read  etc", "")
    command = ["--", "/usr/bin/python3", "-uc", HOSTILE]
    learned = runner_as("learn", *command, input=f"{place}\n")
    # A filter of its own that allows a call does not hide it. (One that refuses calls hides them, and the
    # plugin gets nothing by them either.) A listener is refused in every cage.
    assert learned.stdout == "plain filter 0\nlistener EINVAL\n"
    lines = learned.stderr.splitlines()
    assert f"    read  {place}/child  asked for 4 times" in lines
    assert any("it asked for more different things than are noted" in line for line in lines)
    assert any("paths that lie more than 100 folders deep were not looked at" in line for line in lines)
    assert f'    "{place}/a\\\\x1b[2J\\\\n  read  etc" (4 times): its name has' in learned.stderr
    assert "\x1b" not in learned.stderr


BUSY = """
import os, time
os.path.exists("/var/tmp")
print("runs", flush=True)
while True:
    try:
        os.stat("/var/tmp")
    except OSError:
        time.sleep(0.01)
"""


def _observers(runner: int) -> list[int]:
    found = []
    for child in psutil.Process(runner).children():
        with suppress(psutil.NoSuchProcess):
            if child.name() != "runner-init":
                found.append(child.pid)
    return found


@pytest.mark.needs("user")
def test_it_ends_with_its_observer(runner_as_user: Caller) -> None:
    with runner_as_user.start("learn", "--", "/usr/bin/python3", "-c", BUSY) as learning:
        assert learning.stdout is not None and learning.stdout.readline() == b"runs\n"
        # Those that only helped with the launch end soon.
        assert wait_for(lambda: len(_observers(learning.pid)) == 1)
        [observer] = _observers(learning.pid)
        os.kill(observer, signal.SIGKILL)
        _, said = learning.communicate(timeout=60)
    assert b"the process that observes the plugin has ended" in said
    assert b"ended early: nothing that it saw is known" in said


@pytest.mark.needs("user")
def test_ctrl_c_ends_it_with_the_proposal(runner_as_user: Caller) -> None:
    with runner_as_user.start("learn", "--", "/usr/bin/python3", "-c", BUSY) as learning:
        assert learning.stdout is not None and learning.stdout.readline() == b"runs\n"
        learning.send_signal(signal.SIGINT)
        _, said = learning.communicate(timeout=60)
    assert learning.returncode == 0
    assert b"what python3 missed in its cage" in said and b"/var/tmp (" in said


def test_calls_drive_it_and_the_proposal_is_allowed(
    runner_as: Caller, place: Path, write_file: Write
) -> None:
    data = write_file(place / "data" / "text", "found")
    out, bad, key = place / "out", runner_as.home / "bad", runner_as.home / ".ssh" / "id"
    for folder in (out, bad, key.parent):
        folder.mkdir(exist_ok=True)
    key.write_text("secret")
    os.link(key, bad / "id")  # nobody can be given this folder, and only a launch finds that out
    runner_as.give(runner_as.home)
    runner_as.give(out)
    server = place / "server" / "server.py"
    server.parent.mkdir(mode=0o755)
    shutil.copy(os.path.join(example_folder("mcp"), "server.py"), server)
    asks = f"os.path.exists('{data}'); os.path.exists('{bad}'); os.access('{out}', os.W_OK)"
    code = f"import os, runpy; {asks}; runpy.run_path('{server}', run_name='__main__')"
    entry = {"command": "/usr/bin/python3", "args": ["-c", code], "x-sandbox": {"read": [str(server.parent)]}}
    manifest = write_file(place / "mcp.json", json.dumps({"mcpServers": {"needy": entry}}))
    allowed = runner_as("allow", "--yes", manifest, "--server", "needy")
    assert allowed.returncode == 0, allowed.stderr
    words = [
        str(manifest),
        "--server",
        "needy",
        "--call",
        "greet",
        "--input",
        '{"name": "you"}',
        "--call",
        "none",
    ]
    learned = runner_as("learn", "--emit", "x-sandbox", *words)
    assert learned.returncode == 0, learned.stderr
    assert json.loads(learned.stdout) == {
        "x-sandbox": {"read": sorted((str(bad), str(data))), "write": [str(out)]}
    }
    assert "call greet: it answered\n" in learned.stderr and "call none: " in learned.stderr
    unasked = runner_as("learn", "--apply", *words)
    assert unasked.returncode == 2 and "there is no terminal to ask on" in unasked.stderr
    applied = runner_as("learn", "--apply", "--yes", *words)
    assert applied.returncode == 0 and "Allowed. To take it back" in applied.stdout
    left_out, _, below = applied.stderr.partition("  left out; all else is below\n")
    assert f"runner allow: {bad}: " in left_out and f"to a file of {key.parent}" in left_out
    assert below == ""
    again = runner_as("learn", "--emit", "options", *words)
    assert shlex.split(again.stdout) == ["--read", str(bad)]
    nothing = runner_as("learn", "--apply", "--yes", *words)
    assert nothing.returncode == 21 and "nothing is recorded" in nothing.stderr


SUPERVISED = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
program = struct.pack("@HP", 1, ctypes.addressof(code))
libc.prctl(38, 1, 0, 0, 0)
listener = libc.syscall({"x86_64": 317, "aarch64": 277}[os.uname().machine], 1, 8, program)
os.set_inheritable(listener, True)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.needs("user")
def test_a_runner_that_is_observed_itself_says_so(runner_as_user: Caller) -> None:
    for verb, status in (("run", 0), ("learn", 125)):  # the cage can be built, and nothing can be learned
        command = ["/usr/bin/python3", "-c", SUPERVISED, *runner_as_user.command(verb, "--", "true")]
        done = subprocess.run(command, env=dict(runner_as_user.environ), capture_output=True, text=True)
        assert done.returncode == status, done.stderr
    assert "could not install the filter of runner learn: Device or resource busy" in done.stderr


def test_wrong_options_are_refused(runner_as_user: Caller) -> None:
    for words, told in (
        (("--apply", "--", "true"), "add --name NAME"),
        (("--yes", "--", "true"), "--yes: it goes with --apply"),
        (("--input", "{}", "--", "true"), "--input: it belongs behind the --call"),
        (("--output", "/nowhere/x", "--", "true"), "--output /nowhere/x: No such file or directory"),
    ):
        refused = runner_as_user("learn", *words)
        assert refused.returncode == 2 and told in refused.stderr, refused.stderr
