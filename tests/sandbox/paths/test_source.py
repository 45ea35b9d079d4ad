"""Every way to a denied directory is refused; the same way to its harmless twin is open.

Each attack is a row. `{v}` in it is the vault, `{b}` the directory that holds it, `{m}` and `{s}` are others
in there; the row is tried with the twin that is denied and, as control, with the twin that is not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sandbox import look
from sandbox.paths import source as sources
from sandbox.paths.denied_paths import HOST_PATHS
from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import Mounts, contains, read_mounts
from sandbox.paths.scan import DEPTH_LIMIT, SourceRefused
from sandbox.paths.source import OpenSource, SourceMissing, open_source
from sandbox.spec import Access
from tests.conftest import SYSTEM_PATH, Caller
from tests.tables import one_case


class Answer(NamedTuple):
    rule: str  # "open" if it was opened, "missing" if there is nothing
    reason: str
    hint: str


def ask(path: str | Path, deny: Sequence[str | Path] = (), access: Access = "read", **options: Any) -> Answer:
    denylist = Denylist(read_mounts(), policy=[str(p) for p in deny])
    # Hard links are looked for in the tests' own folders only. /root and the like of this machine may have
    # hundreds of thousands of files, and each search would go through them.
    denylist._roots = {root: entry for root, entry in denylist._roots.items() if entry.origin == "policy"}
    try:
        source = open_source(str(path), access=access, denylist=denylist, **options)
    except SourceRefused as refused:
        return Answer(refused.rule, refused.reason, refused.hint)
    except SourceMissing:
        return Answer("missing", "", "")
    source.close()
    return Answer("open", source.real, "")


def opened(path: str | Path, **options: Any) -> OpenSource:
    return open_source(str(path), access="read", denylist=Denylist(read_mounts()), **options)


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def twins(base: Path) -> None:
    for twin in ("denied", "harmless"):
        (base / twin / "vault" / "inner").mkdir(parents=True)
        (base / twin / "vault" / "inner" / "key").write_text(twin)
        (base / twin / "vault" / "secret").write_text(twin)
        (base / twin / "mine" / "sub").mkdir(parents=True)
        (base / twin / "mine" / "file").touch()
        (base / twin / "spare").mkdir()


def places(base: Path, twin: str) -> dict[str, str]:
    b = str(base.resolve() / twin)
    return {"b": b, "v": f"{b}/vault", "m": f"{b}/mine", "s": f"{b}/spare"}


# --- aliases that need no mount -------------------------------------------------------------------

PLAIN = {
    "itself": ("{v}", "denylist"),
    "below": ("{v}/inner", "denylist"),
    "a file below": ("{v}/inner/key", "denylist"),
    "above": ("{b}", "denylist"),
    "two slashes first": ("/{v}", "denylist"),
    "two slashes inside": ("{b}//vault", "denylist"),
    "slash at the end": ("{v}/", "denylist"),
    "dot inside": ("{b}/./vault/.", "denylist"),
}


@pytest.mark.parametrize(("path", "rule"), PLAIN.values(), ids=PLAIN)
def test_spellings(tmp_path: Path, path: str, rule: str) -> None:
    twins(tmp_path)
    deny = [tmp_path / "denied" / "vault"]
    assert ask(path.format(**places(tmp_path, "denied")), deny).rule == rule
    assert ask(path.format(**places(tmp_path, "harmless")), deny).rule == "open"


@pytest.mark.parametrize("path", ["{b}/mine/../vault", "{v}/..", "{v}/inner/.."])
def test_dotdot_is_refused_wherever_it_leads(tmp_path: Path, path: str) -> None:
    twins(tmp_path)
    for twin in ("denied", "harmless"):
        assert ask(path.format(**places(tmp_path, twin))).rule == "path"
    assert ask(tmp_path / "harmless" / "vault").rule == "open"


@pytest.mark.parametrize("path", ["", "relative", "./x", "~/x", "/a\0b"])
def test_texts_that_are_not_paths(path: str) -> None:
    assert ask(path).rule == "path"


def test_a_link_is_refused_and_its_target_named(tmp_path: Path) -> None:
    twins(tmp_path)
    target = tmp_path.resolve() / "harmless" / "vault"
    link = tmp_path.resolve() / "link"
    link.symlink_to(target)
    answer = ask(link)
    assert answer.rule == "symlink"
    assert str(target) in answer.hint
    assert ask(target).rule == "open"


def test_a_link_as_parent_is_refused_and_the_whole_target_named(tmp_path: Path) -> None:
    twins(tmp_path)
    base = tmp_path.resolve()
    (base / "link").symlink_to("harmless")
    answer = ask(base / "link" / "vault" / "inner")
    assert answer.rule == "symlink"
    assert str(base / "link") in answer.reason
    assert answer.hint.endswith(str(base / "harmless/vault/inner"))
    assert ask(base / "harmless" / "vault" / "inner").rule == "open"


def test_a_dangling_link_and_a_loop_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").symlink_to("nothing")
    assert {ask(tmp_path / name).rule for name in "abc"} == {"symlink"}


@pytest.mark.parametrize("magic", ["/proc/self/root", "/proc/{pid}/root", "/proc/thread-self/root"])
def test_magic_links_to_the_root(tmp_path: Path, magic: str) -> None:
    twins(tmp_path)
    path = magic.format(pid=os.getpid()) + str(tmp_path / "harmless" / "vault")
    assert os.path.isdir(path)  # the way exists
    assert ask(path).rule == "kernel_filesystem"
    assert ask(tmp_path / "harmless" / "vault").rule == "open"


@pytest.mark.parametrize("magic", ["/proc/self/fd/{}", "/dev/fd/{}", "/proc/self/fd/{}/inner"])
def test_magic_links_to_open_files(tmp_path: Path, magic: str) -> None:
    twins(tmp_path)
    fd = os.open(tmp_path / "harmless" / "vault", os.O_PATH | os.O_CLOEXEC)
    try:
        assert os.path.isdir(magic.format(fd))
        assert ask(magic.format(fd)).rule == "kernel_filesystem"
    finally:
        os.close(fd)


def test_the_working_directory_is_no_way_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ask("/proc/self/cwd").rule == "kernel_filesystem"


@pytest.mark.parametrize(
    "path", ["/proc", "/proc/self", "/proc/sys/kernel", "/sys", "/sys/class", "/dev/pts", "/dev/null"]
)
def test_interfaces_to_the_kernel(path: str) -> None:
    assert ask(path).rule in ("kernel_filesystem", "denylist", "special_file")


def test_a_devtmpfs_may_be_on_the_way_and_not_at_the_end() -> None:
    """As /dev is on most machines. In a container it is a tmpfs, so the table of mounts says otherwise."""
    table = labelled("/dev/null", "devtmpfs")
    assert ask("/dev/null", mounts=table).rule == "kernel_filesystem"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert ask(folder, mounts=table).rule == "open"


def labelled(path: str, fstype: str) -> Mounts:
    """The table of mounts, in which the filesystem of `path` is said to be another one."""
    status = os.stat(path)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return Mounts(
        each._replace(fstype=fstype) if each.device == device else each for each in read_mounts().all
    )


@pytest.mark.needs("root")
def test_a_link_that_goes_back_to_a_kernel_filesystem() -> None:
    """Only root's links are followed, and they may end in "..": the last step is then one on the way."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shown, tempfile.TemporaryDirectory(dir="/opt") as own:
        os.mkdir(f"{shown}/inner")
        os.symlink(f"{shown}/inner/..", f"{own}/link")
        assert ask(f"{own}/link").rule == "open"
        assert ask(f"{own}/link", mounts=labelled("/dev/shm", "devtmpfs")).rule == "kernel_filesystem"


def test_a_kernel_filesystem_that_is_newer_than_the_table(tmp_path: Path) -> None:
    """Mounted again, it has the number of the old mount, but may have another device."""
    table = Mounts(
        each._replace(device="0:999999", fstype="proc") if contains(each.point, str(tmp_path)) else each
        for each in read_mounts().all
    )
    assert ask(tmp_path, mounts=table).rule == "kernel_filesystem"
    assert ask(tmp_path).rule == "open"


def test_case_is_decided_by_the_filesystem(tmp_path: Path) -> None:
    twins(tmp_path)
    loud = tmp_path.resolve() / "denied" / "VAULT"
    answer = ask(loud, [tmp_path.resolve() / "denied" / "vault"])
    assert answer.rule == ("denylist" if loud.exists() else "missing")


def test_a_rename_does_not_free_a_denied_directory(tmp_path: Path) -> None:
    twins(tmp_path)
    base = tmp_path.resolve()
    denylist = Denylist(read_mounts(), policy=[str(base / "denied" / "vault")])
    (base / "denied" / "vault").rename(base / "elsewhere")
    (base / "harmless" / "vault").rename(base / "beside")
    for path in (base / "elsewhere", base / "elsewhere" / "inner"):
        with pytest.raises(SourceRefused, match="the file or folder it leads to"):
            open_source(str(path), access="read", denylist=denylist)
    open_source(str(base / "beside"), access="read", denylist=denylist).close()


def test_a_rename_does_not_free_what_contains_a_denied_directory(tmp_path: Path) -> None:
    twins(tmp_path)
    base = tmp_path.resolve()
    denylist = Denylist(read_mounts(), policy=[str(base / "denied" / "vault")])
    (base / "denied").rename(base / "elsewhere")
    (base / "harmless").rename(base / "beside")
    with pytest.raises(SourceRefused, match="the file or folder it leads to contains"):
        open_source(str(base / "elsewhere"), access="read", denylist=denylist)
    open_source(str(base / "beside"), access="read", denylist=denylist).close()


@pytest.mark.parametrize(
    "path", [*HOST_PATHS, "/", "/etc", "/var", "/dev", "/run", "/tmp", "/dev/shm", "/home", "/root/x"]
)
def test_the_real_denylist(path: str) -> None:
    assert ask(path, access="read").rule == "denylist"


@pytest.mark.parametrize("path", ["/usr", "/etc/ssl/certs", "/usr/share"])
def test_the_runtime_is_open_for_reading_only(path: str) -> None:
    assert ask(path, trusted=True).rule == "open"
    assert ask(path, access="write", trusted=True).rule == "denylist"


def test_a_missing_path_is_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert ask(tmp_path / "none").rule == "missing"
    assert ask(tmp_path / "none" / "deeper").rule == "missing"
    assert ask(tmp_path / "file" / "below").rule == "missing"
    assert ask(tmp_path / "file").rule == "open"


def test_a_denied_path_is_refused_even_where_it_does_not_exist(tmp_path: Path) -> None:
    assert ask(tmp_path / "none" / "x", [tmp_path / "none"]).rule == "denylist"


def test_the_systems_own_links_are_followed() -> None:
    answer = ask("/bin/sh" if os.path.islink("/bin/sh") else "/etc/localtime", trusted=True)
    assert answer.rule == "open" and answer.reason.startswith("/usr/")


def test_home_directories(tmp_path: Path) -> None:
    home = tmp_path.resolve() / "someone"
    for name in (".ssh", "plugin", ".config/gh"):
        (home / name).mkdir(parents=True)
    (home / "id").touch()
    (home / ".netrc").touch()
    os.link(home / ".netrc", home / "plugin" / "copy")
    denylist = Denylist(read_mounts(), homes=[str(home)])

    def rule(path: Path) -> str:
        try:
            open_source(str(path), access="read", denylist=denylist).close()
        except SourceRefused as refused:
            return refused.rule
        return "open"

    assert [rule(home / name) for name in ("", ".ssh", ".netrc", ".config", ".config/gh")] == ["denylist"] * 5
    assert rule(home / "plugin") == "hard_link"
    (home / "plugin" / "copy").unlink()
    assert rule(home / "plugin") == rule(home / "id") == "open"


def test_a_plugins_own_state_below_the_runners_directory(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    (base / "plugins" / "mine").mkdir(parents=True)
    denylist = Denylist(
        read_mounts(),
        runner=[str(base / "plugins")],
        states=[str(base / "plugins")],
        policy=[str(base / "plugins" / "no")],
    )

    def rule(name: str, own_state: bool) -> str:
        try:
            open_source(str(base / name), access="write", denylist=denylist, own_state=own_state).close()
        except SourceRefused as refused:
            return refused.rule
        return "open"

    assert rule("plugins/mine", False) == "denylist"
    assert rule("plugins/mine", True) == "open"
    assert rule("plugins", True) == "denylist"
    (base / "plugins" / "no").mkdir()
    assert rule("plugins/no", True) == "denylist"


def test_a_checked_copy_below_the_runners_directory(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    for name in ("packages/mine/bin", "packages/other", "packages/mine2"):
        (base / name).mkdir(parents=True)
    copy = str(base / "packages/mine")
    denylist = Denylist(read_mounts(), runner=[str(base / "packages")], copies=[copy])

    def rule(name: str, access: Access = "read") -> str:
        try:
            open_source(str(base / name), access=access, denylist=denylist).close()
        except SourceRefused as refused:
            return refused.rule
        return "open"

    assert rule("packages/mine") == rule("packages/mine/bin") == "open"
    assert rule("packages/mine", "write") == rule("packages/mine/bin", "write") == "denylist"
    assert rule("packages") == rule("packages/other") == rule("packages/mine2") == "denylist"


def test_storage_of_other_hosts_is_denied(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    kept = base / "place/.storage"
    denylist = Denylist(read_mounts(), storage=[str(kept)])
    (base / "place/state").mkdir(parents=True)

    def rules(path: Path) -> list[str]:
        """For reading and for writing."""
        found = []
        for access in ("read", "write"):
            try:
                open_source(str(path), access=access, denylist=denylist, own_state=True).close()
            except SourceRefused as refused:
                found.append(refused.rule)
            except SourceMissing:
                found.append("missing")
            else:
                found.append("open")
        return found

    for exists in (False, True):
        if exists:
            (kept / "state").mkdir(parents=True)
            denylist = Denylist(read_mounts(), storage=[str(kept)])
        assert rules(kept) == rules(kept / "state") == ["denylist", "denylist"]
        assert rules(base / "place") == rules(base) == ["open", "denylist"]
        assert rules(base / "place/state") == ["open", "open"]
    with pytest.raises(SourceRefused) as caught:
        open_source(str(base), access="write", denylist=denylist)
    assert caught.value.reason == f"it contains {kept}, where hosts keep what plugins store"
    assert caught.value.hint.endswith("or choose another place with --state-dir")
    # Under another name, too.
    (base / "place").rename(base / "moved")
    assert rules(base / "moved/.storage") == ["denylist", "denylist"]


# --- aliases by mount -----------------------------------------------------------------------------
# Made in a mount namespace of the probe's own, as root and, inside a user namespace, as an ordinary user.

PROBE = """
import json, os, subprocess, sys
from sandbox.paths.denylist import Denylist
from sandbox.paths.mounts import Mounts, read_mounts
from sandbox.paths.scan import SourceRefused
from sandbox.paths.source import SourceMissing, open_source

def ask(path, deny):
    try:
        source = open_source(path, access="read", denylist=Denylist(read_mounts(), policy=deny))
    except SourceRefused as refused:
        return refused.rule, refused.reason
    except SourceMissing:
        return "missing", ""
    return "open", source.real

order = json.load(sys.stdin)
for step in order["steps"]:
    kind, *args = step
    if kind == "symlink":
        os.symlink(*args)
    elif kind == "mkdir":
        os.mkdir(*args)
    elif kind == "chown":
        os.chown(args[0], int(args[1]), int(args[1]))
    elif kind == "chmod":
        os.chmod(args[0], int(args[1], 8))
    elif kind == "tmpfs":
        subprocess.run(["mount", "-n", "-t", "tmpfs", "none", *args], check=True)
    else:
        subprocess.run(["mount", "-n", "--" + kind, *args], check=True)
print(json.dumps([ask(path, order["deny"]) for path in order["ask"]]))
"""


def probe(
    caller: Caller, deny: Sequence[str], steps: Sequence[Sequence[str]], ask: Sequence[str]
) -> list[list[str]]:
    """`caller` makes the mounts in a namespace of its own and opens the paths."""
    namespace = ["unshare", *([] if caller.uid == 0 else ["-Ur"]), "-m", "--propagation", "private"]
    done = subprocess.run(
        [*caller.prefix, *namespace, *caller.python, "-c", PROBE],
        input=json.dumps({"deny": list(deny), "steps": [list(step) for step in steps], "ask": list(ask)}),
        env={**caller.environ, "PATH": SYSTEM_PATH + ":/usr/sbin:/sbin"},
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[str]] = json.loads(done.stdout)
    return answers


class Alias(NamedTuple):
    steps: tuple[tuple[str, str, str], ...]
    path: str
    rule: str = "denylist"
    said: str = ""


MOUNTED = {
    "the directory itself": Alias((("bind", "{v}", "{m}"),), "{m}", said="the file or folder it leads to is"),
    "a directory below": Alias((("bind", "{v}/inner", "{m}"),), "{m}", said="it is a mount of"),
    "a file below": Alias((("bind", "{v}/secret", "{m}/file"),), "{m}/file", said="it is a mount of"),
    "a parent": Alias((("bind", "{b}", "{m}"),), "{m}", said="contains"),
    "through a parent": Alias(
        (("bind", "{b}", "{m}"),), "{m}/vault", said="the file or folder it leads to is"
    ),
    "below, through a parent": Alias((("bind", "{b}", "{m}"),), "{m}/vault/inner", said="lies below"),
    "a mount of a mount": Alias(
        (("bind", "{v}", "{m}"), ("bind", "{m}/inner", "{s}")), "{s}", said="it is a mount of"
    ),
    "a mount below the source": Alias((("bind", "{v}/inner", "{m}/sub"),), "{m}", said="mount below"),
    "the directory, mounted below the source": Alias(
        (("bind", "{v}", "{m}/sub"),), "{m}", said="mount below"
    ),
    "a parent, mounted below the source": Alias((("bind", "{b}", "{m}/sub"),), "{m}", said="mount below"),
    "a file mounted below the source": Alias(
        (("bind", "{v}/secret", "{m}/file"),), "{m}", said="mount below"
    ),
    "what a later mount hides": Alias(
        (("bind", "{b}", "{m}"), ("bind", "{s}", "{v}")), "{m}/vault/inner", said="it is a mount of"
    ),
    "a moved mount": Alias(
        (("bind", "{v}/inner", "{m}"), ("move", "{m}", "{s}")), "{s}", said="it is a mount of"
    ),
}


@pytest.mark.parametrize("alias", MOUNTED.values(), ids=MOUNTED)
def test_bind_mounts(runner_as: Caller, alias: Alias) -> None:
    base = runner_as.home / "place"
    twins(base)
    runner_as.give(base)
    steps = []
    asked = []
    for twin in ("denied", "harmless"):
        names = places(base, twin)
        steps += [[part.format(**names) for part in step] for step in alias.steps]
        asked.append(alias.path.format(**names))
    (rule, reason), (control, real) = probe(runner_as, [places(base, "denied")["v"]], steps, asked)
    assert rule == alias.rule
    assert alias.said in reason
    assert (control, real) == ("open", asked[1])


def test_bind_mounts_of_the_target_of_a_denied_link(runner_as: Caller) -> None:
    base = runner_as.home / "place"
    twins(base)
    names = {twin: places(base, twin) for twin in ("denied", "harmless")}
    for twin in names.values():
        os.symlink("vault", twin["b"] + "/link")
    runner_as.give(base)
    steps = [("bind", twin["v"] + "/inner", twin["m"]) for twin in names.values()]
    deny = [names["denied"]["b"] + "/link"]
    answers = probe(runner_as, deny, steps, [twin["m"] for twin in names.values()])
    assert [rule for rule, _ in answers] == ["denylist", "open"]


def test_a_kernel_filesystem_below_the_source(runner_as: Caller) -> None:
    base = runner_as.home / "place"
    twins(base)
    runner_as.give(base)
    here, there = places(base, "denied"), places(base, "harmless")
    steps = [("rbind", "/proc", here["m"] + "/sub"), ("rbind", here["v"], there["m"] + "/sub")]
    answers = probe(
        runner_as, [], steps, [here["m"], here["m"] + "/sub", here["m"] + "/sub/self", there["m"]]
    )
    assert [rule for rule, _ in answers] == ["kernel_filesystem"] * 3 + ["open"]


def test_what_systemd_hides_below_the_source(runner_as: Caller) -> None:
    """ProtectKernelModules= mounts a node of /run over /usr/lib/modules, and ProtectHome= the same one over
    /home. Only a node that nobody may open passes, and only if it is one of systemd's."""
    base = runner_as.home / "place"
    twins(base)
    runner_as.give(base)
    nodes = "/run/systemd/inaccessible"
    hidden, opened, other, foreign = (str(base / name) for name in ("hidden", "opened", "other", "foreign"))
    for folder in (hidden, opened, other, foreign):
        (Path(folder) / "sub").mkdir(parents=True)
    steps: list[tuple[str, ...]] = [("tmpfs", "/run")]
    steps += [("mkdir", path) for path in ("/run/systemd", nodes, f"{nodes}/dir", f"{nodes}/open", "/run/x")]
    steps += [("chmod", f"{nodes}/dir", "000"), ("chmod", "/run/x", "000")]
    steps += [("bind", f"{nodes}/dir", f"{hidden}/sub"), ("bind", f"{nodes}/dir", "/home")]
    steps += [("bind", f"{nodes}/open", f"{opened}/sub"), ("bind", "/run/x", f"{other}/sub")]
    runner_as.give(base)
    asked = [hidden, opened, other]
    if runner_as.uid == 0:  # a user namespace of an ordinary user has no second uid
        steps += [
            ("mkdir", f"{nodes}/own"),
            ("chmod", f"{nodes}/own", "000"),
            ("chown", f"{nodes}/own", "1000"),
        ]
        steps += [("bind", f"{nodes}/own", f"{foreign}/sub")]
        asked.append(foreign)
    answers = probe(runner_as, [], steps, asked)
    assert [rule for rule, _ in answers] == ["open", *["denylist"] * (len(asked) - 1)]


def test_the_directory_mounted_over_a_path_is_judged(runner_as: Caller) -> None:
    """The directory mounted over a harmless path counts, not the hidden one below it."""
    base = runner_as.home / "place"
    twins(base)
    runner_as.give(base)
    denied, harmless = places(base, "denied"), places(base, "harmless")
    steps = [("bind", denied["v"], harmless["v"]), ("bind", harmless["m"], harmless["s"])]
    answers = probe(runner_as, [denied["v"]], steps, [harmless["v"], harmless["s"]])
    assert [rule for rule, _ in answers] == ["denylist", "open"]


@pytest.mark.needs("root")
def test_links_are_the_systems_where_only_root_can_make_them(runner_as_root: Caller) -> None:
    chain = [("symlink", f"l{number + 1}", f"/mnt/l{number}") for number in range(41)]
    steps = [
        ("tmpfs", "/mnt"),
        ("chmod", "/mnt", "755"),
        ("mkdir", "/mnt/target"),
        ("mkdir", "/mnt/shared"),
        ("chmod", "/mnt/shared", "1777"),
        ("symlink", "target", "/mnt/good"),
        ("symlink", "../target", "/mnt/shared/bad"),
        ("symlink", "shared/../target", "/mnt/around"),
        ("symlink", "/root", "/mnt/root"),
        *chain,
        ("symlink", "target", "/mnt/l41"),
    ]
    asked = ["good", "shared/bad", "around", "root", "l2", "l1", "target/../x"]
    answers = probe(runner_as_root, [], steps, [f"/mnt/{name}" for name in asked])
    assert [rule for rule, _ in answers] == ["open", "symlink", "open", "denylist", "open", "symlink", "path"]
    assert answers[0][1] == answers[2][1] == "/mnt/target"


# --- hard links -----------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["secret", "inner/key"])
@pytest.mark.parametrize("source", ["{m}", "{m}/sub/linked"])
@pytest.mark.parametrize("denied", ["{v}", "{v}/secret", "{v}/inner/key"])
def test_hard_links(tmp_path: Path, secret: str, source: str, denied: str) -> None:
    twins(tmp_path)
    deny = [denied.format(**places(tmp_path, "denied"))]
    for twin in ("denied", "harmless"):
        names = places(tmp_path, twin)
        os.link(f"{names['v']}/{secret}", f"{names['m']}/sub/linked")
        touches = twin == "denied" and (denied == "{v}" or denied.endswith(secret))
        answer = ask(source.format(**names), deny, scan_limit=10**6)
        if touches:
            assert answer.rule in ("hard_link", "denylist")
            assert "link" in answer.reason or "the file or folder it leads to" in answer.reason
        else:
            assert answer.rule == "open"


def test_links_that_stay_inside_of_the_source_need_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").touch()
    os.link(tmp_path / "one", tmp_path / "two")
    monkeypatch.setattr(Denylist, "find_linked", lambda *_, **__: pytest.fail("searched"))
    assert ask(tmp_path).rule == "open"


def test_hard_links_that_cannot_be_resolved_are_refused(tmp_path: Path) -> None:
    twins(tmp_path)
    names = places(tmp_path, "harmless")
    for number in range(11):
        (tmp_path / "denied" / "vault" / str(number)).touch()
    os.link(f"{names['v']}/secret", f"{names['m']}/sub/linked")
    # The source has three entries. Five times three is less than the denied directory has below it.
    answer = ask(names["m"], [tmp_path / "denied"], scan_limit=3)
    assert answer.rule == "hard_link"
    assert "scan_limit" in answer.hint


# --- what lies in a source ------------------------------------------------------------------------


def special_files(base: Path) -> dict[str, Path]:
    found = {"socket": base / "socket", "fifo": base / "fifo"}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(found["socket"]))
    os.mkfifo(found["fifo"])
    return found


@pytest.mark.parametrize("kind", ["socket", "fifo"])
@pytest.mark.parametrize("depth", [0, 3])
def test_sockets_and_fifos_in_a_source(plugin_dir: Path, kind: str, depth: int) -> None:
    made = plugin_dir / "made"
    made.mkdir()
    source = plugin_dir / "source"
    deep = source.joinpath(*"abc"[:depth])
    deep.mkdir(parents=True)
    (deep / "file").touch()
    assert ask(source).rule == "open"
    special_files(made)[kind].rename(deep / "found")
    answer = ask(source)
    assert answer.rule == "special_file"
    assert str(deep / "found") in answer.reason
    assert ask(source, trusted=True).rule == "open"
    assert ask(deep / "found", trusted=True).rule == "special_file"


@pytest.mark.needs("root")
def test_devices_in_a_source(tmp_path: Path) -> None:
    os.mknod(tmp_path / "zero", 0o600 | 0o020000, os.makedev(1, 5))
    assert ask(tmp_path).rule == "special_file"
    assert "character device" in ask(tmp_path).reason
    (tmp_path / "zero").unlink()
    assert ask(tmp_path).rule == "open"


def test_a_socket_mounted_over_a_file_is_seen(runner_as: Caller) -> None:
    """The directory entry still says "regular file"; only stat of the file shows the socket."""
    base = runner_as.home / "place"
    (base / "source").mkdir(parents=True)
    (base / "source" / "file").touch()
    made = special_files(base)
    runner_as.give(base)
    steps = [("bind", str(made["socket"]), str(base / "source" / "file"))]
    assert probe(runner_as, [], [], [str(base / "source")])[0][0] == "open"
    assert probe(runner_as, [], steps, [str(base / "source")])[0][0] == "special_file"


def test_links_in_a_source_are_not_followed(plugin_dir: Path) -> None:
    (plugin_dir / "outside").mkdir()
    special_files(plugin_dir / "outside")
    source = plugin_dir / "source"
    source.mkdir()
    (source / "dir").symlink_to("../outside")
    (source / "socket").symlink_to("../outside/socket")
    (source / "loop").symlink_to(".")
    assert ask(plugin_dir / "outside").rule == "special_file"
    assert ask(source).rule == "open"


def test_the_scan_limit_is_exact(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / str(number)).touch()
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "last").touch()
    assert ask(tmp_path, scan_limit=11).rule == "open"
    answer = ask(tmp_path, scan_limit=10)
    assert answer.rule == "scan_limit"
    assert "narrower" in answer.hint and "scan_limit" in answer.hint
    assert ask(tmp_path, scan_limit=10, trusted=True).rule == "open"


def test_the_depth_limit_is_exact(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(DEPTH_LIMIT):
        deep /= "d"
    deep.mkdir(parents=True)
    assert ask(tmp_path).rule == "open"
    (deep / "d").mkdir()
    assert ask(tmp_path).rule == "scan_limit"


@pytest.mark.needs("root", "user")  # to make what is not the user's
@one_case(
    ("mode", "rule"),
    [
        (0o700, "open"),  # closed to the runner, so closed to the plugin, which is no more than the runner
        (0o711, "unreadable"),  # names that are known can be opened
        (0o755, "open"),
    ],
)
def test_directories_the_runner_cannot_list(
    runner_as_user: Caller, plugin_dir: Path, mode: int, rule: str
) -> None:
    foreign = plugin_dir / "source" / "foreign"
    foreign.mkdir(parents=True)
    (plugin_dir / "source").chmod(0o755)
    foreign.chmod(mode)
    done = subprocess.run(
        [*runner_as_user.prefix, *runner_as_user.python, "-c", PROBE],
        input=json.dumps({"deny": [], "steps": [], "ask": [str(plugin_dir / "source")]}),
        env=dict(runner_as_user.environ),
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert json.loads(done.stdout)[0][0] == rule


@pytest.mark.needs("root", "user")  # to make what is not the user's
def test_a_user_gets_nothing_out_of_a_directory_closed_to_them(
    runner_as_user: Caller, plugin_dir: Path
) -> None:
    closed = plugin_dir / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    (answer,) = probe(runner_as_user, [], [], [str(closed / "inner")])
    assert answer[0] == "unreadable"


# --- between looking and mounting -----------------------------------------------------------------


def test_an_opened_source_stays_the_same_file(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    for name in ("real", "other"):
        (base / name).mkdir()
        (base / name / "content").write_text(name)
    source = opened(base / "real")
    try:
        (base / "real").rename(base / "old")
        (base / "real").symlink_to("other")
        assert (base / "real" / "content").read_text() == "other"  # the name leads elsewhere now
        assert Path(f"/proc/self/fd/{source.fd}/content").read_text() == "real"
        status = os.fstat(source.fd)
        assert source.identity[:3] == (status.st_dev, status.st_ino, status.st_mode)
        assert not os.get_inheritable(source.fd)
    finally:
        source.close()


SWAP = """
import os, sys
base = sys.argv[1]
os.chdir(base)
print("ready", flush=True)
while True:
    os.rename("source", "aside")
    os.symlink("secret", "source")
    os.unlink("source")
    os.rename("aside", "source")
"""


def test_a_source_that_is_swapped_all_the_time(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    for name in ("source", "secret"):
        (base / name).mkdir()
        (base / name / "content").write_text(name)
    denylist = Denylist(read_mounts(), policy=[str(base / "secret")])
    counts = {"open": 0, "refused": 0}
    with subprocess.Popen([sys.executable, "-c", SWAP, str(base)], stdout=subprocess.PIPE) as swapper:
        try:
            assert swapper.stdout is not None
            swapper.stdout.readline()
            while min(counts.values()) < 100:
                try:
                    source = open_source(str(base / "source"), access="read", denylist=denylist)
                except (SourceRefused, SourceMissing):
                    counts["refused"] += 1
                    continue
                counts["open"] += 1
                try:
                    assert Path(f"/proc/self/fd/{source.fd}/content").read_text() == "source"
                finally:
                    source.close()
        finally:
            swapper.send_signal(signal.SIGKILL)


def test_a_removed_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    walk = sources._walk

    def late(*args: Any) -> Any:
        steps = walk(*args)
        (tmp_path / "source").rmdir()
        return steps

    monkeypatch.setattr(sources, "_walk", late)
    assert ask(tmp_path / "source").rule == "source_changed"


def test_no_plan_is_stored_where_another_machine_tells_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was scanned is watched by its time: a server of FUSE or NFS could tell any."""
    with look.recording() as asked:
        opened(tmp_path).close()
    assert asked.doubt == ""  # the control
    monkeypatch.setattr(sources, "KEEP_TIMES", frozenset())
    with look.recording() as asked:
        opened(tmp_path).close()
    assert "may not keep the times" in asked.doubt
    with look.recording() as asked:
        opened("/usr/bin", trusted=True).close()  # is not scanned
    assert asked.doubt == ""
