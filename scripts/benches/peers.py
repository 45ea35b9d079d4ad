"""Other programs that confine a process, beside the runner: what a launch costs with each.

None of them is part of the runner. With --peers those that are missing are installed: packages of the system
with apt-get, packages from npm and PyPI below .venv/bench-peers. A peer that cannot be installed or started
here is named with the reason.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from sandbox.speed.value import NamedTuple
from scripts.benches import launch, oci
from scripts.benches.caller import RUNNER, Caller, Unable, reason
from scripts.benches.launch import MANIFEST, OVER_RAW, OVER_SUM, PYTHON, RAW, WRITES, Command
from scripts.benches.machine import version_of
from scripts.benches.resident import resident
from scripts.benches.rows import Table

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".venv/bench-peers"
NODE_FOLDER, PYTHON_FOLDER = FOLDER / "node_modules", FOLDER / "python"

OURS, NEXO = "runner exec, default policy", "raw bwrap, nexo's flags"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TRUE = ("/usr/bin/true",)


class Job(NamedTuple):
    """What a peer is to do."""

    bare: Command  # raw bwrap with the runner's arguments, for the same program
    program: tuple[str, ...] = TRUE  # empty: the command is to be only what stands before a program
    folder: str = ""  # that the program may write to, beside what it has of its own
    stays: bool = False  # a library is called by a program that is running
    number: int = 0  # of several at once

    @property
    def shown(self) -> str:
        """The folder of the program, if it is not in /usr, which all show."""
        program = self.program[0] if self.program else ""
        return "" if program.startswith("/usr/") else os.path.dirname(program)


class Peer(NamedTuple):
    name: str
    programs: tuple[str, ...]  # what has to be there
    packages: tuple[str, ...]  # of the system, that bring them
    command: Callable[[Caller, Job], Command]
    how: str  # how it was configured
    npm: str = ""  # a package
    pypi: str = ""  # a package that is a library


class FoundPeers(NamedTuple):
    """The peers of one run."""

    peers: tuple[Peer, ...]
    versions: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]  # one sentence for each


# --- how each is started ------------------------------------------------------------------------------------


def nexo_command(caller: Caller, job: Job) -> Command:
    """What nexo's documentation says that its host starts: see its section on [plugin.sandbox]."""
    state = caller.own("state-nexo")
    argv = [job.bare.argv[0], "--die-with-parent", "--unshare-pid", "--unshare-uts", "--unshare-ipc"]
    argv += ["--new-session", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl", "/etc/resolv.conf"):
        argv += ["--ro-bind-try", path, path]
    argv += ["--unshare-net", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    argv += ["--setenv", "PATH", "/usr/bin:/bin", "--ro-bind-try", "/usr/bin", "/usr/bin"]
    argv += ["--ro-bind", job.shown, job.shown] if job.shown else []
    argv += ["--bind", job.folder, job.folder] if job.folder else []
    return Command([*argv, "--bind", state, state, "--", *job.program], {})


def firejail_command(caller: Caller, job: Job) -> Command:
    try:
        pwd.getpwuid(caller.uid)
    except KeyError:
        raise Unable(f"it needs a user that has an account, and {caller.uid} has none") from None
    argv = [_path("firejail"), "--quiet", "--noprofile", "--net=none", "--private", "--private-dev"]
    argv += ["--private-tmp", "--caps.drop=all", "--seccomp", "--nonewprivs", "--ipc-namespace"]
    argv += ["--hostname=plugin", "--nodbus", "--rlimit-nofile=256"]
    argv += ["--noroot"] if caller.uid else []  # firejail refuses it to root
    argv += [f"--whitelist={path}" for path in (job.shown, job.folder) if path]
    return Command([*argv, "--", *job.program], {})


def srt_command(caller: Caller, job: Job) -> Command:
    settings = {
        "network": {"allowedDomains": [], "deniedDomains": []},
        "filesystem": {"denyRead": [], "allowWrite": [job.folder] if job.folder else [], "denyWrite": []},
    }
    path = caller.write("srt/settings.json", json.dumps(settings))
    return Command([str(NODE_FOLDER / ".bin/srt"), "--settings", path, *job.program], {})


def codex_command(caller: Caller, job: Job) -> Command:
    """By its own program, without the script in front of it, which starts node."""
    found = [*NODE_FOLDER.glob("@openai/codex-linux-*/vendor/*/bin/codex")]
    if not found:
        raise Unable("npm has no program of it for this machine")
    # Not below /tmp, where it would not put the program that it starts itself by.
    # One for each of several at once, which otherwise delete each other's files.
    home = FOLDER / f"codex-{caller.uid}-{job.number}"
    home.mkdir(exist_ok=True)
    # It starts itself again in there, so it has to see its own program.
    rights = {str(found[0].parent.resolve()): "read", job.shown: "read", job.folder: "write"}
    lines = [f'"{path}" = "{right}"\n' for path, right in rights.items() if path]
    (home / "config.toml").write_text(_CODEX_SETTINGS + "".join(lines))
    if os.geteuid() == 0:
        for path in (home, home / "config.toml"):
            os.chown(path, caller.uid, caller.uid)
    return Command(["/usr/bin/env", f"CODEX_HOME={home}", str(found[0]), "sandbox", "--", *job.program], {})


_CODEX_SETTINGS = """\
default_permissions = "bench"
[permissions.bench.network]
enabled = false
[permissions.bench.filesystem]
":minimal" = "read"
"""


def library_command(name: str) -> Callable[[Caller, Job], Command]:
    def command(caller: Caller, job: Job) -> Command:
        script = caller.write("starter/starter.py", Path(__file__).with_name("starter.py").read_text())
        writable = job.folder or caller.own(f"state-{name}")
        mode = "each" if job.stays else "once"
        argv = [sys.executable, "-I", script, str(PYTHON_FOLDER), name, writable, mode]
        return Command([*argv, *job.program], {})

    return command


def container_command(engine: str, *options: str) -> Callable[[Caller, Job], Command]:
    def command(caller: Caller, job: Job) -> Command:
        if caller.uid:
            raise Unable("it is measured as root only: without, it needs ranges of ids of its own")
        bundle = Path(caller.folder, f"bundle-{engine}-{Path(job.program[0]).name}")
        if job.number == 0:
            shutil.rmtree(bundle, ignore_errors=True)
            oci.make_bundle(bundle, job.bare.argv, job.bare.files)
        argv = [_path(engine), "--root", f"{bundle}/state", *options, "run", "--bundle", str(bundle)]
        return Command([*argv, f"bench-{engine}-{os.getpid()}-{job.number}"], {})

    return command


def gvisor_command(caller: Caller, job: Job) -> Command:
    if job.program:
        return container_command("runsc", "--network=none")(caller, job)
    if caller.uid:
        raise Unable("it is tried as root only")
    # A bundle names its program, so what stands before any program is its command for trying things out.
    return Command([_path("runsc"), "--network=none", "do"], {})


_EQUAL = "the namespaces, mounts, limits and system calls of raw bwrap, in an OCI bundle that is made before"
_CALLED = "its command is not on PyPI, so a Python program that is running calls its library"
PEERS = (
    Peer(NEXO, (), (), nexo_command, "no seccomp filter, no limits, the environment is inherited"),
    Peer(
        "firejail",
        ("firejail",),
        ("firejail",),
        firejail_command,
        "no profile, no network, private home, /dev and /tmp, no capabilities, its own seccomp list",
    ),
    Peer("crun", ("crun",), ("crun",), container_command("crun"), _EQUAL),
    Peer("runc", ("runc",), ("runc",), container_command("runc"), _EQUAL),
    Peer(
        "gVisor",
        ("runsc",),
        ("runsc",),
        gvisor_command,
        "runsc with ptrace, which is Debian's default, no network, and the bundle of runc",
    ),
    Peer(
        "sandlock",
        (),
        (),
        library_command("sandlock"),
        f"/usr read-only, a folder of its own in place of /tmp, no network, no limits; {_CALLED}",
        pypi="sandlock",
    ),
    Peer(
        "nono",
        (),
        (),
        library_command("nono"),
        f"/usr read-only, a folder of its own in place of /tmp, no network, no limits; {_CALLED}",
        pypi="nono-py",
    ),
    Peer(
        "codex",
        ("npm", "bwrap"),
        ("npm", "bubblewrap"),
        codex_command,
        "`codex sandbox` without node in front, a profile that reads :minimal, no network, its own /tmp",
        npm="@openai/codex",
    ),
    Peer(
        "sandbox-runtime",
        ("node", "npm", "bwrap", "socat", "rg"),
        ("nodejs", "npm", "bubblewrap", "socat", "ripgrep"),
        srt_command,
        "no domains, no folders to write to; it starts node, two proxies and bubblewrap",
        npm="@anthropic-ai/sandbox-runtime",
    ),
)


def _path(program: str) -> str:
    found = shutil.which(program, path=PATH)
    if found is None:
        raise Unable(f"there is no {program} in {PATH}")
    return found


# --- finding and installing ---------------------------------------------------------------------------------


def find(install: bool, peers: tuple[Peer, ...] = PEERS) -> FoundPeers:
    """`install`: get what is missing. Otherwise a peer that is missing is only named."""
    present, versions, missing = [], [], []
    for peer in peers:
        reason = _lacks(peer)
        if reason and install:
            reason = _install(peer)
        if reason:
            missing.append(f"{peer.name} is not measured: {reason}")
            continue
        present.append(peer)
        if peer.programs or peer.pypi:
            versions.append((peer.name, _version(peer)))
    return FoundPeers(tuple(present), tuple(versions), tuple(missing))


def _lacks(peer: Peer) -> str:
    lacking = [program for program in peer.programs if shutil.which(program, path=PATH) is None]
    if lacking:
        return f"there is no {' and no '.join(lacking)} here; --peers installs it"
    package = peer.npm or peer.pypi
    if package and not _version_of_package(peer):
        return f"{package} is not in {FOLDER.relative_to(ROOT)}; --peers installs it"
    return ""


def _version(peer: Peer) -> str:
    return _version_of_package(peer) or version_of([_path(peer.programs[0]), "--version"])


def _version_of_package(peer: Peer) -> str:
    """Of npm's or PyPI's package; empty: it is not there, or the peer is none."""
    if peer.pypi:
        found = importlib.metadata.distributions(name=peer.pypi, path=[str(PYTHON_FOLDER)])
        return next((each.version for each in found), "")
    about = NODE_FOLDER / peer.npm / "package.json"
    return str(json.loads(about.read_text())["version"]) if peer.npm and about.exists() else ""


def _install(peer: Peer) -> str:
    """Install a peer. Returns why it failed, or ''."""
    pairs = zip(peer.programs, peer.packages, strict=True)
    wanted = [package for program, package in pairs if shutil.which(program, path=PATH) is None]
    if wanted:
        if os.geteuid() != 0:
            return f"only root can install it: apt-get install {' '.join(wanted)}"
        if fault := _run("apt-get", "install", "-y", "--no-install-recommends", *wanted):
            return fault
    FOLDER.mkdir(exist_ok=True)
    fault = ""
    if peer.npm:
        fault = _run("npm", "install", "--prefix", str(FOLDER), "--ignore-scripts", "--no-audit", peer.npm)
    elif peer.pypi:
        install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--upgrade"]
        # Wheels only: none of these may run a program of its own to be installed.
        fault = _run(*install, "--only-binary=:all:", "--target", str(PYTHON_FOLDER), peer.pypi)
    if fault:
        return fault
    return _lacks(peer)


def _run(*argv: str) -> str:
    """Tell what is done, and do it. Returns the last line of what it said if it failed."""
    print(f"bench: {' '.join(argv)}", file=sys.stderr)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=environ, check=False, timeout=600)
    except (OSError, subprocess.SubprocessError) as fault:
        return f"{argv[0]} did not run: {fault}"
    if done.returncode == 0:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
    return f"{argv[0]} ended with {done.returncode}: {said[-1]}"


# --- measuring ----------------------------------------------------------------------------------------------


def bench(caller: Caller, rounds: int, found: FoundPeers) -> list[Table]:
    manifest = caller.write("peers/nexo-plugin.toml", MANIFEST.replace('"bench"', '"peers"'))
    argv = [RUNNER, "exec", "--state-dir", f"{caller.own('state-peers')}/own", manifest]
    caller.output_of(argv)  # makes the state directory; fills the caches
    folder = launch.writable_folder(caller, "work-peers")
    commands = {
        RAW: launch.raw(caller, argv),
        PYTHON: Command([sys.executable, "-I", "-S", "-c", "pass"], {}),
        OURS: Command(argv, {}),
        WRITES: Command([RUNNER, "run", "--write", folder, "--", *TRUE], {}),
    }
    with ExitStack() as stack:
        job = Job(commands[RAW], stays=True)
        others, notes = usable(caller, job, found, stack, lambda command: launch.measure(caller, command))
        commands |= others
        taken = launch.interleave(caller, commands, rounds)
    over = dict.fromkeys((name for name in commands if name not in (RAW, PYTHON)), (OVER_RAW, OVER_SUM))
    about = f"{rounds} launches of /usr/bin/true each, interleaved"
    headlines: Mapping[str, str] = {peer.name: f"`/usr/bin/true` with {peer.name}" for peer in found.peers}
    return launch.tables("peers", "peers", caller, about, taken, over, headlines, notes)


def usable(
    caller: Caller, job: Job, found: FoundPeers, stack: ExitStack, try_it: Callable[[Command], object]
) -> tuple[dict[str, Command], tuple[str, ...]]:
    """The peers that do it here, and a sentence about each, also about those that do not: `try_it` raises
    Unable. What they need stays until the stack is closed."""
    commands: dict[str, Command] = {}
    notes = list(found.missing)
    for peer in found.peers:
        try:
            command = peer.command(caller, job)
            if peer.pypi and job.stays:
                command = stack.enter_context(resident(caller, command.argv)).command
            try_it(command)
        except Unable as fault:
            notes.append(f"{peer.name} is not measured: {reason(str(fault))}")
        else:
            commands[peer.name] = command
            notes.append(f"{peer.name}: {peer.how}")
    return commands, tuple(notes)
