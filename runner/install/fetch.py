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
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from runner.install.content import BadContent
from runner.install.registry import Registries, npm_registries, pip_registries
from runner.install.request import Request, package_name
from runner.install.store import (
    FETCH_PREFIX,
    SCRIPTS,
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
from sandbox.paths.installation import home_of, parts_of

_LONGEST_SAID = 64 << 10
_LONGEST_LIST = 64 << 20
_LINES_SHOWN = 12
_LONGEST_LINE = 500  # characters of a line that is shown
_LONGEST_NAME = 200  # bytes, of a command
_LONGEST_RANGE = 100  # characters of what a package says about versions
# Warnings, and the name of a file that is gone when a person reads it.
_NOISE = re.compile(r"npm (warn|notice)|.*A complete log of this run", re.IGNORECASE)
_OTHER_PYTHON = re.compile("require a different python version|requires a different Python")
_LEAST_PYTHON = re.compile(r">=?\s*3\.([0-9]{1,3})")
_TICK_SECONDS = 0.25
_NAME = "runner-install"
# Files for the client come on stdin: they may have tokens, which must not be arguments or stay on a disk.
_UNPACK = 'tar -xf - -C "$HOME" && cd "$1" && shift && mkdir -p tree report && '
_NPM = (
    *("install", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--no-progress"),
    # By default npm asks three times, and waits 10 s before the second: a 502 would take minutes. A warning
    # says which package is for another node.
    *(
        "--loglevel=warn",
        "--no-update-notifier",
        "--fetch-retries=1",
        "--fetch-retry-mintimeout=1000",
        "--fetch-timeout=60000",
    ),
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
    note: str = ""  # why it may not start on this machine


Tick = Callable[[], None]  # called while a client works


def registries_of(request: Request, environ: Mapping[str, str]) -> Registries:
    """Where a request's packages would come from. Raises RegistryFault and InstallFailed."""
    if request.registry == "npm":
        return npm_registries(environ)
    return pip_registries(_python(request, environ).path, environ)


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
    node = _node(cage.environ)
    npm: tuple[str, ...] = ("npm",)
    line = 'cd tree && exec "$@"'
    prefix = os.path.dirname(os.path.dirname(node.path))
    own_npm = f"{prefix}/lib/node_modules/npm/bin/npm-cli.js"
    if (shown := _outside_system(node.path)) and os.path.isfile(own_npm):
        cage = cage._replace(shown=shown)
        npm = (node.path, own_npm)
        line = f"PATH={shlex.quote(prefix + '/bin')}:$PATH; {line}"
    told = cage.run("npm", line, (*npm, *_NPM, *cache, "--", *request.packages))
    # It names the set, so it is read before a script can write another one's into it.
    lock = _read_json(os.path.join(cage.state, "tree/package-lock.json")).get("packages")
    if scripts:
        cage = cage.without_tokens()
        cage.run("npm", line, (*npm, "rebuild", "--loglevel=error", "--foreground-scripts", *cache))
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
    installed = Installed(request, found.name, program, tuple(versions))
    return FetchedSet(installed, found, new, _other_node(told, lock, versions, node))


def _other_node(
    told: str, lock: Mapping[str, Any], versions: Sequence[tuple[str, str]], node: _Runtime
) -> str:
    """What npm says of packages that were asked for and want another node, or ''."""
    for name, version in versions:
        if f"EBADENGINE   package: '{name}@{version}'" in told:
            engines = lock[f"node_modules/{name}"].get("engines")
            wanted = engines.get("node", "another one") if isinstance(engines, dict) else "another one"
            wanted = cut(printable(str(wanted)), _LONGEST_RANGE)
            return (
                f"WARNING: {name} {version} is for node {wanted}, and this is node {node.version}"
                f" ({node.path}): it may not start; put a newer node first on the PATH of its host (from your"
                " distribution, or nvm install --lts)"
            )
    return ""


def _node(environ: Mapping[str, str]) -> _Runtime:
    """The person's own node, behind the shims of a version manager. Raises InstallFailed."""
    asked = "console.log(process.execPath); console.log(process.versions.node)"
    return _ask_runtime(("node", "-e", asked), environ)


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


def _python(request: Request, environ: Mapping[str, str]) -> _Runtime:
    """The interpreter that the request's packages are for. Raises InstallFailed."""
    name = f"python{request.python}"
    if not request.python:
        found = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    else:
        found = shutil.which(name, path=environ.get("PATH")) or _python_of_uv(request.python, environ)
    if not found:
        told = f"it asks for Python {request.python}, and there is no {name} on PATH, nor among those of uv"
        raise InstallFailed(f"{told}; {_get_python(request.python)} adds one")
    asked = "import sys; print(getattr(sys, '_base_executable', sys.executable))"
    asked += "; print('%d.%d' % sys.version_info[:2])"
    return _ask_runtime((found, "-IS", "-c", asked), environ)


def _python_of_uv(version: str, environ: Mapping[str, str]) -> str:
    """One of the Pythons that uv has fetched: it puts not all of them on PATH. Empty: there is none."""
    data = environ.get("XDG_DATA_HOME") or os.path.join(environ.get("HOME") or "/", ".local/share")
    place = environ.get("UV_PYTHON_INSTALL_DIR") or os.path.join(data, "uv/python")
    newest = re.compile(rf"cpython-{re.escape(version)}\.([0-9]+)-.*")
    try:
        found = [(int(each[1]), each[0]) for each in map(newest.fullmatch, os.listdir(place)) if each]
    except OSError:
        return ""
    return (
        shutil.which(f"python{version}", path=os.path.join(place, max(found)[1], "bin")) or ""
        if found
        else ""
    )


def _get_python(version: str) -> str:
    """The command that adds a Python. No cage is shown root's home."""
    place = "UV_PYTHON_INSTALL_DIR=/opt/uv/python UV_PYTHON_BIN_DIR=/usr/local/bin "
    return f"{place if os.geteuid() == 0 else ''}uv python install {version}"


def _needs_newer(lines: Sequence[str], python: _Runtime) -> str:
    """The Python that pip's messages ask for, if it is newer than this one: '3.12', or ''."""
    ours = int(python.version.rpartition(".")[2])
    wanted = {
        int(each) for line in lines if _OTHER_PYTHON.search(line) for each in _LEAST_PYTHON.findall(line)
    }
    return f"3.{min(newer)}" if (newer := [each for each in wanted if each > ours]) else ""


def _fetch_wheels(request: Request, cage: _Cage, new: str, scripts: bool) -> FetchedSet:
    """`scripts` changes nothing: wheels have none."""
    found = _python(request, cage.environ)
    python, version = found
    cage = cage._replace(shown=_outside_system(python))
    words = (python, "-I", "-m", "pip", *_PIP, "--", *request.packages)
    compiles = f"{python} -I -m compileall -q --invalidation-mode unchecked-hash tree >/dev/null"
    try:
        cage.run(
            "pip", f'PIP_CONFIG_FILE="$HOME/pip.conf" TMPDIR="$PWD" "$@" || exit; {compiles}; exit 0', words
        )
    except ClientFailed as failed:
        if newer := _needs_newer(failed.lines, found):
            raise InstallFailed(
                f"it needs Python {newer} or later, and this is Python {version} ({python}): write --python"
                f" {newer} into the entry, in front of the package; {_get_python(newer)} adds that Python"
            ) from None
        if any("No matching distribution" in each for each in failed.lines):
            raise InstallFailed(
                f"{failed}\nonly wheels are installed: building a package would run its code"
            ) from None
        raise
    locked = _wheels_in(_read_json(os.path.join(cage.state, _REPORT, "report.json")))
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


class ClientFailed(InstallFailed):
    """npm or pip ended with an error. `lines`: what it said last."""

    def __init__(self, name: str, lines: Sequence[str]) -> None:
        super().__init__("\n".join((f"{name} could not fetch it", *lines[-_LINES_SHOWN:])))
        self.lines = lines


class _Runtime(NamedTuple):
    """A node or Python of this machine."""

    path: str
    version: str


def _ask_runtime(argv: Sequence[str], environ: Mapping[str, str]) -> _Runtime:
    """What an interpreter prints: its own path, which is not the one of a shim, and its version. It is asked
    in a folder that no project can be in. Raises InstallFailed."""
    try:
        said = subprocess.check_output(
            argv, cwd="/", env=dict(environ), text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        path, version = said.split("\n")[:2]
    except FileNotFoundError:
        raise InstallFailed(f"{argv[0]} is not installed") from None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise InstallFailed(f"{argv[0]} does not say its version: {printable(str(error))[:300]}") from None
    return _Runtime(os.path.realpath(path), version)


def _outside_system(program: str) -> tuple[str, ...]:
    """The folders of an interpreter's installation, such as nvm's, that a cage is not shown unasked."""
    prefix = home_of(program)
    if prefix is None or prefix.startswith("/usr/"):
        return ()
    return tuple(each for part in parts_of(prefix) if os.path.isdir(each := os.path.join(prefix, part)))


class _Cage(NamedTuple):
    """The cage that a client fetches in."""

    state: str  # its folder on this machine
    registries: Registries
    environ: Mapping[str, str]
    limits: FetchLimits
    tick: Tick
    shown: tuple[str, ...] = ()  # folders that the client reads

    def without_tokens(self) -> _Cage:
        files = tuple(each for each in self.registries.files if each[0] not in (".npmrc", ".netrc"))
        return self._replace(registries=self.registries._replace(files=files))

    def run(self, client_name: str, line: str, words: Sequence[str]) -> str:
        """Run a line of sh, with `words` as its arguments. Returns the end of what it printed. Raises
        ClientFailed."""
        options = ["--name", _NAME, "--state-dir", self.state, "--deadline", self.limits.deadline]
        options += ["--limit", f"disk={self.limits.disk}"]
        options += [word for host in self.registries.hosts for word in ("--net", host)]
        folders = (*self.registries.folders, *self.shown)
        options += [word for folder in folders for word in ("--read", folder)]
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
        shown = text.decode(errors="replace")
        if client.returncode:
            # The hint names the option of `runner run`; ours has another name.
            lines = [
                cut(printable(re.sub(r"--limit (disk|deadline)=…", r"--\1", each)), _LONGEST_LINE)
                for each in shown.splitlines()
                if each.strip() and not _NOISE.match(each)
            ]
            raise ClientFailed(client_name, lines)
        return shown


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
