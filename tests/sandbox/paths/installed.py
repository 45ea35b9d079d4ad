"""Programs installed the way people install them, in a home that is theirs alone.

Made by the real installers where they need no network (pip, npm, venv), else laid out as they leave them.
Every program prints its name, a word of another package that it needs, and its arguments.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.conftest import SYSTEM_PATH

SYSTEM = Path("/usr/bin/python3").resolve()
VERSION = SYSTEM.name  # python3.11
SAYS = "tool needs met one\n"


class Installed(NamedTuple):
    command: str
    args: tuple[str, ...] = ("one",)
    environ: Mapping[str, str] = {}
    cwd: str = "/"
    hidden: tuple[str, ...] = ()  # files beside it that must not be shown


def write(path: Path, text: str | bytes, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


# --- Python ------------------------------------------------------------------------------------------------

MAIN = "import sys, needed\ndef main():\n    print('tool', needed.WORD, *sys.argv[1:])\n"


def wheel(folder: Path) -> Path:
    """The smallest wheel with a command, and a second package that it needs."""
    path = folder / "tool-1.0-py3-none-any.whl"
    files = {
        "tool/__init__.py": MAIN,
        "tool/__main__.py": "from tool import main\nmain()\n",
        "needed.py": "WORD = 'needs met'\n",
        "tool-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n",
        "tool-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tool-1.0.dist-info/entry_points.txt": "[console_scripts]\ntool = tool:main\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, "tool-1.0.dist-info/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, "tool-1.0.dist-info/RECORD": record}.items():
            archive.writestr(name, text)
    return path


def pip(home: Path, python: Path | str, *args: str | Path) -> None:
    """The pip of this environment, for another interpreter."""
    environ = {"HOME": str(home), "PATH": SYSTEM_PATH, "PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-warn-script-location", *args]
    subprocess.run(command, check=True, env=environ, cwd=home)


def environment(folder: Path, python: Path | str = SYSTEM) -> Path:
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, cwd="/")
    return folder


def prefix(folder: Path) -> Path:
    """A Python of its own, which finds the standard library of the system's as its own."""
    write(folder / "bin" / VERSION, SYSTEM.read_bytes(), 0o755)
    (folder / "bin/python3").symlink_to(VERSION)
    library = folder / "lib" / VERSION
    library.mkdir(parents=True)
    for entry in Path("/usr/lib", VERSION).iterdir():
        (library / entry.name).symlink_to(entry)
    (library / "site-packages").mkdir()
    return folder


def script(path: Path, python: Path) -> Path:
    return write(path, f"#!{python}\nfrom tool import main\nmain()\n", 0o755)


def packages_in(site: Path) -> None:
    write(site / "tool/__init__.py", MAIN)
    write(site / "needed.py", "WORD = 'needs met'\n")


def as_pip_leaves_it(venv: Path) -> None:
    """For a second environment: pip itself takes longer than all the rest of a test."""
    packages_in(venv / "lib" / VERSION / "site-packages")
    script(venv / "bin/tool", venv / "bin/python")


def pip_user(home: Path) -> Installed:
    pip(home, "/usr/bin/python3", "--user", wheel(home))
    write(home / ".local/share/secret", "secret")
    write(home / ".local/bin/other", "#!/bin/sh\n", 0o755)
    hidden = (str(home / ".local/share/secret"), str(home / ".local/bin/other"))
    return Installed(str(home / ".local/bin/tool"), hidden=hidden)


def pip_user_module(home: Path) -> Installed:
    pip(home, "/usr/bin/python3", "--user", wheel(home))
    return Installed("python3", ("-m", "tool", "one"))


def pipx(home: Path) -> Installed:
    venv = environment(home / ".local/share/pipx/venvs/tool")
    pip(home, venv / "bin/python", wheel(home))
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/tool").symlink_to(venv / "bin/tool")
    write(home / ".local/share/pipx/venvs/other/secret", "")
    return Installed(
        str(home / ".local/bin/tool"), hidden=(str(home / ".local/share/pipx/venvs/other/secret"),)
    )


def pipx_before_1_3(home: Path) -> Installed:
    venv = environment(home / ".local/pipx/venvs/tool")
    as_pip_leaves_it(venv)
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/tool").symlink_to(venv / "bin/tool")
    return Installed("tool", environ={"PATH": f"{home}/.local/bin:{SYSTEM_PATH}"})


def uv_tool(home: Path) -> Installed:
    pythons = home / ".local/share/uv/python"
    prefix(pythons / "cpython-3.11.9-linux-x86_64-gnu")
    (pythons / "cpython-3.11-linux-x86_64-gnu").symlink_to("cpython-3.11.9-linux-x86_64-gnu")
    python = pythons / "cpython-3.11-linux-x86_64-gnu/bin" / VERSION
    venv = environment(home / ".local/share/uv/tools/tool", python)
    as_pip_leaves_it(venv)
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/tool").symlink_to(venv / "bin/tool")
    return Installed(str(home / ".local/bin/tool"))


def project_environment(home: Path) -> Installed:
    """As `uv sync` leaves it: the project itself stays where it is, and a path file names its sources."""
    project = home / "dev/tool"
    venv = environment(project / ".venv")
    write(project / "src/tool/__init__.py", MAIN)
    site = venv / "lib" / VERSION / "site-packages"
    write(site / "needed.py", "WORD = 'needs met'\n")
    write(site / "_tool.pth", f"{project}/src\n")
    write(
        site / "tool-1.0.dist-info/direct_url.json",
        f'{{"url":"file://{project}","dir_info":{{"editable":true}}}}',
    )
    script(venv / "bin/tool", venv / "bin/python")
    write(project / ".env", "SECRET=1")
    return Installed(str(venv / "bin/tool"), hidden=(str(project / ".env"),))


def project_with_hook(home: Path) -> Installed:
    """As setuptools leaves it: a module finds the package, and only the record names the project."""
    project = home / "dev/tool"
    venv = environment(project / ".venv")
    write(project / "tool/__init__.py", MAIN)
    site = venv / "lib" / VERSION / "site-packages"
    write(site / "needed.py", "WORD = 'needs met'\n")
    write(site / "__editable__.tool-1.0.pth", "import __editable___tool_finder\n")
    write(site / "__editable___tool_finder.py", f"import sys\nsys.path.append({str(project)!r})\n")
    write(
        site / "tool-1.0.dist-info/direct_url.json",
        f'{{"dir_info": {{"editable": true}}, "url": "file://{project}"}}',
    )
    script(venv / "bin/tool", venv / "bin/python")
    return Installed(".venv/bin/tool", cwd=str(project))


def _pyenv(home: Path) -> Path:
    root = home / ".pyenv"
    for version in ("3.11.7", "3.11.10"):
        base = prefix(root / "versions" / version)
        packages_in(base / "lib" / VERSION / "site-packages")
        packages_in(base / "lib/python3/dist-packages")  # where Debian's interpreter looks
        script(base / "bin/tool", base / "bin" / VERSION)
    bad = prefix(root / "versions/3.12.1")  # without the package
    script(bad / "bin/tool", bad / "bin" / VERSION)
    shim = (
        '#!/usr/bin/env bash\nset -e\n[ -n "$PYENV_DEBUG" ] && set -x\n\nprogram="${0##*/}"\n\n'
        f'export PYENV_ROOT="{root}"\nexec "{root}/libexec/pyenv" exec "$program" "$@"\n'
    )
    write(root / "version", "3.12.1\n")
    return write(root / "shims/tool", shim, 0o755)


def pyenv_by_variable(home: Path) -> Installed:
    return Installed(str(_pyenv(home)), environ={"PYENV_VERSION": "3.11.7"})


def pyenv_by_file(home: Path) -> Installed:
    shim = _pyenv(home)
    write(home / "dev/.python-version", "# newest\n3.11\n")
    (home / "dev/deep").mkdir()
    path = f"{shim.parent}:{SYSTEM_PATH}"
    return Installed("tool", environ={"PATH": path}, cwd=str(home / "dev/deep"))


def pyenv_by_default(home: Path) -> Installed:
    shim = _pyenv(home)
    write(home / ".pyenv/version", "3.11.10\n")
    return Installed(str(shim))


# --- node --------------------------------------------------------------------------------------------------

PROGRAM = "#!/usr/bin/env node\nconsole.log('tool', require('needed'), process.argv.slice(2).join())\n"
NEEDED = "module.exports = 'needs met'\n"


def node_package(folder: Path) -> Path:
    write(folder / "package.json", '{"name": "tool", "version": "1.0.0", "bin": {"tool": "dist/cli.js"}}')
    write(folder / "dist/cli.js", PROGRAM, 0o755)
    return folder


def archive(folder: Path) -> Path:
    """The package with its dependency inside, as `npm pack` would make it: npm installs it offline."""
    source = folder / "package"
    node_package(source)
    write(
        source / "package.json",
        '{"name": "tool", "version": "1.0.0", "bin": {"tool": "dist/cli.js"},'
        ' "dependencies": {"needed": "1.0.0"}, "bundleDependencies": ["needed"]}',
    )
    write(source / "node_modules/needed/package.json", '{"name": "needed", "version": "1.0.0"}')
    write(source / "node_modules/needed/index.js", NEEDED)
    packed = shutil.make_archive(str(folder / "tool"), "gztar", folder, "package")
    shutil.rmtree(source)
    return Path(packed)


def npm(home: Path, *args: str | Path) -> None:
    environ = {"HOME": str(home), "PATH": SYSTEM_PATH, "npm_config_cache": str(home / ".npm")}
    command = [
        "npm",
        "install",
        "--offline",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--loglevel=error",
    ]
    subprocess.run([*command, *args], check=True, env=environ, cwd=home, stdout=subprocess.DEVNULL)
    shutil.rmtree(home / ".npm", ignore_errors=True)


def npm_local(home: Path) -> Installed:
    project = home / "dev/app"
    write(project / "package.json", "{}")
    write(project / ".env", "SECRET=1")
    npm(home, "--prefix", project, archive(home))
    return Installed("node_modules/.bin/tool", cwd=str(project), hidden=(str(project / ".env"),))


def npm_global(home: Path) -> Installed:
    (home / ".npm-global").mkdir()
    npm(home, "-g", "--prefix", home / ".npm-global", archive(home))
    write(home / ".npm-global/etc/npmrc", "token")
    return Installed(
        "tool",
        environ={"PATH": f"{home}/.npm-global/bin:{SYSTEM_PATH}"},
        hidden=(str(home / ".npm-global/etc/npmrc"),),
    )


def npm_workspace(home: Path) -> Installed:
    """npm links the packages of a workspace into node_modules, and puts what they need beside them."""
    project = home / "dev/many"
    write(project / "package.json", '{"workspaces": ["packages/*"]}')
    node_package(project / "packages/tool")
    write(project / "packages/needed/package.json", '{"name": "needed", "version": "1.0.0"}')
    write(project / "packages/needed/index.js", "module.exports = require('deeper')\n")
    write(project / "packages/private/package.json", "{}")
    npm(home, "--prefix", project)
    (project / "node_modules/private").unlink(missing_ok=True)
    write(project / "node_modules/deeper/index.js", NEEDED)
    write(project / ".env", "SECRET=1")
    hidden = (str(project / ".env"), str(project / "packages/private/package.json"))
    return Installed(str(project / "node_modules/.bin/tool"), hidden=hidden)


def npm_workspace_script(home: Path) -> Installed:
    installed = npm_workspace(home)
    return installed._replace(
        command="node", args=("packages/tool/dist/cli.js", "one"), cwd=f"{home}/dev/many"
    )


def pnpm(home: Path) -> Installed:
    """pnpm keeps every package in a folder of its own, with links to what it needs, and writes scripts."""
    modules = home / "dev/app/node_modules"
    store = modules / ".pnpm"
    node_package(store / "tool@1.0.0/node_modules/tool")
    write(store / "needed@1.0.0/node_modules/needed/index.js", NEEDED)
    (store / "tool@1.0.0/node_modules/needed").symlink_to("../../needed@1.0.0/node_modules/needed")
    (modules / "tool").symlink_to(".pnpm/tool@1.0.0/node_modules/tool")
    return Installed(str(_pnpm_script(modules / ".bin/tool", "../tool/dist/cli.js")))


def pnpm_workspace(home: Path) -> Installed:
    """In a workspace the links of a package lead to the node_modules at the top."""
    top = home / "dev/many"
    write(top / "pnpm-workspace.yaml", "packages: ['packages/*']\n")
    store = top / "node_modules/.pnpm"
    node_package(store / "tool@1.0.0/node_modules/tool")
    write(store / "tool@1.0.0/node_modules/needed/index.js", NEEDED)
    modules = top / "packages/app/node_modules"
    modules.mkdir(parents=True)
    (modules / "tool").symlink_to("../../../node_modules/.pnpm/tool@1.0.0/node_modules/tool")
    return Installed(str(_pnpm_script(modules / ".bin/tool", "../tool/dist/cli.js")))


def pnpm_global(home: Path) -> Installed:
    folder = home / ".local/share/pnpm"
    store = folder / "global/5/.pnpm/tool@1.0.0/node_modules"
    node_package(store / "tool")
    write(store / "needed/index.js", NEEDED)
    (folder / "global/5/node_modules").mkdir()
    (folder / "global/5/node_modules/tool").symlink_to("../.pnpm/tool@1.0.0/node_modules/tool")
    return Installed(str(_pnpm_script(folder / "tool", "global/5/node_modules/tool/dist/cli.js")))


def _pnpm_script(path: Path, target: str) -> Path:
    return write(
        path,
        "#!/bin/sh\n"
        'basedir=$(dirname "$(echo "$0" | sed -e \'s,\\\\,/,g\')")\n\n'
        'if [ -x "$basedir/node" ]; then\n'
        f'  exec "$basedir/node"  "$basedir/{target}" "$@"\n'
        "else\n"
        f'  exec node  "$basedir/{target}" "$@"\n'
        "fi\n",
        0o755,
    )


def _node_prefix(folder: Path) -> Path:
    """A node of its own: a script in its place, which marks that it was this one."""
    write(folder / "bin/node", '#!/bin/sh\nOWN=1 exec /usr/bin/node "$@"\n', 0o755)
    write(folder / "lib/node_modules/npm/package.json", "{}")
    package = node_package(folder / "lib/node_modules/tool")
    write(package / "dist/cli.js", PROGRAM.replace("'tool'", "process.env.OWN && 'tool'"), 0o755)
    write(package / "node_modules/needed/index.js", NEEDED)
    (folder / "bin/tool").symlink_to("../lib/node_modules/tool/dist/cli.js")
    write(folder / "etc/npmrc", "token")
    return folder


def nvm(home: Path) -> Installed:
    folder = _node_prefix(home / ".nvm/versions/node/v22.1.0")
    return Installed(str(folder / "bin/tool"), hidden=(str(folder / "etc/npmrc"),))


def asdf(home: Path) -> Installed:
    _node_prefix(home / ".asdf/installs/nodejs/20.11.0")
    _node_prefix(home / ".asdf/installs/nodejs/22.1.0")
    text = (
        "#!/usr/bin/env bash\n# asdf-plugin: nodejs 20.11.0\n# asdf-plugin: nodejs 22.1.0\n"
        f'exec {home}/.asdf/bin/asdf exec "tool" "$@" # asdf_allow: \' asdf \'\n'
    )
    shim = write(home / ".asdf/shims/tool", text, 0o755)
    write(home / ".tool-versions", "python 3.12.1\nnodejs 22.1.0 # newest\n")
    return Installed(str(shim))


def mise(home: Path) -> Installed:
    installs = home / ".local/share/mise/installs"
    _node_prefix(installs / "node/22.1.0")
    for name in ("22", "latest"):
        (installs / "node" / name).symlink_to("./22.1.0")
    write(home / ".local/bin/mise", b"\x7fELF", 0o755)
    shim = home / ".local/share/mise/shims/tool"
    shim.parent.mkdir()
    shim.symlink_to(home / ".local/bin/mise")
    return Installed("tool", environ={"PATH": f"{shim.parent}:{SYSTEM_PATH}"})


PYTHON: tuple[Callable[[Path], Installed], ...] = (
    *(pip_user, pip_user_module, pipx, pipx_before_1_3, uv_tool, project_environment, project_with_hook),
    *(pyenv_by_variable, pyenv_by_file, pyenv_by_default),
)
NODE: tuple[Callable[[Path], Installed], ...] = (
    *(npm_local, npm_global, npm_workspace, npm_workspace_script, pnpm, pnpm_workspace, pnpm_global),
    *(nvm, asdf, mise),
)


def open_to_all(home: Path) -> None:
    """Modes as under the usual umask, whatever it is here."""
    for path in [home, *home.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
