"""The Python interpreters of a machine, and a virtual environment for tests on each."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
# The supported versions. Later ones are tested if they are found.
SUPPORTED = ("3.11", "3.12", "3.13")
WISHED = (*SUPPORTED, "3.14")

_NAME = re.compile(r"python3(\.\d+)?\Z")
# Where users and version managers install interpreters below a home directory. PATH is searched too.
_BELOW_HOME = (
    ".pyenv/versions/*/bin",
    ".local/bin",
    ".local/share/uv/python/*/bin",
    ".asdf/installs/python/*/bin",
    ".local/share/mise/installs/python/*/bin",
    ".rye/py/*/bin",
    ".local/share/rye/py/*/bin",
    *(
        f"{conda}/{folder}"
        for conda in ("miniconda3", "anaconda3", "miniforge3", "mambaforge", "micromamba", ".conda")
        for folder in ("bin", "envs/*/bin")
    ),
)
_SYSTEM = ("/usr/bin", "/usr/local/bin", "/opt/python/*/bin", "/opt/conda/bin", "/opt/conda/envs/*/bin")
# Variables that move a version manager's root elsewhere.
_ROOTS = {
    "PYENV_ROOT": "versions/*/bin",
    "UV_PYTHON_INSTALL_DIR": "*/bin",
    "ASDF_DATA_DIR": "installs/python/*/bin",
    "CONDA_PREFIX": "bin",
}
_ASK = """\
import json, platform, sys, sysconfig
print(json.dumps([sys.executable, platform.python_version(), sys.implementation.name,
    sys.version_info.releaselevel, list(sys.version_info[:2]), sys.base_prefix, sys.prefix,
    bool(sysconfig.get_config_var("Py_GIL_DISABLED"))]))
"""
_ASK_SECONDS = 20


class NotInstallable(Exception):
    """Tests cannot run on this interpreter, because a package that they import cannot be installed."""


@dataclass(frozen=True)
class Python:
    path: Path
    version: str

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def is_supported(self) -> bool:
        return self.minor in SUPPORTED

    def __str__(self) -> str:
        return f"Python {self.version} ({self.path})"


def find_pythons(
    own_prefix: str,
    own_version: str,
    environ: Mapping[str, str] = os.environ,
    system: Sequence[str] = _SYSTEM,
) -> tuple[list[Python], list[tuple[str, str]]]:
    """One interpreter of each version except our own, oldest first; and the unused ones with the reason."""
    found: dict[str, Python] = {}
    passed_over: dict[str, str] = {}
    seen: set[str] = set()
    for candidate in _candidates(environ, system):
        real = os.path.realpath(candidate)
        if real in seen:
            continue
        seen.add(real)
        try:
            done = subprocess.run(
                [candidate, "-IS", "-c", _ASK],
                capture_output=True,
                timeout=_ASK_SECONDS,
                stdin=subprocess.DEVNULL,
            )
            # A shim starts another program. The answer is about that program.
            path, version, name, level, minor, base, prefix, free_threaded = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            continue  # a shim without a version, a broken installation, or not a Python at all
        if tuple(minor) < OLDEST or prefix != base or os.path.realpath(base) == os.path.realpath(own_prefix):
            continue  # too old, a virtual environment, or the one that runs everything else
        if name != "cpython":
            passed_over[f"{name} {version} ({path})"] = "it is not CPython"
        elif level != "final":
            passed_over[f"Python {version} ({path})"] = "it is not a release"
        elif free_threaded:
            passed_over[f"Python {version} ({path})"] = "it is built without a global interpreter lock"
        elif version != own_version:
            found.setdefault(version, Python(Path(path), version))
    return sorted(found.values(), key=lambda python: _numbers(python.version)), list(passed_over.items())


def missing_versions(versions: Sequence[str]) -> list[str]:
    there = {".".join(version.split(".")[:2]) for version in versions}
    return [version for version in WISHED if version not in there]


def _candidates(environ: Mapping[str, str], system: Sequence[str]) -> Iterator[Path]:
    folders = [each for each in environ.get("PATH", "").split(":") if each.startswith("/")]
    patterns = [*system]
    if home := environ.get("HOME"):
        patterns += [f"{home}/{below}" for below in _BELOW_HOME]
    patterns += [f"{environ[name]}/{below}" for name, below in _ROOTS.items() if environ.get(name)]
    for pattern in patterns:
        fixed, _, rest = pattern.partition("*")
        top = Path(fixed)
        folders += [pattern] if not rest else [str(path) for path in sorted(top.glob(f"*{rest}"))]
    for folder in dict.fromkeys(folders):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if _NAME.match(name) and os.access(f"{folder}/{name}", os.X_OK):
                yield Path(folder, name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version))


# --- A virtual environment for one interpreter -------------------------------------------------------------


def environment(python: Python) -> tuple[Python, list[str]]:
    """The interpreter in .venv-VERSION, which is made or updated; and what could not be installed there."""
    venv = ROOT / f".venv-{python.version}"
    inside = Python(venv / "bin/python", python.version)
    wanted = f"{ROOT} {os.path.realpath(python.path)} {zlib.crc32((ROOT / 'pyproject.toml').read_bytes())}\n"
    mark = venv / ".installed"
    with open(ROOT / "scripts/pythons.py", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once must not build the same environment
        if mark.exists() and mark.read_text().startswith(wanted):
            return inside, mark.read_text().splitlines()[1:]
        print(f"building {venv.name}", flush=True)
        _make(python, venv)
        lacking = [] if _installs(inside, "--editable", f"{ROOT}[dev,prctl]") else _one_by_one(inside)
        mark.write_text(wanted + "".join(f"{each}\n" for each in lacking))
    return inside, lacking


def _make(python: Python, venv: Path) -> None:
    make = [str(python.path), "-m", "venv", "--clear", str(venv)]
    try:
        _run(make)
    except NotInstallable:  # Debian has ensurepip in a package of its own
        _run([*make, "--without-pip"])
        with tempfile.TemporaryDirectory() as folder:
            _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "pip"])
            (wheel,) = Path(folder).iterdir()
            # pip can run from its own wheel. Ours may be too old for that Python.
            _run([str(venv / "bin/python"), f"{wheel}/pip", "install", "--quiet", str(wheel)])


def _one_by_one(python: Python) -> list[str]:
    """Which requirements cannot be installed, after installing all of them at once has failed."""
    if not _installs(python, "--editable", str(ROOT)):
        raise NotInstallable(f"the runner's own dependencies cannot be installed: {_last_error}")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [*extras["dev"], *extras["prctl"]]
    lacking = [requirement for requirement in wanted if not _installs(python, requirement)]
    if any(each.startswith("pytest") for each in lacking):
        raise NotInstallable(f"{', '.join(lacking)} cannot be installed: {_last_error}")
    return lacking


_last_error = ""


def _installs(python: Python, *what: str) -> bool:
    global _last_error
    pip = [str(python.path), "-m", "pip", "--disable-pip-version-check", "install", "--use-pep517"]
    try:
        _run([*pip, *what])
    except NotInstallable as error:
        _last_error = str(error)
        return False
    return True


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", cwd=ROOT)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if re.match("error: (?!exception)", line, re.IGNORECASE)]
        raise NotInstallable((errors or lines or [f"{shlex.join(argv)} failed"])[-1])
