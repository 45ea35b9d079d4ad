"""The compiled filters, read as data: every number, on both architectures, in an interpreter of our own.

What a kernel makes of them is in test_seccomp_kernel.py.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pyseccomp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.seccomp import bpf, syscalls
from sandbox.seccomp import filter as seccomp_filter
from sandbox.seccomp import profile as seccomp_profile
from sandbox.seccomp.profile import ArgumentTest, Case, Profile, ProfileError, Rule
from sandbox.spec import SECCOMP_WITHOUT_INTERNET
from tests.conftest import ROOT
from tests.quick import needs_filters
from tests.sandbox.seccomp.bpf_machine import Machine, verdict
from tests.tables import one_case

ARCHES = ("aarch64", "x86_64")
PROFILES = ("strict", "default", "compat")
AUDIT = {"aarch64": 0xC00000B7, "x86_64": 0xC000003E}
FOREIGN = {"i386": 0x40000003, "AArch32": 0x40000028, "s390x": 0x80000016, "riscv64": 0xC00000F3, "none": 0}
ANSWERS = {"allow": "allow", "enosys": "ENOSYS", "einval": "EINVAL", "deny": "EPERM"}  # of each table
LIBSECCOMP = {"aarch64": pyseccomp.Arch.AARCH64, "x86_64": pyseccomp.Arch.X86_64}

both = [pytest.param(profile, arch, id=f"{profile}-{arch}") for profile in PROFILES for arch in ARCHES]


class Filter:
    """A committed filter in the interpreter."""

    def __init__(self, profile: str, arch: str) -> None:
        self.arch = arch
        self.table = syscalls.load(arch)
        self.machine = Machine(seccomp_filter.filter_bytes(profile, arch))

    def __call__(self, call: str | int, *arguments: int, arch: str | None = None) -> str:
        number = self.table[call] if isinstance(call, str) else call
        audit = (AUDIT | FOREIGN)[arch or self.arch]
        return verdict(self.machine.run(audit, number, *arguments)[0])


@pytest.mark.parametrize(("profile", "arch"), both)
@pytest.mark.parametrize("family", [2, 10])  # AF_INET, AF_INET6
def test_which_profiles_have_no_sockets_of_the_internet(profile: str, arch: str, family: int) -> None:
    allowed = Filter(profile, arch)("socket", family, 1, 0) == "allow"
    assert allowed is (profile not in SECCOMP_WITHOUT_INTERNET)


def stated_verdicts(profile: str) -> dict[str, str]:
    """Name to verdict, read from the TOML without the code under test. "rule" where arguments decide."""
    document = tomllib.loads((ROOT / "policies" / "seccomp" / f"{profile}.toml").read_text())
    verdicts = stated_verdicts(document["extends"]) if "extends" in document else {}
    for table, its in ANSWERS.items():
        for names in document.get(table, {}).values():
            verdicts.update(dict.fromkeys(names, its))
    return verdicts | dict.fromkeys(document.get("rules", {}), "rule")


# --- Tables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "name", "number"),
    [
        ("x86_64", "read", 0),
        ("x86_64", "execve", 59),
        ("aarch64", "read", 63),
        ("aarch64", "execve", 221),
        *((arch, *row) for arch in ARCHES for row in [("clone3", 435), ("mseal", 462), ("setxattrat", 463)]),
        *((arch, *row) for arch in ARCHES for row in [("statmount", 457), ("listmount", 458)]),
        *((arch, *row) for arch in ARCHES for row in [("open_tree_attr", 467), ("file_getattr", 468)]),
    ],
)
def test_table_knows(arch: str, name: str, number: int) -> None:
    assert syscalls.load(arch)[name] == number


@pytest.mark.parametrize("arch", ARCHES)
def test_table_equals_libseccomps_in_both_directions(arch: str) -> None:
    table = syscalls.load(arch)
    resolved = {name: pyseccomp.resolve_syscall(LIBSECCOMP[arch], name) for name in table}
    known = {name: number for name, number in resolved.items() if number != -1}
    assert {name: table[name] for name in known} == known
    assert len(known) > 300
    for number in range(600):
        try:
            name = pyseccomp.resolve_syscall(LIBSECCOMP[arch], number).decode()
        except ValueError:
            continue
        assert table.get(name) == number


def test_table_of_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="no system call table for sparc64"):
        syscalls.load("sparc64")


def test_the_table_script_reads_headers_and_refuses_contradictions(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "syscall-tables"
    header = tmp_path / "unistd_64.h"
    rows = sorted(syscalls.load("x86_64").items(), key=lambda row: -row[1])
    header.write_text(
        "".join(f"#define __NR_{name} {number}\n" for name, number in rows) + "#define __NR_syscalls 472\n"
    )
    copy = tmp_path / "copy"
    for path in (
        "scripts/syscall-tables",
        "sandbox/__init__.py",
        "sandbox/seccomp/__init__.py",
        "sandbox/seccomp/syscalls/__init__.py",
    ):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes((ROOT / path).read_bytes())
    argv = [sys.executable, str(copy / script.relative_to(ROOT)), "x86_64", str(header)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = copy / "sandbox" / "seccomp" / "syscalls" / "x86_64.txt"
    assert written.read_bytes() == (ROOT / "sandbox" / "seccomp" / "syscalls" / "x86_64.txt").read_bytes()

    other = tmp_path / "other.h"
    other.write_text("#define __NR_read 7\n")
    done = subprocess.run([*argv, str(other)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "read is 7, but an earlier header says 0" in done.stderr


# --- Profiles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_every_known_call_has_a_verdict_and_every_verdict_a_known_call(profile: str) -> None:
    known = set(syscalls.load("aarch64")) | set(syscalls.load("x86_64"))
    assert set(stated_verdicts(profile)) == known
    loaded = seccomp_profile.load_profile(profile)
    assert set(loaded.verdicts) | set(loaded.rules) == known
    assert len(loaded.verdicts) + len(loaded.rules) == len(known)


def test_each_profile_allows_all_that_the_stricter_one_allows() -> None:
    strict, default, compat = map(stated_verdicts, PROFILES)
    allowed = {"allow", "rule"}
    for less, more in ((strict, default), (default, compat)):
        assert {n for n in less if less[n] in allowed} <= {n for n in more if more[n] in allowed}


def test_compat_adds_exactly_these_calls() -> None:
    default, compat = stated_verdicts("default"), stated_verdicts("compat")
    added = {name for name in default if default[name] != compat[name]}
    assert added == {"clone3", "ptrace", "process_vm_readv", "process_vm_writev"}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", ["execve", "wait4", "exit_group", "write", "prctl", "rt_sigreturn", "mmap"])
def test_every_profile_lets_bubblewrap_finish_and_the_plugin_start(profile: str, name: str) -> None:
    assert stated_verdicts(profile)[name] == ("rule" if name == "mmap" else "allow")


EMPTY: Profile = Profile("p", {}, {})


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"allowed": {}}, "unknown table allowed"),
        ({"allow": {"a": ["read"], "b": ["read"]}}, "read already has a verdict"),
        ({"allow": {"a": ["read"]}, "deny": {"b": ["read"]}}, "read already has a verdict"),
        (
            {"allow": {"a": ["read"]}, "rules": {"read": {"cases": [], "otherwise": "allow"}}},
            "both a verdict and",
        ),
        ({"rules": {"read": {"otherwise": "allow"}}}, "exactly `cases` and `otherwise`"),
        ({"rules": {"read": {"cases": [], "otherwise": "EWHAT"}}}, "'EWHAT' is neither allow nor"),
        (
            {"rules": {"read": {"cases": [{"if": [], "then": "allow"}], "otherwise": "EPERM"}}},
            "at least one test",
        ),
        *(
            ({"rules": {"read": {"cases": [{"if": [test], "then": "allow"}], "otherwise": "EPERM"}}}, fault)
            for test, fault in [
                ({"arg": 6, "in": [1]}, "arguments are 0 to 5"),
                ({"arg": 0, "any": 1 << 32}, "values have 32 bits"),
                ({"arg": 0, "any": 0}, "`any` needs at least one bit"),
                ({"arg": 0, "above": -1}, "`above` needs a number"),
                ({"arg": 0, "above": 0xFFFFFFFF}, "`above` needs a number"),
                ({"arg": 6, "above": 1}, "arguments are 0 to 5"),
                ({"arg": 0, "above": 1, "mask": 1}, "a test is"),
                ({"arg": 0, "in": []}, "`in` needs values"),
                ({"arg": 0, "in": [16], "mask": 0xF}, "each within the mask"),
                ({"arg": 0, "equals": 1}, "a test is"),
            ]
        ),
    ],
)
def test_faulty_profiles_are_refused(document: dict[str, object], fault: str) -> None:
    with pytest.raises(ProfileError, match=fault):
        seccomp_profile.read_profile("p", document, None)


def test_repeating_a_verdict_of_the_base_is_refused() -> None:
    base = EMPTY._replace(name="base", verdicts={"read": "allow"})
    with pytest.raises(ProfileError, match="read has this verdict in base"):
        seccomp_profile.read_profile("p", {"allow": {"again": ["read"]}}, base)


def test_a_name_without_a_verdict_is_denied() -> None:
    machine = Machine(seccomp_profile.compile_filter(EMPTY, "x86_64"))
    assert verdict(machine.run(AUDIT["x86_64"], 0)[0]) == "EPERM"


@pytest.mark.parametrize("arch", ARCHES)
def test_a_name_of_the_other_architecture_is_skipped_and_a_name_of_none_refused(arch: str) -> None:
    fits = EMPTY._replace(verdicts={"open": "allow"})  # not on aarch64
    machine = Machine(seccomp_profile.compile_filter(fits, arch))
    assert verdict(machine.run(AUDIT[arch], 2)[0]) == (
        "allow" if arch == "x86_64" else "EPERM"
    )  # x86_64's open
    with pytest.raises(ProfileError, match="no system call is called opne"):
        seccomp_profile.compile_filter(EMPTY._replace(verdicts={"opne": "allow"}), arch)


# --- Every number ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "arch"), both)
def test_every_number_gets_its_stated_verdict(profile: str, arch: str) -> None:
    stated = stated_verdicts(profile)
    filtered = Filter(profile, arch)
    by_number = {number: name for name, number in filtered.table.items()}
    for number in range(601):
        name = by_number.get(number)
        expected = stated[name] if name else "ENOSYS"
        if expected != "rule":
            assert filtered(number, *[0xFFFFFFFFFFFFFFFF] * 6) == expected, (number, name)


@one_case(("profile", "arch"), both)
@one_case("number", [472, 599, 1024, 0xFFFF, 0x3FFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_numbers_of_future_calls(profile: str, arch: str, number: int) -> None:
    assert Filter(profile, arch)(number) == "ENOSYS"


@pytest.mark.parametrize("profile", PROFILES)
def test_x32_calls_do_not_exist(profile: str) -> None:
    filtered = Filter(profile, "x86_64")
    for number in range(601):
        assert filtered(0x40000000 | number) == "ENOSYS"


@pytest.mark.parametrize(("profile", "arch"), both)
def test_foreign_architectures_kill_whatever_the_number(profile: str, arch: str) -> None:
    filtered = Filter(profile, arch)
    others = [*FOREIGN, *(other for other in ARCHES if other != arch)]
    for other in others:
        for number in (*range(601), 0x40000000, 0xFFFFFFFF):
            assert filtered(number, arch=other) == "kill"


# --- Arguments ---------------------------------------------------------------------------------------------

HIGH = 0xFFFFFFFF_00000000
SIGCHLD = 17
# What pthread_create and fork of glibc and musl pass.
THREAD = 0x3D0F00
FORK = 0x01200011
NAMESPACES = [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]
FAMILIES = range(64)
UNIX, INET, INET6, NETLINK, VSOCK = 1, 2, 10, 16, 40
STREAM, DGRAM, RAW, SEQPACKET = 1, 2, 3, 5
CLOEXEC, NONBLOCK = 0o2000000, 0o4000
FASTOPEN = 0x20000000
REFUSED_OPTIONS = {
    0: (38, 39, 41, 43, 46, 48),
    1: (26, 50, 51, 52),
    6: (14, 30, 31, 32, 34, 38),
    41: (6, 20, 32, 42, 43, 46, 48, 54, 55, 57, 59),
}

Row = tuple[str, tuple[int, ...], str]


def argument_rows() -> Iterator[Row]:
    """Rows for the default profile, and for compat."""
    yield "clone", (THREAD,), "allow"
    yield "clone", (FORK,), "allow"
    yield "clone", (SIGCHLD,), "allow"
    for bit in NAMESPACES:
        yield "clone", (bit | SIGCHLD,), "EPERM"
        yield "clone", (HIGH | bit | THREAD,), "EPERM"
        yield "clone", (SIGCHLD, bit), "allow"  # the stack pointer is no flag
    for request in (0x5412, 0x541C, 0x541D, 0x5423, 0x5452):
        yield "ioctl", (0, request), "EPERM"
        yield "ioctl", (0, HIGH | request), "EPERM"
        yield "ioctl", (0, request | 1 << 32), "EPERM"
        yield "ioctl", (request, 0x5401), "allow"  # a descriptor is no request
        yield "ioctl", (0, request | 0x10000), "allow"
    for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5411, 0x541A, 0x541E, 0x5422, 0x5424, 0):
        yield "ioctl", (0, request), "allow"
    for family in FAMILIES:
        plain = "allow" if family in (UNIX, INET, INET6, NETLINK) else "EAFNOSUPPORT"
        yield "socket", (family, STREAM, 0), plain
        yield "socket", (HIGH | family, STREAM, 0), plain
        yield "socketpair", (family, STREAM, 0), "allow" if family == UNIX else "EAFNOSUPPORT"
    yield "socket", (NETLINK, RAW, HIGH), "allow"
    for protocol in range(1, 24):
        yield "socket", (NETLINK, RAW, protocol), "EAFNOSUPPORT"
    for family in (INET, INET6):
        for kind in (STREAM, DGRAM):
            for protocol in (0, 6, 17):
                yield "socket", (family, kind | CLOEXEC | NONBLOCK, protocol), "allow"
                yield "socket", (family, HIGH | kind, HIGH | protocol), "allow"
            for protocol in (1, 2, 33, 58, 132, 136, 255, 262):
                yield "socket", (family, kind, protocol), "EPROTONOSUPPORT"
                yield "socket", (family, kind, HIGH | protocol), "EPROTONOSUPPORT"
        for kind in (RAW, SEQPACKET, 0, 4, 6, 10):
            yield "socket", (family, kind, 0), "EPROTONOSUPPORT"
    for kind in (STREAM, DGRAM, SEQPACKET):
        yield "socket", (UNIX, kind, 0), "allow"
    for call, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
        before = (FASTOPEN,) * flags  # of other arguments every bit is allowed
        for more in (0, 0x4000, HIGH):
            yield call, (*before, FASTOPEN | more), "EOPNOTSUPP"
            yield call, (*before, more), "allow"
        yield call, (*before, 0xFFFFFFFF & ~FASTOPEN), "allow"
    for level in (0, 1, 6, 17, 41, 270):
        for option in range(80):
            refused = option in REFUSED_OPTIONS.get(level, ())
            for high in (0, HIGH):
                words = (0, high | level, high | option, high, high | 4096)
                yield "setsockopt", words, "ENOPROTOOPT" if refused else "allow"
    for length in (4097, 65536, 0x80000000, 0xFFFFFFFF, HIGH | 4097):
        for level, option in ((1, 2), (1, 26), (6, 1), (41, 6), (0, 0)):
            yield "setsockopt", (0, level, option, 0, length), "EINVAL"
    for call, at, most, answer in (
        ("setxattr", 3, 1000, "EOPNOTSUPP"),
        ("lsetxattr", 3, 1000, "EOPNOTSUPP"),
        ("fsetxattr", 3, 1000, "EOPNOTSUPP"),
        ("poll", 1, 1024, "EINVAL"),
        ("ppoll", 1, 1024, "EINVAL"),
        ("select", 0, 1024, "EINVAL"),
        ("pselect6", 0, 1024, "EINVAL"),
    ):
        for high in (0, HIGH):
            before, after = (high | 0xFFFFFFFF,) * at, (high | 0xFFFFFFFF,) * (5 - at)
            for size in (0, 1, most):
                yield call, (*before, high | size, *after), "allow"
            for size in (most + 1, 65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
                yield call, (*before, high | size, *after), answer
    for call, at, bit, answer in (
        ("mmap", 3, 0x40000, "ENOMEM"),
        ("memfd_create", 1, 0x4, "EINVAL"),
        ("shmget", 2, 0o4000, "ENOMEM"),
        ("seccomp", 1, 0x8, "EINVAL"),
    ):
        before, after = (0xFFFFFFFF,) * at, (0xFFFFFFFF,) * (5 - at)
        for more in (0, 0x22, HIGH, 0x58000000):
            yield call, (*before, bit | more, *after), answer
            yield call, (*before, more, *after), "allow"
        yield call, (*before, 0xFFFFFFFF & ~bit, *after), "allow"
    for command in (1024, 1026, HIGH | 1024):
        yield "fcntl", (0, command), "EPERM"
    for command in (0, 1, 2, 3, 4, 5, 6, 7, 1025, 1030, 1033):
        yield "fcntl", (0, command), "allow"
        yield "fcntl", (0, command, 0o20000), "EPERM" if command == 4 else "allow"  # F_SETFL with O_ASYNC
    yield "fcntl", (0, HIGH | 4, HIGH | 0o24001), "EPERM"
    yield "fcntl", (0o20000, 4, ~0o20000 & 0xFFFFFFFF), "allow"
    yield "socketpair", (UNIX, DGRAM | CLOEXEC, 0), "allow"
    for persona in (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF, HIGH | 0xFFFFFFFF):
        yield "personality", (persona,), "allow"
    for persona in (0x40000, 0x400000, 0x40008, 1, 0x20001, 0xFFFFFFFE):
        yield "personality", (persona,), "EPERM"


# Where each call that makes or changes a file has its mode, and where its flags, if it has any.
MODES: dict[str, tuple[int, int | None]] = {
    "chmod": (1, None),
    "fchmod": (1, None),
    "fchmodat": (2, None),
    "fchmodat2": (2, None),
    "creat": (1, None),
    "mknod": (1, None),
    "mknodat": (2, None),
    "open": (2, 1),
    "openat": (3, 2),
}


def mode_rows(arch: str) -> Iterator[Row]:
    """Rows for all profiles: no set-user-id and no set-group-id files."""
    for call, (mode, flags) in MODES.items():
        if call not in syscalls.load(arch):
            continue
        for bits, expected in (
            (0o4755, "EPERM"),
            (0o2755, "EPERM"),
            (0o106000, "EPERM"),
            (0o1777, "allow"),
            (0, "allow"),
        ):
            for high in (0, HIGH):
                arguments = [0] * (mode + 1)
                arguments[mode] = high | bits
                if flags is not None:
                    yield call, tuple(arguments), "allow"  # nothing is made: the register may hold anything
                    arguments[flags] = 0o101
                    yield call, tuple(arguments), expected
                    arguments[flags] = 0o20000002  # O_TMPFILE, without the bit that differs between machines
                yield call, tuple(arguments), expected


def strict_rows() -> Iterator[Row]:
    for call, arguments, expected in argument_rows():
        if call not in ("socket", "socketpair", "shmget"):
            yield call, arguments, expected
    for family in FAMILIES:
        for protocol in (0, 1, 6):
            yield "socket", (family, STREAM, protocol), "EAFNOSUPPORT"
        yield "socketpair", (family, STREAM, 0), "allow" if family == UNIX else "EAFNOSUPPORT"
    for kind in (STREAM, SEQPACKET):
        yield "socketpair", (UNIX, kind | CLOEXEC | NONBLOCK, 0), "allow"
        yield "socketpair", (HIGH | UNIX, HIGH | kind, 0), "allow"
    for kind in (DGRAM, RAW, 0, 4, 6, 10):
        yield "socketpair", (UNIX, kind, 0), "EAFNOSUPPORT"
        yield "socketpair", (UNIX, kind | CLOEXEC | NONBLOCK, 0), "EAFNOSUPPORT"


@pytest.mark.parametrize(("profile", "arch"), both)
def test_arguments(profile: str, arch: str) -> None:
    filtered = Filter(profile, arch)
    known = syscalls.load(arch)
    rows = [*(strict_rows() if profile == "strict" else argument_rows()), *mode_rows(arch)]
    rows = [row for row in rows if row[0] in known]  # aarch64 has neither poll nor select
    decided = {name for name, its in stated_verdicts(profile).items() if its == "rule" and name in known}
    assert decided == {call for call, _, _ in rows}, "a rule without a row"
    for call, arguments, expected in rows:
        assert filtered(call, *arguments) == expected, (call, [hex(a) for a in arguments])


# --- The compiler ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "arch"), both)
def test_committed_filters_are_what_the_compiler_makes_today(profile: str, arch: str) -> None:
    fresh = seccomp_profile.compile_filter(seccomp_profile.load_profile(profile), arch)
    assert seccomp_filter.filter_bytes(profile, arch) == fresh, (
        "run scripts/seccomp-filters and commit the result"
    )


@pytest.mark.parametrize(("profile", "arch"), both)
def test_programs_are_short(profile: str, arch: str) -> None:
    machine = Machine(seccomp_filter.filter_bytes(profile, arch))
    assert len(machine.code) < 260
    assert machine.unreachable() == []
    steps = {number: machine.run(AUDIT[arch], number)[1] for number in range(601)}
    assert steps.pop(syscalls.load(arch)["setsockopt"]) <= 30  # by length, level and option
    assert max(steps.values()) <= 21  # socket, by three arguments


def test_bytes_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from sandbox.seccomp import filter as seccomp; from sandbox.seccomp import profile as p\n"
        "print([seccomp.digest(p.compile_filter(p.load_profile(n), a))"
        " for n in seccomp.PROFILES for a in sorted(seccomp.AUDIT_ARCH)])"
    )
    outputs = set()
    for seed in ("0", "1", "4242"):
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        outputs.add(
            subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, check=True).stdout
        )
    assert len(outputs) == 1
    expected = [seccomp_filter.digest(seccomp_filter.filter_bytes(n, a)) for n in PROFILES for a in ARCHES]
    assert outputs.pop().decode().strip() == str(expected)


actions = st.sampled_from(
    ["allow", "EPERM", "ENOSYS", "EAFNOSUPPORT", "EPROTONOSUPPORT", "EOPNOTSUPP", "ENOPROTOOPT", "EINVAL"]
)
words = st.integers(0, 0xFFFFFFFF)
argument_tests = st.one_of(
    st.builds(lambda arg, most: ArgumentTest(arg, above=most), st.integers(0, 5), st.integers(0, 0xFFFFFFFE)),
    st.builds(
        lambda arg, bits: ArgumentTest(arg, any_bits=bits), st.integers(0, 5), st.integers(1, 0xFFFFFFFF)
    ),
    st.builds(
        lambda arg, values, mask: ArgumentTest(arg, tuple(v & mask for v in values), mask),
        st.integers(0, 5),
        st.lists(words, min_size=1, max_size=4),
        st.sampled_from([0xFFFFFFFF, 0xF, 0xFF00]),
    ),
)
rules = st.builds(
    Rule,
    st.lists(
        st.builds(Case, st.lists(argument_tests, min_size=1, max_size=3).map(tuple), actions), max_size=4
    ).map(tuple),
    actions,
)


def decide(rule: Rule, arguments: list[int]) -> str:
    def holds(test: ArgumentTest) -> bool:
        low = arguments[test.arg] & 0xFFFFFFFF
        if test.above is not None:
            return low > test.above
        return bool(low & test.any_bits) if test.any_bits else low & test.mask in test.values

    return next((case.action for case in rule.cases if all(map(holds, case.tests))), rule.otherwise)


@settings(max_examples=60, deadline=None, database=None)
@given(
    arch=st.sampled_from(ARCHES),
    seed=st.integers(0, 1 << 32),
    positions=st.dictionaries(st.integers(0, 300), rules, max_size=25),
)
def test_any_profile_compiles_to_its_verdicts(arch: str, seed: int, positions: dict[int, Rule]) -> None:
    """Random verdicts change at nearly every number: long programs, whose jumps need intermediate jumps."""
    table = syscalls.load(arch)
    pick = random.Random(seed)
    verdicts = {name: pick.choice(list(ANSWERS)) for name in table}
    chosen = {list(table)[at]: rule for at, rule in positions.items()}
    stated = {name: its for name, its in verdicts.items() if name not in chosen}
    machine = Machine(seccomp_profile.compile_filter(Profile("random", stated, chosen), arch))
    interesting = [
        v
        for r in chosen.values()
        for c in r.cases
        for t in c.tests
        for v in (*t.values, t.any_bits, *(() if t.above is None else (t.above, t.above + 1)))
    ] or [0]
    for name, number in table.items():
        for _ in range(8 if name in chosen else 1):
            arguments = [pick.choice(interesting) | pick.choice([0, 1 << 32, HIGH]) for _ in range(6)]
            expected = decide(chosen[name], arguments) if name in chosen else ANSWERS[verdicts[name]]
            assert verdict(machine.run(AUDIT[arch], number, *arguments)[0]) == expected
    assert verdict(machine.run(AUDIT[arch], max(table.values()) + 1)[0]) == "ENOSYS"


def test_far_jumps_get_intermediate_jumps() -> None:
    """The longest possible search tree, with blocks behind it: one jump of 255 is not enough."""
    table = syscalls.load("x86_64")
    verdicts = {name: number % 2 for name, number in table.items()}
    rule = Rule(tuple(Case((ArgumentTest(0, (value,)),), "EPERM") for value in range(200)), "allow")
    stated = {name: "allow" if odd else "enosys" for name, odd in verdicts.items() if name != "ioctl"}
    profile = Profile("far", stated, {"ioctl": rule})
    program = seccomp_profile.compile_filter(profile, "x86_64")
    machine = Machine(program)
    assert len(machine.code) > 700
    assert machine.unreachable() == []
    for name, number in table.items():
        if name != "ioctl":
            expected = "allow" if verdicts[name] else "ENOSYS"
            assert verdict(machine.run(AUDIT["x86_64"], number)[0]) == expected, name
    for value in (0, 100, 199, 200):
        expected = "EPERM" if value < 200 else "allow"
        assert verdict(machine.run(AUDIT["x86_64"], table["ioctl"], value)[0]) == expected


def test_a_program_the_kernel_would_not_take_is_refused() -> None:
    code = bpf.Assembler()
    place = code.ret(bpf.ALLOW)
    for _ in range(bpf.MAX_INSTRUCTIONS):
        place = code.load(bpf.OFFSET_NUMBER, place)
    with pytest.raises(ValueError, match="4097 instructions: the kernel takes 4096"):
        code.program()


# --- Against libseccomp ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "arch"), both)
def test_libseccomp_makes_a_filter_with_the_same_verdicts(profile: str, arch: str) -> None:
    loaded = seccomp_profile.load_profile(profile)
    theirs = pyseccomp.SyscallFilter(pyseccomp.ERRNO(1))
    if LIBSECCOMP[arch] != pyseccomp.system_arch():
        theirs.add_arch(LIBSECCOMP[arch])
        theirs.remove_arch(pyseccomp.Arch.NATIVE)
    table = syscalls.load(arch)
    compared = {n for n in table if pyseccomp.resolve_syscall(LIBSECCOMP[arch], n) >= 0}
    for its, answer in (("allow", pyseccomp.ALLOW), ("enosys", pyseccomp.ERRNO(38))):
        for name in sorted(compared & loaded.calls(its)):
            theirs.add_rule(answer, name)

    def low(arg: int, value: int, mask: int = 0xFFFFFFFF) -> pyseccomp.Arg:
        return pyseccomp.Arg(arg, pyseccomp.MASKED_EQ, mask, value)

    theirs.add_rule(pyseccomp.ALLOW, "clone", low(0, 0, 0x7E020000))
    for name, flags, bit in (
        ("sendto", 3, FASTOPEN),
        ("sendmsg", 2, FASTOPEN),
        ("sendmmsg", 3, FASTOPEN),
        ("mmap", 3, 0x40000),
        ("memfd_create", 1, 0x4),
        ("seccomp", 1, 0x8),
        *([] if profile == "strict" else [("shmget", 2, 0o4000)]),
    ):
        theirs.add_rule(pyseccomp.ALLOW, name, low(flags, 0, bit))
    for persona in (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF):
        theirs.add_rule(pyseccomp.ALLOW, "personality", low(0, persona))
    if profile == "strict":
        for kind in (STREAM, SEQPACKET):
            theirs.add_rule(pyseccomp.ALLOW, "socketpair", low(0, UNIX), low(1, kind, 0xF))
    else:
        theirs.add_rule(pyseccomp.ALLOW, "socketpair", low(0, UNIX))
        theirs.add_rule(pyseccomp.ALLOW, "socket", low(0, UNIX))
        for family, kind, protocol in itertools.product((INET, INET6), (STREAM, DGRAM), (0, 6, 17)):
            theirs.add_rule(pyseccomp.ALLOW, "socket", low(0, family), low(1, kind, 0xF), low(2, protocol))
        theirs.add_rule(pyseccomp.ALLOW, "socket", low(0, NETLINK), low(2, 0))
    with tempfile.TemporaryFile() as file:
        theirs.export_bpf(file)
        file.seek(0)
        their_machine = Machine(file.read())
    our_machine = Machine(seccomp_filter.filter_bytes(profile, arch))

    def same(name: str, *arguments: int) -> None:
        ours, their = (
            verdict(m.run(AUDIT[arch], table[name], *arguments)[0]) for m in (our_machine, their_machine)
        )
        # One default for all is all that libseccomp has.
        if ours not in ("allow", "ENOSYS"):
            ours = "EPERM"
        assert ours == their, (name, arguments)

    different = {"ioctl", "fcntl", "setsockopt"}  # rules of the other sense: everything but these requests
    different |= {"setxattr", "lsetxattr", "fsetxattr"}  # libseccomp compares all 64 bits of a size
    different |= {"poll", "ppoll", "select", "pselect6"}
    for name in sorted(compared - set(loaded.rules)):
        same(name)
    for name, arguments, _ in strict_rows() if profile == "strict" else argument_rows():
        if name not in different:
            same(name, *arguments)
    assert len(compared) > 300


# --- For people and for the launch -------------------------------------------------------------------------


def test_describe_names_calls_and_verdicts() -> None:
    listing = seccomp_profile.describe(seccomp_filter.filter_bytes("default", "x86_64"))
    lines = listing.splitlines()
    assert len(lines) == len(seccomp_filter.filter_bytes("default", "x86_64")) // 8
    assert lines[:3] == [
        "0000  load arch",
        "0001  if == x86_64 goto 0003 else 0002",
        "0002  kill the process",
    ]
    for fragment in (
        "clone3",
        "load argument 1, low half",
        "if == 0x5412",
        "fail with EAFNOSUPPORT",
        "allow",
    ):
        assert fragment in listing


def test_describe_takes_any_program() -> None:
    assert seccomp_profile.describe(b"") == ""
    assert "code 0x87" in seccomp_profile.describe(b"\x87\0\0\0\0\0\0\0")
    with pytest.raises(ValueError, match="not a whole number"):
        seccomp_profile.describe(b"123")


def test_digest_names_the_bytes() -> None:
    assert (
        seccomp_filter.digest(b"")
        == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )


def test_a_machine_without_a_table_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seccomp_filter.machine_arch() == os.uname().machine
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "h", "6", "v", "riscv64")))
    with pytest.raises(
        seccomp_filter.SeccompUnavailable, match="riscv64; filters exist for aarch64 and x86_64"
    ):
        seccomp_filter.machine_arch()


@pytest.mark.parametrize("damage", [None, b"", b"1234567"])
def test_a_damaged_installation_never_yields_a_filter(
    damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp_filter, "PROFILE_DIRECTORY", str(tmp_path))
    if damage is not None:
        (tmp_path / "default.x86_64.bpf").write_bytes(damage)
    with pytest.raises(
        seccomp_filter.SeccompUnavailable, match=r"default\.x86_64\.bpf: .*install the runner again"
    ):
        seccomp_filter.filter_bytes("default", "x86_64")


def test_an_unknown_profile_is_not_read_as_a_path() -> None:
    with pytest.raises(ValueError, match="no seccomp profile is called"):
        seccomp_filter.filter_bytes("../default")


# --- The kernel's checker, for both architectures ----------------------------------------------------------


LOAD = """
import ctypes, os, sys
program = bytes.fromhex(sys.argv[1])
class Fprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))
prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
if prctl(22, 2, ctypes.byref(Fprog(len(program) // 8, program)), 0, 0):  # PR_SET_SECCOMP, a filter
    os._exit(100 + ctypes.get_errno())
os._exit(7)
"""


def exit_under(program: bytes) -> int:
    """Load a filter in a new process, make one more call, and report how it ended."""
    return subprocess.run([sys.executable, "-I", "-c", LOAD, program.hex()]).returncode


@needs_filters
@pytest.mark.parametrize(("profile", "arch"), both)
def test_the_kernel_takes_every_filter_and_kills_the_foreign_architecture(profile: str, arch: str) -> None:
    """The other architecture's filter sees our calls as foreign: the first call must kill the process."""
    expected = 7 if arch == os.uname().machine else -signal.SIGSYS
    assert exit_under(seccomp_filter.filter_bytes(profile, arch)) == expected


def test_the_kernel_refuses_what_our_machine_refuses() -> None:
    off_the_end = b"\x20\0\0\0\0\0\0\0"
    assert exit_under(off_the_end) == 100 + 22  # EINVAL
    with pytest.raises(AssertionError):
        Machine(off_the_end)
