"""Install the published servers of tests/published once, at the versions that are pinned there.

They go to .venv/published: one folder from npm, and two environments of Python packages. `python -m
tests.published.install` does it by hand. MCP's own conformance suite is a folder beside them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / ".venv/published"
ENVIRONMENTS = ("mcp-1", "mcp-2")
REGISTRIES = ("https://pypi.org/simple/mcp-server-time/", "https://registry.npmjs.org/mcp-remote/latest")

_PROBE_SECONDS = 10.0
_INSTALL_SECONDS = 600.0


class InstallationFailed(Exception):
    """The registries answered, and a package could not be installed."""


def lacks_registry() -> str:
    """Why the servers cannot be had; empty if they are installed, or the registries answer."""
    if is_installed():
        return ""
    for address in REGISTRIES:
        try:
            with urllib.request.urlopen(address, timeout=_PROBE_SECONDS):
                pass
        except (OSError, urllib.error.URLError) as error:
            return f"needs {address.split('/')[2]}, which does not answer: {error}"
    return "" if shutil.which("npm") else "needs npm (apt-get install npm)"


def is_installed() -> bool:
    try:
        return (FOLDER / ".installed").read_text() == _pins()
    except OSError:
        return False


def install() -> Path:
    """The folder with the servers. Raises InstallationFailed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _alone():
        if not is_installed():
            _install()
            (FOLDER / ".installed").write_text(_pins())
    return FOLDER


def install_suite() -> Path:
    """The folder with MCP's conformance suite. Raises InstallationFailed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = b"\0".join(path.read_bytes() for path in sorted((HERE / "suite").iterdir()))
    mark, digest = FOLDER / ".installed-suite", hashlib.sha256(wanted).hexdigest()
    with _alone():
        if not mark.exists() or mark.read_text() != digest:
            if fault := _from_npm("suite")():
                raise InstallationFailed(fault)
            mark.write_text(digest)
    return FOLDER / "suite"


def _pins() -> str:
    files = [HERE / "npm/package-lock.json", *(HERE / f"{name}.txt" for name in ENVIRONMENTS)]
    content = b"\0".join(path.read_bytes() for path in files)
    return f"{sys.version_info[:2]} {hashlib.sha256(content).hexdigest()}"


@contextmanager
def _alone() -> Iterator[None]:
    """Two test processes must not install at once."""
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install() -> None:
    (FOLDER / ".installed").unlink(missing_ok=True)
    running = [_from_npm("npm"), *(_from_pypi(name) for name in ENVIRONMENTS)]
    faults = [fault for finish in running if (fault := finish())]
    if faults:
        raise InstallationFailed("\n".join(faults))


def _from_npm(name: str) -> Callable[[], str]:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE / name, folder)
    # Their install scripts are untrusted code and do not run.
    words = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    return _start(name, [*words, "--cache", str(FOLDER / "npm-cache")], folder)


def _from_pypi(name: str) -> Callable[[], str]:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    python = os.path.realpath(sys.executable)
    subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_SECONDS)
    # Every package is in the list: nothing has to be resolved.
    words = ("pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--only-binary=:all:")
    return _start(name, [str(folder / "bin/python"), "-m", *words, "-r", str(HERE / f"{name}.txt")], folder)


def _start(name: str, argv: list[str], folder: Path) -> Callable[[], str]:
    log = (FOLDER / f"{name}.log").open("w")
    process = subprocess.Popen(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def finish() -> str:
        with log:
            try:
                status = process.wait(_INSTALL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
        if status == 0:
            return ""
        lines = (FOLDER / f"{name}.log").read_text(errors="replace").splitlines()[-5:]
        return "\n".join([f"{name}: exit code {status}", *lines])

    return finish


if __name__ == "__main__":
    install()
