"""runner plan: the plan for people and programs, where it is stored, and the bare command run for real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.cli.plan import _KINDS
from runner.contracts.registry import contract_options
from sandbox.facts import Facts
from tests.conftest import SYSTEM_PATH, Caller
from tests.manifests import SANDBOX, nexo
from tests.runner.launch.stored.stored_plugin import unless_others_change
from tests.tables import one_case
from tests.template import settled

Write = Callable[..., Path]

NEXO = nexo("planned", version="1.2.3") + SANDBOX
# What a plugin sees of its cage.
TELL = """\
#!/bin/sh
id -u
grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status
cat /etc/shadow
ls /sys/class/net
cat ./private
echo "TOKEN=$TOKEN CANARY=$CANARY"
tr '\\0' '\\n' </proc/1/environ | grep -a CANARY
echo "$@"
cat
exit 7
"""
SECRET = "s3cret-of-the-caller"


@pytest.fixture
def plugin(plugin_dir: Path, write_file: Write) -> Path:
    write_file(plugin_dir / "run", TELL, 0o755)
    write_file(plugin_dir / "nexo-plugin.toml", NEXO)
    return plugin_dir


def rows(said: str) -> dict[str, str]:
    """The lines of the plan, by their first word or two."""
    found = (re.split(r"  +", line, maxsplit=1) for line in said.splitlines() if "  " in line)
    return {row[0]: row[1] for row in found}


def stored(caller: Caller, *words: Any, **more: Any) -> dict[str, str]:
    """The plan, as if all files it rests on were old enough."""
    said = settled(caller)("plan", *words, **more)
    assert said.returncode == 0, said.stderr
    return rows(said.stdout)


# --- for people ---------------------------------------------------------------------------------------------


def test_the_plan_in_a_few_lines(runner_as: Caller, plugin: Path) -> None:
    said = runner_as("plan", plugin, "--", "--verbose", "two words")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith(f"planned 1.2.3 (nexo) from {plugin}/nexo-plugin.toml\n")
    found = rows(said.stdout)
    assert found["runs"] == f"{plugin}/run --verbose two words" and found["in"] == str(plugin)
    assert "none of them writable" in found["mounts"] and "none degraded" in found["layers"]
    assert "memory" in found["limits"] and "HOME" in found["env"].split()
    counts = [int(number) for number in re.findall(r"(\d+) of kind", found["rests on"])]
    assert sum(counts) == int(found["rests on"].split()[0]) > 50
    assert len(said.stdout.splitlines()) < 15


def test_the_facts_are_names_and_no_values(runner_as_user: Caller, plugin: Path) -> None:
    said = runner_as_user("plan", "--facts", "--env", "TOKEN", plugin, env={"TOKEN": SECRET})
    facts = [tuple(line.split(maxsplit=1)) for line in said.stdout.partition("\n\n")[2].splitlines()]
    assert tuple(_KINDS) == Facts._fields
    assert ("variable", "TOKEN") in facts and ("path", f"{plugin}/run") in facts
    assert ("path", f"{plugin}/nexo-plugin.toml") in facts and ("path", "/usr/bin/bwrap") in facts
    assert SECRET not in said.stdout + said.stderr


@one_case(
    ("change", "policy", "status"),
    [
        ('fs_read_paths = ["/srv"]\n', "default", 21),
        ("nonsense = 1\n", "default", 20),
        ("", "nope", 26),
        ('[plugin.limits]\nmemory = "1"\n', "default", 20),
    ],
)
def test_refusals_are_those_of_exec(
    runner_as_user: Caller, plugin: Path, write_file: Write, change: str, policy: str, status: int
) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO + change)
    refused = runner_as_user("exec", "--policy", policy, plugin)
    assert refused.returncode == 126 and refused.stderr
    for emit in ((), ("--emit", "sh"), ("--emit=argv",)):
        said = runner_as_user("plan", *emit, "--policy", policy, plugin)
        assert (said.returncode, said.stdout, said.stderr) == (status, "", refused.stderr)
    said = runner_as_user("plan", "--emit", "json", "--policy", policy, plugin)
    document = json.loads(said.stdout)
    assert said.returncode == status and document["outcome"]["code"] != "ok" and "argv" not in document


def test_it_takes_the_words_of_exec(runner_as_user: Caller, plugin: Path) -> None:
    assert contract_options("plan") == contract_options("exec")
    said = runner_as_user("plan", "--report", "/nowhere/x", "--inspect", "--tty", "--events", "3", plugin)
    assert (said.returncode, said.stderr) == (0, "")  # nothing is started, and no report is written
    said = runner_as_user("plan", "--facts", "--emit", "sh", plugin)
    assert said.returncode == 2 and "--facts" in said.stderr


# --- keeping it ---------------------------------------------------------------------------------------------


def test_it_is_stored_for_exec_with_the_same_words(runner_as: Caller, plugin: Path) -> None:
    path = stored(runner_as, plugin)["stored"]
    assert Path(path).stat().st_mode & 0o777 == 0o600 and Path(path).stat().st_uid == runner_as.uid
    # Options that only this verb has make no difference; what exec is told does.
    assert stored(runner_as, "--facts", plugin)["stored"] == path
    assert stored(runner_as, "--policy", "dev", plugin)["stored"] != path
    assert stored(runner_as, plugin, "--", "--more")["stored"] != path
    document = json.loads(settled(runner_as)("plan", "--emit", "json", plugin).stdout)
    assert document["kept"] == {"path": path, "reason": ""}
    for emit in ("sh", "argv", "json"):
        os.unlink(path)
        said = settled(runner_as)("plan", "--emit", emit, plugin)
        assert said.returncode == 0 and os.path.exists(path)


@pytest.mark.usefixtures("nothing_left")
def test_exec_takes_the_plan_that_was_stored(runner_as: Caller, plugin: Path) -> None:
    debug = {"RUNNER_DEBUG": "1"}  # then exec says so
    os.unlink(stored(runner_as, plugin, "--", "given", env=debug)["stored"])
    control = settled(runner_as)("exec", plugin, "--", "another", env=debug)
    assert "stored plan is used" not in control.stderr and control.returncode == 7
    assert stored(runner_as, "--facts", plugin, "--", "given", env=debug)["stored"].startswith("/")
    said = unless_others_change(plugin, lambda: settled(runner_as)("exec", plugin, "--", "given", env=debug))
    assert "stored plan is used" in said.stderr and said.returncode == 7
    assert said.stdout == control.stdout.replace("another", "given")


def test_why_it_is_not_stored(runner_as_user: Caller, plugin: Path) -> None:
    assert stored(runner_as_user, plugin, env={"RUNNER_CACHE": "off"})["stored"] == "no: RUNNER_CACHE=off"
    assert "decides anew" in stored(runner_as_user, "--memory", "64M", plugin)["stored"]
    unsafe = Path(runner_as_user.environ["XDG_CACHE_HOME"]) / "runner"
    unsafe.mkdir(exist_ok=True)
    unsafe.chmod(0o777)
    assert str(unsafe) in stored(runner_as_user, plugin)["stored"]
    unsafe.chmod(0o700)
    runner_as_user.give(unsafe)
    assert stored(runner_as_user, plugin)["stored"].startswith("/")  # the control
    tomorrow = time.time() + 86400.0  # it cannot settle by itself, and no other file is so new
    os.utime(plugin / "nexo-plugin.toml", (tomorrow, tomorrow))
    said = stored(runner_as_user, plugin)
    assert said["stored"] == f"no: {plugin}/nexo-plugin.toml was changed a moment ago"


# --- the script ---------------------------------------------------------------------------------------------


def run_script(
    caller: Caller, script: str, *args: str, env: dict[str, str] | None = None, shell: str = "/bin/sh"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*caller.prefix, shell, "-c", script, "script", *args],
        env={"PATH": SYSTEM_PATH, "CANARY": "sings", **(env or {})},
        cwd="/",
        input="from stdin\n",
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.usefixtures("nothing_left")
@one_case("shell", ["/bin/sh", "/bin/bash"])
def test_the_script_makes_the_cage(runner_as: Caller, plugin: Path, shell: str) -> None:
    said = runner_as("plan", "--emit", "sh", plugin, "--", "given")
    assert (said.returncode, said.stderr) == (0, "") and said.stdout.startswith("#!/bin/sh\n")
    ran = run_script(runner_as, said.stdout, "a b", "*", shell=shell)
    assert ran.returncode == 7, ran.stderr
    told = "65534\nNoNewPrivs:\t1\nSeccomp:\t2\nTOKEN= CANARY=\ngiven a b *\nfrom stdin\n"
    assert ran.stdout == told
    assert "'/etc/shadow'" in ran.stderr.replace("/etc/shadow:", "'/etc/shadow':") and "net" in ran.stderr


def test_the_filter_of_the_script_is_what_filters(runner_as: Caller, plugin: Path) -> None:
    script = runner_as("plan", "--emit", "sh", plugin).stdout
    without = re.sub(r"--seccomp \d+ ", "", script)
    assert without != script
    assert "Seccomp:\t0\n" in run_script(runner_as, without).stdout
    # And without its file nothing starts.
    gone = re.sub(r"exec 4<\S+", "exec 4</nonexistent", script)
    assert gone != script
    ran = run_script(runner_as, gone)
    assert ran.returncode != 0 and ran.stdout == ""


@pytest.mark.needs("root")
def test_root_gives_the_script_no_uid_of_its_own(
    runner_as_root: Caller, plugin: Path, write_file: Write
) -> None:
    write_file(plugin / "private", "private\n", 0o600)
    script = runner_as_root("plan", "--emit", "sh", plugin).stdout
    ran = run_script(runner_as_root, script)
    assert ran.returncode == 7 and "private\n" not in ran.stdout and "./private" in ran.stderr
    with_root = re.sub(r"(?m)^ *case .* esac$", "", script)
    assert with_root != script
    assert "private\n" in run_script(runner_as_root, with_root).stdout


def test_its_head_says_what_it_leaves_out(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO + 'fs_write_paths = ["${state_dir}"]\n')
    head = runner_as("plan", "--emit", "sh", "--deadline", "9s", plugin).stdout.partition("\nset -u")[0]
    for words in ("memory", "deadline", "uid of its own", "cgroups", "swapped", "It makes and shows /"):
        assert words in head
    assert all(line.startswith("#") for line in head.splitlines())


@pytest.mark.usefixtures("nothing_left")
def test_no_secret_is_written_out_or_on_a_command_line(
    runner_as: Caller, plugin: Path, write_file: Write
) -> None:
    write_file(plugin / "run", '#!/bin/sh\necho "$TOKEN $GIVEN $OWN"; read line\n', 0o755)
    write_file(plugin / "nexo-plugin.toml", NEXO)
    given = "given-on-the-command-line"
    words = ("--env", "TOKEN", "--env", f"GIVEN={given}", "--env", "OWN=1", plugin)
    for emit in ("sh", "argv", "json"):
        said = runner_as("plan", "--emit", emit, *words, env={"TOKEN": SECRET})
        assert said.returncode == 0 and SECRET not in said.stdout + said.stderr
        assert given not in said.stdout + said.stderr
    env = {entry["name"]: entry for entry in json.loads(said.stdout)["env"]}
    assert env["TOKEN"] == {"name": "TOKEN", "origin": "caller", "value": None}
    assert env["GIVEN"] == {"name": "GIVEN", "origin": "command line", "value": None}
    assert env["HOME"] == {"name": "HOME", "origin": "runner", "value": "/tmp"}
    script = runner_as("plan", "--emit", "sh", *words, env={"TOKEN": SECRET}).stdout
    process = subprocess.Popen(
        [*runner_as.prefix, "/bin/sh", "-c", script],
        env={"PATH": SYSTEM_PATH, "TOKEN": SECRET, "GIVEN": given},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        assert process.stdout.readline() == f"{SECRET} {given} \n"
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes())
            except OSError:
                continue
        process.stdin.close()
        process.wait(30)
    assert any(str(plugin / "run").encode() in line for line in lines)  # the control
    assert [line for line in lines if SECRET.encode() in line] == []


def test_a_secret_within_an_argument_is_named(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write
) -> None:
    """A manifest that fills a variable into its words."""
    write_file(plugin_dir / "tell", '#!/bin/sh\necho "$@" "$SET" "$PLAIN"\n', 0o755)
    server = {
        "command": str(plugin_dir / "tell"),
        "args": ["--key=${TOKEN}!", "x"],
        "env": {"SET": "Bearer ${TOKEN}", "PLAIN": "debug"},
    }
    manifest = write_file(plugin_dir / ".mcp.json", json.dumps({"mcpServers": {"one": server}}))
    words = ("--env", "TOKEN", manifest)
    said = runner_as_user("plan", *words, env={"TOKEN": SECRET})
    assert said.returncode == 0 and "--key=$TOKEN! x" in said.stdout
    script = runner_as_user("plan", "--emit", "sh", *words, env={"TOKEN": SECRET})
    document = runner_as_user("plan", "--emit", "json", *words, env={"TOKEN": SECRET})
    refused = runner_as_user("plan", "--emit", "argv", *words, env={"TOKEN": SECRET})
    for each in (said, script, document, refused):
        assert SECRET not in each.stdout + each.stderr
    assert refused.returncode == 2 and "$TOKEN" in refused.stderr
    assert ["--key=", {"variable": "TOKEN"}, "!"] in json.loads(document.stdout)["argv"]
    env = {entry["name"]: (entry["origin"], entry["value"]) for entry in json.loads(document.stdout)["env"]}
    assert env["SET"] == ("manifest", None) and env["PLAIN"] == ("manifest", "debug")
    ran = run_script(runner_as_user, script.stdout, env={"TOKEN": "another", "SET": "set"})
    assert ran.stdout == "--key=another! x set debug\n", ran.stderr


# --- for programs -------------------------------------------------------------------------------------------

# Opens what the document says and becomes bwrap.
_START = """\
import json, os, sys
document = json.load(open(sys.argv[1]))
for each in document["descriptors"]:
    if "file" in each:
        fd = os.open(each["file"], os.O_RDONLY)
    else:
        fd = os.memfd_create("x")
        os.write(fd, os.fsencode(each["content"]))
        os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, each["number"])
os.execve(document["bwrap"], document["argv"], {})
"""


@pytest.mark.usefixtures("nothing_left")
def test_a_program_can_start_what_the_document_says(runner_as: Caller, plugin: Path) -> None:
    said = runner_as("plan", "--emit", "json", plugin)
    document = json.loads(said.stdout)
    assert document["schema"] == "runner.plan.v1" and document["outcome"]["code"] == "ok"
    assert {"kind": "bind", "dest": str(plugin), "source": str(plugin), "writable": False} in document[
        "mounts"
    ]
    assert f"{plugin}/run" in document["facts"]["places"] and document["directory"] == str(plugin)
    assert {"seccomp", "uid"} <= {layer["layer"] for layer in document["layers"]}
    assert "memory" in [limit["name"] for limit in document["limits"]] and document["left_out"]
    filters = [each for each in document["descriptors"] if "file" in each]
    assert [each["number"] for each in filters] == [10] and filters[0]["file"].endswith(".bpf")
    vector = runner_as("plan", "--emit", "argv", plugin).stdout
    assert vector.split("\0") == [*document["argv"], ""]
    file = runner_as.home / "plan.json"
    file.write_text(said.stdout)
    file.chmod(0o644)
    runner_as.give(file)
    ran = subprocess.run(
        [*runner_as.prefix, *runner_as.python, "-c", _START, str(file)],
        env=dict(runner_as.environ),
        cwd="/",
        input="x",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout.startswith("65534\nNoNewPrivs:\t1\nSeccomp:\t2\n")


def test_no_bare_command_for_what_only_the_runner_can_do(
    runner_as_user: Caller, plugin: Path, write_file: Write
) -> None:
    write_file(plugin / "nexo-plugin.toml", NEXO.replace("enabled = true", "enabled = false"))
    policy = write_file(runner_as_user.home / "policy.toml", 'version = 1\nunsandboxed = "allow"\n', 0o600)
    runner_as_user.give(policy)
    words = ("--policy", policy, plugin)
    for emit in ("sh", "argv"):
        said = runner_as_user("plan", "--emit", emit, *words)
        assert (said.returncode, said.stdout) == (2, "") and "without a cage" in said.stderr
    document = json.loads(runner_as_user("plan", "--emit", "json", *words).stdout)
    assert document["argv"] is None and "without a cage" in document["argv_refused"]
    said = runner_as_user("plan", *words)
    assert "UNSANDBOXED" in said.stdout and "without a cage" in rows(said.stdout)["stored"]


@pytest.mark.needs("user")
def test_a_folder_with_guarded_names_is_for_the_runner(
    runner_as_user: Caller, plugin: Path, write_file: Write
) -> None:
    place = runner_as_user.home / "project"
    (place / ".git/hooks").mkdir(parents=True)
    runner_as_user.give(place)
    write_file(plugin / "nexo-plugin.toml", NEXO + f'fs_write_paths = ["{place}"]\n')
    policy = f'version = 1\n[write]\nceiling = ["{place}"]\n'
    file = write_file(runner_as_user.home / "policy.toml", policy, 0o600)
    runner_as_user.give(file)
    assert runner_as_user("plan", "--policy", file, plugin).returncode == 0
    said = runner_as_user("plan", "--emit", "sh", "--policy", file, plugin)
    assert (said.returncode, said.stdout) == (2, "") and "guarded" in said.stderr
