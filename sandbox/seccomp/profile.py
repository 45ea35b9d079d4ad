"""Seccomp profiles, and how one is compiled.

    policies/seccomp/NAME.toml --load_profile--> Profile --compile_filter--> BPF program

Everything is pure and deterministic: the same profile gives the same bytes on every machine. A launch does
not use this module (see sandbox/seccomp/filter.py): scripts/seccomp-filters, `runner explain` and tests do.
"""

from __future__ import annotations

import os
import tomllib
from typing import NamedTuple, cast

from sandbox.seccomp import bpf, syscalls
from sandbox.seccomp.filter import AUDIT_ARCH, PROFILE_DIRECTORY

# Asm-generic numbers, the same on both architectures. Not from the module errno, so that the result does not
# depend on the machine that compiles.
ERRNOS: dict[str, int] = {
    "EPERM": 1,
    "ENOMEM": 12,
    "EINVAL": 22,
    "ENOSYS": 38,
    "ENOPROTOOPT": 92,
    "EPROTONOSUPPORT": 93,
    "EOPNOTSUPP": 95,
    "EAFNOSUPPORT": 97,
}

_LOW_WORD = 0xFFFFFFFF

# The tables of a profile that list calls, and the answer of each.
VERDICTS: dict[str, str] = {"allow": "allow", "enosys": "ENOSYS", "einval": "EINVAL", "deny": "EPERM"}


class ProfileError(ValueError):
    """The profile cannot be compiled. The text names profile, entry and fault."""


class ArgumentTest(NamedTuple):
    """A test of the low 32 bits of one argument: (argument & mask) in values, argument & any_bits, or
    argument > above, unsigned."""

    arg: int
    values: tuple[int, ...] = ()
    mask: int = _LOW_WORD
    any_bits: int = 0
    above: int | None = None


class Case(NamedTuple):
    tests: tuple[ArgumentTest, ...]  # all must hold
    action: str  # "allow" or the name of an errno


class Rule(NamedTuple):
    cases: tuple[Case, ...]  # the first that holds decides
    otherwise: str


class Profile(NamedTuple):
    """A verdict for each system call; calls that have none are denied."""

    name: str
    verdicts: dict[str, str]  # a key of VERDICTS for each call
    rules: dict[str, Rule]

    def action(self, name: str) -> str | Rule:
        if name in self.rules:
            return self.rules[name]
        return VERDICTS[self.verdicts.get(name, "deny")]

    def calls(self, verdict: str) -> frozenset[str]:
        return frozenset(call for call, its in self.verdicts.items() if its == verdict)


# Profiles ----------------------------------------------------------------------------------------------


def load_profile(name: str) -> Profile:
    """Read a profile and the one it extends."""
    path = os.path.join(PROFILE_DIRECTORY, f"{name}.toml")
    with open(path, "rb") as file:
        document = tomllib.load(file)
    base = load_profile(str(document["extends"])) if "extends" in document else None
    return read_profile(name, document, base)


def read_profile(name: str, document: dict[str, object], base: Profile | None) -> Profile:
    """The verdicts of a document, added to those of the profile it extends.

    A call has one verdict. Repeating a verdict of the base is refused: the author probably misread the base.
    """
    unknown_tables = sorted(set(document) - {"extends", "rules", *VERDICTS})
    if unknown_tables:
        raise ProfileError(f"{name}: unknown table {unknown_tables[0]}")
    stated: dict[str, str] = {}
    for verdict in VERDICTS:
        for group, names in cast("dict[str, list[str]]", document.get(verdict, {})).items():
            for call in names:
                if call in stated:
                    raise ProfileError(f"{name}: [{verdict}] {group}: {call} already has a verdict")
                if base is not None and base.verdicts.get(call) == verdict:
                    raise ProfileError(f"{name}: [{verdict}] {group}: {call} has this verdict in {base.name}")
                stated[call] = verdict
    rules: dict[str, Rule] = {}
    for call, table in cast("dict[str, dict[str, object]]", document.get("rules", {})).items():
        if call in stated:
            raise ProfileError(f"{name}: {call} has both a verdict and a rule")
        rules[call] = _read_rule(f"{name}: rules.{call}", table)

    kept: dict[str, str] = {} if base is None else {c: v for c, v in base.verdicts.items() if c not in rules}
    kept_rules = {} if base is None else {c: r for c, r in base.rules.items() if c not in stated}
    return Profile(name, kept | stated, kept_rules | rules)


def _read_rule(where: str, table: dict[str, object]) -> Rule:
    if set(table) != {"cases", "otherwise"}:
        raise ProfileError(f"{where}: needs exactly `cases` and `otherwise`")
    cases = []
    for case in cast("list[dict[str, object]]", table["cases"]):
        if set(case) != {"if", "then"} or not case["if"]:
            raise ProfileError(f"{where}: a case needs `if`, with at least one test, and `then`")
        tests = tuple(_read_test(where, test) for test in cast("list[dict[str, object]]", case["if"]))
        cases.append(Case(tests, _read_action(where, case["then"])))
    return Rule(tuple(cases), _read_action(where, table["otherwise"]))


def _read_test(where: str, test: dict[str, object]) -> ArgumentTest:
    if set(test) == {"arg", "any"}:
        read = ArgumentTest(cast(int, test["arg"]), any_bits=cast(int, test["any"]))
        if not read.any_bits:
            raise ProfileError(f"{where}: `any` needs at least one bit")
    elif set(test) == {"arg", "above"}:
        read = ArgumentTest(cast(int, test["arg"]), above=cast(int, test["above"]))
        if not 0 <= cast(int, read.above) < _LOW_WORD:
            raise ProfileError(f"{where}: `above` needs a number below the highest of 32 bits")
    elif {"arg", "in"} <= set(test) <= {"arg", "in", "mask"}:
        values = tuple(cast("list[int]", test["in"]))
        read = ArgumentTest(cast(int, test["arg"]), values, cast(int, test.get("mask", _LOW_WORD)))
        if not values or any(value & ~read.mask for value in values):
            raise ProfileError(f"{where}: `in` needs values, and each within the mask")
    else:
        raise ProfileError(f"{where}: a test is `arg` with `any`, `above`, or `in` and perhaps `mask`")
    if not 0 <= read.arg <= 5 or not 0 <= read.any_bits <= _LOW_WORD or not 0 < read.mask <= _LOW_WORD:
        raise ProfileError(f"{where}: arguments are 0 to 5 and values have 32 bits")
    return read


def _read_action(where: str, action: object) -> str:
    if action == "allow" or action in ERRNOS:
        return str(action)
    raise ProfileError(f"{where}: {action!r} is neither allow nor one of {', '.join(sorted(ERRNOS))}")


# Compiling ---------------------------------------------------------------------------------------------


def compile_filter(profile: Profile, arch: str) -> bytes:
    """The program, an array of struct sock_filter: a check of the architecture, then a binary search over
    ranges of numbers with the same verdict.

    Numbers that are not in the table are in ranges that return ENOSYS. That includes x32's: 0x40000000 and
    up, and 512 to 547, which old kernels also accepted without that bit.
    """
    table = syscalls.load(arch)
    known = set(table).union(*(syscalls.load(other) for other in syscalls.ARCHES))
    named = set(profile.verdicts) | set(profile.rules)
    unknown = sorted(named - known)
    if unknown:
        raise ProfileError(f"{profile.name}: no system call is called {unknown[0]}")

    by_number = {number: profile.action(name) for name, number in table.items()}
    ranges: list[tuple[int, str | Rule]] = []  # where each begins; the next one ends it
    for number in range(max(by_number) + 2):
        action = by_number.get(number, "ENOSYS")
        if not ranges or ranges[-1][1] != action:
            ranges.append((number, action))

    code = bpf.Assembler()

    def return_place(action: str) -> int:
        return code.ret(bpf.ALLOW if action == "allow" else bpf.ERRNO | ERRNOS[action])

    def decide(rule: Rule) -> int:
        place = return_place(rule.otherwise)
        for case in reversed(rule.cases):
            otherwise, place = place, return_place(case.action)
            for test in reversed(case.tests):
                if test.any_bits:
                    place = code.branch(bpf.JSET, test.any_bits, place, otherwise)
                elif test.above is not None:
                    place = code.branch(bpf.JGE, test.above + 1, place, otherwise)
                else:
                    found, place = place, otherwise
                    for value in reversed(test.values):
                        place = code.branch(bpf.JEQ, value, found, place)
                    if test.mask != _LOW_WORD:
                        place = code.mask(test.mask, place)
                place = code.load(bpf.argument_offset(test.arg), place)
        return place

    def search(low: int, high: int) -> int:
        if high - low == 1:
            action = ranges[low][1]
            return return_place(action) if isinstance(action, str) else blocks[action]
        middle = (low + high) // 2
        right = search(middle, high)
        left = search(low, middle)
        return code.branch(bpf.JGE, ranges[middle][0], right, left)

    blocks: dict[Rule, int] = {}
    for _, action in ranges:
        if isinstance(action, Rule) and action not in blocks:
            blocks[action] = decide(action)
    tree = code.load(bpf.OFFSET_NUMBER, search(0, len(ranges)))
    known_arch = code.branch(bpf.JEQ, AUDIT_ARCH[arch], tree, code.ret(bpf.KILL_PROCESS))
    code.load(bpf.OFFSET_ARCH, known_arch)
    return code.program()


# Explaining --------------------------------------------------------------------------------------------


def describe(program: bytes) -> str:
    """A readable listing of the program, with the names of the system calls."""
    code = bpf.instructions(program)
    arch = next((a for a, value in AUDIT_ARCH.items() if len(code) > 1 and code[1].k == value), None)
    names = {number: name for name, number in syscalls.load(arch).items()} if arch else {}
    errnos = {number: name for name, number in ERRNOS.items()}
    loads = {bpf.OFFSET_NUMBER: "number", bpf.OFFSET_ARCH: "arch"}
    loads |= {bpf.argument_offset(i): f"argument {i}, low half" for i in range(6)}
    tests = {bpf.JEQ: "==", bpf.JGE: ">=", bpf.JSET: "&"}
    about = ""
    lines = []
    for at, (op, jt, jf, k) in enumerate(code):
        if op == bpf.LD_ABS:
            about = loads.get(k, f"offset {k}")
            text = f"load {about}"
        elif op == bpf.AND:
            text = f"and {k:#x}"
        elif op == bpf.JA:
            text = f"goto {at + 1 + k:04}"
        elif op in tests:
            value = f"{k} {names.get(k, '')}".rstrip() if about == "number" else f"{k:#x}"
            if about == "arch" and arch:
                value = arch
            text = f"if {tests[op]} {value} goto {at + 1 + jt:04} else {at + 1 + jf:04}"
        elif op == bpf.RET and k == bpf.ALLOW:
            text = "allow"
        elif op == bpf.RET and k == bpf.KILL_PROCESS:
            text = "kill the process"
        elif op == bpf.RET and k & 0xFFFF0000 == bpf.ERRNO:
            text = f"fail with {errnos.get(k & 0xFFFF, k & 0xFFFF)}"
        else:
            text = f"code {op:#04x} jt {jt} jf {jf} k {k:#x}"
        lines.append(f"{at:04}  {text}\n")
    return "".join(lines)
