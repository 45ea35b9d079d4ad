"""Other programs that confine a process, beside the runner: what a launch costs with each.

None of them is part of the runner. With --peers those that are missing are installed: packages of the system
with apt-get, packages from npm below .venv/bench-peers. A peer that cannot be installed or started here is
named with the reason.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sandbox.speed.value import NamedTuple
from scripts.benches import launch, oci
from scripts.benches.caller import RUNNER, Caller, Unable, reason
from scripts.benches.launch import MANIFEST, OVER_RAW, OVER_SUM, PYTHON, RAW, Command
from scripts.benches.machine import version_of
from scripts.benches.rows import Table

ROOT = Path(__file__).resolve().parent.parent.parent
NODE_FOLDER = ROOT / ".venv/bench-peers"
NODE_PACKAGE = "@anthropic-ai/sandbox-runtime"

OURS, NEXO = "runner exec, default policy", "raw bwrap, nexo's flags"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Peer(NamedTuple):
    name: str
    programs: tuple[str, ...]  # what has to be there
    packages: tuple[str, ...]  # of the system, that bring them
    from_npm: bool
    command: Callable[[Caller, Command], Command]  # the second: raw bwrap with the runner's arguments
    how: str  # how it was configured


class FoundPeers(NamedTuple):
    """The peers of one run."""

    peers: tuple[Peer, ...]
    versions: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]  # one sentence for each


# --- how each is started ------------------------------------------------------------------------------------


def nexo_command(caller: Caller, bare: Command) -> Command:
    """What nexo's documentation says that its host starts: see its section on [plugin.sandbox]."""
    bwrap = bare.argv[0]
    state = caller.own("state-nexo")
    argv = [bwrap, "--die-with-parent", "--unshare-pid", "--unshare-uts", "--unshare-ipc", "--new-session"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl", "/etc/resolv.conf"):
        argv += ["--ro-bind-try", path, path]
    argv += ["--unshare-net", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    argv += ["--setenv", "PATH", "/usr/bin:/bin", "--ro-bind-try", "/usr/bin", "/usr/bin"]
    return Command([*argv, "--bind", state, state, "--", "/usr/bin/true"], {})


def firejail_command(caller: Caller, bare: Command) -> Command:
    try:
        pwd.getpwuid(caller.uid)
    except KeyError:
        raise Unable(f"it needs a user that has an account, and {caller.uid} has none") from None
    argv = [_path("firejail"), "--quiet", "--noprofile", "--net=none", "--private", "--private-dev"]
    argv += ["--private-tmp", "--caps.drop=all", "--seccomp", "--nonewprivs", "--ipc-namespace"]
    argv += ["--hostname=plugin", "--nodbus", "--rlimit-nofile=256"]
    argv += ["--noroot"] if caller.uid else []  # firejail refuses it to root
    return Command([*argv, "--", "/usr/bin/true"], {})


def srt_command(caller: Caller, bare: Command) -> Command:
    settings = {
        "network": {"allowedDomains": [], "deniedDomains": []},
        "filesystem": {"denyRead": [], "allowWrite": [], "denyWrite": []},
    }
    path = caller.write("srt/settings.json", json.dumps(settings))
    program = NODE_FOLDER / "node_modules/.bin/srt"
    return Command([str(program), "--settings", path, "/usr/bin/true"], {})


def container_command(engine: str) -> Callable[[Caller, Command], Command]:
    def command(caller: Caller, bare: Command) -> Command:
        if caller.uid:
            raise Unable("it is measured as root only: without, it needs ranges of ids of its own")
        bundle = Path(caller.folder, f"bundle-{engine}")
        oci.make_bundle(bundle, bare.argv, bare.files)
        argv = [_path(engine), "--root", f"{bundle}/state", "run", "--bundle", str(bundle)]
        return Command([*argv, f"bench-{engine}-{os.getpid()}"], {})

    return command


_EQUAL = "the namespaces, mounts, limits and system calls of raw bwrap, in an OCI bundle that is made before"
PEERS = (
    Peer(NEXO, (), (), False, nexo_command, "no seccomp filter, no limits, the environment is inherited"),
    Peer(
        "firejail",
        ("firejail",),
        ("firejail",),
        False,
        firejail_command,
        "no profile, no network, private home, /dev and /tmp, no capabilities, its own seccomp list",
    ),
    Peer("crun", ("crun",), ("crun",), False, container_command("crun"), _EQUAL),
    Peer("runc", ("runc",), ("runc",), False, container_command("runc"), _EQUAL),
    Peer(
        "sandbox-runtime",
        ("node", "npm", "bwrap", "socat", "rg"),
        ("nodejs", "npm", "bubblewrap", "socat", "ripgrep"),
        True,
        srt_command,
        "no domains, no folders to write to; it starts node, two proxies and bubblewrap",
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
        if peer.programs:
            versions.append((peer.name, _version(peer)))
    return FoundPeers(tuple(present), tuple(versions), tuple(missing))


def _lacks(peer: Peer) -> str:
    lacking = [program for program in peer.programs if shutil.which(program, path=PATH) is None]
    if lacking:
        return f"there is no {' and no '.join(lacking)} here; --peers installs it"
    if peer.from_npm and not (NODE_FOLDER / "node_modules" / NODE_PACKAGE).exists():
        return f"{NODE_PACKAGE} is not in {NODE_FOLDER.relative_to(ROOT)}; --peers installs it"
    return ""


def _version(peer: Peer) -> str:
    if not peer.from_npm:
        return version_of([_path(peer.programs[0]), "--version"])
    package = json.loads((NODE_FOLDER / "node_modules" / NODE_PACKAGE / "package.json").read_text())
    return str(package["version"])


def _install(peer: Peer) -> str:
    """Install a peer. Returns why it failed, or ''."""
    pairs = zip(peer.programs, peer.packages, strict=True)
    wanted = [package for program, package in pairs if shutil.which(program, path=PATH) is None]
    if wanted:
        if os.geteuid() != 0:
            return f"only root can install it: apt-get install {' '.join(wanted)}"
        if fault := _run("apt-get", "install", "-y", "--no-install-recommends", *wanted):
            return fault
    if peer.from_npm:
        NODE_FOLDER.mkdir(exist_ok=True)
        fault = _run(
            "npm", "install", "--prefix", str(NODE_FOLDER), "--ignore-scripts", "--no-audit", NODE_PACKAGE
        )
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
    commands = {
        RAW: launch.raw(caller, argv),
        PYTHON: Command([sys.executable, "-I", "-S", "-c", "pass"], {}),
        OURS: Command(argv, {}),
    }
    others, notes = usable(caller, commands[RAW], found)
    commands |= others
    taken = launch.interleave(caller, commands, rounds)
    over = dict.fromkeys((name for name in commands if name not in (RAW, PYTHON)), (OVER_RAW, OVER_SUM))
    about = f"{rounds} launches of /usr/bin/true each, interleaved"
    headlines: Mapping[str, str] = {peer.name: f"the same with {peer.name}" for peer in found.peers}
    return launch.tables("peers", "peers", caller, about, taken, over, headlines, notes)


def usable(caller: Caller, bare: Command, found: FoundPeers) -> tuple[dict[str, Command], tuple[str, ...]]:
    """The peers that start here, and a sentence about each, also about those that do not."""
    commands: dict[str, Command] = {}
    notes = list(found.missing)
    for peer in found.peers:
        try:
            command = peer.command(caller, bare)
            launch.measure(caller, command)
        except Unable as fault:
            notes.append(f"{peer.name} is not measured: {reason(str(fault))}")
        else:
            commands[peer.name] = command
            notes.append(f"{peer.name}: {peer.how}")
    return commands, tuple(notes)
