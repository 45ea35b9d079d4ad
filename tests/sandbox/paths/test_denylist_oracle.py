"""The denylist refuses what an index of all denied paths refuses: links, mounts, overlays, spellings."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sandbox import look
from sandbox.paths.denylist import Denylist, Hit, Place
from sandbox.paths.mounts import Inside, parse_mountinfo, read_mounts
from sandbox.paths.scan import SourceRefused
from sandbox.paths.source import SourceMissing, open_source
from sandbox.spec import Access
from tests.conftest import ROOT
from tests.sandbox.paths.denylist_index import IndexedDenylist

ACCESSES: tuple[Access, ...] = ("read", "write")


class Watched(Denylist):
    """Keeps the places that it was asked about."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.places: list[Place] = []

    def hit(self, place: Place, access: Access = "read", *, own_state: bool = False) -> Hit | None:
        self.places.append(place)
        return super().hit(place, access, own_state=own_state)


def answer(path: str, access: Access, denylist: Denylist) -> str:
    """The rule by which a source is refused, or "open"."""
    # Only the tree itself is searched for hard links, not /root and others of this machine.
    denylist._roots = {root: entry for root, entry in denylist._roots.items() if entry.origin == "policy"}
    try:
        open_source(path, access=access, denylist=denylist).close()
    except SourceRefused as refused:
        return refused.rule
    except SourceMissing:
        return "missing"
    return "open"


def compare(paths: Sequence[str], denied: Sequence[str], home: str) -> Counter[str]:
    """Judge each path with the denylist and with the oracle. Returns how often each answer was given."""
    mounts = read_mounts()
    options: dict[str, Any] = {"policy": denied, "homes": [home]}
    ours, oracle = Watched(mounts, **options), IndexedDenylist(mounts, **options)
    answers: Counter[str] = Counter()
    for path in paths:
        for access in ACCESSES:
            ours.places.clear()
            found, expected = answer(path, access, ours), answer(path, access, oracle)
            if mounts.overlays and expected == "open":
                # A layer of a denied path, mounted elsewhere, is known only to ours.
                assert found in ("open", "denylist")
            else:
                assert found == expected, (path, access)
            for place in ours.places:
                assert set(oracle._hits(place)) <= set(ours._hits(place)), (path, access)
            answers[found] += 1
    return answers


def check_spellings(paths: Iterable[str], denied: Sequence[str], home: str) -> Counter[str]:
    """All names of one file are judged alike: by its real path, with dots and slashes, through links, through
    other names of the root. Another spelling may be refused for itself, and opens nothing."""
    denylist = Denylist(read_mounts(), policy=denied, homes=[home])
    answers: Counter[str] = Counter()
    for path in paths:
        real = os.path.realpath(path)
        for access in ACCESSES:
            plain = answer(real, access, denylist)
            parent, name = os.path.split(real)
            for same in (f"{real}/", f"/{real}", f"{parent}//./{name}/."):
                assert answer(same, access, denylist) == plain, (same, access)
            through = (
                path,
                f"/proc/self/root{real}",
                f"/proc/{os.getpid()}/root{real}",
                f"{parent}/../{real}",
            )
            for other in (*through, f"{real}/../{name}"):
                found = answer(other, access, denylist)
                assert found == plain or found not in ("open", "missing"), (other, real, access)
                assert found != "open" or plain == "open"
                answers[f"{plain} {found}"] += 1
    return answers


# --- tables of mounts --------------------------------------------------------------------------------------

PARTS = st.sampled_from(["a", "b", "ab"])
NAMES = st.lists(PARTS, max_size=4).map(lambda parts: "/" + "/".join(parts))
BELOW = NAMES.map(lambda name: "/d" + name.rstrip("/"))  # names of no file on this machine
DEVICES = ["8:1", "8:2", "8:3"]
PLAIN = st.tuples(st.sampled_from(DEVICES), NAMES, BELOW)
OVERLAYS = st.tuples(NAMES, BELOW, st.lists(BELOW, min_size=1, max_size=2), BELOW)


def table(plain: Sequence[tuple[str, str, str]], overlays: Sequence[Any]) -> bytes:
    lines = ["1 0 8:1 / / rw - ext4 none rw"]
    for number, (device, root, point) in enumerate(plain, 2):
        lines.append(f"{number} 1 {device} {root} {point} rw - ext4 none rw")
    for number, (root, point, lower, upper) in enumerate(overlays):
        options = f"rw,lowerdir={':'.join(lower)},upperdir={upper},workdir=/work"
        lines.append(f"{50 + number} 1 0:{50 + number} {root} {point} rw - overlay none {options}")
    return "\n".join(lines).encode() + b"\n"


@settings(max_examples=120)
@given(
    plain=st.lists(PLAIN, max_size=5),
    overlays=st.lists(OVERLAYS, max_size=2),
    denied=st.lists(BELOW, min_size=1, max_size=4),
    names=st.lists(BELOW, min_size=1, max_size=2),
    insides=st.lists(
        st.tuples(st.sampled_from([*DEVICES, "0:50", "0:51"]), NAMES | BELOW), min_size=1, max_size=3
    ),
)
def test_tables_of_mounts(
    plain: Any, overlays: Any, denied: list[str], names: list[str], insides: list[tuple[str, str]]
) -> None:
    mounts = parse_mountinfo(table(plain, overlays))
    options: dict[str, Any] = {"policy": denied, "homes": ["/d/a/b"], "storage": ["/d/b/b"]}
    ours, oracle = Denylist(mounts, **options), IndexedDenylist(mounts, **options)
    inside, *below = [Inside(*each) for each in insides]
    place = Place(tuple(names), (0, 0), (), inside, tuple(below))
    found, expected = set(ours._hits(place)), set(oracle._hits(place))
    assert expected <= found
    assert found == expected or mounts.overlays
    for access in ACCESSES:
        assert ours.hit(place, access) is not None or oracle.hit(place, access) is None
        for name in names:
            for spelled in (name, f"/{name}/", name.replace("/", "//"), f"{name}/./"):
                assert ours.name_hit(spelled, access) == oracle.name_hit(spelled, access) or mounts.overlays


def test_a_layer_of_a_denied_path_is_denied_wherever_it_is_mounted() -> None:
    mounts = parse_mountinfo(
        b"1 0 8:1 / / rw - ext4 none rw\n"
        b"2 1 0:50 / /d rw - overlay none rw,lowerdir=/layers/low\n"
        b"3 1 8:1 /layers/low/vault /innocent rw - ext4 none rw\n"
    )
    found = Denylist(mounts, policy=["/d/vault"])
    place = Place(("/innocent",), (0, 0), (), Inside("8:1", "/layers/low/vault"), ())
    assert found.hit(place) is not None
    assert found.hit(place._replace(inside=Inside("8:1", "/layers/low/other"))) is None


# --- real trees --------------------------------------------------------------------------------------------

FOLDERS = ["a", "b", "a/a", "a/b", "b/b", "a/a/b", ".ssh", ".config"]
FILES = ["f", "a/f", "a/a/f", "b/f", ".ssh/f", ".bashrc"]
FREE = ["l", "m", "a/l", "b/l", "b/b/l", ".config/gh", ".config/nvim", ".netrc", ".local", ".aws"]
ANY = [*FOLDERS, *FILES, *FREE]
# What may be asked for or denied: also below a link, and what does not exist.
ASKED = st.sampled_from(
    [".", *ANY, "l/b", "l/a/f", "m/f", "a/l/b", "none", "a/none/x", ".local/bin", ".config/gh/x"]
)
OPERATIONS = st.one_of(
    st.tuples(st.just("link"), st.sampled_from([*ANY, "none", "."]), st.sampled_from(FREE)),
    st.tuples(st.just("hard link"), st.sampled_from(FILES), st.sampled_from(FREE)),
    st.tuples(st.just("rename"), st.sampled_from(ANY), st.sampled_from(FREE)),
    st.tuples(st.just("folder"), st.just("."), st.sampled_from(FREE)),
)
MOUNTS = st.one_of(
    st.tuples(st.sampled_from(["bind", "rbind", "overlay"]), st.sampled_from(ANY), st.sampled_from(ANY)),
    st.tuples(st.just("tmpfs"), st.just("."), st.sampled_from(FOLDERS)),
)
SPELLINGS = st.sampled_from(["{}/{}", "/{}//{}", "{}/./{}", "{}/{}/", "{}/{}/."])
_BIND, _RECURSIVE, _DETACH = 4096, 16384, 2


def plant(base: str) -> None:
    for folder in FOLDERS:
        os.mkdir(f"{base}/{folder}")
    for file in FILES:
        Path(f"{base}/{file}").touch()


def operate(base: str, operation: str, source: str, dest: str) -> bool:
    """Returns False where it cannot be done: something stands there, or a parent is missing."""
    source, dest = os.path.join(base, source), os.path.join(base, dest)
    try:
        if operation == "link":
            os.symlink(source, dest)
        elif operation == "hard link":
            os.link(source, dest)
        elif operation == "rename":
            os.rename(source, dest)
        elif operation == "folder":
            os.mkdir(dest)
        elif operation == "tmpfs":
            mount("none", dest, "tmpfs", 0, "")
        elif operation == "overlay":
            mount("none", dest, "overlay", 0, f"lowerdir={source}:{base}/b/b")
        else:
            mount(source, dest, "", _BIND | (_RECURSIVE if operation == "rbind" else 0), "")
    except OSError:
        return False
    return True


def mount(source: str, dest: str, kind: str, flags: int, data: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), dest.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()):
        raise OSError(ctypes.get_errno(), "mount")


def unmount(path: str) -> None:
    ctypes.CDLL(None).umount2(path.encode(), _DETACH)


@settings(max_examples=30)
@given(
    operations=st.lists(OPERATIONS, max_size=4),
    denied=st.lists(ASKED, min_size=1, max_size=3),
    asked=st.lists(ASKED, min_size=2, max_size=4),
    spelling=SPELLINGS,
)
def test_links(operations: Any, denied: list[str], asked: list[str], spelling: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        plant(base)
        for operation in operations:
            operate(base, *operation)
        compare(
            [spelling.format(base, each) for each in asked],
            [os.path.normpath(f"{base}/{each}") for each in denied],
            base,
        )
        existing = [f"{base}/{each}" for each in (*asked, *FREE) if os.path.exists(f"{base}/{each}")]
        check_spellings(existing, [os.path.normpath(f"{base}/{each}") for each in denied], base)


@settings(max_examples=40)
@given(
    operations=st.lists(OPERATIONS, max_size=3),
    denied=st.lists(ASKED, max_size=2),
    later=OPERATIONS,
)
def test_what_changes_the_denylist_changes_its_facts(
    operations: Any, denied: list[str], later: tuple[str, str, str]
) -> None:
    """A stored plan does not hold once a denied path appears, or is another file."""
    with tempfile.TemporaryDirectory() as base:
        plant(base)
        for operation in operations:
            operate(base, *operation)
        mounts = read_mounts()

        def known() -> list[object]:
            options: Any = {"policy": [os.path.normpath(f"{base}/{each}") for each in denied]}
            made = Denylist(mounts, homes=[base], **options)
            return [made._names, made._at, made._above, made._roots]

        with look.recording() as asked:
            before = known()
        assert asked.facts.changed({}) == ""  # the control
        assume(operate(base, *later))
        assert known() == before or asked.facts.changed({}) != ""


# --- mounts of a namespace of our own ----------------------------------------------------------------------

TOTAL: Counter[str] = Counter()


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(
    operations=st.lists(OPERATIONS, max_size=2),
    mounted=st.lists(MOUNTS, min_size=1, max_size=3),
    after=st.lists(OPERATIONS, max_size=1),
    denied=st.lists(ASKED, min_size=1, max_size=2),
    asked=st.lists(ASKED, min_size=2, max_size=4),
    spelling=SPELLINGS,
)
def compare_mounted(
    operations: Any, mounted: Any, after: Any, denied: list[str], asked: list[str], spelling: str
) -> None:
    base = "/mnt"
    mount("none", base, "tmpfs", 0, "mode=755")  # root's: links in it are followed
    try:
        plant(base)
        for operation in (*operations, *mounted, *after):
            if operate(base, *operation):
                TOTAL[operation[0]] += 1
        paths = [spelling.format(base, each) for each in asked]
        refused = [os.path.normpath(f"{base}/{each}") for each in denied]
        TOTAL.update(compare(paths, refused, base))
        TOTAL.update(check_spellings(filter(os.path.exists, paths), refused, base))
    finally:
        unmount(base)


@pytest.mark.launches
def test_mounts() -> None:
    program = (
        "from tests.sandbox.paths import test_denylist_oracle as here\n"
        "here.compare_mounted()\n"
        "print(*here.TOTAL, sep='|', end='')\n"
    )
    own = ["unshare", *([] if os.geteuid() == 0 else ["-Ur"]), "-m", "--propagation", "private"]
    done = subprocess.run(
        [*own, sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    # Each was made, and each answer was given.
    assert {"bind", "rbind", "overlay", "tmpfs", "link", "hard link", "rename"} <= set(done.stdout.split("|"))
    assert {"open", "denylist", "missing", "open open", "denylist denylist"} <= set(done.stdout.split("|"))
    assert {"open path", "open kernel_filesystem"} <= set(done.stdout.split("|"))
