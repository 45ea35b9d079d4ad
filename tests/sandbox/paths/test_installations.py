"""Programs as people's installers leave them run in a cage as they are, by `runner run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sandbox.paths import packages, shims
from sandbox.paths.executable import ProgramFault
from sandbox.paths.mounts import contains
from sandbox.paths.program import Program, ShowRules, resolve
from tests.conftest import SYSTEM_PATH, Caller
from tests.sandbox.paths import installed
from tests.sandbox.paths.installed import NODE, PYTHON, Installed, write

CASES = [pytest.param(build, id=build.__name__) for build in PYTHON] + [
    pytest.param(build, id=build.__name__, marks=pytest.mark.needs("node")) for build in NODE
]


@pytest.mark.parametrize("build", CASES)
def test_an_installed_program_runs_as_it_is(runner_as: Caller, build: Callable[[Path], Installed]) -> None:
    program = build(runner_as.home)
    installed.open_to_all(runner_as.home)
    runner_as.give(runner_as.home)
    done = runner_as(
        "run", "--", program.command, *program.args, env=program.environ, cwd=program.cwd, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, installed.SAYS), done.stderr


def found(
    command: str | Path,
    *args: str,
    trusted: bool = True,
    directory: Path | str = "/",
    environ: Mapping[str, str] | None = None,
    denied: Path | None = None,
) -> Program:
    environ = {"PATH": SYSTEM_PATH, **(environ or {})}
    return resolve(
        str(command),
        args,
        directory=str(directory),
        search_path=environ["PATH"],
        roots=["/usr"],
        rules=ShowRules(
            lambda path: "it is denied" if denied is not None and contains(str(denied), path) else None,
            lambda _: False,
        ),
        trusted=trusted,
        environ=environ,
    )


HIDING = (installed.pip_user, installed.pipx, installed.project_environment)
HIDING_NODE = (installed.npm_local, installed.npm_global, installed.npm_workspace, installed.nvm)


@pytest.mark.parametrize(
    "build", [*HIDING, *(pytest.param(each, marks=pytest.mark.needs("node")) for each in HIDING_NODE)]
)
def test_what_lies_beside_a_program_is_not_shown(tmp_path: Path, build: Callable[[Path], Installed]) -> None:
    program = build(tmp_path)
    environ = {"HOME": str(tmp_path), **program.environ}
    shown = found(program.command, *program.args, directory=program.cwd, environ=environ)
    assert program.hidden
    for path in program.hidden:
        assert os.path.exists(path) and not any(contains(tree, path) for tree in shown.trees)
    # The home is seen in parts only, and a stranger's manifest with the same words does not see these.
    assert not any(contains(tree, str(tmp_path)) for tree in shown.trees)
    if build is installed.nvm:  # a language's own installation, which every plugin may use
        assert found(program.command, trusted=False).trees == shown.trees
    elif "/" in program.command:
        with pytest.raises(ProgramFault, match="cannot be shown"):
            found(program.command, *program.args, trusted=False, directory=program.cwd)


def test_the_packages_of_a_user_are_shown_and_found_by_a_variable(tmp_path: Path) -> None:
    program = found(installed.pip_user(tmp_path).command)
    site = tmp_path / ".local/lib" / installed.VERSION / "site-packages"
    assert set(program.trees) == {str(tmp_path / ".local/bin/tool"), str(site)}
    assert program.env == (("PYTHONUSERBASE", str(tmp_path / ".local")),)
    # Only for a module that is there, and only if python itself is asked to run it.
    home = {"HOME": str(tmp_path)}
    assert found("python3", "-m", "tool", environ=home).trees == (str(site),)
    for words in (("-m", "json.tool"), ("-m", "../tool"), ("-c", "import tool"), ("x", "-m", "tool")):
        assert found("python3", *words, environ=home).trees == ()
    assert found("/usr/bin/env", "python3", "-m", "tool", environ=home).trees == ()
    assert found("python3", "-m", "tool", environ=home, trusted=False).trees == ()
    refused = found("python3", "-m", "tool", environ=home, denied=tmp_path)
    assert refused.trees == () and refused.notes == (f"{site} is not shown: it is denied",)


# --- shims -------------------------------------------------------------------------------------------------


def pyenv_root(tmp_path: Path, *versions: str) -> Path:
    for version in versions:
        write(tmp_path / f"versions/{version}/bin/tool", "#!/bin/sh\n", 0o755)
    write(tmp_path / "elsewhere/bin/tool", "#!/bin/sh\n", 0o755)
    return write(tmp_path / "shims/tool", "#!/usr/bin/env bash\nexec pyenv exec tool\n", 0o755)


@pytest.mark.parametrize(
    ("written", "chosen"),
    [
        ("3.12.1", "3.12.1"),
        ("3.12", "3.12.10"),  # by number, not by letter
        ("3.12.1  # comment", "3.12.1"),
        ("9.9.9\n3.12.1", "3.12.1"),  # the first one that has the program
        ("python-3.12.1", "3.12.1"),
        ("my-env", "my-env"),
        ("system", None),
        ("3", "3.12.10"),
        ("", None),
        # A project's file chooses among what is installed, and nothing else.
        ("../elsewhere", None),
        ("..", None),
        (".", None),
        ("3.12.1/../../elsewhere", None),
        ("/usr", None),
        ("3.12.1\0", None),
        ("*", None),
        ("3.12.1;id", None),
        ("x" * 100_000, None),
        ("\udcff", None),
    ],
)
def test_which_version_pyenv_runs(tmp_path: Path, written: str, chosen: str | None) -> None:
    shim = pyenv_root(tmp_path, "3.12.1", "3.12.9", "3.12.10", "my-env")
    work = tmp_path / "work/deep"
    work.mkdir(parents=True)
    write(tmp_path / "work/.python-version", written.encode("utf-8", "surrogateescape"))
    expected = None if chosen is None else str(tmp_path / f"versions/{chosen}/bin/tool")
    assert shims.target_of(str(shim), "pyenv", str(work), {}) == expected
    if written.isprintable() and written:
        assert shims.target_of(str(shim), "pyenv", "/", {"PYENV_VERSION": written}) in (expected, None)


def test_a_version_file_that_is_no_file(tmp_path: Path) -> None:
    shim = pyenv_root(tmp_path, "3.12.1")
    os.mkfifo(tmp_path / ".python-version")
    write(tmp_path / "version", "3.12.1\n")
    assert shims.target_of(str(shim), "pyenv", str(tmp_path), {}) == f"{tmp_path}/versions/3.12.1/bin/tool"


@pytest.mark.parametrize(
    ("environ", "versions", "chosen"),
    [
        ({}, "nodejs 20.1.0\n", "20.1.0"),
        ({}, "nodejs 9.9.9 22.2.0\n", "22.2.0"),
        ({"ASDF_NODEJS_VERSION": "22.2.0"}, "nodejs 20.1.0\n", "22.2.0"),
        ({}, "python 3.12\n", None),
        ({}, "", None),
        ({}, "nodejs path:/etc\n", None),
        ({}, "nodejs ../../../elsewhere\n", None),
        ({}, "nodejs system\n", None),
        ({}, "nodejs 23.0.0\n", None),  # installed, but the shim does not list it
    ],
)
def test_which_version_asdf_runs(
    tmp_path: Path, environ: dict[str, str], versions: str, chosen: str | None
) -> None:
    for version in ("20.1.0", "22.2.0", "23.0.0"):
        write(tmp_path / f"installs/nodejs/{version}/bin/tool", "#!/bin/sh\n", 0o755)
    lines = "# asdf-plugin: nodejs 20.1.0\n# asdf-plugin: nodejs 22.2.0\n# asdf-plugin: ../.. ../..\n"
    shim = write(tmp_path / "shims/tool", f"#!/usr/bin/env bash\n{lines}exec asdf exec tool\n", 0o755)
    write(tmp_path / "work/.tool-versions", versions)
    expected = None if chosen is None else f"{tmp_path}/installs/nodejs/{chosen}/bin/tool"
    assert shims.target_of(str(shim), "asdf", str(tmp_path / "work"), environ) == expected


def test_mise_has_to_be_asked_where_two_versions_have_the_program(tmp_path: Path) -> None:
    program = installed.mise(tmp_path)
    shim = tmp_path / ".local/share/mise/shims/tool"
    only = found(program.command, environ=program.environ)
    assert only.argv == (f"{tmp_path}/.local/share/mise/installs/node/22.1.0/bin/tool",)
    assert only.notes == (f"{shim} is a shim of mise; it runs {only.argv[0]}",)
    write(tmp_path / ".local/share/mise/installs/node/20.1.0/bin/tool", "#!/bin/sh\n", 0o755)
    with pytest.raises(ProgramFault) as refused:
        found(program.command, environ=program.environ)
    assert refused.value.hint == "name the program by its own path; 'mise which tool' prints it"


def test_a_shim_whose_program_may_not_be_shown(tmp_path: Path) -> None:
    shim = pyenv_root(tmp_path, "3.12.1")
    environ = {"PYENV_VERSION": "3.12.1"}
    assert found(shim, environ=environ).argv == (f"{tmp_path}/versions/3.12.1/bin/tool",)
    with pytest.raises(ProgramFault, match="a shim of pyenv"):
        found(shim, environ=environ, denied=tmp_path / "versions")
    # A stranger's command does not get behind a shim.
    with pytest.raises(ProgramFault, match="a shim of pyenv"):
        found(shim, environ=environ, trusted=False)


# --- what a project's own files may not do -----------------------------------------------------------------


@pytest.mark.needs("node")
def test_links_in_node_modules_do_not_lead_out_of_the_project(tmp_path: Path) -> None:
    project = tmp_path / "project"
    modules = project / "node_modules"
    write(modules / "tool/cli.js", installed.PROGRAM, 0o755)
    (modules / ".bin").mkdir()
    (modules / ".bin/tool").symlink_to("../tool/cli.js")
    write(project / "packages/own/package.json", "{}")
    write(tmp_path / "private/package.json", "{}")
    write(tmp_path / "private/node_modules/x/index.js", "")
    (modules / "own").symlink_to("../packages/own")
    (modules / "@scope").mkdir()
    (modules / "@scope/stolen").symlink_to(tmp_path / "private")
    (modules / "deeper").symlink_to(tmp_path / "private/node_modules/x")
    (modules / "all").symlink_to("..")
    (modules / "above").symlink_to("../..")
    shown = found(modules / ".bin/tool")
    assert set(shown.trees) == {str(modules), str(project / "packages/own")}


@pytest.mark.needs("node")
def test_a_script_of_pnpm_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "private/node_modules/x/cli.js", "")
    inside = write(tmp_path / "project/node_modules/x/cli.js", "")
    for target, shown in (("../private/node_modules/x/cli.js", None), ("node_modules/x/cli.js", str(inside))):
        script = write(
            tmp_path / "project/run", f'#!/bin/sh\nbasedir=.\nexec node "$basedir/{target}"\n', 0o755
        )
        assert packages.script_behind(str(script)) == shown
    (tmp_path / "project/node_modules/y").symlink_to(tmp_path / "private/node_modules/x")
    text = '#!/bin/sh\nbasedir=.\nexec node "$basedir/node_modules/y/cli.js"\n'
    assert packages.script_behind(str(write(tmp_path / "project/run", text, 0o755))) is None


def test_a_path_file_does_not_lead_out_of_the_project(tmp_path: Path) -> None:
    program = installed.project_environment(tmp_path)
    site = tmp_path / "dev/tool/.venv/lib" / installed.VERSION / "site-packages"
    write(tmp_path / "private/x.py", "")
    (tmp_path / "dev/tool/link").symlink_to(tmp_path / "private")
    write(site / "more.pth", f"{tmp_path}/private\n{tmp_path}/dev/tool/link\n/\n{tmp_path}\nrelative\n\n")
    for number, text in enumerate(('{"editable"', '{"editable": [1], "dir_info": 3}', "[" * 60_000)):
        write(site / f"x{number}-1.dist-info/direct_url.json", text)
    shown = found(program.command)
    assert not any(contains(tree, str(tmp_path / "private")) for tree in shown.trees)
    assert str(tmp_path / "dev/tool/src") in shown.trees
    (note,) = [note for note in shown.notes if "/private" in note]
    assert note == (
        f"{tmp_path}/dev/tool/.venv imports {tmp_path}/private, which is not shown because it is outside of "
        f"{tmp_path}/dev/tool; let the plugin read it"
    )


def _other_environment(place: Path) -> Path:
    """Another project of the same person, with an environment that imports its sources in place."""
    command = Path(installed.project_environment(place).command)
    return command.parent.parent


LINKS = ("python", "environment", "folder", "file")


def _linked(kind: str, project: Path, other: Path) -> str:
    """A project with a link into another one; the command that passes through it."""
    project.mkdir(parents=True)
    match kind:
        case "python":
            (project / ".venv/bin").mkdir(parents=True)
            write(project / ".venv/pyvenv.cfg", "home = /usr/bin\n")
            (project / ".venv/bin/python").symlink_to(other / "bin/python")
            return ".venv/bin/python"
        case "environment":
            (project / ".venv").symlink_to(other)
            return ".venv/bin/python"
        case "folder":
            (project / "tools").symlink_to(other.parent)
            return f"tools/{other.name}/bin/python"
        case _:
            (project / "node_modules/.bin").mkdir(parents=True)
            (project / "node_modules/.bin/x").symlink_to(other.parent / "backup.sh")
            return "node_modules/.bin/x"


@pytest.mark.parametrize("kind", LINKS)
def test_a_link_of_a_project_does_not_show_another_project(runner_as: Caller, kind: str) -> None:
    other = _other_environment(runner_as.home)
    if not os.path.lexists(other / "bin/python"):
        (other / "bin/python").symlink_to("/usr/bin/python3")
    secret = write(other.parent / "secret.txt", "another project's")
    write(other.parent / "backup.sh", f"#!/bin/sh\ncat {secret}\n", 0o755)
    write(other / "lib/secret.txt", "another project's")
    project = runner_as.home / "hostile"
    command = _linked(kind, project, other)
    code = f"print(open({str(other / 'lib/secret.txt')!r}).read())"
    args = () if kind == "file" else ("-c", code)
    installed.open_to_all(runner_as.home)
    runner_as.give(runner_as.home)
    done = runner_as("run", "--", command, *args, cwd=project, timeout=120)
    assert done.returncode != 0 and "another project's" not in done.stdout
    assert "links of a project show nothing outside of it" in done.stderr, done.stderr
    # A person who names the other program means it.
    if kind != "file":
        done = runner_as("run", "--", str(other / "bin/python"), *args, cwd=project, timeout=120)
        assert done.stdout.strip() == "another project's", done.stderr
    else:
        done = runner_as(
            *("run", "--read", str(secret), "--", str(other.parent / "backup.sh")), cwd=project, timeout=120
        )
        assert done.stdout.strip() == "another project's", done.stderr


def test_a_script_that_is_a_link_into_another_project(tmp_path: Path) -> None:
    real = write(tmp_path / "private/x.py", "")
    (tmp_path / "project").mkdir()
    link = tmp_path / "project/x.py"
    link.symlink_to(real)
    with pytest.raises(ProgramFault, match="links of a project show nothing outside"):
        found("python3", str(link))
    assert found("python3", str(real)).trees == (str(tmp_path / "private"),)
    # Inside of a project a link leads where it likes, and what is on PATH is the person's own.
    write(tmp_path / "project/package.json", "{}")
    write(tmp_path / "project/deep/y.py", "")
    (tmp_path / "project/other").mkdir()
    (tmp_path / "project/other/y.py").symlink_to("../deep/y.py")
    assert found("python3", str(tmp_path / "project/other/y.py")).trees == (str(tmp_path / "project"),)


def test_links_of_a_persons_own_lead_anywhere(tmp_path: Path) -> None:
    tool = write(tmp_path / "src/tool/run", "#!/bin/sh\n", 0o755)
    for folder in ("bin", ".local/bin", "own", "project/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "tool").symlink_to(tool)
    home = {"HOME": str(tmp_path)}
    for folder in ("bin", ".local/bin"):
        assert str(tool) in found(tmp_path / folder / "tool", environ=home).trees
    on_path = {**home, "PATH": f"{tmp_path}/own:{SYSTEM_PATH}"}
    assert str(tool) in found(tmp_path / "own/tool", environ=on_path).trees
    assert str(tool) in found("tool", environ=on_path).trees
    for folder in ("own", "project/bin"):
        with pytest.raises(ProgramFault) as caught:
            found(tmp_path / folder / "tool", environ=home)
        assert str(tool) in caught.value.hint
    # A link above the project is the person's own as well.
    (tmp_path / "work").symlink_to(tmp_path / "src")
    assert str(tool) in found(tmp_path / "work/tool/run", environ=home).trees
