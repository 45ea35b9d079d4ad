"""Fixtures of all tests: callers (root, an ordinary user), folders a dropped uid can reach, and leak checks.

Most tests run the real program and the real bwrap. A test declares what it needs of the machine with
`@pytest.mark.needs("node")` and so on. A test whose need is not met is skipped with the reason. The summary
of the run lists, for each need, how many tests ran and how many did not.

Tests run side by side (scripts/test), so a test must not count what other tests make. Two leak checks:

- `nothing_left` checks descendants of this process: for every test that launches.
- `machine_as_before` checks mounts, files in shared folders and cgroups of the whole machine. Tests that use
  it are marked `machine`, as are tests that use up a resource of the machine. They run one by one at the end.

The whole run fails if it leaves something on the machine.

Runners are forked from a template (tests/template.py), because the imports of a new interpreter take longer
than the launch. A test that is about a new interpreter is marked `fresh`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from sandbox.identity.all_states import StateInUse, StateNotRemoved, list_states, remove_state
from sandbox.limits.cgroup import sweep
from sandbox.limits.cgroup_survey import survey
from sandbox.paths.mounts import read_mounts
from tests import bounds, hidden, quick, spread
from tests.published.install import lacks_registry
from tests.tally import Tally

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("runner", "sandbox", "policies")

# A uid without an account: outside the ranges of Debian's adduser, of systemd and of the runner's own leases.
# Each xdist worker has another, so that workers do not share what the kernel counts per user.
USER_UID = 54321 + int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
# The first of 32 unused uids: no plugin is given one, and accounts, /etc/subuid, systemd (up to 1879048191,
# and from 2147352576) and directory services (up to 2000200000) do not have them. Each process of a run has
# others, so that two tests never use the same one at a time.
SPARE_UID = 2_100_000_000 + os.getpid() % 1_000_000 * 32
# Where bwrap, node and interpreters are searched. Not the PATH of the user who runs the tests: a plugin
# cannot see programs below a home directory.
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# The pid of the first process of a run, the same in all its processes.
_RUN = os.environ.setdefault("RUNNER_TEST_RUN", str(os.getpid()))
# The leak check also uses it to tell this run's own directories from the runner's.
TEMP_PREFIX = f"rt-{_RUN}-"

# A factor for the two times below. Tests of the leak checks leave something behind: for them it is small.
_PATIENCE = float(os.environ.get("RUNNER_TEST_PATIENCE", "1"))
# How long a process may take to end after the runner has returned: long enough for a busy machine.
_VANISH_SECONDS = 30.0 * _PATIENCE
_PR_SET_CHILD_SUBREAPER = 36


# What changes the runner, Python, git, widths, colours or messages.
_OF_AN_ACCOUNT = re.compile(
    r"(RUNNER_(?!TEST_|SOAK_)|XDG_(?!RUNTIME_DIR)|PYTHON|GIT_|LC_|(LANGUAGE|COLUMNS|LINES|NO_COLOR|FORCE_COLOR)$)"
)
# What people have on this machine that could not be hidden from the tests, and why.
_SEEN = pytest.StashKey[str]()


# --- What the machine offers -------------------------------------------------------------------------------


def _lacks_root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def _lacks_user() -> str:
    if os.geteuid() == 0 and not shutil.which("setpriv", path=SYSTEM_PATH):
        return "needs setpriv (apt-get install util-linux) to become an ordinary user"
    probe = [*_become_user(), "bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "true"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60, env={"PATH": SYSTEM_PATH})
    except OSError as error:
        return f"needs bubblewrap: {error}"
    return "" if done.returncode == 0 else f"needs unprivileged user namespaces: {done.stderr.strip()}"


def _lacks_program(name: str, package: str) -> str:
    return "" if shutil.which(name, path=SYSTEM_PATH) else f"needs {name} (apt-get install {package})"


# Where scripts/setup puts published servers.
NODE_PEERS = ROOT / ".venv/peers/node_modules"


def _lacks_npm() -> str:
    # This file is made last: without it an installation was interrupted.
    installed = (NODE_PEERS.parent / ".installed").exists()
    return _lacks_program("node", "nodejs") if installed else "needs servers from npm (scripts/setup test)"


def _lacks_programs(*programs: tuple[str, str]) -> str:
    return next(filter(None, (_lacks_program(name, package) for name, package in programs)), "")


# As scripts/setup unpacks it, or installed. NATS_SERVER names another version.
NATS_SERVER = os.environ.get("NATS_SERVER") or shutil.which(
    "nats-server",
    path=f"{ROOT}/.venv/nats/newer/usr/sbin:{ROOT}/.venv/nats/usr/sbin:{SYSTEM_PATH}:/usr/local/sbin:/usr/sbin",
)


def _lacks_nats() -> str:
    return "" if NATS_SERVER else "needs nats-server (scripts/setup test)"


def _lacks_nats_cluster() -> str:
    if not NATS_SERVER:
        return _lacks_nats()
    said = subprocess.run([NATS_SERVER, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(map(int, re.findall(r"\d+", said)[:2]))
    return "" if version >= (2, 10) else "needs nats-server 2.10 (scripts/setup all)"


def docker_registry() -> str:
    """Debian's registry, installed or as scripts/setup unpacks it; "" if it is not there."""
    return shutil.which("docker-registry", path=f"{SYSTEM_PATH}:{ROOT}/.venv/registry/usr/bin") or ""


# The command that makes transient units.
MANAGER = ("systemd-run",) if os.geteuid() == 0 else ("systemd-run", "--user")


@functools.cache
def busybox() -> str:
    """A busybox that needs no libc, which images of tests do not have; "" if there is none."""
    found = shutil.which("busybox", path=f"{ROOT}/.venv/busybox/bin:{SYSTEM_PATH}") or ""
    return "" if found and b"/ld-" in Path(found).read_bytes()[:4096] else found  # the name of its loader


def umoci() -> str:
    """Debian's umoci, installed or as scripts/setup unpacks it; "" if it is not there."""
    return shutil.which("umoci", path=f"{SYSTEM_PATH}:{ROOT}/.venv/umoci/usr/bin") or ""


def sshd() -> str:
    """OpenSSH's server, installed or as scripts/setup unpacks it; "" if it is not there."""
    return shutil.which("sshd", path=f"/usr/sbin:{ROOT}/.venv/sshd/usr/sbin") or ""


def _lacks_ssh() -> str:
    if not sshd():
        return "needs sshd (scripts/setup test)"
    return _lacks_programs(("ssh-agent", "openssh-client"), ("git", "git"))


def _lacks_systemd() -> str:
    probe = [*MANAGER, "--scope", "-q", "-p", "Delegate=yes", "true"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60)
    except OSError:
        return "needs systemd"
    unified = any(line.startswith("0::") for line in Path("/proc/self/cgroup").read_text().splitlines()[:1])
    if done.returncode == 0 and not unified:
        return "needs a pure cgroup v2"
    return "" if done.returncode == 0 else f"needs a systemd that makes units for us: {done.stderr.strip()}"


# Each returns the reason why it is missing, or "".
_CAPABILITIES: Mapping[str, Callable[[], str]] = {
    "root": _lacks_root,
    "user": _lacks_user,
    "node": lambda: _lacks_program("node", "nodejs"),
    "npm": _lacks_npm,
    "gcc": lambda: _lacks_program("gcc", "gcc libc6-dev"),
    "curl": lambda: _lacks_program("curl", "curl"),
    "openssl": lambda: _lacks_program("openssl", "openssl"),
    "zsh": lambda: _lacks_program("zsh", "zsh"),
    "fish": lambda: _lacks_program("fish", "fish"),
    "chromium": lambda: _lacks_programs(("chromium", "chromium"), ("chromedriver", "chromium-driver")),
    "nats": _lacks_nats,
    "nats-cluster": _lacks_nats_cluster,
    "docker-registry": lambda: "" if docker_registry() else "needs docker-registry (scripts/setup test)",
    "busybox": lambda: "" if busybox() else "needs busybox (scripts/setup test)",
    "umoci": lambda: "" if umoci() else "needs umoci (scripts/setup test)",
    "ssh": _lacks_ssh,
    "systemd": _lacks_systemd,
    "binutils": lambda: _lacks_programs(
        ("x86_64-linux-gnu-as", "binutils-x86-64-linux-gnu"),
        ("aarch64-linux-gnu-as", "binutils-aarch64-linux-gnu"),
    ),
    "redis": lambda: _lacks_program("redis-check-rdb", "redis-tools"),
    "registry": lacks_registry,
}


@functools.cache
def lacks(capability: str) -> str:
    """Why tests that need `capability` cannot run here; empty if they can."""
    return _CAPABILITIES[capability]()


def _become_user() -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["/usr/bin/setpriv", f"--reuid={USER_UID}", f"--regid={USER_UID}", "--clear-groups", "--"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("runner")
    group.addoption(
        "--part",
        choices=["all", "parallel", "machine"],
        default="all",
        help="tests that can run side by side, or those marked `machine`",
    )
    group.addoption("--quick", action="store_true", help="only tests that launch nothing")
    group.addoption(
        "--all",
        action="store_true",
        help="every test of `runner_as` as root and as a user, and the tests marked `broad`",
    )
    group.addoption("--screenshots", metavar="DIR", help="write the pictures of docs/serve.md there")
    group.addoption("--tally", metavar="FILE", help="write counts and durations there, for scripts/test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"needs(*capabilities): skip, with the reason, where one is missing ({', '.join(_CAPABILITIES)})",
    )
    config.addinivalue_line(
        "markers",
        "machine: counts what is left on the machine, or uses up something of it; runs alone",
    )
    config.addinivalue_line(
        "markers",
        "both_callers: the code it tests branches on who calls, so it always runs as root and as a user",
    )
    config.addinivalue_line("markers", "broad: runs only with --all")
    config.addinivalue_line("markers", "fresh: its runners are new interpreters, not forked from a template")
    # How long an example takes, to make or to run, depends on the machine and its load.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("suite")
    from tests import template  # which imports this module

    if _is_first_process(config):  # xdist workers inherit the mounts, and a quick run cannot make them later
        _hide_what_people_have(config)
    _forget_the_account()
    config.pluginmanager.register(bounds)
    config.pluginmanager.register(template)
    config.pluginmanager.register(quick)
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(spread)
    # Orphans become children of this process instead of pid 1: so the leak check finds them, and only ours.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _forget_the_account() -> None:
    """Tests that use the environment of this process do not depend on whose it is."""
    for name in filter(_OF_AN_ACCOUNT.match, list(os.environ)):
        del os.environ[name]
    os.environ["LANG"] = "C.UTF-8"  # other programs' messages
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        for name in ("no_proxy", "NO_PROXY"):  # servers of tests are on this machine
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "localhost,127.0.0.1,::1")))
    os.umask(0o022)  # tests make folders for other users


def _hide_what_people_have(config: pytest.Config) -> None:
    places = hidden.in_use()
    if places and os.geteuid() == 0:
        hiding = contextlib.ExitStack()
        fault = hiding.enter_context(hidden.hidden(places, TEMP_PREFIX))
        config.add_cleanup(hiding.close)
    else:
        fault = "only root can hide it" if places else ""
    if fault:
        config.stash[_SEEN] = f"tests see what people have in {' and '.join(places)}: {fault}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    wanted = [
        item
        for item in items
        if part in ("all", "machine" if item.get_closest_marker("machine") else "parallel")
        and not (config.getoption("--quick") and quick.launches(item))
        and (config.getoption("--all") or not item.get_closest_marker("broad"))
    ]
    if not config.getoption("--all"):
        wanted = list(one_caller_each(wanted))
    # The longest tests are beside this file. They begin early: at the end the other workers would wait.
    here = Path(__file__).parent
    wanted.sort(key=lambda item: item.path.parent != here)
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=list(set(items) - set(wanted)))
    items[:] = wanted
    for item in items:
        needs = {name for mark in item.iter_markers("needs") for name in mark.args}
        for name in sorted(needs):
            if name not in _CAPABILITIES:
                raise pytest.UsageError(f"{item.nodeid} needs {name!r}: known are {', '.join(_CAPABILITIES)}")
            # Stored in the report, so that the summary also sees tests of other processes (xdist).
            item.user_properties.append(("needs", name))
            if reason := lacks(name):
                item.add_marker(pytest.mark.skip(reason=reason))


# Attacks, limits and network access are tested as root and as a user.
_BOTH_CALLERS = tuple(f"{ROOT}/tests/{folder}/" for folder in ("escape", "limits", "egress"))


def one_caller_each(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Leave out one of the two runs, as root and as a user, of each test. A hash of the test's name chooses:
    always the same, and both equally often."""
    for item in items:
        caller = getattr(item, "callspec", None) and item.callspec.params.get("runner_as")  # type: ignore[attr-defined]
        both = item.get_closest_marker("both_callers") or str(item.path).startswith(_BOTH_CALLERS)
        if caller is None or both or caller == _only_caller(item.nodeid, caller):
            yield item


def _only_caller(test: str, caller: str) -> str:
    available = [name for name in ("root", "user") if not lacks(name)] or ["root", "user"]
    name = re.sub(rf"(?<=[\[-]){caller}(?=[]-])", "*", test, count=1)
    return available[zlib.crc32(name.encode()) % len(available)]


# The garbage collector would traverse thousands of collected tests again and again.
@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --part machine, leave out the files that have no such test: to import all of them takes longer
    than to run it. A file that was named on the command line stays, because pytest refuses to ignore it."""
    if config.getoption("--part") != "machine" or config.args_source is not config.ArgsSource.TESTPATHS:
        return None
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and "mark.machine" not in collection_path.read_text() else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    tally = Tally.of(terminalreporter.stats)
    if path := config.getoption("--tally"):
        tally.write(Path(path))
    elif lines := tally.needs():
        terminalreporter.section("what the machine let us test")
        for line in lines:
            terminalreporter.line(line, yellow="skipped" in line)
    for line in told(terminalreporter.stats, "published"):
        terminalreporter.line(line)
    if seen := config.stash.get(_SEEN, ""):
        terminalreporter.line(seen, yellow=True)
    if left := config.stash.get(_LEFT, []):
        terminalreporter.section("left on the machine by this run", red=True)
        for line in left:
            terminalreporter.line(line)


def told(stats: Mapping[str, Sequence[Any]], key: str) -> list[str]:
    """What tests recorded for the end of a run with record_property(key, line)."""
    reports = [report for reports in stats.values() for report in reports if hasattr(report, "when")]
    return sorted(
        {line for each in reports for name, line in getattr(each, "user_properties", ()) if name == key}
    )


# --- Callers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """A user of the command line: root, or a user without privileges."""

    name: str
    uid: int
    home: Path  # private to the caller, with the XDG directories and TMPDIR below it
    prefix: tuple[str, ...]  # the command that starts a process as this caller
    python: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)

    def command(self, *args: str | os.PathLike[str]) -> list[str]:
        return [*self.prefix, *self.python, "-m", "runner", *(os.fspath(arg) for arg in args)]

    def __call__(
        self,
        *args: str | os.PathLike[str],
        input: str | bytes | None = None,  # noqa: A002 -- named as in subprocess.run
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "/",
        pass_fds: Sequence[int] = (),
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run `runner ARGS` to its end. Bytes that are not UTF-8 come back as surrogate escapes."""
        process = self.start(
            *args,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        )
        with process:
            try:
                out, err = process.communicate(input.encode() if isinstance(input, str) else input, timeout)
            except BaseException:
                process.kill()
                raise
        text = (data.decode("utf-8", "surrogateescape") for data in (out, err))
        return subprocess.CompletedProcess(process.args, process.returncode, *text)

    def start(
        self,
        *args: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = "/",
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Start `runner ARGS` with pipes, unless `popen` says otherwise.

        Every command of the prefix calls exec, so the pid is the runner's.
        """
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            self.command(*args), env={**self.environ, **(env or {})}, cwd=cwd, **{**streams, **popen}
        )

    def give(self, path: str | os.PathLike[str]) -> None:
        """Make `path`, and all below it, belong to this caller."""
        if os.geteuid() == 0:
            for each in [Path(path), *Path(path).rglob("*")]:
                os.chown(each, self.uid, self.uid, follow_symlinks=False)


@pytest.fixture(
    params=[
        pytest.param("root", marks=pytest.mark.needs("root")),
        pytest.param("user", marks=pytest.mark.needs("user")),
    ]
)
def runner_as(request: pytest.FixtureRequest, templates: None) -> Iterator[Caller]:
    """The command line, as root or as an ordinary user: `one_caller_each` chooses. As both if the test is
    marked `both_callers`, and with --all."""
    yield from _caller(request.param, request)


@pytest.fixture
def runner_as_root(request: pytest.FixtureRequest, templates: None) -> Iterator[Caller]:
    """For behaviour of root's runner only. The test marks itself `needs("root")`."""
    yield from _caller("root", request)


@pytest.fixture
def runner_as_user(request: pytest.FixtureRequest, templates: None) -> Iterator[Caller]:
    """For behaviour that is the same for every user. The test marks itself `needs("user")` if it launches."""
    yield from _caller("user", request)


def _caller(name: str, request: pytest.FixtureRequest) -> Iterator[Caller]:
    from tests.template import quick as from_template

    become = _become_user() if name == "user" else []
    uid = USER_UID if become else os.geteuid()
    if become:
        try:
            python, pythonpath = request.getfixturevalue("_code_for_everybody")
        except pytest.skip.Exception:
            # So that the summary counts it, whether the test is marked or not.
            if ("needs", "user") not in request.node.user_properties:
                request.node.user_properties.append(("needs", "user"))
            raise
    else:
        python, pythonpath = (sys.executable,), str(ROOT)
    with _public_directory() as parent:
        home = parent / "home"
        environ = {
            "PATH": SYSTEM_PATH,
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "TMPDIR": str(home / "tmp"),
            "PYTHONPATH": pythonpath,
        }
        for variable, folder in {
            "XDG_CACHE_HOME": ".cache",
            "XDG_CONFIG_HOME": ".config",
            "XDG_DATA_HOME": ".local/share",
            "XDG_RUNTIME_DIR": "run",
            "XDG_STATE_HOME": ".local/state",
        }.items():
            environ[variable] = str(home / folder)
        for variable, path in environ.items():
            if variable.startswith("XDG_") or variable == "TMPDIR":
                Path(path).mkdir(parents=True, mode=0o700)
        home.chmod(0o700)
        caller = Caller(name, uid, home, tuple(become), tuple(python), environ)
        caller.give(home)
        yield caller if request.node.get_closest_marker("fresh") else from_template(caller)
        assert os.listdir(environ["TMPDIR"]) == [], "the runner left temporary files"


@contextlib.contextmanager
def account_of(caller: Caller) -> Iterator[Caller]:
    """The caller, with an account in a password database of its own that has the caller's home. Entries of
    `runner wrap` are started with that home, whatever HOME says. Only root can do this: a test that starts
    such an entry marks itself `needs("root")`."""
    from tests.template import with_account  # which imports this module

    if os.geteuid() != 0:
        yield caller
        return
    lines = [
        line
        for line in Path("/etc/passwd").read_text().splitlines()
        if line.split(":")[2:3] != [str(caller.uid)]
    ]
    own = f"tester:x:{caller.uid}:{caller.uid}::{caller.home}:/bin/sh"
    with _public_directory() as folder:
        passwd = folder / "passwd"
        passwd.write_text("\n".join((own, *lines)) + "\n")
        passwd.chmod(0o644)
        script = 'mount --bind "$0" /etc/passwd && exec "$@"'
        alone = (
            "/usr/bin/unshare",
            "--mount",
            "--propagation",
            "private",
            "/bin/sh",
            "-c",
            script,
            str(passwd),
        )
        yield with_account(caller, alone, str(passwd))


@pytest.fixture
def account_as(runner_as: Caller) -> Iterator[Caller]:
    """As runner_as, with an account."""
    with account_of(runner_as) as caller:
        yield caller


@pytest.fixture
def account_user(runner_as_user: Caller) -> Iterator[Caller]:
    """As runner_as_user, with an account."""
    with account_of(runner_as_user) as caller:
        yield caller


@pytest.fixture(scope="session")
def _code_for_everybody() -> Iterator[tuple[tuple[str, ...], str]]:
    """An interpreter and a PYTHONPATH that the ordinary user can use.

    Normally those of this process. A user cannot reach a checkout or an interpreter below /root (0700): then
    the code is copied to /tmp, and the system's own interpreter of the same version runs it.
    """
    imports = f"import {', '.join(PACKAGES)}, pydantic"

    def works(python: str, pythonpath: str) -> bool:
        argv = [*_become_user(), python, "-c", imports]
        env = {"PATH": SYSTEM_PATH, "PYTHONPATH": pythonpath, "HOME": "/"}
        try:
            done = subprocess.run(argv, env=env, cwd="/", capture_output=True, timeout=60)
        except OSError:
            return False
        return done.returncode == 0

    if works(sys.executable, str(ROOT)):
        yield (sys.executable,), str(ROOT)
        return
    with _public_directory() as copy:
        heavy = shutil.ignore_patterns(
            "__pycache__", "mypy*", "ruff*", "pip*", "setuptools*", "hypothesis*", "*.pth"
        )
        shutil.copytree(sysconfig.get_path("platlib"), copy / "site", ignore=heavy, symlinks=True)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, copy / "code" / package, ignore=heavy, symlinks=True)
        for path in copy.rglob("*"):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
        pythonpath = f"{copy / 'code'}:{copy / 'site'}"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        for python in (os.path.realpath(sys.executable), f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
            if works(python, pythonpath):
                yield (python,), pythonpath
                return
        pytest.skip(unreachable(os.path.realpath(sys.executable), version))


def unreachable(python: str, version: str) -> str:
    """Why an ordinary user cannot run our interpreter."""
    closed = [str(path) for path in Path(python).parents if not path.stat().st_mode & 0o001]
    why = f"only its owner may enter {closed[-1]}" if closed else "it does not work for them"
    return (
        f"needs an interpreter that an ordinary user can run: not {python} ({why}),"
        f" and there is no {version} with the same packages in /usr/bin or /usr/local/bin"
    )


# --- Folders and files -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _public_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)
        _forget_states(path)


def _forget_states(folder: Path) -> None:
    """Root's plugins keep their state in the machine's own place. Remove that of the plugins in `folder`."""
    if os.geteuid() == 0:
        for state in list_states(os.environ):
            if state.manifest.startswith(f"{folder}/"):
                with contextlib.suppress(StateInUse, StateNotRemoved):
                    remove_state(state)


@pytest.fixture
def plugin_dir() -> Iterator[Path]:
    """A new directory that every user may enter. pytest's own tmp_path is 0700, closed to a dropped uid."""
    with _public_directory() as path:
        yield path


@pytest.fixture
def write_file() -> Callable[..., Path]:
    """write_file(path, text, mode=0o644): write a world-readable file, whatever the umask."""

    def write(path: Path, text: str | bytes, mode: int = 0o644) -> Path:
        for parent in reversed([p for p in path.parents if not p.exists()]):
            parent.mkdir()
            parent.chmod(0o755)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return path

    return write


# --- Nothing left behind -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traces:
    """Things that launches could leave on the machine, besides processes."""

    mounts: frozenset[str]
    files: frozenset[str]
    groups: frozenset[str]

    def since(self, before: Traces) -> list[str]:
        """What is new since `before`, and mounts that are missing."""
        return sorted(
            (self.mounts ^ before.mounts) | (self.files - before.files) | (self.groups - before.groups)
        )


def traces() -> Traces:
    """This machine's mounts, files in the folders the runner uses, and cgroups of ended runners."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    files = {
        f"{folder}/{name}"
        for folder, folders, names in os.walk("/run/runner")  # skips what others remove meanwhile
        for name in (*folders, *names)
    } - {"/run/runner/uids"}
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            files |= {f"{place}/{name}" for name in os.listdir(place) if _MADE_BY_THE_RUNNER.match(name)}
    groups = set()
    for site in survey(read_mounts()).sites:
        # A killed runner cannot remove its cgroups. The next runner does; here this process does.
        sweep(site.directory)
        for folder, names, _ in os.walk(site.directory):
            # runner-PID-START-NUMBER. The leaf that a runner moves to on v2 stays until its unit ends.
            groups |= {f"{folder}/{name}" for name in names if re.fullmatch(r"runner-\d+-\d+-\d+", name)}
    return Traces(frozenset(mounts), frozenset(files), frozenset(filter(_has_no_runner, groups)))


def _has_no_runner(group: str) -> bool:
    """A runner keeps a lock on its cgroups as long as it lives."""
    try:
        fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False  # removed since the listing, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


# A cache is no leak.
_MADE_BY_THE_RUNNER = re.compile(r"\.*(runner(?!-cache-)|bwrap|bubblewrap)")


def _parents() -> dict[int, int]:
    """The parent of each living process.

    Not by /proc/PID/task/TID/children, which is faster: the kernel may leave out a child while others end.
    """
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_bytes()  # with the name of a program, in any encoding
        except OSError:  # it ended after the listing
            continue
        state, parent = stat.rpartition(b")")[2].split()[:2]
        if state not in b"ZX":
            parents[int(name)] = int(parent)
    return parents


def children_of(pid: int) -> list[int]:
    """The pids of its living children."""
    return sorted(child for child, parent in _parents().items() if parent == pid)


def descendants() -> set[int]:
    """The pids of all living processes below this one, orphans included."""
    parents = _parents()
    family = {os.getpid()}
    while True:
        grown = family | {pid for pid, parent in parents.items() if parent in family}
        if grown == family:
            return family - {os.getpid()}
        family = grown


def vanished(pids: set[int], seconds: float = _VANISH_SECONDS) -> bool:
    """Wait until all of `pids` have ended. False if some are still alive after `seconds`."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with open(fd, "rb"):
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
    return True


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails the test if a process that it started, or an orphan of one, is still alive at its end."""
    with _no_process_left():
        yield


@pytest.fixture
def machine_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test if it leaves a process, a mount, a file or a cgroup behind, anywhere on the machine."""
    refuse_beside_others(request.node)
    before = traces()
    with _no_process_left():
        yield
    assert traces().since(before) == []


def refuse_beside_others(test: pytest.Item) -> None:
    """Fails a test that checks the whole machine, unless it runs alone."""
    if test.get_closest_marker("machine") is None:
        pytest.fail(
            "machine_as_before counts what all processes of this machine make."
            " Mark the test @pytest.mark.machine, so that it runs alone,"
            " or use nothing_left, which looks only at processes the test started"
        )
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.fail(
            "tests marked `machine` do not run beside others: use scripts/test, or pytest without -n,"
            " or leave them out with --part parallel"
        )


@contextlib.contextmanager
def _no_process_left() -> Iterator[None]:
    before = descendants()
    yield
    left = descendants() - before
    all_ended = vanished(left)
    _reap_orphans()
    if not all_ended:
        left &= descendants()
        names = {pid: _cmdline(pid) for pid in left}
        for pid in left:  # so that one leak is one failure
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail(f"processes left behind: {names}")
    assert descendants() <= before, "new processes appeared after the test had ended"


def _reap_orphans() -> None:
    """Wait for ended orphans that became children of this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"


# --- Nothing left behind by the whole run ------------------------------------------------------------------

_BEFORE = pytest.StashKey[Traces]()
_LEFT = pytest.StashKey[list[str]]()
# Other users of the machine also make files and mounts. Theirs are transient or have other names.
_LEFT_SECONDS = 10.0 * _PATIENCE


def pytest_sessionstart(session: pytest.Session) -> None:
    # Before the first xdist worker starts.
    if _is_first_process(session.config):
        session.config.stash[_BEFORE] = traces()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # After the last xdist worker has ended.
    if _is_first_process(session.config) and (before := session.config.stash.get(_BEFORE, None)) is not None:
        left = left_by_run(before)
        deadline = time.monotonic() + _LEFT_SECONDS
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left &= left_by_run(before)
        if left:
            session.config.stash[_LEFT] = sorted(left)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_first_process(config: pytest.Config) -> bool:
    return not hasattr(config, "workerinput") and not config.option.collectonly


def left_by_run(before: Traces) -> set[str]:
    """New traces that by their name could be this run's."""
    found = {
        line
        for line in traces().since(before)
        if line.startswith("/") or re.search(r" /\S*(/rt-|runner|bwrap)|nsfs", line)
    }
    return found | {f"/tmp/{name}" for name in os.listdir("/tmp") if name.startswith(TEMP_PREFIX)}
