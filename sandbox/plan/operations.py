"""What is mounted in a cage, in order: the system's runtime, the plugin's paths, and files of our own."""

from __future__ import annotations

import os

from sandbox import look
from sandbox.network.egress import DNS_ADDRESS
from sandbox.paths.mounts import contains, join, relative
from sandbox.plan.plan import (
    AgentFolder,
    Bind,
    Dev,
    Mask,
    Operation,
    PlanRequest,
    Proc,
    ReadOnly,
    Symlink,
    Text,
    Tmpfs,
)
from sandbox.plan.ssh import known_hosts_text
from sandbox.spawn.order import FOLDERS_ROOT
from sandbox.spec import Grant, MemoryFile
from sandbox.speed.typed import TYPE_CHECKING, Callable, Collection, Iterable, Iterator, Sequence

if TYPE_CHECKING:
    from sandbox.network.ssh import SshPlan
    from sandbox.plan.image import ImageCage

DEFAULT_TMP_BYTES = 64 << 20


DEFAULT_SHM_BYTES = 16 << 20


# The system's read-only runtime, as far as it exists here. Directories of the old layout (/bin, /lib, …)
# are links on a merged system and become the same links inside.
RUNTIME_TREES = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs", "/etc/pki/tls/certs")


RUNTIME_LINKS = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32", "/etc/localtime")


_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/services")


_NETWORK_FILE_LIMIT = 1 << 20


# Parts of a procfs that reveal the host: world-readable ones, and ones that only root may read. Also the
# memory of the cage's own init, which still holds bwrap's options and the host's mount table.
PROC_MASKS = tuple("kallsyms kcore keys timer_list interrupts sched_debug kmsg 1/mem 1/task/1/mem".split())


_PASSWD = b"root:x:0:0:root:/:/usr/sbin/nologin\nnobody:x:65534:65534:plugin:/tmp:/usr/sbin/nologin\n"


_GROUP = b"root:x:0:\nnogroup:x:65534:\n"


_HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"


# Where ssh looks whatever HOME is, and after the plugin's own file.
_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"

# The gate answers at once, so there is one attempt: a plugin whose gate has ended must not wait long.
_RESOLVER = f"nameserver {DNS_ADDRESS}\noptions timeout:5 attempts:1\n".encode()
# Without a network, too: without resolv.conf programs ask 127.0.0.1; sandbox/cell/name_lookups.py answers.
_NSSWITCH = b"passwd: files\ngroup: files\nhosts: files dns\n"


def operations(
    request: PlanRequest,
    grant: Grant,
    binds: Sequence[Bind],
    links: Iterable[Symlink],
    ssh: SshPlan | None = None,
    root: ImageCage | None = None,
) -> tuple[Operation, ...]:
    """`root`: of an image, in place of the system's runtime."""
    limits = grant.limits
    early = [bind for bind in binds if bind.dest in RUNTIME_TREES or bind.dest in RUNTIME_LINKS]
    if root is not None:
        early = [bind for bind in binds if bind.dest in root.dests]
    masks = [Mask(f"/proc/{name}") for name in PROC_MASKS if look.kernel_lexists(f"/proc/{name}")]
    covered = {bind.dest for bind in binds}
    concealed = [
        Mask(join(bind.dest, relative(path, bind.real)))
        for path in request.conceal
        for bind in binds
        if not bind.writable and contains(bind.real, path)
    ]
    ways = dict.fromkeys(links)
    folders = () if root is None else sorted(set(root.folders) - {"/tmp"})
    return (
        *early,
        *(link for link in ways if link.dest in RUNTIME_LINKS or root is not None),
        *(_folder(path, folder_size(limits.tmp), 0o755) for path in folders if not contains("/tmp", path)),
        Proc(),
        *masks,
        # bwrap makes /proc/sys read-only only if its caller could write to the folder. But single sysctls of
        # the plugin's own namespaces are writable, and so is its oom_score_adj.
        ReadOnly("/proc"),
        Dev(),
        *(() if grant.seccomp == "compat" else _NO_TERMINALS),
        _folder("/dev/shm", limits.shm or DEFAULT_SHM_BYTES),
        ReadOnly("/dev"),
        _folder("/tmp", folder_size(limits.tmp)),
        *(_folder(path, folder_size(limits.tmp), 0o755) for path in folders if contains("/tmp", path)),
        # after /tmp: some are below it
        *(link for link in ways if link.dest not in RUNTIME_LINKS and root is None),
        *(bind for bind in binds if bind not in early),
        *dict.fromkeys(concealed),
        *(
            Text(dest, content, covers=root is not None)
            for dest, content in _texts(grant, has_accounts=root is not None)
            if dest not in covered
        ),
        *(() if ssh is None else _ssh_operations(ssh, covered)),
        *_scratch(grant),
        *grant.memory_files,  # after the scratch folder, which some are in
        *(() if root is not None and root.layer_bytes else (ReadOnly("/"),)),
    )


def folder_size(asked: int | None) -> int:
    """Bytes of /tmp, and of each other place in memory."""
    return asked or DEFAULT_TMP_BYTES


# kernel.pty.max counts for the whole machine: a plugin could use up all pseudo-terminals.
_NO_TERMINALS = (Tmpfs("/dev/pts", 4096, 0o755), ReadOnly("/dev/pts"))


_BYTES_PER_INODE = 4096  # an empty file takes 1 KB of kernel memory, and nothing of the size


_FEWEST_INODES = 1024


def _folder(dest: str, size: int, mode: int = 0o1777) -> Tmpfs:
    bounded = look.isdir(FOLDERS_ROOT)  # missing in a hand-made chroot
    return Tmpfs(dest, size, mode, max(_FEWEST_INODES, size // _BYTES_PER_INODE) if bounded else 0)


def _scratch(grant: Grant) -> Iterator[Tmpfs]:
    size = grant.scratch_bytes
    if grant.scratch is not None and size is not None:
        yield _folder(grant.scratch.dest, size, 0o700)._replace(is_scratch=True)


def _texts(grant: Grant, *, has_accounts: bool) -> Iterator[tuple[str, bytes]]:
    """`has_accounts`: an image has its own, and services too."""
    if not has_accounts:
        yield "/etc/passwd", _PASSWD
        yield "/etc/group", _GROUP
    if grant.network.mode != "host":
        yield "/etc/hosts", _HOSTS
        yield "/etc/nsswitch.conf", _NSSWITCH
        if grant.network.mode != "none":
            yield "/etc/resolv.conf", _RESOLVER
            if not has_accounts:
                yield from _copies(("/etc/services",))
        return
    yield from _copies(_NETWORK_FILES[:2] if has_accounts else _NETWORK_FILES)
    if has_accounts:
        yield "/etc/nsswitch.conf", _NSSWITCH  # the host's may name modules that the image does not have


def _ssh_operations(ssh: SshPlan, covered: Collection[str]) -> Iterator[Operation]:
    yield AgentFolder()
    # Where the plugin sees the host's own files, ssh has those.
    if not any(contains(dest, _KNOWN_HOSTS) for dest in covered):
        yield Text(_KNOWN_HOSTS, known_hosts_text(ssh))


def _copies(paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    # Copied and not bound: resolv.conf is often a link into /run, where daemons keep their sockets.
    for path in paths:
        look.note_content(path)
        try:
            with open(path, "rb") as file:
                yield path, file.read(_NETWORK_FILE_LIMIT)
        except OSError:
            continue


_FIXED_FOLDERS = (
    "/tmp",
    "/dev/shm",
    "/dev/pts",
)  # folders of the cage's own, under names that the host has too


def visibility_check(operations: Iterable[Operation], roots: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tells whether an absolute path leads to the same file in the cage as on the
    host.

    A path that only the cage has counts as shown. A folder of the host that has another path in the cage does
    not. `roots`: folders that count as shown if a part of them is. Not below /tmp: what a plugin writes there
    beside the part is lost with its cage.
    """
    places = shown_places(operations)
    parts = [
        root
        for root in roots
        if not contains("/tmp", root) and any(contains(root, place) for place in places)
    ]
    return lambda path: path in parts or any(contains(place, path) for place in places)


def shown_places(operations: Iterable[Operation]) -> tuple[str, ...]:
    """The paths that lead to the same file in the cage as on the host, or that only the cage has. Each stands
    for everything below it."""
    operations = tuple(operations)
    places = [op.dest for op in operations if isinstance(op, Bind | Symlink | Text)]
    places += [os.path.dirname(op.dest) for op in operations if isinstance(op, MemoryFile)]
    places += [op.dest for op in operations if isinstance(op, Tmpfs) and op.dest not in _FIXED_FOLDERS]
    return tuple(places)
