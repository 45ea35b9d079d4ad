"""From a grant to a plan: its operations, their order, and the grants that are refused."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.network.egress import EgressPlan
from sandbox.paths.access import Unreadable, unreachable
from sandbox.paths.executable import ProgramFault
from sandbox.paths.mounts import contains
from sandbox.plan.operations import DEFAULT_SHM_BYTES, DEFAULT_TMP_BYTES
from sandbox.plan.plan import Bind, Dev, Mask, PlanRefused, Proc, ReadOnly, ShownPath, Symlink, Text, Tmpfs
from sandbox.policy.policy import PathRule
from sandbox.spec import Denial, GrantedPath, Limits, Network
from tests import elsewhere
from tests.conftest import SYSTEM_PATH, USER_UID, Caller
from tests.sandbox import cages
from tests.sandbox.cages import compiled, grant, granted, request

Write = Callable[..., Path]

LEASED = 61234


@pytest.fixture(autouse=True)
def _no_open_files_left() -> Iterator[None]:
    before = cages.open_descriptors()
    yield
    assert cages.open_descriptors() == before


@pytest.fixture
def plugin(plugin_dir: Path, write_file: Write) -> Path:
    """A plugin's own folder with a script in it."""
    return write_file(plugin_dir / "plugin/run", "#!/bin/sh\n", 0o755).parent


def run(plugin: Path, **changes: Any) -> Any:
    return request("./run", directory=str(plugin), **changes)


def refusals(asked: Any, given: Any = None, **more: Any) -> tuple[Denial, ...]:
    with pytest.raises(PlanRefused) as caught:
        compiled(asked, given, **more)
    assert all(denial.reason and denial.hint for denial in caught.value.denials)
    assert str(caught.value) == "; ".join(denial.reason for denial in caught.value.denials)
    return caught.value.denials


# --- order -------------------------------------------------------------------------------------------------


def test_a_folder_comes_before_the_paths_below_it(plugin: Path, plugin_dir: Path) -> None:
    places = [plugin_dir / name for name in ("b/c/d", "a", "b", "b/c", "a/z")]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    plan = compiled(run(plugin), grant([granted(str(place)) for place in places]))
    binds = [op.dest for op in plan.operations if isinstance(op, Bind)]
    assert {str(place) for place in (*places, plugin)} <= set(binds)
    for number, dest in enumerate(binds):
        assert not any(contains(dest, earlier) for earlier in binds[:number]), f"{dest} hides an earlier bind"


def test_the_cages_own_tmp_comes_before_what_is_below_it(plugin: Path, plugin_dir: Path) -> None:
    link = plugin_dir / "link"
    link.symlink_to("/bin/sh")
    for asked in (run(plugin), request(str(link))):
        plan = compiled(asked)
        kinds = list(plan.operations)
        tmp = kinds.index(Tmpfs("/tmp", DEFAULT_TMP_BYTES, 0o1777, DEFAULT_TMP_BYTES // 4096))
        below = [number for number, op in enumerate(kinds) if op.dest != "/tmp" and contains("/tmp", op.dest)]
        assert below and min(below) > tmp


def test_the_skeleton(plugin: Path) -> None:
    operations = compiled(run(plugin)).operations
    # With their kinds: as tuples, Dev("/dev") and ReadOnly("/dev") are equal.
    at = {(type(op), op.dest): number for number, op in enumerate(operations)}
    assert at[ReadOnly, "/"] == len(operations) - 1
    assert at[Dev, "/dev"] < at[Tmpfs, "/dev/shm"]
    assert at[Dev, "/dev"] < at[ReadOnly, "/dev"]
    masks = [number for (kind, _), number in at.items() if kind is Mask]
    assert masks and at[Proc, "/proc"] < min(masks) and max(masks) < at[ReadOnly, "/proc"]
    assert operations[at[Tmpfs, "/dev/shm"]] == Tmpfs(
        "/dev/shm", DEFAULT_SHM_BYTES, 0o1777, DEFAULT_SHM_BYTES // 4096
    )
    texts = {op.dest: op.content for op in operations if isinstance(op, Text)}
    assert set(texts) == {"/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf"}
    assert b"65534" in texts["/etc/passwd"] and b"65534" in texts["/etc/group"]
    assert Bind("/usr", "/usr", False, identity("/usr")) in operations
    for name in ("/bin", "/lib", "/sbin"):
        if os.path.islink(name):
            assert Symlink(name, os.readlink(name)) in operations
    dests = [op.dest for op in operations if not isinstance(op, ReadOnly)]
    assert len(dests) == len(set(dests)), "something is mounted twice"


def identity(path: str) -> Any:
    from sandbox.paths.file_identity import FileIdentity

    held = os.stat(path)
    return FileIdentity(held.st_dev, held.st_ino, held.st_mode, held.st_ctime_ns)


def test_sources_are_identified_by_inode(plugin: Path) -> None:
    with cages.opened(run(plugin)) as held:
        (bind,) = (op for op in held.plan.operations if isinstance(op, Bind) and op.dest == str(plugin))
        assert bind == Bind(str(plugin), str(plugin), False, identity(str(plugin)))
        # What was looked at is held open, and is what a launch mounts.
        assert os.path.samestat(os.fstat(held.descriptors[str(plugin)]), os.stat(plugin))
        plugin.rename(plugin.with_name("moved"))
        assert os.readlink(f"/proc/self/fd/{held.descriptors[str(plugin)]}").endswith("/moved")


def test_sizes_of_the_cages_own_places(plugin: Path) -> None:
    operations = compiled(run(plugin), grant(limits=Limits(tmp=4096, shm=8192))).operations
    assert Tmpfs("/tmp", 4096, 0o1777, 1024) in operations
    assert Tmpfs("/dev/shm", 8192, 0o1777, 1024) in operations


# --- the same bytes ----------------------------------------------------------------------------------------


def described(directory: str, paths: list[str]) -> list[Any]:
    """All parts of a plan that a launch uses, compiled in a new process."""
    from sandbox.paths.denylist import Denylist
    from sandbox.paths.mounts import read_mounts
    from sandbox.plan import bwrap
    from sandbox.plan.available_layers import available_layers
    from sandbox.plan.compile import open_plan
    from sandbox.plan.plan import PlanRequest, Text
    from sandbox.policy.policy import Policy
    from sandbox.spec import Grant, GrantedPath, Limits, Network

    asked = PlanRequest("./run", ("a", "b"), directory, directory, False, False, (), None)
    grant = Grant(
        policy="test",
        unsandboxed=False,
        paths=tuple(GrantedPath(path, "read", True, "manifest", ()) for path in paths),
        network=Network("none"),
        env=(("ZED", "1"), ("ALPHA", "2"), ("MID", "3")),
        seccomp="default",
        limits=Limits(),
        decided_by=(),
        denials=(),
    )
    policy = Policy(name="test", file="/nonexistent")
    layers = available_layers(grant, policy, "/usr/bin/bwrap", can_join_keyring=True)
    denylist = Denylist(read_mounts())
    with open_plan(asked, grant, policy, layers, denylist, {"PATH": "/usr/bin"}) as held:
        texts = {
            op.dest: 200 + number for number, op in enumerate(held.plan.operations) if isinstance(op, Text)
        }
        sources = {dest: 100 + number for number, dest in enumerate(sorted(held.descriptors))}
        slots = bwrap.Slots(sources, texts, {op.dest: "/f" for op in held.plan.folders}, (3,), 4)
        return [repr(held.plan), list(bwrap.options(held.plan, slots))]


def test_two_compilations_give_the_same_bytes(runner_as_user: Caller, plugin: Path, plugin_dir: Path) -> None:
    paths = [str(plugin_dir / name) for name in "fbdeac"]
    for path in paths:
        os.mkdir(path)
    first, again, other, unseeded = (
        elsewhere.run(runner_as_user, described, str(plugin), paths, env={"PYTHONHASHSEED": seed})
        for seed in ("1", "1", "4242", "random")
    )
    assert first == again == other == unseeded
    # And the order in which things were granted does not show.
    backwards = elsewhere.run(runner_as_user, described, str(plugin), paths[::-1])
    assert backwards[1] == first[1]


def give_away(*places: Path) -> None:
    """Give the path to an ordinary user: root's plugins cannot write files of root."""
    for place in places if os.geteuid() == 0 else ():
        os.chown(place, USER_UID, USER_UID)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.launches  # as root a namespace says who may write there
@pytest.mark.parametrize("inner", ["data/inner", "data/deep/er"])
@pytest.mark.parametrize("access", ["read", "write"])
def test_nothing_is_mounted_below_a_writable_bind(
    plugin: Path, plugin_dir: Path, inner: str, access: Any
) -> None:
    outer = plugin_dir / "data"
    (plugin_dir / inner).mkdir(parents=True)
    (plugin_dir / "data2").mkdir()
    give_away(outer, plugin_dir / inner, plugin_dir / "data2")
    given = grant([granted(str(outer), "write"), granted(str(plugin_dir / inner), access)])
    (denial,) = refusals(run(plugin), given)
    assert (denial.rule, denial.asked) == ("below_writable", str(plugin_dir / inner))
    # The control: below a folder it can only read the same is fine.
    given = grant([granted(str(outer)), granted(str(plugin_dir / inner), access)])
    compiled(run(plugin), given)
    # And a neighbour whose name begins in the same way is not below.
    compiled(run(plugin), grant([granted(str(outer), "write"), granted(str(plugin_dir / "data2"), access)]))


def test_the_plugins_own_folder_is_not_mounted_below_a_writable_bind(plugin: Path, plugin_dir: Path) -> None:
    (denial,) = refusals(run(plugin), grant([granted(str(plugin_dir), "write")]))
    assert (denial.rule, denial.asked) == ("below_writable", str(plugin))


@pytest.mark.launches  # as root a namespace says who may write there
@pytest.mark.parametrize("where", ["plugin", "policies"])
def test_a_plugin_cannot_write_its_next_grant(
    plugin: Path, plugin_dir: Path, write_file: Write, where: str
) -> None:
    deciding = write_file(plugin_dir / where / "sub/decides.toml", "")
    asked, files = run(plugin), [str(deciding)]
    for folder in (deciding.parent, deciding.parent.parent):
        given = grant([granted(str(folder), "write")])
        assert {denial.rule for denial in refusals(asked, given, deciding=files)} == {"self_grant"}
    # The control: a folder beside it, and the same folder for reading.
    beside = plugin_dir / where / "sub/data"
    beside.mkdir()
    give_away(beside)
    given = grant([granted(str(beside), "write"), granted(str(deciding.parent))])
    compiled(asked, given, deciding=files)
    # A second name of the file is the file.
    os.link(deciding, beside / "other")
    assert {denial.rule for denial in refusals(asked, given, deciding=files)} == {"hard_link"}


@pytest.mark.needs("root")
def test_a_plugin_cannot_write_its_next_grant_through_a_link(
    plugin: Path, write_file: Write, request: pytest.FixtureRequest
) -> None:
    """A link of root's in a directory of root's is followed; its target counts."""
    link = Path(f"/opt/rt-link-{os.getpid()}")
    deciding = write_file(plugin.parent / "deciding/policy.toml", "")
    link.symlink_to(deciding.parent)
    request.addfinalizer(link.unlink)
    (denial,) = refusals(run(plugin), grant([granted(str(link), "write")]), deciding=[str(deciding)])
    assert (denial.rule, denial.asked) == ("self_grant", str(link))


def test_missing_paths(plugin: Path, plugin_dir: Path) -> None:
    optional, needed, also = (str(plugin_dir / name) for name in ("optional", "needed", "also"))
    plan = compiled(run(plugin), grant([granted(optional, required=False)]))
    assert ShownPath(optional, "read", "manifest", "missing") in plan.shown
    assert not any(op.dest == optional for op in plan.operations)
    # Required ones are all named at once, with where they stand in the manifest.
    denials = refusals(
        run(plugin), grant([granted(optional, required=False), granted(needed), granted(also, "write")])
    )
    assert [(d.rule, d.asked, d.where) for d in denials] == [
        ("missing_path", needed, ("paths", needed)),
        ("missing_path", also, ("paths", also)),
    ]


def test_all_refusals_are_reported_at_once(plugin: Path, plugin_dir: Path) -> None:
    os.mkfifo(plugin_dir / "fifo")
    (plugin_dir / "denied").mkdir()
    paths = [granted(str(plugin_dir / name)) for name in ("fifo", "denied", "gone")]
    denials = refusals(run(plugin), grant(paths), deny=[str(plugin_dir / "denied")])
    assert [denial.rule for denial in denials] == ["special_file", "denylist", "missing_path"]


def test_an_optional_path_may_be_missing_but_not_forbidden(plugin: Path, plugin_dir: Path) -> None:
    (plugin_dir / "denied").mkdir()
    paths = [granted(str(plugin_dir / "denied"), required=False)]
    (denial,) = refusals(run(plugin), grant(paths), deny=[str(plugin_dir / "denied")])
    assert denial.rule == "denylist"


def test_limits_that_are_enforced(plugin: Path) -> None:
    plan = compiled(run(plugin), grant(limits=Limits(tmp=1 << 20, shm=1 << 20, deadline=5.0)))
    assert plan.limits.deadline == 5.0


def test_a_program_that_may_not_be_shown(plugin: Path, plugin_dir: Path, write_file: Write) -> None:
    tool = write_file(plugin_dir / "elsewhere/tool", "#!/bin/sh\n", 0o755)
    with pytest.raises(ProgramFault, match=str(tool)):
        compiled(request(str(tool), directory=str(plugin)))
    rules = cages.policy(read=PathRule(ceiling=(str(tool.parent),)))
    plan = compiled(request(str(tool), directory=str(plugin)), rules=rules)
    assert ShownPath(str(tool), "read", "the program", "bound") in plan.shown


# --- what is in it -----------------------------------------------------------------------------------------


@pytest.mark.launches  # as root a namespace says who may write there
def test_writing_wins_over_reading(plugin: Path, plugin_dir: Path) -> None:
    place = plugin_dir / "data"
    place.mkdir()
    give_away(place)
    for accesses in (("read", "write"), ("write", "read")):
        plan = compiled(run(plugin), grant([granted(str(place), access) for access in accesses]))
        assert [op.writable for op in plan.operations if isinstance(op, Bind) and op.dest == str(place)] == [
            True
        ]


def test_paths_of_the_runtime_are_bound_once(plugin: Path) -> None:
    plan = compiled(run(plugin), grant([granted("/usr/share"), granted("/bin")]))
    dests = {op.dest for op in plan.operations if isinstance(op, Bind)}
    assert "/usr/share" not in dests and "/bin" not in dests


def test_the_network(plugin: Path) -> None:
    none, host = (compiled(run(plugin), grant(network=mode)) for mode in ("none", "host"))
    assert not none.share_network and host.share_network
    own, copied = ({op.dest: op.content for op in p.operations if isinstance(op, Text)} for p in (none, host))
    assert own["/etc/hosts"] == b"127.0.0.1 localhost\n::1 localhost\n" and "/etc/resolv.conf" not in own
    assert copied["/etc/hosts"] == Path("/etc/hosts").read_bytes()
    # A copy, never a bind: it is often a link into /run.
    if os.path.exists("/etc/resolv.conf"):
        assert copied["/etc/resolv.conf"] == Path("/etc/resolv.conf").read_bytes()
    assert not any(isinstance(op, Bind) and op.dest in copied for op in host.operations)


def test_the_network_behind_a_gate(plugin: Path) -> None:
    given = grant()._replace(network=Network("allowlist", ("example.com:443",)))
    plan = compiled(run(plugin), given)
    assert plan.egress == EgressPlan(("example.com:443",)) and not plan.share_network
    texts = {op.dest: op.content for op in plan.operations if isinstance(op, Text)}
    assert texts["/etc/resolv.conf"].splitlines()[0] == b"nameserver 127.0.0.1"
    assert b"hosts: files dns\n" in texts["/etc/nsswitch.conf"]
    assert texts["/etc/hosts"] == b"127.0.0.1 localhost\n::1 localhost\n"


@pytest.mark.parametrize("bare", [False, True])
def test_the_environment(plugin: Path, bare: bool) -> None:
    plan = compiled(run(plugin, bare_environment=bare), grant(env={"B": "2", "A": "1"}))
    ours = [
        ("HOME", "/tmp"),
        ("LANG", "C.UTF-8"),
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("TMPDIR", "/tmp"),
    ]
    assert list(plan.env) == [("A", "1"), ("B", "2"), *([] if bare else ours)]


def test_granted_variables_win_over_the_runners(plugin: Path) -> None:
    plan = compiled(run(plugin, state_dir="/var/lib/x"), grant(env={"PATH": "/own", "HOME": "/own"}))
    assert dict(plan.env) == {
        "HOME": "/own",
        "LANG": "C.UTF-8",
        "PATH": "/own",
        "RUNNER_STATE_DIR": "/var/lib/x",
        "TMPDIR": "/tmp",
    }


def test_a_bare_environment_has_the_path_a_script_needs(
    plugin: Path, plugin_dir: Path, write_file: Write
) -> None:
    write_file(plugin_dir / "tools/own-tool", "#!/bin/sh\n", 0o755)
    plan = compiled(
        request("own-tool", bare_environment=True), environ={"PATH": f"{SYSTEM_PATH}:{plugin_dir}/tools"}
    )
    assert [name for name, _ in plan.env] == ["PATH"]
    assert dict(plan.env)["PATH"].startswith(f"{plugin_dir}/tools:/usr/local/sbin:")


def test_the_working_directory(plugin: Path) -> None:
    assert compiled(run(plugin)).directory == str(plugin)
    # A place that is not in the cage is no place to start in.
    assert compiled(request("sh", directory="/var", root=None)).directory == "/tmp"


def test_state_that_does_not_exist_yet_can_be_explained(plugin: Path, plugin_dir: Path) -> None:
    state = str(plugin_dir / "state")
    given = grant([GrantedPath(state, "write", True, "state", ())])
    plan = compiled(run(plugin, state_dir=state), given)
    assert ShownPath(state, "write", "state", "made at launch") in plan.shown
    assert any(isinstance(op, Bind) and op.dest == state and op.writable for op in plan.operations)
    assert not os.path.exists(state)


# --- what must not be read ---------------------------------------------------------------------------------


def test_the_operators_own_file_is_concealed(runner_as: Caller, plugin: Path, write_file: Write) -> None:
    secret = write_file(plugin / "mcp.json", "token")
    tell = "#!/bin/sh\ncat mcp.json 2>/dev/null; echo $?\n"
    write_file(plugin / "run", tell, 0o755)
    assert cages.run(runner_as, run(plugin))["output"] == "token0\n"  # the control
    assert cages.run(runner_as, run(plugin, conceal=(str(secret),)))["output"] == "1\n"


def test_the_operators_file_is_concealed_under_its_shown_name(
    runner_as_root: Caller, plugin: Path, write_file: Write, request: pytest.FixtureRequest
) -> None:
    """A folder granted through a link of root's appears under the link's name."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make a link that is followed")
    secret = write_file(plugin.parent / "config/mcp.json", "token")
    link = Path(f"/opt/rt-link-{os.getpid()}")
    link.symlink_to(secret.parent)
    request.addfinalizer(link.unlink)
    write_file(plugin / "run", f"#!/bin/sh\nls {link}; cat {link}/mcp.json 2>/dev/null; echo $?\n", 0o755)
    shown = [(str(link), "read")]
    said = cages.run(runner_as_root, run(plugin), paths=shown)["output"]
    assert said == "mcp.json\ntoken0\n"  # the control
    said = cages.run(runner_as_root, run(plugin, conceal=(str(secret),)), paths=shown)["output"]
    assert said == "mcp.json\n1\n"


def test_nothing_is_masked_that_is_not_shown(plugin: Path, plugin_dir: Path, write_file: Write) -> None:
    secret = write_file(plugin_dir / "config/mcp.json", "token")
    plan = compiled(run(plugin, conceal=(str(secret),)))
    assert not any(isinstance(op, Mask) and "mcp.json" in op.dest for op in plan.operations)


# --- what the dropped uid cannot read ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoiled", "mode", "remedy"),
    [
        ("plugin", 0o750, "chmod o+rx {}"),
        ("plugin/run", 0o740, "chmod o+rx {}"),
        (".", 0o750, "chmod o+x {}, or move it to a folder that everybody may enter, such as /opt"),
    ],
)
@pytest.mark.needs("root")
def test_the_first_unreadable_file_is_named_with_a_remedy(
    plugin: Path, plugin_dir: Path, spoiled: str, mode: int, remedy: str
) -> None:
    path = plugin_dir / spoiled
    compiled(run(plugin))  # the control
    path.chmod(mode)
    with pytest.raises(Unreadable, match=f"{path} cannot be read") as caught:
        compiled(run(plugin))
    assert caught.value.hint == remedy.format(path)
    # The remedy it names is a remedy.
    subprocess.run(caught.value.hint.split(",")[0].split(), check=True)
    compiled(run(plugin))


@pytest.mark.needs("root")
def test_no_remedy_opens_the_hosts_own_files(plugin: Path, plugin_dir: Path, write_file: Write) -> None:
    secret = write_file(plugin_dir / "host/secret", "s", 0o600)
    with pytest.raises(Unreadable) as caught:
        compiled(run(plugin), grant([granted(str(secret))]))
    assert "ask for less" in caught.value.hint


def test_permission_bits(plugin: Path) -> None:
    path = plugin / "run"
    held = path.stat()
    somebody = (LEASED, LEASED)
    path.chmod(0o750)
    assert unreachable(str(path), *somebody, 0o5) == str(path)
    assert unreachable(str(path), LEASED, held.st_gid, 0o5) is None
    assert unreachable(str(path), held.st_uid, LEASED, 0o5) is None
    plugin.chmod(0o700)
    assert unreachable(str(path), *somebody, 0o5) == str(plugin)
    plugin.chmod(0o755)
    # The kernel looks at one class only: a group without rights is not helped by those of others.
    path.chmod(0o705)
    assert unreachable(str(path), LEASED, held.st_gid, 0o5) == str(path)


def test_the_whole_state_directory_includes_its_parts(plugin: Path) -> None:
    state = str(plugin.parent / "state")
    both = [GrantedPath(path, "write", True, "state") for path in (f"{state}/sub", state)]
    plan = compiled(run(plugin, state_dir=state), grant(both))
    assert [op.dest for op in plan.operations if isinstance(op, Bind) and op.writable] == [state]


def test_a_magic_link_is_refused_without_an_exception(plugin: Path) -> None:
    """An ordinary user cannot even stat /proc/1/root."""
    for path in ("/proc/1/root/etc", "/proc/self/root/etc", "/proc/1/cwd"):
        (denial,) = refusals(run(plugin), grant([granted(path)]))
        assert denial.asked == path
