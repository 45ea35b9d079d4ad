"""The command `runner`: scripts/entry/runner and runner-start, in virtual environments and elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import runner
from tests.conftest import ROOT, SYSTEM_PATH, Caller
from tests.manifests import nexo
from tests.tables import one_case
from tests.test_layers import _loaded, _slow

pytestmark = pytest.mark.fresh

PATH_FILE = f"__editable__.plugin_runner-{runner.__version__}.pth"
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
# Stands for runner/cli/: says what the entry made of this process.
PROBE = """
import sys
def console_entry():
    entry()
def entry():
    known = sorted(sys.modules)
    import json, os
    if sys.argv[1:2] == ["wait"]:
        print(sys.stdin.readline(), end="", flush=True)
        sys.stdin.read()
    if sys.argv[1:2] == ["import"]:
        __import__(sys.argv[2])
    print(json.dumps({"argv": sys.argv, "path": sys.path, "prefix": [sys.prefix, sys.exec_prefix],
        "executable": sys.executable, "modules": known, "late": sorted(sys.modules), "pid": os.getpid(),
        "file": __file__}), flush=True)
    os._exit(len(sys.argv[1:]))
"""


class Install(NamedTuple):
    """What pip makes of an editable install of the checkout `code`."""

    prefix: Path
    code: Path

    @property
    def command(self) -> Path:
        return self.prefix / "bin/runner"

    @property
    def packages(self) -> Path:
        return self.prefix / "lib" / VERSION / "site-packages"


def install(prefix: Path, code: Path, python: str = sys.executable, *, venv: bool = True) -> Install:
    python = os.path.realpath(python)
    made = Install(prefix, code)
    made.packages.mkdir(parents=True)
    (prefix / "bin").mkdir()
    for name in ("runner", "runner-start"):
        shutil.copy(ROOT / "scripts/entry" / name, prefix / "bin")
        (prefix / "bin" / name).chmod(0o755)
    console = prefix / "bin/runner-console"  # as pip writes it
    console.write_text(f"#!{python}\nimport sys\nfrom runner.cli import console_entry\nconsole_entry()\n")
    console.chmod(0o755)
    if venv:
        (prefix / "bin/python").symlink_to(python)
        (prefix / "pyvenv.cfg").write_text(
            f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n"
        )
        (made.packages / PATH_FILE).write_bytes(os.fsencode(code) + b"\n")
    return made


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """A checkout whose command line is PROBE."""
    (tmp_path / "checkout/runner/cli").mkdir(parents=True)
    (tmp_path / "checkout/runner/__init__.py").touch()
    for name in ("__init__.py", "speed/__init__.py", "speed/bundle.py", "speed/late_site.py"):
        copy = tmp_path / "checkout/sandbox" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "sandbox" / name, copy)
    (tmp_path / "checkout/runner/cli/__init__.py").write_text(PROBE)
    return tmp_path / "checkout"


@pytest.fixture
def installed(tmp_path: Path, probe: Path) -> Install:
    return install(tmp_path / "venv", probe)


def run(
    *argv: str | Path, env: Mapping[str, str] | None = None, cwd: str | Path = "/"
) -> subprocess.CompletedProcess[str]:
    env = {"PATH": SYSTEM_PATH, **(env or {})}
    return subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)


def said(*argv: str | Path, env: Mapping[str, str] | None = None, cwd: str | Path = "/") -> dict[str, Any]:
    done = run(*argv, env=env, cwd=cwd)
    assert (done.returncode, done.stderr) == (len(argv) - 1, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def baseline(python: Path) -> list[str]:
    """What the interpreter itself has loaded before it runs a file. For -c it may load more."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write("import sys; print(*sorted(sys.modules))")
        file.flush()
        return run(python, "-I", "-S", file.name).stdout.split()


# --- What a start loads -------------------------------------------------------------------------------------


def test_nothing_is_loaded_before_our_first_module(installed: Install) -> None:
    found = said(installed.command)
    ours = ["runner", "runner.cli", "sandbox", "sandbox.speed", "sandbox.speed.bundle"]
    ours.append("sandbox.speed.late_site")
    assert found["modules"] == sorted([*baseline(installed.prefix / "bin/python"), *ours])
    assert not {"site", "re", "os", "sysconfig", "__future__"} & set(found["modules"])


def test_launching_a_known_manifest_loads_no_site(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """The same as test_layers.py pins for `python -m runner`, by the command that people use."""
    made = environment(plugin_dir / "venv", runner_as)
    # In place of the interpreter: the same one, which also says what it imports.
    (made.prefix / "bin/python").rename(made.prefix / "bin/real")
    script = f'#!/bin/sh\nexec {made.prefix}/bin/real ${{TELL:+-X importtime}} "$@"\n'
    write_file(made.prefix / "bin/python", script, 0o755)
    manifest = write_file(plugin_dir / "nexo-plugin.toml", QUICK)

    def launch(**env: str) -> subprocess.CompletedProcess[str]:
        argv = [*runner_as.prefix, str(made.command), "exec", str(manifest)]
        return run(*argv, env={**runner_as.environ, **env})

    first = launch()  # reads, validates and remembers: by pydantic, which a .pth file leads to
    assert (first.returncode, first.stderr) == (0, "")
    second = launch(TELL="1")
    assert second.returncode == 0, second.stderr
    loaded = _loaded(second.stderr)
    assert {"runner", "runner.cli", "runner.launch.run"} <= loaded  # or nothing was measured
    assert _slow(loaded) == set()
    assert not loaded & {"site", "sysconfig", "sitecustomize", "_distutils_hack", "functools"}
    lines = [line.rpartition("|")[2].strip() for line in second.stderr.splitlines() if "|" in line]
    known = {"imported package", *baseline(made.prefix / "bin/real")}
    assert set(lines[: lines.index("sandbox")]) <= known


QUICK = nexo("quick", "/bin/true")


def environment(prefix: Path, caller: Caller) -> Install:
    """This checkout, and a .pth file that leads to the dependencies."""
    code, *more = caller.environ["PYTHONPATH"].split(":")
    made = install(prefix, Path(code), caller.python[0])
    places = more or [sysconfig.get_path("purelib")]
    (made.packages / "dependencies.pth").write_text("\n".join(places) + "\n")
    return made


# --- How it finds itself ------------------------------------------------------------------------------------

ODD_NAMES = (
    "plain",
    "a b",
    "-d",
    'it\'s "odd" $HOME `x` * \\',
    "line\nfeed\n",
    "ünï",
    b"\xff".decode(errors="surrogateescape"),
)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_it_works_below_any_name(tmp_path: Path, probe: Path, name: str, shell: str) -> None:
    home = tmp_path / name
    code = shutil.copytree(probe, home / f"code {name}")
    made = Install(home / "venv", code)
    install(made.prefix, code)
    links = home / "links"
    links.mkdir()
    (links / "absolute").symlink_to(made.command)
    (links / "relative").symlink_to("../venv/bin/runner")
    (links / f"second {name}").symlink_to("relative")
    (links / f"third {name}").symlink_to(links / f"second {name}")
    (home / "folder").symlink_to("venv")
    (home / "programs").mkdir()
    (home / "programs/bin").symlink_to("../venv/bin")
    sh = shutil.which(shell, path=SYSTEM_PATH)
    assert sh is not None  # bash: scripts/setup is written in it; dash: essential on Debian
    ways = [made.command, *links.iterdir(), home / "folder/bin/runner", home / "programs/bin/runner"]
    assert len(ways) == 7
    for way in ways:
        for typed, cwd in (
            (way, Path("/")),
            (Path(way.name), way.parent),
            (way.relative_to(tmp_path), tmp_path),
        ):
            done = run(sh, "--", typed, "one", cwd=cwd)
            assert (done.returncode, done.stderr) == (1, ""), (typed, cwd)
            found = json.loads(done.stdout)
            assert found["argv"] == [str(typed), "one"]
            assert found["file"] == str(code / "runner/cli/__init__.py")
            assert os.path.samefile(found["prefix"][0], made.prefix)
            assert "/../" not in found["executable"] + found["prefix"][0]
            assert found["executable"] == found["prefix"][0] + "/bin/python"


def test_the_environment_is_that_of_python(installed: Install) -> None:
    """As with `site`, except that our checkout comes before other packages."""
    code = "import json, sys; print(json.dumps([sys.path, [sys.prefix, sys.exec_prefix], sys.executable]))"
    path, prefix, executable = json.loads(run(installed.prefix / "bin/python", "-I", "-c", code).stdout)
    found = said(installed.command)
    assert (found["prefix"], found["executable"]) == (prefix, executable)
    assert sorted(found["path"]) == sorted(path)
    assert found["path"][-2:] == [str(installed.code), str(installed.packages)]


def test_an_installed_copy_is_preferred_and_replaces_no_standard_module(installed: Install) -> None:
    for name in ("runner", "sandbox"):
        shutil.copytree(installed.code / name, installed.packages / name)
    for name in ("os", "json", "posix"):
        (installed.packages / f"{name}.py").write_text("raise SystemExit('planted')\n")
    found = said(installed.command)
    assert found["file"] == str(installed.packages / "runner/cli/__init__.py")
    assert str(installed.code) not in found["path"]


def test_a_link_within_an_environment_is_not_followed(installed: Install, tmp_path: Path) -> None:
    """An installer may link files from its cache."""
    shutil.move(installed.command, tmp_path / "cached")
    installed.command.symlink_to(tmp_path / "cached")
    (tmp_path / "link").symlink_to(installed.command)
    assert said(tmp_path / "link")["prefix"][0] == str(installed.prefix)


def test_a_layout_that_is_not_known_is_left_to_site(installed: Install, probe: Path) -> None:
    path = installed.packages / PATH_FILE
    path.rename(installed.packages / "other.pth")
    found = said(installed.command)
    assert found["file"] == str(probe / "runner/cli/__init__.py")
    assert "site" in found["modules"]


@pytest.mark.parametrize("content", [b"", b"import __editable___plugin_runner\n", b"code\n"])
def test_a_file_that_holds_no_path_does_not_lead_to_the_working_directory(
    installed: Install, tmp_path: Path, content: bytes
) -> None:
    (installed.packages / PATH_FILE).write_bytes(content)
    folder = tmp_path / "cwd"
    for package in ("runner", "sandbox", "sandbox/speed"):
        place = folder / content.decode().strip() / package
        place.mkdir(parents=True)
        for name in ("__init__", "late_site"):
            (place / f"{name}.py").write_text("print('hostile')")
    done = subprocess.run([installed.command, "--version"], cwd=folder, capture_output=True, text=True)
    assert "hostile" not in done.stdout


def test_a_link_in_another_environment_is_followed(installed: Install, tmp_path: Path) -> None:
    other = tmp_path / "other/bin"
    other.mkdir(parents=True)
    (tmp_path / "other/pyvenv.cfg").write_text("")
    (other / "runner").symlink_to(installed.command)
    assert said(other / "runner")["prefix"][0] == str(installed.prefix)


def test_elsewhere_it_is_a_console_script(tmp_path: Path, probe: Path) -> None:
    made = install(tmp_path / "usr", probe, venv=False)
    (tmp_path / "link").symlink_to("usr/bin/runner")
    for way in (made.command, tmp_path / "link"):
        found = said(way, "one", env={"PYTHONPATH": str(probe)})
        assert os.path.samefile(found["argv"][0], made.prefix / "bin/runner-console")
        assert "site" in found["modules"]


def test_a_console_script_goes_by_the_name_of_the_command() -> None:
    code = """
import sys
from runner import cli
cli.main = lambda: print(sys.argv[0])
sys.argv[0] = "/usr/bin/runner-console"
cli.console_entry()
"""
    assert run(sys.executable, "-c", code, cwd=ROOT).stdout == "/usr/bin/runner\n"


def test_an_environment_without_its_python_says_so(installed: Install) -> None:
    (installed.prefix / "bin/python").unlink()
    (installed.prefix / "bin/python").symlink_to("/nonexistent/python")
    done = run(installed.command, "--version")
    assert (done.returncode, done.stdout) == (125, "")
    assert f"there is no Python at {installed.prefix}/bin/python" in done.stderr


def test_it_is_one_process(installed: Install) -> None:
    """Its pid, signals, streams and status are the runner's own."""
    pipe = subprocess.PIPE
    argv = [str(installed.command), "wait"]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        out, _ = process.communicate("a line\n", timeout=60)
    first, second = out.splitlines()
    assert (first, json.loads(second)["pid"], process.returncode) == ("a line", process.pid, 1)
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("ready\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


# --- What surrounds it --------------------------------------------------------------------------------------


def test_no_variable_and_no_folder_changes_what_is_imported(installed: Install, tmp_path: Path) -> None:
    hostile, marks = tmp_path / "hostile", tmp_path / "marks"
    (hostile / "bin").mkdir(parents=True)
    marks.mkdir()
    for name in ("os", "posix", "json", "encodings", "site", "sitecustomize", "usercustomize", "runner"):
        (hostile / f"{name}.py").write_text(f"open({str(marks / name)!r}, 'w')\nraise SystemExit(9)\n")
    for name in ("python", "python3", "readlink", "env", "sh", "dirname", "[", "echo"):
        program = hostile / "bin" / name
        program.write_text(f"#!/bin/sh\n: > '{marks}/{name}'\nexit 9\n")
        program.chmod(0o755)
    (hostile / "rc").write_text(f": > '{marks}/rc'\nexit 9\n")
    link = tmp_path / "link"
    link.symlink_to(installed.command)
    surroundings = {
        "PATH": str(hostile / "bin"),
        "PYTHONPATH": str(hostile),
        "PYTHONSTARTUP": str(hostile / "os.py"),
        "PYTHONHOME": str(hostile),
        "PYTHONPLATLIBDIR": "hostile",
        "PYTHONUSERBASE": str(hostile),
        "PYTHONINSPECT": "1",
        "ENV": str(hostile / "rc"),
        "BASH_ENV": str(hostile / "rc"),
        "CDPATH": str(hostile),
        "IFS": "/",
    }
    plain = said(installed.command)
    for way in (installed.command, link):
        found = said(way, "one", env=surroundings, cwd=hostile)
        assert (found["path"], found["modules"]) == (plain["path"], plain["modules"])
    assert os.listdir(marks) == []
    # The control: each of them has its effect without the options and the care of the entry.
    python = installed.prefix / "bin/python"
    (hostile / "encodings.py").unlink()  # that one stops the interpreter
    run(python, "-c", "import runner", env={"PYTHONPATH": str(hostile)})
    run("/bin/sh", "-c", "readlink x; python", env={"PATH": surroundings["PATH"]})
    run("/bin/bash", "-c", ":", env={"BASH_ENV": surroundings["BASH_ENV"]})
    assert run(python, "-c", "", env={"PYTHONHOME": str(hostile)}).returncode != 0
    assert {"readlink", "python", "rc", "sitecustomize"} <= set(os.listdir(marks))


def test_functions_that_bash_exported_are_not_called(installed: Install, tmp_path: Path) -> None:
    """Where /bin/sh is bash, it takes functions from its environment."""
    sh = tmp_path / "sh"
    sh.symlink_to("/bin/bash")
    link = tmp_path / "link"
    link.symlink_to(installed.command)
    names = ("[", "command", "echo", "readlink", "exec")
    env = {f"BASH_FUNC_{name}%%": "() { exit 9; }" for name in names}
    for way in (installed.command, link):
        assert run(sh, way, "one", env=env).returncode == 1
    careless = installed.prefix / "bin/careless"
    lines = installed.command.read_text().splitlines(keepends=True)
    careless.write_text("".join(line for line in lines if not line.startswith("unset ")))
    assert run(sh, careless, "one", env=env).returncode == 9  # the control


def test_the_script_uses_no_word_of_bash_alone() -> None:
    for shell in ("dash", "bash"):
        sh = shutil.which(shell, path=SYSTEM_PATH)
        assert sh is not None
        assert run(sh, "-n", ROOT / "scripts/entry/runner").stderr == ""
    assert (ROOT / "scripts/entry/runner").read_text().startswith("#!/bin/sh\n")


# --- Python's `site`, late ----------------------------------------------------------------------------------


def test_site_runs_when_a_module_is_nowhere_else(installed: Install, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more/elsewhere.py").touch()
    (installed.packages / "here.py").touch()
    (installed.packages / "more.pth").write_text(f"{tmp_path}/more\nimport is_not_there_either\n")
    near = said(installed.command, "import", "here")
    assert "site" not in near["late"]
    far = run(installed.command, "import", "elsewhere")
    assert far.returncode == 2 and "site" in json.loads(far.stdout)["late"]
    assert json.loads(far.stdout)["path"][-1] == f"{tmp_path}/more"
    missing = run(installed.command, "import", "is_not_there")
    assert "ModuleNotFoundError: No module named 'is_not_there'" in missing.stderr


@pytest.mark.parametrize("name", ["subprocess", "copy", "pickle"])
def test_site_does_not_run_for_modules_of_other_systems(installed: Install, name: str) -> None:
    """Parts of the standard library try to import what exists on Windows or in Jython only."""
    found = said(installed.command, "import", name)
    assert name in found["late"]
    assert "site" not in found["late"]


def test_packages_of_the_system_are_found_where_the_environment_says_so(
    installed: Install, tmp_path: Path
) -> None:
    config = installed.prefix / "pyvenv.cfg"
    config.write_text(config.read_text().replace("false", "true"))
    code = "import sys; sys.stdout.write('\\n'.join(sys.path))"
    wanted = run(installed.prefix / "bin/python", "-I", "-c", code).stdout.splitlines()
    assert set(said(installed.command)["path"]) < set(wanted)  # there are such packages
    (tmp_path / "found.py").touch()
    (installed.packages / "late.pth").write_text(f"{tmp_path}\n")
    found = said(installed.command, "import", "found")
    assert set(found["path"]) == {*wanted, str(tmp_path)}
    assert found["prefix"] == [str(installed.prefix)] * 2


@one_case("asked", ["prefix", "code", "linked", "free"])
def test_a_plugin_may_not_write_where_the_entry_imports_from(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path], asked: str
) -> None:
    """Also not to a folder that only a .pth file names, although nothing was imported from there yet."""
    made = environment(plugin_dir / "venv", runner_as)
    for name in ("linked", "free"):
        (plugin_dir / name).mkdir()
    with (made.packages / "dependencies.pth").open("a") as file:
        file.write(f"{plugin_dir}/linked\n")
    place = {"prefix": made.prefix / "share", "code": made.packages}.get(asked, plugin_dir / asked)
    place.mkdir(exist_ok=True)
    runner_as.give(place)
    place.chmod(0o777)
    sandbox = f'[plugin.sandbox]\nenabled = true\nfs_write_paths = ["{place}"]\n'
    manifest = write_file(plugin_dir / "plugin/nexo-plugin.toml", QUICK + sandbox)
    argv = [*runner_as.prefix, str(made.command), "exec", "--policy", "dev", str(manifest)]
    for _ in range(2):  # read anew, and remembered
        done = run(*argv, env=runner_as.environ)
        assert done.returncode == (0 if asked == "free" else 126), done.stderr
        assert ("policy_denied" in done.stderr) == (asked != "free")


def test_a_fork_server_is_started_as_its_host_was() -> None:
    """Without `site`, and able to run it, if the host is."""
    host = """
import sys
late, *sys.path[len(sys.path):] = sys.argv[1:]
from sandbox.speed.late_site import LateSite
if late:
    sys.meta_path.append(LateSite())
from runner.launch.remote import forkserver
sys.addaudithook(lambda event, args: event == "subprocess.Popen" and print("-S" in args[1]))
forkserver.start_by_exec()
"""
    server = """
import sys
sys.path += sys.argv[1:]
from runner.launch.remote import forkserver
from sandbox.speed.late_site import is_site_waiting
forkserver.serve = lambda orders, *how: print(is_site_waiting(), flush=True)
forkserver.main(0)
"""
    places = (ROOT, sysconfig.get_path("purelib"))
    for late in ("late", ""):
        done = run(sys.executable, "-I", "-S", "-c", host, late, *places)
        assert (done.stdout, done.stderr) == (f"{bool(late)}\n", "")
    for option in ("-IS", "-I"):
        one, other = socket.socketpair()
        with one, other:
            argv = [sys.executable, option, "-c", server, *map(str, places)]
            done = subprocess.run(argv, stdin=one.fileno(), capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{option == '-IS'}\n"


def test_a_fork_server_finds_what_its_host_finds(runner_as: Caller, plugin_dir: Path) -> None:
    """Here a .pth file leads to trio, so `site` has run in the host when it starts one."""
    made = environment(plugin_dir / "venv", runner_as)
    shutil.copytree(ROOT / "tests/plugins/nexo_bare", plugin_dir / "bare")
    for path in (plugin_dir / "bare", *(plugin_dir / "bare").iterdir()):
        path.chmod(0o755)
    argv = [*runner_as.prefix, str(made.command), "call", str(plugin_dir / "bare"), "bare_echo"]
    done = run(*argv, "--input", '{"text": "hello"}', env=runner_as.environ)
    assert done.returncode == 0, done.stderr
    assert "hello" in done.stdout
