"""Shims of version managers (pyenv, asdf, mise and others) on PATH: small programs that start the real one.

A shim finds the real program by files in the manager's own folder. No cage shows that folder, so a shim fails
there. Where the manager's rules are simple, `target_of` follows them and finds the real program. A file such
as .python-version can come with a project: it only chooses among the installed versions.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.files import text_at
from sandbox.paths.executable import is_executable
from sandbox.speed.typed import Iterator, Mapping

# Managers whose shims are links to the manager itself, which acts by the name it is called with.
_BY_TARGET = {"mise": "mise", "rtx": "rtx", "volta-shim": "volta", "proto-shim": "proto", "asdf": "asdf"}
# Managers whose shims are scripts that run the manager with `exec`.
_BY_SCRIPT = ("pyenv", "nodenv", "rbenv", "goenv", "jenv", "plenv", "asdf", "mise", "rtx")
_SCRIPT_BYTES = 4096
_MOST_INSTALLED = 1000  # folders that are looked at


def manager_of(path: str) -> str:
    """The version manager whose shim `path` is; '' if it is no shim."""
    try:
        real = look.realpath(path)  # raises for a link that we may not read
    except OSError:
        return ""
    target = _BY_TARGET.get(os.path.basename(real), "")
    if target and os.path.basename(path) != os.path.basename(real):
        return target
    head = _read(real)
    if not head.startswith("#!"):
        return ""
    for line in head.splitlines():
        words = line.replace('"', " ").replace("'", " ").split()
        if words[:1] == ["exec"] and "exec" in words[2:3] and os.path.basename(words[1]) in _BY_SCRIPT:
            return os.path.basename(words[1])
    return ""


def remedy(name: str, manager: str) -> str:
    return f"name the program by its own path; '{manager} which {name}' prints it"


def target_of(path: str, manager: str, directory: str, environ: Mapping[str, str]) -> str | None:
    """The program that a shim runs when it is started in `directory`; None if that is unknown."""
    folder, name = os.path.split(path)
    if os.path.basename(folder) != "shims":
        return None
    root = os.path.dirname(folder)
    if manager in ("pyenv", "nodenv"):
        found = _of_pyenv(root, name, manager, directory, environ)
    elif manager == "asdf":
        found = _of_asdf(root, path, directory, environ)
    elif manager in ("mise", "rtx"):
        found = _of_mise(root, name)
    else:
        found = None
    return found if found is not None and is_executable(found) else None


# --- the managers' rules -----------------------------------------------------------------------------------


def _of_pyenv(root: str, name: str, manager: str, directory: str, environ: Mapping[str, str]) -> str | None:
    """The version is chosen by a variable, else by a file in the working directory or above it, else by the
    file `version`."""
    variable, file, language = {
        "pyenv": ("PYENV_VERSION", ".python-version", "python-"),
        "nodenv": ("NODENV_VERSION", ".node-version", "node-"),
    }[manager]
    if given := environ.get(variable):
        chosen = given.split(":")
    else:
        lines = next(_upwards(directory, file), None) or _read(os.path.join(root, "version"))
        chosen = [word for line in lines.splitlines() for word in line.partition("#")[0].split()]
    for version in chosen:
        installed = _installed(os.path.join(root, "versions"), version.removeprefix(language))
        if installed is not None and is_executable(path := f"{installed}/bin/{name}"):
            return path
    return None


def _installed(versions: str, version: str) -> str | None:
    """The folder of an installed version, or None. 3.12 means the newest 3.12.x, as for pyenv itself."""
    import re

    if not _is_name(version):
        return None
    path = os.path.join(versions, version)
    if look.isdir(path):
        return path
    begins = [each for each in _listed(versions) if re.fullmatch(rf"{re.escape(version)}(\.\d+)+", each)]
    newest = max(begins, key=lambda each: [int(part) for part in re.findall(r"\d+", each)], default=None)
    return None if newest is None else os.path.join(versions, newest)


def _of_asdf(root: str, shim: str, directory: str, environ: Mapping[str, str]) -> str | None:
    """The shim lists the tools and versions that have the program. A variable or .tool-versions chooses."""
    import re

    listed = re.findall(r"^# asdf-plugin: (\S+) (\S+)\s*$", _read(look.realpath(shim)), re.MULTILINE)
    files = [*_upwards(directory, ".tool-versions")]
    if home := environ.get("HOME", ""):
        files.append(_read(os.path.join(home, ".tool-versions")))
    for tool in dict.fromkeys(tool for tool, _ in listed):
        variable = f"ASDF_{tool.upper().replace('-', '_')}_VERSION"
        for version in environ.get(variable, "").split() or _tool_versions(files, tool):
            if (tool, version) in listed and _is_name(tool) and _is_name(version):
                path = f"{root}/installs/{tool}/{version}/bin/{os.path.basename(shim)}"
                if is_executable(path):
                    return path
    return None


def _tool_versions(files: list[str], tool: str) -> list[str]:
    """The versions of the first file that names the tool."""
    for text in files:
        for line in text.splitlines():
            words = line.partition("#")[0].split()
            if words[:1] == [tool]:
                return words[1:]
    return []


def _of_mise(root: str, name: str) -> str | None:
    """The program, if exactly one installed version of one tool has it: mise has many ways to choose."""
    found: set[str] = set()
    for tool in _listed(f"{root}/installs"):
        for version in _listed(f"{root}/installs/{tool}"):
            # `20` and `latest` are links to `20.11.0`.
            folder = look.realpath(f"{root}/installs/{tool}/{version}")
            if is_executable(f"{folder}/bin/{name}"):
                found.add(f"{folder}/bin/{name}")
    return found.pop() if len(found) == 1 else None


# --- files -------------------------------------------------------------------------------------------------


def _upwards(directory: str, name: str) -> Iterator[str]:
    """The texts of the files with this name in a folder and above it, the nearest first."""
    folder = look.realpath(directory)
    while True:
        if text := _read(os.path.join(folder, name)):
            yield text
        if folder == "/":
            return
        folder = os.path.dirname(folder)


def _listed(folder: str) -> list[str]:
    try:
        return sorted(name for name in look.listdir(folder) if _is_name(name))[:_MOST_INSTALLED]
    except OSError:
        return []


def _read(path: str) -> str:
    return text_at(path, _SCRIPT_BYTES)


def _is_name(text: str) -> bool:
    """Whether a version or tool can have this name: it is the name of a folder, without a slash or a dot at
    its beginning. Files of a project may hold anything."""
    import re

    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+@-]*", text) is not None
