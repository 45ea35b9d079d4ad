"""Rehearse a launch: run bwrap with every option a plugin gets, and check the cage from inside.

An option that bwrap accepts may still have no effect. So a shell in the cage prints its ids, capabilities,
filter and namespaces, and tries what must fail. If bwrap fails with all options together, each group of
options is tried alone, to find the layer at fault.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

from sandbox.doctor.finding import Finding
from sandbox.doctor.trial import Run, run_bwrap
from sandbox.doctor.user_namespaces import filter_remedy, read_surroundings
from sandbox.files import write_all
from sandbox.plan.operations import PROC_MASKS
from sandbox.spec import INSIDE_ID as INSIDE_NUMBER

INSIDE_ID = str(INSIDE_NUMBER)
_SHELL = "/bin/sh"
_ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)  # BPF_RET | BPF_K, SECCOMP_RET_ALLOW

# Builtins and readlink only, so that every system with a shell can run it. Each line: a word and a value.
_LOOK = """
while IFS= read -r line; do
  case $line in Uid:*|Gid:*|CapEff:*|CapBnd:*|NoNewPrivs:*|Seccomp:*) echo "${line%%:*} ${line#*:}";; esac
done < /proc/self/status
for name in user pid net ipc uts cgroup mnt; do echo "ns_$name $(readlink /proc/self/ns/$name)"; done
interfaces=
while read -r name rest; do
  case $name in *:*) interfaces="$interfaces${name%%:*} ";; esac
done < /proc/net/dev
echo "interfaces $interfaces"
for path in / /usr /dev /proc/sys; do
  if ( : > "$path/.runner-doctor" ) 2>/dev/null; then echo "writable $path"; fi
done
for path in /tmp /dev/shm; do
  if ( : > "$path/probe" ) 2>/dev/null; then echo "scratch $path"; fi
done
for name in $MASKS; do
  if ( read -r line < "/proc/$name" ) 2>/dev/null; then echo "unmasked /proc/$name"; fi
done
for number in 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  if [ -e "/proc/self/fd/$number" ]; then echo "open_fd $number"; fi
done
if IFS= read -r line < /proc/1/environ || [ -n "$line" ]; then echo "environ leaked"; fi
if [ -d /fd-bind/bin ] || [ -d /fd-bind/lib ]; then echo "fd_bind yes"; fi
if [ -e /sys/kernel ]; then echo "sys visible"; fi
echo "end yes"
"""

Facts = dict[str, list[str]]


class LayerOptions(NamedTuple):
    """bwrap's options for one layer, what they do, and the check of their effect from inside."""

    layer: str
    holds: str
    options: tuple[str, ...]
    problem: Callable[[Facts], str]  # returns '' if the layer has its effect
    along: tuple[str, ...] = ()  # further options that it needs when tried alone


def rehearse(bwrap: str, uid: int | None, filter_program: bytes = b"") -> list[Finding]:
    """One finding for each layer that bwrap makes."""
    seccomp = os.memfd_create("seccomp")
    usr = os.open("/usr", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        groups = _groups(usr, seccomp)

        def run(chosen: list[LayerOptions], script: str) -> Run:
            os.lseek(seccomp, 0, os.SEEK_SET)
            options = [
                *foundation(),
                *(option for group in chosen for option in group.options),
                "--chdir",
                "/",
            ]
            # bwrap closes its copies of both descriptors. Ours stay open for the next run.
            return run_bwrap(bwrap, options, (_SHELL, "-c", script), uid=uid, descriptors=(usr, seccomp))

        write_all(seccomp, filter_program or _ALLOW_ALL)
        return _judge(groups, run)
    finally:
        os.close(usr)
        os.close(seccomp)


def _judge(groups: list[LayerOptions], run: Callable[[list[LayerOptions], str], Run]) -> list[Finding]:
    masks = " ".join(name for name in PROC_MASKS if os.path.exists(f"/proc/{name}"))
    whole = run(groups, f"MASKS='{masks}'{_LOOK}")
    if whole.worked:
        facts = read_facts(whole.output)
        return [_from_inside(group, facts) for group in groups]
    bare = run([], ":")
    if not bare.worked:
        return [
            Finding(
                "cage",
                "missing",
                f"bwrap cannot build even the smallest cage: {describe_run(bare)}",
                remedy=_bare_remedy(bare),
                cause="cage",
            )
        ]
    findings = [
        _alone(group, run([group._replace(options=(*group.along, *group.options))], ":")) for group in groups
    ]
    if all(finding.status == "ok" for finding in findings):
        findings.append(
            Finding(
                "cage",
                "missing",
                f"each layer works alone, but all of them together do not: {describe_run(whole)}",
            )
        )
    return findings


def _from_inside(group: LayerOptions, facts: Facts) -> Finding:
    problem = group.problem(facts) if "end" in facts else "the check from inside the cage did not finish"
    if problem:
        return Finding(
            group.layer,
            "missing",
            f"bwrap accepted the options, but they have no effect: {problem}",
            cause="ineffective",
        )
    return Finding(group.layer, "ok", group.holds, "tried in a cage, and checked from inside")


def _alone(group: LayerOptions, run: Run) -> Finding:
    if run.worked:
        return Finding(
            group.layer, "ok", group.holds, "tried alone, because the whole cage could not be built"
        )
    return Finding(
        group.layer,
        "missing",
        describe_run(run),
        f"tried: bwrap {' '.join(group.options)}",
        _remedy(group, run),
        "bwrap",
    )


def _bare_remedy(run: Run) -> str:
    if os.strerror(errno.ENOSYS) in run.complaint:  # of openat2: the filter cannot read its flags
        return filter_remedy(read_surroundings(), ("openat2",))
    return "see the other findings of `runner doctor`"


def _remedy(group: LayerOptions, run: Run) -> str:
    if "Unknown option" in run.complaint:
        return "this bwrap is too old: install bubblewrap 0.10 or newer (Debian 12's 0.8 has the options too)"
    if "NETLINK_ROUTE" in run.complaint:
        return filter_remedy(read_surroundings(), ("socket(AF_NETLINK)",))
    if group.layer == "masked_proc":
        return "in a container: --security-opt systempaths=unconfined (podman: unmask=ALL)"
    return "see the other findings of `runner doctor`; the kernel log (journalctl -k) names the denial"


def describe_run(run: Run) -> str:
    """Describe a failed run in one sentence."""
    if run.stage:
        return f"could not {run.stage}: {os.strerror(run.number)}"
    if run.late:
        return "it took longer than 60 s"
    if run.signal:
        return f"the spawner was ended by signal {run.signal}"
    return (
        run.complaint.splitlines()[-1]
        if run.complaint
        else f"bwrap exited with {run.code} and without a message"
    )


def read_facts(output: str) -> Facts:
    facts: Facts = {}
    for line in output.splitlines():
        word, _, seen = line.partition(" ")
        facts.setdefault(word, []).append(seen.strip())
    return facts


def foundation() -> list[str]:
    """The fewest options that run a shell: a user namespace and the system's own programs."""
    options = ["--unshare-user", "--uid", INSIDE_ID, "--gid", INSIDE_ID, "--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store"):
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    return options


def _groups(usr: int, seccomp: int) -> list[LayerOptions]:
    masks = [
        o
        for name in PROC_MASKS
        if os.path.exists(f"/proc/{name}")
        for o in ("--ro-bind", "/dev/null", f"/proc/{name}")
    ]
    return [
        LayerOptions(
            "namespaces",
            "own user, pid, mount, ipc and uts namespaces",
            ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "plugin"),
            lambda facts: _shared(facts, "user", "pid", "mnt", "ipc", "uts"),
        ),
        LayerOptions(
            "cgroup_namespace",
            "own cgroup namespace",
            ("--unshare-cgroup",),
            lambda facts: _shared(facts, "cgroup"),
        ),
        LayerOptions(
            "network", "own network namespace with nothing but loopback", ("--unshare-net",), _shared_network
        ),
        LayerOptions(
            "nested_user_namespaces",
            "no further user namespaces inside (bwrap tried to make one and was refused)",
            ("--disable-userns", "--assert-userns-disabled"),
            lambda facts: "",
        ),
        LayerOptions(
            "identity", f"uid and gid {INSIDE_ID} inside", ("--uid", INSIDE_ID, "--gid", INSIDE_ID), _identity
        ),
        LayerOptions(
            "capabilities", "no capabilities, and no way to get one", ("--cap-drop", "ALL"), _capabilities
        ),
        LayerOptions(
            "session",
            "own session, empty environment, no descriptors but 0-2, no new privileges",
            ("--new-session", "--die-with-parent", "--clearenv"),
            _session,
        ),
        LayerOptions(
            "fd_binds",
            "folders are bound by open descriptor",
            ("--ro-bind-fd", str(usr), "/fd-bind"),
            _fd_bind,
        ),
        LayerOptions(
            "masked_proc",
            "fresh /proc with its dangerous files masked, and no /sys",
            ("--proc", "/proc", *masks),
            _masked,
            along=("--unshare-pid",),  # without, bwrap binds the host's /proc instead of mounting one
        ),
        LayerOptions(
            "scratch",
            "private /tmp and /dev/shm with a size limit",
            (
                "--dev",
                "/dev",
                "--size",
                "1048576",
                "--perms",
                "1777",
                "--tmpfs",
                "/tmp",
                "--size",
                "1048576",
                "--perms",
                "1777",
                "--tmpfs",
                "/dev/shm",
                "--remount-ro",
                "/dev",
            ),
            lambda facts: (
                "" if facts.get("scratch") == ["/tmp", "/dev/shm"] else "/tmp or /dev/shm cannot be written"
            ),
        ),
        LayerOptions(
            "seccomp_in_cage",
            "bwrap loads the system call filter",
            ("--add-seccomp-fd", str(seccomp)),
            _filtered,
        ),
        LayerOptions(
            "read_only_root",
            "everything else is read-only",
            ("--remount-ro", "/"),
            lambda facts: " ".join(("writable:", *facts["writable"])) if "writable" in facts else "",
        ),
    ]


def _shared(facts: Facts, *names: str) -> str:
    shared = [name for name in names if facts.get(f"ns_{name}", [""])[0] in ("", _namespace(name))]
    return f"shared with the host: {', '.join(shared)}" if shared else ""


def _namespace(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{name}")
    except OSError:  # a kernel without this kind
        return ""


def _shared_network(facts: Facts) -> str:
    if shared := _shared(facts, "net"):
        return shared
    return "" if facts.get("interfaces") == ["lo"] else f"interfaces inside: {facts.get('interfaces')}"


def _identity(facts: Facts) -> str:
    for kind in ("Uid", "Gid"):
        if set(facts.get(kind, ["?"])[0].split()) != {INSIDE_ID}:
            return f"{kind} inside: {facts.get(kind)}"
    return ""


def _capabilities(facts: Facts) -> str:
    for kind in ("CapEff", "CapBnd"):
        if int(facts.get(kind, ["1"])[0], 16):
            return f"{kind} inside: {facts.get(kind)}"
    return ""


def _session(facts: Facts) -> str:
    if facts.get("NoNewPrivs") != ["1"]:
        return "no_new_privs is not set inside"
    if "environ" in facts:
        return "bwrap's environment can be read inside"
    return f"open descriptors inside: {', '.join(facts['open_fd'])}" if "open_fd" in facts else ""


def _fd_bind(facts: Facts) -> str:
    return "" if "fd_bind" in facts else "the folder bound by descriptor is empty inside"


def _masked(facts: Facts) -> str:
    if "sys" in facts:
        return "/sys is visible inside"
    return f"readable inside: {', '.join(facts['unmasked'])}" if "unmasked" in facts else ""


def _filtered(facts: Facts) -> str:
    return "" if facts.get("Seccomp") == ["2"] else f"Seccomp inside: {facts.get('Seccomp')}"
