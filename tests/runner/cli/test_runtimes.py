"""Ordinary plugins just work: every language and contract, through `runner exec`, as root and as a user."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SYSTEM_PATH, Caller
from tests.tables import one_case

pytestmark = pytest.mark.usefixtures("nothing_left")

DEADLINE, NO_CAGE, REFUSED, NOT_FOUND = 124, 125, 126, 127

NEXO = """\
[plugin]
id = "{id}"
version = "1.0.0"
name = "Plugin"
description = "An ordinary one."
min_nexo_version = ">=0.1"

[plugin.entrypoint]
command = {command}
args = {args}
{tables}
"""
STATE = '[plugin.sandbox]\nenabled = true\nfs_write_paths = ["${state_dir}"]\n'


def nexo(folder: Path, command: str, *args: str, tables: str = "", plugin_id: str = "ordinary") -> Path:
    text = NEXO.format(id=plugin_id, command=json.dumps(command), args=json.dumps(args), tables=tables)
    return _written(folder / "nexo-plugin.toml", text)


def rune(folder: Path, **process: object) -> Path:
    bundle = {
        "plugin_id": "ordinary",
        "plugin_version": "1",
        "protocol_version": "rterm.plugin.v1",
        "process": process,
        "tools": [{"name": "x"}],
    }
    return _written(folder / "rterm-plugin.json", json.dumps(bundle))


def mcp(folder: Path, *, name: str = "mcp.json", **servers: dict[str, Any]) -> Path:
    return _written(folder / name, json.dumps({"mcpServers": servers}))


def _written(path: Path, text: str | bytes, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    for parent in path.parents:
        if parent.name.startswith("rt-"):
            break
        parent.chmod(0o755)
    return path


def script(path: Path, text: str) -> Path:
    return _written(path, text, 0o755)


# --- Languages ---------------------------------------------------------------------------------------------


@one_case("shebang", ["/usr/bin/python3", "/usr/bin/env python3", "/usr/bin/python3 -I"])
def test_a_python_script(runner_as: Caller, plugin_dir: Path, shebang: str) -> None:
    text = f"#!{shebang}\nimport ssl, sqlite3, ctypes, json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    script(plugin_dir / "plugin.py", text)
    nexo(plugin_dir, "./plugin.py", "one")
    done = runner_as("exec", plugin_dir, "--", "two")
    assert (done.returncode, done.stdout, done.stderr) == (0, '["one", "two"]\n', "")


def test_a_python_script_with_modules_beside_it(runner_as: Caller, plugin_dir: Path) -> None:
    _written(plugin_dir / "lib/helper.py", "NAME = 'beside'\n")
    script(
        plugin_dir / "bin/plugin",
        "#!/usr/bin/python3\nimport sys\nsys.path.insert(0, 'lib')\nimport helper\nprint(helper.NAME)\n",
    )
    nexo(plugin_dir, "bin/plugin")
    done = runner_as("exec", plugin_dir / "nexo-plugin.toml")
    assert (done.returncode, done.stdout) == (0, "beside\n"), done.stderr


@pytest.fixture(scope="module")
def venv() -> Callable[[Path], Path]:
    """Makes a virtual environment of the system's Python, with a package of its own in it."""

    def make(path: Path) -> Path:
        subprocess.run(
            ["/usr/bin/python3", "-m", "venv", "--without-pip", str(path)],
            check=True,
            env={"PATH": SYSTEM_PATH},
        )
        (site,) = path.glob("lib/python3*/site-packages")
        _written(site / "only_here.py", "NAME = 'from the environment'\n")
        for each in (path, *path.rglob("*")):
            if not each.is_symlink():
                each.chmod(each.stat().st_mode | (0o755 if each.is_dir() else 0o444))
        return path

    return make


WHERE = "import only_here, sys; print(only_here.NAME, sys.prefix)"


def test_a_virtual_environment_in_the_plugins_folder(
    runner_as: Caller, plugin_dir: Path, venv: Callable[[Path], Path]
) -> None:
    home = venv(plugin_dir / ".venv")
    for command in (".venv/bin/python", "./.venv/bin/python3"):
        nexo(plugin_dir, command, "-c", WHERE)
        done = runner_as("exec", plugin_dir)
        assert (done.returncode, done.stdout) == (0, f"from the environment {home}\n"), done.stderr
    script(plugin_dir / "plugin.py", f"#!{home}/bin/python\n{WHERE}\n")
    nexo(plugin_dir, "./plugin.py")
    done = runner_as("exec", plugin_dir)
    assert (done.returncode, done.stdout) == (0, f"from the environment {home}\n"), done.stderr


def test_a_virtual_environment_elsewhere(
    runner_as: Caller, plugin_dir: Path, venv: Callable[[Path], Path]
) -> None:
    """As people have it in their mcp.json: the interpreter of one folder, the script of another."""
    home = venv(plugin_dir / "environment")
    server = _written(plugin_dir / "server/main.py", f"{WHERE}; import beside; print(beside.NAME)\n")
    _written(plugin_dir / "server/beside.py", "NAME = 'and beside'\n")
    config = mcp(plugin_dir / "config", one={"command": f"{home}/bin/python", "args": [str(server)]})
    done = runner_as("exec", config)
    assert (done.returncode, done.stdout) == (0, f"from the environment {home}\nand beside\n"), done.stderr


@pytest.mark.needs("node")
def test_a_node_script_with_its_modules(runner_as: Caller, plugin_dir: Path) -> None:
    _written(plugin_dir / "node_modules/greet/package.json", '{"name": "greet", "main": "index.js"}')
    _written(plugin_dir / "node_modules/greet/index.js", "module.exports = name => `hello ${name}`\n")
    _written(plugin_dir / "package.json", '{"name": "plugin"}')
    text = "const greet = require('greet');\n"
    text += "process.stdin.on('data', d => console.log(greet(d.toString().trim())));\n"
    script(plugin_dir / "plugin.js", "#!/usr/bin/env node\n" + text)
    nexo(plugin_dir, "./plugin.js")
    done = runner_as("exec", plugin_dir, input="node")
    assert (done.returncode, done.stdout) == (0, "hello node\n"), done.stderr

    (plugin_dir / "nexo-plugin.toml").unlink()
    mcp(plugin_dir, one={"command": "node", "args": ["plugin.js"]})
    done = runner_as("exec", plugin_dir, input="mcp")
    assert (done.returncode, done.stdout) == (0, "hello mcp\n"), done.stderr


@pytest.mark.needs("node")
def test_node_threads_and_its_own_network(runner_as: Caller, plugin_dir: Path) -> None:
    text = """
const { Worker, isMainThread, parentPort } = require('worker_threads');
const { createHash } = require('crypto');
if (!isMainThread) {
  parentPort.postMessage(createHash('sha256').update('x').digest('hex').length);
} else {
  const server = require('http').createServer((_, r) => r.end('served')).listen(0, '127.0.0.1', () => {
    require('http').get({ port: server.address().port, host: '127.0.0.1' }, r => r.on('data', d => {
      new Worker(__filename).on('message', n => { console.log(d.toString(), n); server.close(); });
    }));
  });
}
"""
    script(plugin_dir / "plugin.js", "#!/usr/bin/env node\n" + text)
    nexo(plugin_dir, "./plugin.js")
    done = runner_as("exec", plugin_dir)
    assert (done.returncode, done.stdout) == (0, "served 64\n"), done.stderr


@one_case("shell", ["/bin/sh", "/usr/bin/env bash"])
def test_a_shell_script(runner_as: Caller, plugin_dir: Path, shell: str) -> None:
    text = 'while read -r line; do echo "got $line"; done; (echo "in $(basename "$PWD")" | cat) >&2'
    script(plugin_dir / "run", f"#!{shell}\n{text}\n")
    nexo(plugin_dir, "./run")
    done = runner_as("exec", plugin_dir, input="a\nb\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "got a\ngot b\n", f"in {plugin_dir.name}\n")


@pytest.mark.needs("gcc")
@one_case("linking", ["-static", "-pie"])
def test_a_compiled_program(runner_as: Caller, plugin_dir: Path, linking: str) -> None:
    source = _written(
        plugin_dir / "plugin.c",
        '#include <stdio.h>\nint main(int n, char **v) { printf("%d %s\\n", n, v[n - 1]); return 3; }\n',
    )
    program = plugin_dir / "plugin"
    subprocess.run(["gcc", linking, "-o", program, source], check=True)
    program.chmod(0o755)
    nexo(plugin_dir, "./plugin")
    done = runner_as("exec", plugin_dir, "--", "x", "last")
    assert (done.returncode, done.stdout) == (3, "3 last\n"), done.stderr


@pytest.mark.needs("gcc")
def test_a_program_with_a_library_beside_it(runner_as: Caller, plugin_dir: Path) -> None:
    library = _written(plugin_dir / "own.c", "int own(void) { return 42; }\n")
    main = _written(
        plugin_dir / "main.c", '#include <stdio.h>\nint own(void);\nint main() { printf("%d\\n", own()); }\n'
    )
    (plugin_dir / "lib").mkdir()
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", plugin_dir / "lib/libown.so", library], check=True)
    argv = ["gcc", "-o", f"{plugin_dir}/main", str(main), f"-L{plugin_dir}/lib", "-lown"]
    subprocess.run([*argv, "-Wl,-rpath,$ORIGIN/lib"], check=True)
    for path in (plugin_dir / "lib", plugin_dir / "lib/libown.so", plugin_dir / "main"):
        path.chmod(0o755)
    nexo(plugin_dir, "./main")
    done = runner_as("exec", plugin_dir)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


# --- Where commands are ------------------------------------------------------------------------------------


@one_case("command", ["echo", "/bin/echo", "/usr/bin/echo"])
def test_a_command_of_the_system(runner_as: Caller, plugin_dir: Path, command: str) -> None:
    nexo(plugin_dir, command, "here")
    assert runner_as("exec", plugin_dir).stdout == "here\n"


def test_a_command_on_path_outside_of_the_system(runner_as: Caller, plugin_dir: Path) -> None:
    tool = script(plugin_dir / "tools/mytool", "#!/bin/sh\necho found\n")
    nexo(plugin_dir / "plugin", "mytool")
    done = runner_as("exec", plugin_dir / "plugin", env={"PATH": f"{tool.parent}:{SYSTEM_PATH}"})
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


@one_case("command", ["./run", "bin/run", "./bin/../run"])
def test_a_command_relative_to_the_manifest(runner_as: Caller, plugin_dir: Path, command: str) -> None:
    for place in ("run", "bin/run"):
        script(plugin_dir / place, "#!/bin/sh\necho ran; pwd\n")
    nexo(plugin_dir, command)
    done = runner_as("exec", plugin_dir, cwd="/")
    assert (done.returncode, done.stdout) == (0, f"ran\n{plugin_dir}\n"), done.stderr


def test_a_command_that_is_a_link(runner_as: Caller, plugin_dir: Path) -> None:
    """In the plugin's folder, and as an operator's own shortcut below /tmp."""
    (plugin_dir / "plugin").mkdir()
    (plugin_dir / "plugin/python").symlink_to("/usr/bin/python3")
    (plugin_dir / "python").symlink_to("/usr/bin/python3")
    nexo(plugin_dir / "plugin", "./python", "-c", "print(1)")
    done = runner_as("exec", plugin_dir / "plugin")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    config = mcp(plugin_dir / "config", one={"command": f"{plugin_dir}/python", "args": ["-c", "print(2)"]})
    done = runner_as("exec", config)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_a_manifest_given_by_a_relative_path(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir / "plugin", "pwd")
    for word, cwd in (
        ("plugin", plugin_dir),
        (".", plugin_dir / "plugin"),
        ("nexo-plugin.toml", plugin_dir / "plugin"),
    ):
        assert runner_as("exec", word, cwd=cwd).stdout == f"{plugin_dir}/plugin\n"


# --- Contracts ---------------------------------------------------------------------------------------------


@one_case("name", ["nexo-plugin.toml", "plugin.toml"])
def test_nexo(runner_as: Caller, plugin_dir: Path, name: str) -> None:
    nexo(
        plugin_dir, "sh", "-c", "echo $GREETING", tables='[plugin.entrypoint.env]\nGREETING = "hello"\n'
    ).rename(plugin_dir / name)
    assert runner_as("exec", plugin_dir).stdout == "hello\n"


def test_rune_has_exactly_the_environment_it_lists(runner_as: Caller, plugin_dir: Path) -> None:
    (plugin_dir / "work").mkdir()
    rune(plugin_dir, command="/usr/bin/env", dir="work", env=["A=1", "B=x=y"])
    done = runner_as("exec", plugin_dir)
    variables = set(done.stdout.splitlines()) - {f"PWD={plugin_dir}/work"}  # bubblewrap's own
    assert variables == {"A=1", "B=x=y"}, done.stderr


def test_rune_command_hangs_on_the_bundle(runner_as: Caller, plugin_dir: Path) -> None:
    script(plugin_dir / "bin/run", "#!/bin/sh\npwd\n")
    (plugin_dir / "work").mkdir()
    rune(plugin_dir, command="bin/run", dir="work")
    done = runner_as("exec", plugin_dir)
    assert (done.returncode, done.stdout) == (0, f"{plugin_dir}/work\n"), done.stderr


@one_case("name", ["mcp.json", ".mcp.json", "claude_desktop_config.json"])
def test_mcp(runner_as: Caller, plugin_dir: Path, name: str) -> None:
    mcp(plugin_dir, name=name, only={"command": "sh", "args": ["-c", "echo $TOKEN"], "env": {"TOKEN": "t"}})
    done = runner_as("exec", plugin_dir)
    assert (done.returncode, done.stdout) == (0, "t\n"), done.stderr


def test_mcp_with_several_servers(runner_as: Caller, plugin_dir: Path) -> None:
    mcp(plugin_dir, one={"command": "echo", "args": ["1"]}, two={"command": "echo", "args": ["2"]})
    assert runner_as("exec", "--server", "two", plugin_dir).stdout == "2\n"
    unclear = runner_as("exec", plugin_dir)
    assert unclear.returncode == REFUSED
    assert "--server" in unclear.stderr and "one" in unclear.stderr
    wrong = runner_as("exec", "--server", "tow", plugin_dir)
    assert wrong.returncode == REFUSED
    assert "two" in wrong.stderr


def test_mcp_gets_what_its_x_sandbox_asks(runner_as: Caller, plugin_dir: Path) -> None:
    _written(plugin_dir / "data/file", "content")
    asks = {
        "read": [str(plugin_dir / "data"), {"path": "/nonexistent/x", "optional": True}],
        "env": ["COLOR"],
    }
    server = {"command": "sh", "args": ["-c", f"cat {plugin_dir}/data/file; echo $COLOR"]}
    config = mcp(plugin_dir / "config", plain=server, granted={**server, "x-sandbox": asks})
    plain = runner_as("exec", "--policy", "dev", "--server", "plain", config, env={"COLOR": "red"})
    assert "content" not in plain.stdout and "red" not in plain.stdout
    granted = runner_as("exec", "--policy", "dev", "--server", "granted", config, env={"COLOR": "red"})
    assert (granted.returncode, granted.stdout) == (0, "contentred\n"), granted.stderr


def test_mcp_servers_do_not_see_the_configuration(runner_as: Caller, plugin_dir: Path) -> None:
    """It has the other servers' keys."""
    server = {"command": "cat", "args": ["mcp.json"], "x-sandbox": {"read": [str(plugin_dir)]}}
    mcp(plugin_dir, nosy=server, other={"command": "x", "env": {"KEY": "canary"}})
    done = runner_as("exec", "--policy", "dev", "--server", "nosy", plugin_dir)
    assert done.returncode == 1
    assert "canary" not in done.stdout


def test_a_contract_can_be_named(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir, "echo", "hi").rename(plugin_dir / "odd.name")
    assert runner_as("exec", "--contract", "nexo", plugin_dir / "odd.name").stdout == "hi\n"


# --- Streams -----------------------------------------------------------------------------------------------


def test_bytes_pass_unchanged_in_both_directions(runner_as: Caller, plugin_dir: Path) -> None:
    """More than any pipe holds, of every value, while both directions are in use."""
    data = random.Random(1).randbytes(8 << 20)
    nexo(plugin_dir, "cat")
    with runner_as.start("exec", plugin_dir) as process:
        out, err = process.communicate(data, timeout=60)
    assert process.returncode == 0
    assert out == data
    assert err == b""


def test_streams_are_the_callers_own(runner_as: Caller, plugin_dir: Path) -> None:
    """Not copies: the plugin's stdout is the very file the caller gave."""
    nexo(plugin_dir, "stat", "-Lc", "%i", "/proc/self/fd/1")
    with open(plugin_dir / "out", "w+b") as file:
        with runner_as.start("exec", plugin_dir, stdout=file) as process:
            process.communicate(timeout=60)
        file.seek(0)
        assert int(file.read()) == os.fstat(file.fileno()).st_ino


def test_no_word_of_ours_is_mixed_in(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir, "sh", "-c", "printf out; printf err >&2")
    done = runner_as("exec", plugin_dir)
    assert (done.stdout, done.stderr) == ("out", "err")


def test_a_closed_reader_ends_a_writer(runner_as: Caller, plugin_dir: Path) -> None:
    """SIGPIPE, which Python programs ignore and hand on, has its default effect."""
    nexo(plugin_dir, "yes")
    with runner_as.start("exec", plugin_dir) as process:
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE


# --- Endings -----------------------------------------------------------------------------------------------


@one_case("code", [0, 1, 7, 123, 255])
def test_the_exit_code_is_the_plugins(runner_as: Caller, plugin_dir: Path, code: int) -> None:
    nexo(plugin_dir, "sh", "-c", f"exit {code}")
    assert runner_as("exec", plugin_dir).returncode == code


@one_case("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_death_by_signal_is_128_and_its_number(
    runner_as: Caller, plugin_dir: Path, number: signal.Signals
) -> None:
    nexo(plugin_dir, "sh", "-c", f"kill -{int(number)} $$")
    report = runner_as.home / "report.json"
    done = runner_as("exec", "--report", report, plugin_dir)
    assert done.returncode == 128 + number
    outcome = json.loads(report.read_text())["outcome"]
    assert (outcome["code"], outcome["cause"]) == ("crashed", f"signal:{int(number)}")


def test_a_deadline(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir, "sleep", "1000")
    done = runner_as("exec", "--deadline", "0.5s", plugin_dir)
    assert done.returncode == DEADLINE
    assert "deadline" in done.stderr


def test_a_cage_that_cannot_be_built(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir, "true")
    assert runner_as("exec", plugin_dir).returncode == 0
    done = runner_as("exec", plugin_dir, env={"RUNNER_BWRAP": "/nonexistent/bwrap"})
    assert done.returncode == NO_CAGE
    assert "/nonexistent" in done.stderr


def test_refusals_of_policy_and_manifest_have_their_status(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir, "true", tables='[plugin.sandbox]\nenabled = true\nnetwork = "host"\n')
    assert runner_as("exec", plugin_dir).returncode == REFUSED
    _written(plugin_dir / "nexo-plugin.toml", "[plugin\n")
    assert runner_as("exec", plugin_dir).returncode == REFUSED


@one_case("command", ["no-such-program", "./missing", "/nonexistent/program"])
def test_a_command_that_does_not_exist(runner_as: Caller, plugin_dir: Path, command: str) -> None:
    nexo(plugin_dir, command)
    done = runner_as("exec", plugin_dir)
    assert done.returncode == NOT_FOUND
    assert os.path.basename(command) in done.stderr
    assert len(done.stderr.splitlines()) == 2  # what, and what to do


@one_case("kind", ["not executable", "a directory", "not a program", "no interpreter"])
def test_a_command_that_cannot_run(runner_as: Caller, plugin_dir: Path, kind: str) -> None:
    if kind == "not executable":
        _written(plugin_dir / "run", "#!/bin/sh\n")
    elif kind == "a directory":
        (plugin_dir / "run").mkdir()
    elif kind == "not a program":
        script(plugin_dir / "run", "neither\n")
    else:
        script(plugin_dir / "run", "#!/nonexistent/interpreter\n")
    nexo(plugin_dir, "./run")
    done = runner_as("exec", plugin_dir)
    assert done.returncode == (NOT_FOUND if kind == "no interpreter" else REFUSED)
    assert "run" in done.stderr and "Traceback" not in done.stderr


# --- Arguments and environment -----------------------------------------------------------------------------


def test_arguments_after_the_dashes(runner_as: Caller, plugin_dir: Path) -> None:
    words = ["--policy", "x", "-h", "--", "", " ", "a b", "'\"$HOME", "é", "\n", "--deadline=1"]
    script(plugin_dir / "show", "#!/usr/bin/python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    nexo(plugin_dir, "./show", "first")
    assert json.loads(runner_as("exec", plugin_dir, "--", *words).stdout) == ["first", *words]


def test_many_arguments_and_a_large_environment(runner_as: Caller, plugin_dir: Path) -> None:
    """As much as fits into one execve for each of the two programs on the way."""
    script(plugin_dir / "count", '#!/bin/sh\necho $# "${#BIG}" "${#V499}"\n')
    variables = "".join(f'V{number} = "{"v" * 100}"\n' for number in range(500))
    nexo(plugin_dir, "./count", tables=f'[plugin.entrypoint.env]\nBIG = "{"x" * 100_000}"\n{variables}')
    done = runner_as("exec", plugin_dir, "--", *(["argument"] * 5000))
    assert (done.returncode, done.stdout) == (0, "5000 100000 100\n"), done.stderr


def test_env_option(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir, "sh", "-c", 'echo "$A $B"')
    done = runner_as("exec", "--env", "A=1=2", "--env", "B", plugin_dir, env={"B": "host's"})
    assert (done.returncode, done.stdout) == (0, "1=2 host's\n"), done.stderr


def test_variables_programs_expect(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir, "sh", "-c", "cd ~ && touch x && mktemp >/dev/null && command -v ls && id -un")
    done = runner_as("exec", plugin_dir)
    assert (done.returncode, done.stdout.split()[-1]) == (0, "nobody"), done.stderr


# --- State -------------------------------------------------------------------------------------------------

COUNT = 'echo x >>"$RUNNER_STATE_DIR/runs"; wc -l <"$RUNNER_STATE_DIR/runs"; stat -c %a "$RUNNER_STATE_DIR"'


def states(caller: Caller, folder: Path) -> set[Path]:
    """Of the plugins in a folder: root's states are all in one place, with those of other tests."""
    said = json.loads(caller("state", "list", "--json").stdout)["states"]
    return {Path(each["path"]) for each in said if (each["manifest"] or "").startswith(f"{folder}/")}


@pytest.fixture
def state_root(runner_as: Caller, plugin_dir: Path) -> Iterator[Path]:
    """Where the state directories of this caller's plugins are; those of the test are removed."""
    root = Path("/var/lib/runner/plugins")
    if runner_as.uid != 0:
        root = Path(runner_as.environ["XDG_STATE_HOME"]) / "runner/plugins"
    yield root
    for path in states(runner_as, plugin_dir):
        assert runner_as("state", "remove", path).returncode == 0


def test_state_persists_and_is_the_plugins_alone(
    runner_as: Caller, plugin_dir: Path, state_root: Path
) -> None:
    for name in ("one", "two"):
        nexo(plugin_dir / name, "sh", "-c", COUNT, tables=STATE)
    for expected in ("1", "2", "3"):
        assert runner_as("exec", plugin_dir / "one").stdout.split() == [expected, "700"]
    # Another plugin that claims the same id has a state of its own.
    assert runner_as("exec", plugin_dir / "two").stdout.split() == ["1", "700"]
    made = states(runner_as, plugin_dir)
    assert len(made) == 2 and {path.parent for path in made} == {state_root}
    for path in made:
        held = path.stat()
        assert stat.S_IMODE(held.st_mode) == 0o700
        assert held.st_uid == runner_as.uid or (
            runner_as.uid == 0 and held.st_uid in range(2147418112, 1 << 31)
        )
    assert len({path.stat().st_uid for path in made}) == (2 if runner_as.uid == 0 else 1)


def test_one_plugins_state_is_invisible_to_another(
    runner_as: Caller, plugin_dir: Path, state_root: Path
) -> None:
    nexo(plugin_dir / "one", "sh", "-c", 'echo "$RUNNER_STATE_DIR"', tables=STATE)
    where = runner_as("exec", plugin_dir / "one").stdout.strip()
    assert where.startswith(str(state_root))
    nexo(plugin_dir / "two", "sh", "-c", f'ls "$RUNNER_STATE_DIR/.." ; ls -d {where}', tables=STATE)
    done = runner_as("exec", plugin_dir / "two")
    assert done.returncode != 0
    assert os.path.basename(where) not in done.stdout
    # Nor can it be asked for by name.
    nexo(
        plugin_dir / "three",
        "ls",
        where,
        tables=f"[plugin.sandbox]\nenabled = true\nfs_read_paths = [{json.dumps(where)}]\n",
    )
    asked = runner_as("exec", "--policy", "dev", plugin_dir / "three")
    assert asked.returncode == REFUSED


def test_a_chosen_state_directory(runner_as: Caller, plugin_dir: Path) -> None:
    nexo(plugin_dir / "plugin", "sh", "-c", COUNT, tables=STATE)
    state = plugin_dir / "state"
    if runner_as.uid != 0:
        runner_as.give(plugin_dir)
    owners = set()
    for expected in ("1", "2"):
        done = runner_as("exec", "--state-dir", state, plugin_dir / "plugin")
        assert done.stdout.split() == [expected, "700"], done.stderr
        owners.add(state.stat().st_uid)
    assert len(owners) == 1  # it keeps its owner over runs


def test_a_plugin_that_asks_for_no_state_has_none(
    runner_as: Caller, plugin_dir: Path, state_root: Path
) -> None:
    manifest = plugin_dir / "plugin"
    nexo(manifest, "sh", "-c", 'echo "<$RUNNER_STATE_DIR>"')
    assert runner_as("exec", manifest).stdout == "<>\n"
    assert states(runner_as, plugin_dir) == set()
    nexo(manifest, "true", tables=STATE)  # the control
    assert runner_as("exec", manifest).returncode == 0
    assert len(states(runner_as, plugin_dir)) == 1


# --- Named before launch -----------------------------------------------------------------------------------


def test_missing_paths(runner_as: Caller, plugin_dir: Path) -> None:
    """What a nexo manifest would like to read may be missing; what it must write may not."""
    optional = '[plugin.sandbox]\nenabled = true\nfs_read_paths = ["/opt/no/such/chrome"]\n'
    nexo(plugin_dir, "echo", "fine", tables=optional)
    report = runner_as.home / "report.json"
    done = runner_as("exec", "--policy", "dev", "--report", report, plugin_dir)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    paths = {row["path"]: row["state"] for row in json.loads(report.read_text())["grant"]["paths"]}
    assert paths["/opt/no/such/chrome"] == "missing"

    nexo(
        plugin_dir,
        "true",
        tables='[plugin.sandbox]\nenabled = true\nfs_write_paths = ["/tmp/no/such/folder"]\n',
    )
    done = runner_as("exec", "--policy", "dev", plugin_dir)
    assert done.returncode == REFUSED
    assert "/tmp/no/such/folder" in done.stderr and "does not exist" in done.stderr
    assert f"{plugin_dir}/nexo-plugin.toml:" in done.stderr


def test_missing_paths_of_an_mcp_server(runner_as: Caller, plugin_dir: Path) -> None:
    def server(path: object) -> dict[str, Any]:
        return {"command": "echo", "args": ["fine"], "x-sandbox": {"read": [path]}}

    config = mcp(
        plugin_dir,
        must=server("/opt/no/such/data"),
        may=server({"path": "/opt/no/such/data", "optional": True}),
    )
    done = runner_as("exec", "--policy", "dev", "--server", "may", config)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    done = runner_as("exec", "--policy", "dev", "--server", "must", config)
    assert done.returncode == REFUSED
    assert "/opt/no/such/data" in done.stderr


@pytest.mark.needs("root")
@one_case("closed", [".", "inner", "inner/plugin", "inner/plugin/run"])
def test_what_the_dropped_uid_cannot_read_is_named(
    runner_as_root: Caller, plugin_dir: Path, closed: str
) -> None:
    """The folder itself, one above it, and the program: each with the command that opens it."""
    folder = plugin_dir / "inner/plugin"
    nexo(folder, "./run")
    script(folder / "run", "#!/bin/sh\necho ran\n")
    (plugin_dir / "inner").chmod(0o755)
    assert runner_as_root("exec", folder).stdout == "ran\n"
    target = plugin_dir / closed
    target.chmod(0o700)
    done = runner_as_root("exec", folder)
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert str(target).rstrip("/.") in done.stderr
    assert "chmod" in done.stderr


def test_an_interpreter_below_a_denied_path_is_named(runner_as: Caller, plugin_dir: Path) -> None:
    """A Python in somebody's home is common, and ~/.ssh is as denied as /root."""
    hidden = runner_as.home / ".ssh/bin"
    hidden.mkdir(parents=True)
    runner_as.home.chmod(0o755)
    shutil.copy("/bin/sh", hidden / "interpreter")
    runner_as.give(runner_as.home)
    script(plugin_dir / "run", f"#!{hidden}/interpreter\n")
    nexo(plugin_dir, "./run")
    done = runner_as("exec", "--policy", "dev", plugin_dir)
    assert done.returncode == REFUSED
    assert str(hidden) in done.stderr
    assert "/usr" in done.stderr  # where one can be used from


def test_a_command_on_a_denied_part_of_path_is_passed_over(runner_as: Caller, plugin_dir: Path) -> None:
    hidden = runner_as.home / ".ssh/bin"
    hidden.mkdir(parents=True)
    runner_as.home.chmod(0o755)
    script(hidden / "echo", "#!/bin/sh\necho hidden\n")
    runner_as.give(runner_as.home)
    nexo(plugin_dir, "echo", "system's")
    done = runner_as("exec", plugin_dir, env={"PATH": f"{hidden}:{SYSTEM_PATH}"})
    assert (done.returncode, done.stdout) == (0, "system's\n"), done.stderr


def test_a_second_launch_reads_the_manifest_from_its_cache(runner_as: Caller, plugin_dir: Path) -> None:
    """And a changed manifest is a new one."""
    nexo(plugin_dir, "echo", "one")
    assert [runner_as("exec", plugin_dir).stdout for _ in range(2)] == ["one\n"] * 2
    nexo(plugin_dir, "echo", "two")
    assert runner_as("exec", plugin_dir).stdout == "two\n"
