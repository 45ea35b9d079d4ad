"""Fetch packages in a cage that reaches only their registries, and find the program in what came.

npm and pip do the work, as they are installed on this machine. They run as `runner run` runs any command, so
the operator's policy holds for them too: their folder is a state directory, their network the registries. No
code of a package runs: npm gets --ignore-scripts, pip takes wheels only. With --scripts those of npm packages
run afterwards, in the same cage, without tokens. What comes out is a stranger's folder: it is checked while
it is copied (runner/install/store.py), and only the copy is read.
"""

from __future__ import annotations

import codecs
import io
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from runner.install.registry import Registries, npm_registries, pip_registries
from runner.install.request import Request, package_name
from runner.install.store import (
    FETCH_PREFIX,
    SCRIPTS,
    BadContent,
    Installed,
    Lock,
    Locked,
    Store,
    copy_tree,
    remove_tree,
)
from runner.protocol import wire
from sandbox import process
from sandbox.document.diagnostic import cut, printable
from sandbox.speed.value import NamedTuple

_LONGEST_SAID = 64 << 10
_LONGEST_LIST = 64 << 20
_LINES_SHOWN = 12
_LONGEST_LINE = 500  # characters of a line that is shown
_LONGEST_NAME = 200  # bytes, of a command
_TICK_SECONDS = 0.25
_NAME = "runner-install"
# Files for the client come on stdin: they may have tokens, which must not be arguments or stay on a disk.
_UNPACK = 'tar -xf - -C "$HOME" && cd "$1" && shift && mkdir -p tree report && '
_NPM = (
    *("npm", "install", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--no-progress"),
    # By default npm asks three times, and waits 10 s before the second: a 502 would take minutes.
    *("--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000"),
    "--install-links=false",
)
_PIP = (
    *("install", "--only-binary=:all:", "--no-compile", "--quiet", "--cache-dir", "${state_dir}/cache"),
    *("--no-warn-script-location", "--retries=1", "--report", "report/report.json", "--target", "tree"),
)
_REPORT = "report"
_LOCK_FILES = ("package-lock.json", "node_modules/.package-lock.json")


class FetchLimits(NamedTuple):
    """Of the cage that fetches one request."""

    deadline: str = "30m"  # as `runner run` takes them
    disk: str = "4G"


USUAL_LIMITS = FetchLimits()


class InstallFailed(Exception):
    """The message says what failed; lines of the client follow."""


class FetchedSet(NamedTuple):
    installed: Installed
    lock: Lock
    folder: str  # has the checked files; `Store.add` takes it


Tick = Callable[[], None]  # called while a client works


def registries_of(request: Request, environ: Mapping[str, str]) -> Registries:
    """Where a request's packages would come from. Raises RegistryFault and InstallFailed."""
    if request.registry == "npm":
        return npm_registries(environ)
    return pip_registries(_python(request), environ)


@contextmanager
def fetch_place(store: Store, environ: Mapping[str, str]) -> Iterator[str]:
    """The folder that all requests of one command are fetched in. Raises OSError."""
    place = os.path.join(_temporary_folder(environ), FETCH_PREFIX + secrets.token_hex(8))
    with store.fetching_into(place):
        if os.geteuid() == 0:
            os.chmod(place, 0o711)  # the client has a uid of its own
        yield place


@contextmanager
def fetching(
    store: Store,
    place: str,
    request: Request,
    registries: Registries,
    environ: Mapping[str, str],
    *,
    scripts: bool = False,
    limits: FetchLimits = USUAL_LIMITS,
    tick: Tick = lambda: None,
) -> Iterator[FetchedSet]:
    """Fetch the packages of a request for the store, which the caller holds. Raises InstallFailed, BadContent
    and OSError."""
    # The client's cache stays for the next request: servers have most of their packages in common. Not if
    # code of a package may have changed it, and not after a failure: it may be what was too large.
    # No package's name begins with a dot, so no word of a client's command line is a path beside it.
    state = os.path.join(place, f".{request.registry}-scripts" if scripts else f".{request.registry}")
    fetch = _fetch_npm if request.registry == "npm" else _fetch_wheels
    keeps = False
    try:
        with store.new_set() as new:
            fetched = fetch(request, _Cage(state, registries, environ, limits, tick), new, scripts)
            keeps = not scripts
            yield fetched
    finally:
        # Some versions of pip let a wheel name a command "../../x", and make it beside these folders.
        for gone in _names_in(state) if keeps else ("",):
            remove_tree(os.path.join(state, gone).rstrip("/"))


def _names_in(state: str) -> list[str]:
    """All but the client's cache."""
    return [name for name in os.listdir(state) if name != "cache"]


def _temporary_folder(environ: Mapping[str, str]) -> str:
    """/tmp is in memory on many machines. Root's client has a uid of its own, which enters no home."""
    chosen = environ.get("TMPDIR", "")
    if chosen.startswith("/") and os.geteuid() != 0:
        return chosen
    return "/var/tmp" if os.path.isdir("/var/tmp") else tempfile.gettempdir()


# --- npm ----------------------------------------------------------------------------------------------------


def _fetch_npm(request: Request, cage: _Cage, new: str, scripts: bool) -> FetchedSet:
    cache = ("--cache", "${state_dir}/cache")
    cage.run('cd tree && exec "$@"', (*_NPM, *cache, "--", *request.packages))
    # It names the set, so it is read before a script can write another one's into it.
    lock = _read_json(os.path.join(cage.state, "tree/package-lock.json")).get("packages")
    if scripts:
        cage = cage.without_tokens()
        cage.run(
            'cd tree && exec "$@"', ("npm", "rebuild", "--loglevel=error", "--foreground-scripts", *cache)
        )
    tree = os.path.join(new, "tree")
    copy_tree(os.path.join(cage.state, "tree"), tree)
    for name in _LOCK_FILES:  # they have the address of each archive, and that may have a password
        _hide_in(os.path.join(tree, name), cage.registries)
    if not isinstance(lock, dict):
        raise BadContent("npm left no package-lock.json with packages")
    locked = []
    for path, about in lock.items():
        if not path or not isinstance(about, dict) or about.get("inBundle"):  # it came with the one above it
            continue
        if not isinstance(about.get("integrity"), str) or about.get("link"):
            raise BadContent(
                f"{printable(path)} did not come from a registry: the lock file has no digest of it"
            )
        name = path.removeprefix("node_modules/")
        locked.append(Locked(name, str(about.get("version", "")), about["integrity"]))
    # Some packages are for one processor alone, and scripts compile for one.
    runtime = f"node {platform.machine()}{SCRIPTS if scripts else ''}"
    found = Lock("npm", runtime, tuple(sorted(set(locked))))
    names = [package_name("npm", spec) for spec in request.packages]
    versions = []
    for name in names:
        about = lock.get(f"node_modules/{name}")
        if not isinstance(about, dict):
            raise InstallFailed(f"npm installed no package {printable(name)}")
        versions.append((name, str(about.get("version", ""))))
    program = _npm_program(tree, names, request.program)
    return FetchedSet(Installed(request, found.name, program, tuple(versions)), found, new)


def _hide_in(path: str, registries: Registries) -> None:
    """Take secrets out of a file."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return
    hidden = registries.hidden.hide_in_bytes(content)
    if hidden != content:
        os.unlink(path)
        with open(path, "wb") as file:
            file.write(hidden)


def _npm_program(tree: str, names: Sequence[str], wanted: str) -> tuple[str, ...]:
    """The program of the packages. Only what they say of themselves counts: node_modules/.bin may have a
    program of one of their dependencies under the same name."""
    known: list[str] = []
    for name in names:
        folder = f"node_modules/{name}"
        about = _read_json(os.path.join(tree, folder, "package.json"))
        bins = about.get("bin")
        if isinstance(bins, str):
            bins = {name.rpartition("/")[2]: bins}
        if not isinstance(bins, dict):
            continue
        bins = {str(each): path for each, path in bins.items() if isinstance(path, str)}
        known += bins
        short = name.rpartition("/")[2]
        if wanted:
            chosen = bins.get(wanted)
        elif len(set(bins.values())) == 1:
            chosen = next(iter(bins.values()))
        else:
            chosen = bins.get(short)
        if chosen is not None:
            return _npm_words(tree, folder, chosen)
        if not wanted:
            break
    asked = f"no command {printable(wanted)}" if wanted else "no command of the package's own name"
    have = (
        f"; there are {', '.join(map(printable, sorted(known)[:20]))}: name one with --package"
        if known
        else ""
    )
    raise InstallFailed(f"{printable(names[0])} has {asked}{have}")


def _npm_words(tree: str, folder: str, path: str) -> tuple[str, ...]:
    inside = os.path.normpath(os.path.join(folder, path))
    real = os.path.realpath(os.path.join(tree, inside))
    if not inside.startswith(folder + "/") or not real.startswith(
        os.path.realpath(os.path.join(tree, folder)) + "/"
    ):
        raise BadContent(f"its command is outside of the package: {printable(path)}")
    try:
        with open(real, "rb") as file:
            first = file.readline(256)
    except OSError:
        raise BadContent(f"its command is not in the package: {printable(path)}") from None
    is_script = not first.startswith(b"#!") or b"node" in first
    is_script = is_script and not first.startswith(b"\x7fELF")
    return ("node", f"tree/{inside}") if is_script else (f"tree/{inside}",)


# --- Python -------------------------------------------------------------------------------------------------


def _python(request: Request) -> str:
    """The interpreter that the request's packages are for. Raises InstallFailed."""
    if not request.python:
        return os.path.realpath(shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable)
    found = shutil.which(f"python{request.python}")
    if found is None:
        raise InstallFailed(
            f"it asks for Python {request.python}, and there is no python{request.python} on PATH"
        )
    return os.path.realpath(found)


def _fetch_wheels(request: Request, cage: _Cage, new: str, scripts: bool) -> FetchedSet:
    """`scripts` changes nothing: wheels have none."""
    python = _python(request)
    words = (python, "-I", "-m", "pip", *_PIP, "--", *request.packages)
    compiles = f"{python} -I -m compileall -q --invalidation-mode unchecked-hash tree >/dev/null"
    cage.run(f'PIP_CONFIG_FILE="$HOME/pip.conf" TMPDIR="$PWD" "$@" || exit; {compiles}; exit 0', words)
    locked = _wheels_in(_read_json(os.path.join(cage.state, _REPORT, "report.json")))
    version = _version_of(python)
    tree = os.path.join(new, "tree")
    packages = os.path.join(tree, f"lib/python{version}/site-packages")
    copy_tree(os.path.join(cage.state, "tree"), packages)
    names = [_plain(package_name("pypi", spec)) for spec in request.packages]
    programs = _entry_points(packages, names)
    wanted = request.program or names[0]
    if wanted != "python" and wanted not in programs:
        plain = {_plain(name): name for name in programs}
        if _plain(wanted) not in plain:
            have = (
                f"; there are {', '.join(map(printable, sorted(programs)[:20]))}: name one with --from"
                if programs
                else ""
            )
            raise InstallFailed(f"{printable(names[0])} has no command {printable(wanted)}{have}")
        wanted = plain[_plain(wanted)]
    _make_environment(tree, packages, python, version, programs)
    program = ("tree/bin/python",) if wanted == "python" else ("tree/bin/python", f"tree/bin/{wanted}")
    made = {each.name: each.version for each in locked}
    versions = tuple((name, made.get(name, "")) for name in names)
    lock = Lock("pypi", f"python{version} {platform.machine()} {python}", tuple(sorted(locked)))
    return FetchedSet(Installed(request, lock.name, program, versions), lock, new)


def _version_of(python: str) -> str:
    asked = [python, "-IS", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        return subprocess.check_output(asked, text=True, timeout=60).strip()
    except subprocess.SubprocessError as error:
        raise InstallFailed(f"{python} does not say its version: {error}") from None


def _wheels_in(report: Mapping[str, Any]) -> list[Locked]:
    """What pip's report says of the wheels. Raises BadContent."""
    found: list[Locked] = []
    try:
        for each in report["install"]:
            name, version = str(each["metadata"]["name"]), str(each["metadata"]["version"])
            digest = each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
            if not isinstance(digest, str):
                raise BadContent(f"{printable(name)} did not come from an index: there is no digest of it")
            found.append(Locked(_plain(name), version, f"sha256:{digest}"))
    except (KeyError, TypeError, AttributeError):
        raise BadContent("pip left no report of what it installed") from None
    return found


def _entry_points(lib: str, names: Sequence[str]) -> dict[str, str]:
    """The commands of the packages: name -> "module:function"."""
    from configparser import ConfigParser
    from configparser import Error as ParserError

    found: dict[str, str] = {}
    entries: list[tuple[int, str]] = []
    for entry in os.listdir(lib):
        package, _, rest = entry.partition("-")
        if rest.endswith(".dist-info") and _plain(package) in names:
            entries.append((names.index(_plain(package)), entry))
    for _, entry in sorted(entries):
        parser = ConfigParser(delimiters=("=",), interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]  # names have capitals
        try:
            with open(os.path.join(lib, entry, "entry_points.txt"), encoding="utf-8") as file:
                parser.read_string(file.read(1 << 20))
        except (OSError, ParserError, ValueError):
            continue
        if parser.has_section("console_scripts"):
            # The package that is named first has the program: one that is added to it does not replace it.
            own = {name: text for name, text in parser.items("console_scripts") if _is_entry(name, text)}
            found = own | found
    return found


def _is_entry(name: str, text: str) -> bool:
    module, _, function = text.partition("[")[0].strip().partition(":")
    parts = (*module.split("."), *function.split("."))
    is_file_name = "/" not in name and name not in (".", "..") and len(name.encode()) <= _LONGEST_NAME
    return bool(function) and all(map(str.isidentifier, parts)) and name.isprintable() and is_file_name


def _make_environment(
    tree: str, packages: str, python: str, version: str, programs: Mapping[str, str]
) -> None:
    """Make an environment of the interpreter around the packages."""
    shutil.rmtree(
        os.path.join(packages, "bin"), ignore_errors=True
    )  # these scripts name a folder that is gone
    os.mkdir(os.path.join(tree, "bin"))
    os.symlink(python, os.path.join(tree, "bin/python"))
    with open(os.path.join(tree, "pyvenv.cfg"), "w") as file:
        file.write(
            f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\nversion = {version}\n"
        )
    for name, text in programs.items():
        if name == "python":
            continue
        module, _, function = text.partition("[")[0].strip().partition(":")
        with open(os.path.join(tree, "bin", name), "w", encoding="utf-8") as file:
            begin = function.partition(".")[0]
            file.write(f"import sys\nfrom {module} import {begin}\n\nsys.exit({function}())\n")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


# --- the cage -----------------------------------------------------------------------------------------------


class _Cage(NamedTuple):
    """The cage that a client fetches in."""

    state: str  # its folder on this machine
    registries: Registries
    environ: Mapping[str, str]
    limits: FetchLimits
    tick: Tick

    def without_tokens(self) -> _Cage:
        files = tuple(each for each in self.registries.files if each[0] not in (".npmrc", ".netrc"))
        return self._replace(registries=self.registries._replace(files=files))

    def run(self, line: str, words: Sequence[str]) -> None:
        """Run a line of sh, with `words` as its arguments. Raises InstallFailed."""
        options = ["--name", _NAME, "--state-dir", self.state, "--deadline", self.limits.deadline]
        options += ["--limit", f"disk={self.limits.disk}"]
        options += [word for host in self.registries.hosts for word in ("--net", host)]
        options += [word for folder in self.registries.folders for word in ("--read", folder)]
        command = ["sh", "-c", _UNPACK + line, "sh", "${state_dir}", *words]
        argv = [sys.executable, "-P", "-m", "runner", "run", *options, "--", *command]
        process.load()
        with open(os.memfd_create(_NAME), "w+b") as given, tempfile.TemporaryFile() as said:
            given.write(_tar(self.registries.files))
            given.seek(0)
            # If this process is killed, the kernel ends the runner, and that ends its cage.
            client = subprocess.Popen(
                argv,
                cwd=os.path.dirname(self.state),
                env=dict(self.environ),
                stdin=given,
                stdout=said,
                stderr=said,
                preexec_fn=process.die_with_parent,
            )
            try:
                _wait(client, self.tick)
            except BaseException:
                client.terminate()
                client.wait()
                raise
            size = said.seek(0, os.SEEK_END)
            said.seek(max(0, size - _LONGEST_SAID))
            text = self.registries.hidden.hide_in_tail(said.read(), cut=size > _LONGEST_SAID)
        if client.returncode:
            # The hint names the option of `runner run`; ours has another name.
            lines = [
                cut(printable(re.sub(r"--limit (disk|deadline)=…", r"--\1", each)), _LONGEST_LINE)
                for each in text.decode(errors="replace").splitlines()
                if each.strip() and "A complete log of this run" not in each  # it is gone by then
            ]
            if any("No matching distribution" in each for each in lines):
                lines.append("only wheels are installed: building a package would run its code")
            name = "npm" if words[0] == "npm" else "pip"
            raise InstallFailed("\n".join((f"{name} could not fetch it", *lines[-_LINES_SHOWN:])))


def _wait(client: subprocess.Popen[bytes], tick: Tick) -> None:
    while True:
        try:
            client.wait(_TICK_SECONDS)
            return
        except subprocess.TimeoutExpired:
            tick()


def _tar(files: Sequence[tuple[str, bytes]]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files:
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(content), 0o600
            archive.addfile(about, io.BytesIO(content))
    return made.getvalue()


def _read_json(path: str) -> dict[str, Any]:
    """Raises BadContent, also for a document that would take much memory: a package chooses its size."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            data = wire.decode(file.read(_LONGEST_LIST).removeprefix(codecs.BOM_UTF8))
    except (OSError, ValueError) as error:
        raise BadContent(f"{os.path.basename(path)} cannot be read: {printable(str(error))[:200]}") from None
    return data if isinstance(data, dict) else {}
