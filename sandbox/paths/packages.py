"""Finds the packages of an operator's own program that are in other folders than the program.

npm makes links between node_modules and the folders of a workspace, pnpm writes scripts that start node, pip
--user installs packages apart from the interpreter, and an environment may import a project that is not
copied into it. Each function reads what the installer wrote and returns folders to show. These files can come
with a project, so they never lead out of the project's own folder.
"""

from __future__ import annotations

import os
from itertools import islice

from sandbox import look
from sandbox.files import text_at
from sandbox.paths.executable import ProgramFault, follow
from sandbox.paths.installation import is_runtime
from sandbox.paths.mounts import contains
from sandbox.speed.typed import Mapping, Sequence
from sandbox.speed.value import NamedTuple

_MODULES = "/node_modules/"
_MOST_ENTRIES = 4000  # of one folder
_MOST_LINKED = 64
_MOST_LEVELS = 8
_TEXT_BYTES = 65536


class EditableProjects(NamedTuple):
    folders: tuple[str, ...]  # real paths to show
    notes: tuple[str, ...]  # messages about folders that are needed and not shown


# --- projects ----------------------------------------------------------------------------------------------

_MARKS = (".git", "package.json", "pyproject.toml")
_NO_PROJECTS = ("/", "/home", "/opt", "/srv", "/usr", "/tmp", "/var", "/root")
_SYSTEM_BINS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def require_own(project: str | None, tree: str, path: str, reached: str) -> None:
    """Raise ProgramFault if a link of `project` leads out of it, except to the installation of a language."""
    if project is None or contains(project, reached) or is_runtime(tree):
        return
    raise ProgramFault(
        f"{path} is in {project}, and a symbolic link leads from there to {reached}: links of a project show "
        "nothing outside of it",
        f"if that is the program you mean, give its own path: {reached}",
        found=True,
        denied=True,
    )


def project_of(path: str, directory: str, search_path: str, environ: Mapping[str, str]) -> str | None:
    """The real path of the project that a name on the command line is in. None: it is in a folder for the
    operator's own programs, whose links may lead anywhere.

    `.venv/bin/python` looks like a part of the project. If it is a link into another project, that one must
    not be shown. Links above the project are the operator's own.
    """
    home = os.path.normpath(environ.get("HOME") or "/")
    folder = os.path.dirname(path)
    own = (*search_path.split(":"), *_SYSTEM_BINS, *(f"{home}/{each}" for each in ("bin", ".local/bin")))
    if folder in own:
        return None
    project = _project_around(path, home)
    around = look.realpath(directory)
    for link in follow(project)[1]:
        # The folder of the project is behind a link, which may belong to another project around it.
        owner = _nearest_project(os.path.dirname(link.path), home)
        if owner is None and contains(around, link.path) and not contains(around, home):
            owner = around
        if owner is not None and not contains(owner, look.realpath(link.path)):
            return look.realpath(owner)
    return look.realpath(project)


def _project_around(path: str, home: str) -> str:
    before, among, _ = path.partition(_MODULES)
    folder = os.path.dirname(path)
    if among:
        start = before or "/"
    elif os.path.basename(folder) in ("bin", "sbin"):
        # The parts of an installation are beside bin. A virtual environment is inside of its project.
        start = os.path.dirname(folder)
        if look.lexists(f"{start}/pyvenv.cfg"):
            start = os.path.dirname(start)
    else:
        start = folder
    marked = _nearest_project(start, home) or start
    workspace = _workspace_around(f"{marked}/x")
    return workspace if workspace is not None and workspace not in (home, *_NO_PROJECTS) else marked


def _nearest_project(folder: str, home: str) -> str | None:
    """The nearest folder at or above this one that has the files of a project, or None."""
    while folder not in (home, *_NO_PROJECTS):
        if any(look.lexists(f"{folder}/{mark}") for mark in _MARKS):
            return folder
        folder = os.path.dirname(folder)
    return None


# --- node --------------------------------------------------------------------------------------------------


def modules_of(path: str) -> str | None:
    """The outermost node_modules folder that a path is in, or None."""
    before, among, _ = path.partition(_MODULES)
    return f"{before}/node_modules" if among else None


def workspace_of(passed: Sequence[str]) -> tuple[str, ...]:
    """The folders that a program in a workspace needs besides its package. `passed`: the names on the way to
    it, the real one last.

    node looks for a package in the node_modules of each folder above a script's real path. npm's links there
    lead to other packages of the workspace, and pnpm's links to the node_modules at the top.
    """
    befores = {each.partition(_MODULES)[0] for each in passed if _MODULES in each}
    tops = [before for before in befores if before and contains(before, passed[0])]
    if (around := _workspace_around(passed[0])) is not None:
        tops.append(around)
    if not tops:
        return ()
    root = min(tops, key=len)
    found: dict[str, None] = {}
    waiting = [f"{before}/node_modules" for before in sorted({root, *befores}) if contains(root, before)]
    while waiting and len(found) < _MOST_LINKED:
        modules = waiting.pop(0)
        if modules in found or not look.isdir(modules) or look.islink(modules):
            continue
        found[modules] = None
        for target in _linked_out_of(modules):
            inner = modules_of(target)
            if not contains(root, target) or contains(target, modules):
                continue  # outside of the workspace, or all of it: a project's link may show neither
            if inner is not None:
                waiting.append(inner)
            elif look.isfile(f"{target}/package.json"):
                found[target] = None
                waiting.append(f"{target}/node_modules")
    return tuple(found)


def _workspace_around(script: str) -> str | None:
    """The nearest folder above a script that is a workspace of npm or pnpm, or None."""
    folder = os.path.dirname(script)
    for _ in range(_MOST_LEVELS):
        if folder == "/":
            return None
        many = '"workspaces"' in text_at(f"{folder}/package.json", _TEXT_BYTES)
        if many or look.isfile(f"{folder}/pnpm-workspace.yaml"):
            return folder
        folder = os.path.dirname(folder)
    return None


def _linked_out_of(modules: str) -> list[str]:
    """The real paths of packages that are links out of a node_modules folder."""
    targets: dict[str, None] = {}
    folders = [modules]
    for folder in folders:
        for name, is_link in _entries(folder):
            if name.startswith("@") and not is_link and folder is modules:
                folders.append(f"{folder}/{name}")
            elif is_link and not name.startswith("."):
                real = look.realpath(f"{folder}/{name}")
                if not contains(modules, real) and look.isdir(real):
                    targets[real] = None
    return list(targets)


def _entries(folder: str) -> list[tuple[str, bool]]:
    """The names in a folder, and whether each is a link, without a system call for each."""
    try:
        with look.scandir(folder) as found:
            return sorted((entry.name, entry.is_symlink()) for entry in islice(found, _MOST_ENTRIES))
    except OSError:
        return []


def script_behind(path: str) -> str | None:
    """The script that a launcher of pnpm starts, by a line such as
    `exec node "$basedir/global/5/node_modules/x/cli.js"`; None if `path` is no launcher."""
    text = text_at(path, _TEXT_BYTES)
    if not text.startswith("#!/bin/sh") or "basedir=" not in text:
        return None
    import re  # late: few programs are such scripts

    folder = os.path.dirname(look.realpath(path))
    for written in re.findall(r'"\$basedir/([^"$`\\]+)"', text):
        target = os.path.normpath(os.path.join(folder, written))
        inside = contains(folder, target) and contains(folder, look.realpath(target))
        if _MODULES in target and inside and look.isfile(target):
            return target
    return None


# --- Python ------------------------------------------------------------------------------------------------


def is_python(file: str) -> bool:
    return bool(_python_version(file))


def _python_version(file: str) -> str:
    """`3.12` for an interpreter named python3.12; '' for any other name."""
    version = os.path.basename(file).removeprefix("python")
    minor = version.removeprefix("3.")
    named = f"python3.{minor}" == os.path.basename(file) and minor.isascii() and minor.isdecimal()
    return version if named else ""


def user_site(base: str, interpreter: str) -> str | None:
    """The folder where `pip install --user` puts packages for an interpreter; None if it does not exist."""
    version = _python_version(interpreter)
    path = f"{base}/lib/python{version}/site-packages" if version else ""
    return path if path and look.isdir(path) and not look.islink(path) else None


def has_module(site: str, name: str) -> bool:
    """Whether `python -m NAME` would find the module there."""
    top = name.partition(".")[0]
    if not top.isidentifier():
        return False
    return look.isdir(f"{site}/{top}") or look.isfile(f"{site}/{top}.py")


def editable_of(environment: str) -> EditableProjects:
    """The folders of projects that a virtual environment imports in place, after `uv sync` or `pip install
    --editable`. Only those beside the environment are shown."""
    folders: dict[str, None] = {}
    notes: list[str] = []
    around = os.path.dirname(environment)
    for site in _sites(environment):
        names = _names(site)
        lines = [line.strip() for each in names if each.endswith(".pth") for line in _lines(f"{site}/{each}")]
        paths = [look.realpath(line) for line in lines if line.startswith("/") and "\0" not in line]
        projects = [
            project
            for each in names
            if each.endswith(".dist-info") and (project := _project(f"{site}/{each}"))
        ]
        # A .pth file names the imported folder itself. Without one, an import hook finds it in the project.
        paths += [project for project in projects if not any(contains(project, path) for path in paths)]
        for path in dict.fromkeys(paths):
            if not look.isdir(path) or contains(environment, path):
                continue
            if around != "/" and contains(around, path):
                folders[path] = None
            elif not contains("/usr", path):
                said = f"{environment} imports {path}, which is not shown because it is outside of {around}"
                notes.append(f"{said}; let the plugin read it")
    return EditableProjects(tuple(folders)[:_MOST_LINKED], tuple(dict.fromkeys(notes))[:8])


def _sites(environment: str) -> list[str]:
    library = f"{environment}/lib"
    sites = [f"{library}/{name}/site-packages" for name in _names(library) if name.startswith("python3")]
    return [site for site in sites if look.isdir(site)]


def _project(information: str) -> str | None:
    """The folder of a project that was installed in place, by its .dist-info folder; else None."""
    text = text_at(f"{information}/direct_url.json", _TEXT_BYTES)
    if '"editable"' not in text:
        return None
    import json
    from urllib.parse import unquote

    try:
        written = json.loads(text)
        url, editable = written["url"], written["dir_info"]["editable"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if editable is not True or not isinstance(url, str) or not url.startswith("file:///"):
        return None
    path = unquote(url.removeprefix("file://"))
    return None if "\0" in path else look.realpath(path)


# --- files -------------------------------------------------------------------------------------------------


def _names(folder: str) -> list[str]:
    try:
        return sorted(look.listdir(folder))[:_MOST_ENTRIES]
    except OSError:
        return []


def _lines(path: str) -> list[str]:
    return text_at(path, _TEXT_BYTES).splitlines()
