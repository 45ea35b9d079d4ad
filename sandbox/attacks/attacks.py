"""The list of attacks. One list for `runner doctor --attack` and for tests/escape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from sandbox.spec import Limits

Group = Literal[
    "filesystem",
    "kernel surface",
    "processes",
    "network",
    "resources",
    "kernel memory",
    "secrets",
    "protocol",
]
# How the control is run. Most are the same plan without this layer (controls.py). "unix": without the mounts,
# for sockets. "limits": the whole plan, but without limits and cgroups. "uid": the plan with root's uid.
# "bare": no sandbox. "unread": the whole plan, but no runner reads what it prints.
Control = Literal[
    "filter",
    "lock",
    "mounts",
    "unix",
    "masks",
    "read_only",
    "pids",
    "network",
    "limits",
    "uid",
    "bare",
    "unread",
]


class AttackedLayer(NamedTuple):
    title: str
    control: Control
    remedy: str


_DOCTOR = "run `runner doctor`, which names what is in the way"
LAYERS: Mapping[str, AttackedLayer] = {
    "filter": AttackedLayer("system call filter", "filter", f"{_DOCTOR}; let [layers] seccomp say require"),
    "lock": AttackedLayer(
        "system call filter, user namespace lock",
        "lock",
        f"{_DOCTOR}; let [layers] user_namespace_lock say require",
    ),
    "mounts": AttackedLayer("own mounts", "mounts", "take the path out of [read] and [write] in the policy"),
    "unix": AttackedLayer("own mounts", "unix", "take the path out of [read] and [write] in the policy"),
    "masks": AttackedLayer("masked /proc", "masks", _DOCTOR),
    "read_only": AttackedLayer("read-only mounts", "read_only", _DOCTOR),
    "read_only_system": AttackedLayer("read-only mounts", "mounts", _DOCTOR),
    "pids": AttackedLayer("pid namespace", "pids", _DOCTOR),
    "network": AttackedLayer(
        "network namespace",
        "network",
        "let [network] default say none in the policy, and run `runner doctor`",
    ),
    "uid": AttackedLayer("a uid of its own", "uid", f"{_DOCTOR}; let [layers] uid say require"),
    "privileges": AttackedLayer("no capabilities, one mapped uid", "bare", _DOCTOR),
    "environment": AttackedLayer("own environment", "bare", "take the variable out of [env] in the policy"),
    "descriptors": AttackedLayer(
        "closed descriptors", "bare", "report it: no setting of a policy opens them"
    ),
    "end": AttackedLayer(
        "everything ends with the plugin", "bare", "report it: no setting of a policy changes it"
    ),
    "memory": AttackedLayer(
        "memory limit",
        "limits",
        "give the runner a cgroup: run it as root, or by systemd-run --user --scope -p Delegate=yes",
    ),
    "processes": AttackedLayer(
        "process limit",
        "limits",
        "give the runner a cgroup: run it as root, or by systemd-run --user --scope -p Delegate=yes",
    ),
    "sizes": AttackedLayer("sizes of /tmp and /dev/shm", "limits", _DOCTOR),
    "rlimits": AttackedLayer("resource limits of each process", "limits", _DOCTOR),
    "reader": AttackedLayer(
        "strict reading of messages", "unread", "report it: no setting of a policy changes it"
    ),
}


class Attack(NamedTuple):
    """An attempt that a cage must refuse."""

    id: str
    group: Group
    tries: str  # for people: to …
    layer: str  # of LAYERS
    # An act of probe.py and its arguments. {name}: a decoy. call:NAME: the number of a system call.
    act: tuple[str, ...]
    held: tuple[str, ...]  # errnos and signals that show that the layer held; first: under the default policy
    limit: str = ""  # a limit of the policy that it exceeds. Such attacks run in a cage with SMALL limits
    cves: tuple[str, ...] = ()  # holes that needed just this to succeed


# Published holes, by the attack that was their first step.
_CVES: Mapping[str, tuple[str, ...]] = {
    "init-3": ("CVE-2012-0056",),
    "replace-bwrap": ("CVE-2019-5736",),
    "sysctl": ("CVE-2022-0811",),
    "call-io_uring_setup": ("CVE-2022-29582",),
    "call-fsopen": ("CVE-2022-0185",),
    "call-bpf": ("CVE-2021-3490",),
    "call-perf_event_open": ("CVE-2013-2094",),
    "session-keyring": ("CVE-2016-0728",),
    "32-bit": ("CVE-2010-3301",),
    "socket-AF_VSOCK": ("CVE-2021-26708",),
    "socket-AF_PACKET": ("CVE-2016-8655", "CVE-2017-7308"),
    "socket-AF_ALG": ("CVE-2026-31431",),
    "socket-AF_CAN": ("CVE-2021-3609",),
    "socket-AF_RXRPC": ("CVE-2026-43500",),
    "socket-NETLINK_SOCK_DIAG": ("CVE-2013-1763",),
    "socket-NETLINK_XFRM": ("CVE-2017-16939", "CVE-2026-43284"),
    "socket-NETLINK_NETFILTER": ("CVE-2024-1086",),
    "ulp-espintcp": ("CVE-2026-46300",),
    "process-trace-child": ("CVE-2019-13272",),
    "reach-abstract": ("CVE-2020-15257",),
    "keep-tls": ("CVE-2023-0461",),
    "secret-descriptor": ("CVE-2024-21626",),
}

# The limits of the cage in which attacks on limits run.
SMALL = Limits(memory=48 << 20, pids=24, tmp=1 << 20, shm=1 << 20)
OUT_OF_MEMORY = "ended by the runner (oom)"

_NEWUSER, _NEWNS = "0x10000000", "0x00020000"
# One control message of 64,000 bytes that the kernel keeps without looking into it; a key for 127.0.0.1; a
# group on loopback; the same with a sender.
_PACKET_OPTIONS = (64000).to_bytes(8, "little").hex() + "0600000001000000"
_MD5_KEY = "020000007f000001" + "00" * 120 + "00000400000000006b657973"
_GROUP6 = "ff12" + "00" * 13 + "01" + "01000000"
_SENDER4 = "e1010101" + "7f000001" + "7f000002"
_TCP4, _UDP4, _UDP6 = ("2", "1"), ("2", "2"), ("10", "2")
_NO_FAMILY = "EAFNOSUPPORT"  # the strict filter has no sockets


def _filesystem() -> Iterator[Attack]:
    for name in ("folder", "tmp", "shm"):
        place = {"folder": "/var/tmp", "tmp": "/tmp", "shm": "/dev/shm"}[name]
        yield Attack(
            f"read-{name}", "filesystem", f"read a file in the host's {place}", "mounts",
            ("read", f"{{{name}}}/secret"), ("ENOENT",),
        )  # fmt: skip
    yield Attack(
        "write-folder", "filesystem", "create a file in a folder that anybody may write", "mounts",
        ("create", "{folder}/open/planted"), ("ENOENT",),
    )  # fmt: skip
    for path in (
        "/etc/shadow", "/etc/machine-id", "/root", "/home", "/run", "/var", "/sys", "/boot", "/opt", "/mnt",
    ):  # fmt: skip
        name = path[1:].replace("/", "-")
        yield Attack(f"see-{name}", "filesystem", f"see {path}", "mounts", ("find", path), ("ENOENT",))
    for path, layer in (
        ("/", "read_only"), ("/etc", "read_only"), ("/dev", "read_only"), ("/usr", "read_only_system"),
    ):  # fmt: skip
        yield Attack(
            f"change-{path[1:] or 'root'}", "filesystem", f"change {path}", layer, ("change_mode", path),
            ("EROFS",),
        )  # fmt: skip
    for name in ("kallsyms", "keys", "timer_list", "interrupts", "kcore", "kmsg", "sched_debug"):
        yield Attack(
            f"proc-{name}", "filesystem", f"open /proc/{name}", "masks", ("open_to_read", f"/proc/{name}"),
            ("EACCES", "ENOENT"),
        )  # fmt: skip
    for path in ("/proc/1/mem", "/proc/1/task/1/mem"):
        yield Attack(
            f"init-{path.count('/')}", "filesystem", f"open {path}, the memory of bwrap", "masks",
            ("open_to_read", path), ("EACCES",),
        )  # fmt: skip
    yield Attack(
        "replace-bwrap", "filesystem", "open the sandbox's own program for writing", "uid",
        ("open_to_write", "/proc/1/exe"), ("EACCES", "EROFS"),
    )  # fmt: skip
    yield Attack(
        "sysctl", "filesystem", "open a sysctl for writing", "privileges",
        ("open_to_write", "/proc/sys/kernel/core_pattern"), ("EACCES", "EROFS", "ENOENT"),
    )  # fmt: skip
    yield Attack("device", "filesystem", "make a device node", "privileges", ("make_device",), ("EPERM",))
    yield Attack(
        "set-user-id", "filesystem", "make a set-user-ID program", "filter", ("set_user_id",), ("EPERM",)
    )


def _calls() -> Iterator[Attack]:
    """System calls with arguments that have no effect: which errno they get tells who refuses them."""
    none = ("0", "0", "0", "0", "0")
    for name, arguments, held, tries in (
        ("mount", none, "EPERM", "mount something"),
        ("umount2", none[:2], "EPERM", "unmount something"),
        ("chroot", ("0",), "EPERM", "change the root"),
        ("setns", ("-1", "0"), "EPERM", "join a namespace"),
        ("clone3", none[:2], "ENOSYS", "make namespaces by clone3, whose flags no filter can read"),
        ("io_uring_setup", none[:2], "ENOSYS", "use io_uring, which no filter sees"),
        ("userfaultfd", ("-1",), "ENOSYS", "use userfaultfd"),
        ("open_tree", ("-1", "0", "0"), "ENOSYS", "clone a mount"),
        ("fsopen", none[:2], "ENOSYS", "make a filesystem"),
        ("mount_setattr", ("-1", *none[:4]), "ENOSYS", "make a mount writable"),
        ("bpf", ("-1", "0", "0"), "EPERM", "load a BPF program"),
        ("perf_event_open", ("0", "0", "0", "-1", "-1"), "EPERM", "trace with perf"),
        ("name_to_handle_at", ("-1", *none[:4]), "EPERM", "get handles of files"),
        ("init_module", none[:3], "EPERM", "load a kernel module"),
        (
            "kexec_load",
            ("0", "17", "0", "0x40"),
            "EPERM",
            "load another kernel",
        ),  # never valid: 0 would unload one
        ("syslog", ("3", "0", "0"), "EPERM", "read the kernel's log"),
        ("clock_settime", none[:2], "EPERM", "set the clock"),
        ("unshare", ("0",), "EPERM", "call unshare"),
    ):
        act = ("system_call", f"call:{name}", *arguments)
        yield Attack(f"call-{name}", "kernel surface", tries, "filter", act, (held,))


def _kernel() -> Iterator[Attack]:
    yield from _calls()
    high = hex(0xFFFFFFFF_00000000 | int(_NEWUSER, 0))
    for name, words in {
        "unshare": ("unshare", _NEWUSER),
        "clone": ("clone", "call:clone", _NEWUSER),
        "clone-high": ("clone", "call:clone", high),  # the kernel ignores the high half
    }.items():
        yield Attack(
            f"user-namespace-{name}", "kernel surface", f"make a user namespace by {name.split('-')[0]}"
            + (" with high bits" if "-" in name else ""), "lock", words, ("EPERM",),
        )  # fmt: skip
    for word, words in {
        "add-key": ("add_key", "call:add_key", "runner-attack", "-2"),
        "session-keyring": ("join_keyring", "call:keyctl"),
    }.items():
        yield Attack(word, "kernel surface", f"use the kernel's keys ({word})", "filter", words, ("EPERM",))
    yield Attack(
        "32-bit",
        "kernel surface",
        "make a system call of 32-bit programs",
        "filter",
        ("int_0x80",),
        ("SIGSYS",),
    )
    yield Attack(
        "terminal", "kernel surface", "make a terminal", "mounts", ("terminal",), ("ENOENT", "EACCES")
    )
    for name, number, kind, protocol in (
        ("AF_VSOCK", 40, 1, 0),
        ("AF_PACKET", 17, 2, 0),
        ("AF_ALG", 38, 5, 0),
        ("AF_BLUETOOTH", 31, 3, 0),
        ("AF_CAN", 29, 3, 0),
        ("AF_RXRPC", 33, 2, 2),
        ("AF_XDP", 44, 3, 0),
        ("NETLINK_AUDIT", 16, 3, 9),
        ("NETLINK_KOBJECT_UEVENT", 16, 3, 15),
        ("NETLINK_SOCK_DIAG", 16, 3, 4),
        ("NETLINK_XFRM", 16, 3, 6),
        ("NETLINK_NETFILTER", 16, 3, 12),
        ("NETLINK_GENERIC", 16, 3, 16),
    ):
        act = ("family", str(number), str(kind), str(protocol))
        yield Attack(
            f"socket-{name}", "kernel surface", f"open a socket of {name}", "filter", act, (_NO_FAMILY,)
        )
    yield Attack(
        "ulp-espintcp", "kernel surface", "put IPsec into a TCP connection (TCP_ULP)", "filter",
        ("option", *_TCP4, "6", "31", b"espintcp".hex(), "8"), ("ENOPROTOOPT", _NO_FAMILY),
    )  # fmt: skip


def _processes() -> Iterator[Attack]:
    pids = ("ESRCH", "ENOENT")
    for name, tries, layer, words, held in (
        ("see", "see a process of the caller", "pids", ("find_process", "{nonce}"), pids[1:]),
        ("signal", "signal a process of the caller", "pids", ("signal_process", "{pid}"), pids[:1]),
        ("trace-child", "trace a child", "filter", ("trace_child", "call:ptrace"), ("EPERM",)),
        ("trace-init", "trace the first process", "filter", ("trace_first", "call:ptrace"), ("EPERM",)),
        (
            "memory",
            "read another process's memory",
            "filter",
            ("read_memory", "call:process_vm_readv"),
            ("EPERM",),
        ),
        (
            "descriptor",
            "take another process's descriptor",
            "filter",
            ("steal_descriptor", "call:pidfd_open", "call:pidfd_getfd"),
            ("EPERM",),
        ),
        ("root", "become root", "privileges", ("become", "0"), ("EINVAL", "EPERM")),
        ("other-user", "become another user", "privileges", ("become", "1000"), ("EINVAL", "EPERM")),
        ("daemon", "leave a process behind", "end", ("leave_a_process", "{left}"), ("gone",)),
    ):
        yield Attack(f"process-{name}", "processes", tries, layer, words, held)


def _network() -> Iterator[Attack]:
    refused = ("ECONNREFUSED", _NO_FAMILY)
    no_route = ("ENETUNREACH", _NO_FAMILY)
    for name, tries, layer, words, held in (
        (
            "tcp",
            "a TCP server on the host's localhost",
            "network",
            ("connect", "127.0.0.1", "{tcp}"),
            refused,
        ),
        (
            "tcp6",
            "the same over IPv6",
            "network",
            ("connect", "::1", "{tcp6}"),
            (*refused, "ENETUNREACH", "EADDRNOTAVAIL"),
        ),
        (
            "udp",
            "a UDP server on the host's localhost",
            "network",
            ("datagram", "127.0.0.1", "{udp}"),
            refused,
        ),
        (
            "abstract",
            "an abstract unix socket of the host",
            "network",
            ("connect_unix", "{abstract}"),
            refused,
        ),
        (
            "unix",
            "a unix socket in the host's files",
            "unix",
            ("connect_unix", "{unix}"),
            ("ENOENT", _NO_FAMILY),
        ),
        ("route", "another machine", "network", ("route", "192.0.2.1"), no_route),
        ("metadata", "the metadata address of clouds", "network", ("route", "169.254.169.254"), no_route),
    ):
        yield Attack(f"reach-{name}", "network", f"reach {tries}", layer, words, held)


def _resources() -> Iterator[Attack]:
    full, most = ("ENOSPC",), str(3 << 20)
    eperm, in_memory = ("EPERM",), ("ENOMEM", "EPERM")
    for name, tries, layer, limit, words, held in (
        ("tmp", "fill /tmp", "sizes", "tmp", ("fill", "/tmp", most), full),
        ("shm", "fill /dev/shm", "sizes", "shm", ("fill", "/dev/shm", most), full),
        ("files", "fill /tmp with empty files", "sizes", "tmp", ("empty_files", "/tmp", "1500"), full),
        ("open", "raise its limit of open files", "rlimits", "", ("raise_limit", "NOFILE", "8192"), eperm),
        ("core", "allow itself core dumps", "rlimits", "", ("raise_limit", "CORE", "4096"), eperm),
        ("locked", "lock 1 MiB of memory", "rlimits", "", ("lock_memory", str(1 << 20)), in_memory),
        ("processes", "start 50 processes", "processes", "pids", ("processes", "50"), ("EAGAIN",)),
        # The last one: it ends the plugin.
        (
            "memory",
            "use 64 MiB of memory",
            "memory",
            "memory",
            ("memory", str(64 << 20)),
            (OUT_OF_MEMORY, "ENOMEM", "SIGKILL"),
        ),
    ):
        yield Attack(f"use-{name}", "resources", tries, layer, words, held, limit)


def _kernel_memory() -> Iterator[Attack]:
    """With 64 MiB a plugin held gigabytes, by thousands of each."""
    no_option = ("ENOPROTOOPT", _NO_FAMILY)
    for name, tries, words, held in (
        ("attribute", "a large attribute, by path", ("large_attribute", "path", "60000"), ("ENOTSUP",)),
        ("attribute-link", "one by link", ("large_attribute", "link", "60000"), ("ENOTSUP",)),
        ("attribute-open", "one by descriptor", ("large_attribute", "descriptor", "1004"), ("ENOTSUP",)),
        (
            "packet-options",
            "packet options",
            ("option", *_UDP6, "41", "6", _PACKET_OPTIONS, "64000"),
            ("EINVAL", _NO_FAMILY),
        ),
        (
            "short-options",
            "short packet options",
            ("option", *_UDP6, "41", "6", "10" + "00" * 7 + "06", "16"),
            no_option,
        ),
        ("md5-key", "keys of TCP", ("option", *_TCP4, "6", "14", _MD5_KEY, "216"), no_option),
        ("tls", "the kernel's TLS (TCP_ULP)", ("option", *_TCP4, "6", "31", b"tls".hex(), "3"), no_option),
        ("socket-filter", "a filter of a socket", ("socket_filter",), no_option),
        ("group6", "a multicast group over IPv6", ("option", *_UDP6, "41", "20", _GROUP6, "20"), no_option),
        ("group-sender", "a group by sender", ("option", *_UDP4, "0", "39", _SENDER4, "12"), no_option),
        (
            "filter-listener",
            "a listener of a filter",
            ("listener_of_a_filter", "call:seccomp"),
            ("EINVAL", "EPERM"),
        ),
        ("poll", "1025 descriptors to wait for", ("poll_many", "1025"), ("EINVAL",)),
        ("splice", "pages that splice puts into a pipe", ("zeroes", "splice"), ("EINVAL",)),
        ("tee", "pages that tee puts into a pipe", ("zeroes", "tee"), ("EINVAL",)),
        ("sendfile", "pages that sendfile puts into a socket", ("zeroes", "sendfile"), ("EINVAL",)),
        ("huge-file", "a file of huge pages", ("huge_memory_file",), ("EINVAL",)),
        (
            "huge-page",
            "a huge page",
            ("system_call", "call:mmap", "0", "4096", "3", "0x40022", "-1", "0"),
            ("ENOMEM", "EPERM"),
        ),
        (
            "huge-shared",
            "huge shared memory",
            ("system_call", "call:shmget", "0", "4096", "0x980"),
            ("ENOMEM", "EPERM"),
        ),
    ):
        yield Attack(f"keep-{name}", "kernel memory", f"keep {tries}", "filter", words, held)


def _secrets() -> Iterator[Attack]:
    for name, tries, layer, words in (
        ("variable", "find a variable of its caller", "environment", ("find_variable", "{variable}")),
        ("process", "find a variable of another process", "pids", ("read", "/proc/{pid}/environ")),
        (
            "descriptor",
            "read through a folder that was left open",
            "descriptors",
            ("through_descriptors", "self", "secret"),
        ),
    ):
        yield Attack(f"secret-{name}", "secrets", tries, layer, words, ("ENOENT",))


# What a plugin says in place of an answer to its host, as Python, and why the runner must end it.
_SAYINGS = (
    (
        "endless-line",
        "a line of 17 MiB without an end",
        "for _ in range(17): print('a' * (1 << 20), end='')",
        ("frame_too_large", "output"),
    ),
    ("deep", "JSON that is nested 100,000 deep", "print('[' * 100000)", ("too_deep",)),
    (
        "twice",
        "a message with one key twice",
        """print('{"jsonrpc": "2.0", "id": 1, "id": 1, "result": {}}')""",
        ("duplicate_key",),
    ),
)


def _protocol() -> Iterator[Attack]:
    for name, what, code, causes in _SAYINGS:
        held = tuple(f"ended by the runner ({cause})" for cause in causes)
        yield Attack(f"say-{name}", "protocol", f"answer with {what}", "reader", ("say", code), held)


def _all() -> Iterator[Attack]:
    groups = (_filesystem, _kernel, _processes, _network, _resources, _kernel_memory, _secrets, _protocol)
    for group in groups:
        for attack in group():
            yield attack._replace(cves=_CVES.get(attack.id, ()))


ATTACKS: tuple[Attack, ...] = tuple(_all())
