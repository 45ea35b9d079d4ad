from __future__ import annotations

import os
import pwd
import re
import subprocess
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox import look
from sandbox.limits.cgroup import make_cgroup
from sandbox.limits.cgroup_survey import survey
from sandbox.paths import denied_paths
from sandbox.paths.denied_paths import (
    HOME_PATHS,
    HOST_PATHS,
    HOST_WRITE_PATHS,
    lexical_fault,
    lexical_hit,
    normal,
)
from sandbox.paths.denylist import Denylist, LinksUnproven, Place
from sandbox.paths.homes import homes
from sandbox.paths.mounts import Inside, parse_mountinfo, read_mounts
from sandbox.spec import Access, Limits
from tests.conftest import ROOT, Caller
from tests.manifests import SANDBOX, nexo
from tests.tables import Done, Line, check_rows, run_lines

HOME = "/home/someone"


def test_the_required_paths_are_on_the_denylist() -> None:
    assert HOST_PATHS == (
        "/etc/shadow",
        "/etc/sudoers",
        "/etc/sudoers.d",
        "/proc/sys",
        "/proc/kcore",
        "/proc/kallsyms",
        "/sys/firmware",
        "/sys/kernel",
        "/dev/mem",
        "/dev/kmem",
        "/dev/port",
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/private/var/run/docker.sock",
        "/root",
        "/boot",
    )
    assert HOME_PATHS[: len(denied_paths._USUAL_HOME_PATHS)] == denied_paths._USUAL_HOME_PATHS
    assert {".ssh", ".aws", ".gnupg", ".netrc", ".kube", ".docker", ".npmrc", ".config/gh"} <= set(HOME_PATHS)


def test_the_page_lists_them_all() -> None:
    text = (ROOT / "docs/policy.md").read_text()
    section = text.partition("## What no policy can allow")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([^` ]+)`", section))
    assert {*HOST_PATHS, *(f"~/{path}" for path in HOME_PATHS)} <= listed


def test_the_constants_cannot_be_changed() -> None:
    for constant in (
        HOST_PATHS,
        HOME_PATHS,
        denied_paths.SOCKET_PATHS,
        denied_paths.WHOLE_PATHS,
        HOST_WRITE_PATHS,
    ):
        assert isinstance(constant, tuple)
        assert all(path == path.rstrip("/") or path == "/" for path in constant)


@pytest.mark.parametrize(
    "path", ["/etc", "/var", "/var/run", "/run", "/dev", "/proc", "/sys", "/private", "/"]
)
def test_parents_of_the_contract_paths_are_hit(path: str) -> None:
    assert lexical_hit(path) is not None


@pytest.mark.parametrize(
    "path", ["/etc/ssl/certs", "/etc/shadow_backup", "/rootfs", "/dev/shm", "/proc/self", "/var/lib", "/tmp"]
)
def test_neighbours_of_the_contract_paths_are_not_hit(path: str) -> None:
    assert lexical_hit(path, [HOME]) is None


@pytest.mark.parametrize("denied", HOST_PATHS)
@pytest.mark.parametrize("spelling", ["{}", "{}/below", "{}/", "{}//", "/{}", "/.{}", "{}/.", "{}/x/./y"])
def test_every_spelling_of_every_host_path_is_hit(denied: str, spelling: str) -> None:
    assert lexical_hit(spelling.format(denied)) is not None
    assert lexical_hit(spelling.format(denied + "-not")) is None


@pytest.mark.parametrize("denied", HOME_PATHS)
def test_every_home_path_is_hit_in_three_directions(denied: str) -> None:
    hit = lexical_hit(f"{HOME}/{denied}", [HOME])
    assert hit is not None and (hit.denied, hit.relation, hit.origin) == (f"{HOME}/{denied}", "equal", "home")
    assert lexical_hit(f"{HOME}/{denied}/x", [HOME]) is not None
    assert lexical_hit(HOME, [HOME]) is not None
    assert lexical_hit(f"{HOME}/{denied}", ["/home/other"]) is None


def test_additions_of_a_policy() -> None:
    hit = lexical_hit("/srv/vault/x", extra=["/srv/vault"])
    assert hit is not None and hit.clause() == "lies below /srv/vault, which this policy denies"
    assert lexical_hit("/srv/vault/x") is None


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("", "empty"),
        ("a/b", "absolute"),
        ("./a", "absolute"),
        ("~/x", "absolute"),
        ("/a\0b", "NUL"),
        ("/a/../b", "'..'"),
        ("/..", "'..'"),
        ("/a/..", "'..'"),
        ("/" + "a" * 4095, "longer"),
    ],
)
def test_paths_that_cannot_be_judged(path: str, fault: str) -> None:
    assert fault in (lexical_fault(path) or "")


@pytest.mark.parametrize("path", ["/", "/a", "/a..b/c", "/...", "//a/./b/", "/" + "a" * 4094])
def test_paths_that_can_be_judged(path: str) -> None:
    assert lexical_fault(path) is None


def test_normal_form() -> None:
    assert normal("//a/./b//c/") == "/a/b/c"
    assert normal("/") == normal("//.//") == "/"


# --- homes ---

PASSWD = """root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
www:x:33:33::/var/www:/usr/sbin/nologin
ann:x:1000:1000:Ann:/home/ann:/bin/bash
bob:x:1001:1001:Bob:/srv/people/bob/:/bin/bash
gone:x:1003:1003::/home/gone:/bin/sh
old:x:500:500::/home/old:/bin/sh
nobody:x:65534:65534::/var/nobody:/usr/sbin/nologin
broken line
eve:x:1002:1002::relative/home:/bin/sh
"""


@pytest.mark.parametrize(
    ("environ", "euid", "expected"),
    [
        ({"HOME": "/home/elsewhere"}, 1000, ["/home/elsewhere", "/home/ann"]),
        ({}, 1001, ["/srv/people/bob"]),
        ({"HOME": "/root"}, 0, ["/root", "/home/ann", "/srv/people/bob", "/home/old"]),
        ({"HOME": "/root", "SUDO_USER": "bob"}, 0, ["/root", "/srv/people/bob", "/home/ann", "/home/old"]),
        ({"HOME": "relative"}, 1002, []),
        ({"HOME": "/"}, 33, ["/", "/var/www"]),
    ],
)
def test_homes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    euid: int,
    expected: list[str],
) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/home/gone")
    passwd = tmp_path / "passwd"
    passwd.write_text(PASSWD)
    assert list(homes(environ, euid=euid, passwd=str(passwd), bases=())) == expected


def test_homes_of_accounts_that_are_not_in_passwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounts of a directory server: every folder below /home counts as a home, and our own account is
    looked up."""
    (tmp_path / "home/ldap").mkdir(parents=True)
    (tmp_path / "home/file").write_text("")
    base = str(tmp_path / "home")
    assert homes({}, euid=0, passwd="/dev/null", bases=[base, "/no/such"]) == ("/root", f"{base}/ldap")
    assert homes({}, euid=4_000_000, passwd="/dev/null", bases=[base]) == ()

    def account(name: object) -> Any:
        return types.SimpleNamespace(pw_dir=f"/srv/{name}")

    monkeypatch.setattr(pwd, "getpwuid", account)
    monkeypatch.setattr(pwd, "getpwnam", account)
    assert homes({}, euid=4_000_000, passwd="/dev/null") == ("/srv/4000000",)
    asked = homes({"SUDO_USER": "ann"}, euid=0, passwd="/dev/null", bases=())
    assert asked == ("/srv/0", "/srv/ann")


def test_a_daemons_home_in_usr_does_not_refuse_usr(tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text(PASSWD)
    assert homes({"HOME": "/usr/sbin"}, euid=1, passwd=str(passwd)) == ()


def test_a_home_behind_a_link_counts_under_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    found = homes({"HOME": str(tmp_path / "link")}, euid=4_000_000, passwd="/dev/null")
    assert found == (str(tmp_path / "link"), str(tmp_path.resolve() / "real"))


# --- the list in force ---


def test_policies_and_homes_only_add() -> None:
    plain = {entry.path for entry in Denylist(read_mounts()).entries}
    more = Denylist(
        read_mounts(), homes=[HOME], policy=["/srv/vault/"], runner=["/var/lib/x"], protected=["/opt/y"]
    )
    assert set(HOST_PATHS) <= plain < {entry.path for entry in more.entries}
    for path in (f"{HOME}/.ssh", "/srv/vault", "/var/lib/x", "/opt/y"):
        assert path in {entry.path for entry in more.entries}


@pytest.mark.parametrize(
    ("path", "access", "refused"),
    [
        ("/root/x", "read", True),
        ("/run", "read", True),
        ("/run/user/1", "read", True),
        ("/var/run/x", "read", True),
        ("/tmp", "read", True),
        ("/tmp/x", "read", False),
        ("/dev/shm", "read", True),
        ("/dev/shm/x", "read", False),
        ("/home", "read", True),
        (HOME, "read", True),
        (f"{HOME}/plugin", "write", False),
        (f"{HOME}/.config", "read", True),
        (f"{HOME}/.bashrc", "read", False),
        (f"{HOME}/.bashrc", "write", True),
        (f"{HOME}/.local/bin/x", "write", True),
        ("/usr/local/lib", "read", False),
        ("/usr/local/lib", "write", True),
        ("/etc/ssl/certs", "read", False),
        ("/etc/ssl/certs", "write", True),
        ("/mnt/session/x", "read", True),
        ("/opt/runner/lib", "read", False),
        ("/opt/runner/lib", "write", True),
        ("/opt", "write", True),
    ],
)
def test_by_name(path: str, access: Access, refused: bool) -> None:
    found = Denylist(read_mounts(), homes=[HOME], runtime_dir="/mnt/session", protected=["/opt/runner"])
    assert (found.name_hit(path, access) is not None) is refused


@pytest.mark.parametrize("runtime_dir", [None, "", "relative", "/", "/a/../b"])
def test_a_senseless_runtime_directory_refuses_nothing_more(runtime_dir: str | None) -> None:
    assert Denylist(read_mounts(), runtime_dir=runtime_dir).entries == Denylist(read_mounts()).entries


def test_a_link_as_denied_path_denies_its_target_by_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    found = Denylist(read_mounts(), policy=[str(tmp_path / "link")])
    assert found.name_hit(str(tmp_path.resolve() / "real" / "x")) is not None
    assert found.name_hit(str(tmp_path / "link" / "x")) is not None
    assert found.name_hit(str(tmp_path / "other")) is None


def test_a_folder_is_known_by_its_identity(tmp_path: Path) -> None:
    """Where neither a name nor the mount table tells: a filesystem may have one st_dev for each subvolume."""
    (tmp_path / "above/vault/below").mkdir(parents=True)
    found = Denylist(read_mounts(), policy=[str(tmp_path / "above/vault")])

    def relation(path: Path, ancestors: tuple[Path, ...] = ()) -> str | None:
        held, *above = ((each.stat().st_dev, each.stat().st_ino) for each in (path, *ancestors))
        hit = found.hit(Place(("/innocent",), held, tuple(above), Inside("0:0", "/innocent"), ()))
        return hit and hit.relation

    assert relation(tmp_path / "above/vault") == "equal"
    assert relation(tmp_path / "above") == relation(tmp_path) == "above"
    assert relation(tmp_path / "above/vault/below", (tmp_path / "above/vault",)) == "below"
    assert relation(tmp_path / "above/vault/below") is None


APPEARS: dict[str, Callable[[Path], object]] = {
    "a denied folder": lambda home: (home / ".ssh").mkdir(),
    "a link to what was shown": lambda home: (home / ".ssh").symlink_to("/usr/share"),
    "the folder of a denied one": lambda home: (home / ".config").mkdir(),
    "a link in its place": lambda home: (home / ".config").symlink_to("/usr/share"),
    "the target of a denied link": lambda home: (home / "target").mkdir(),
    "the target of a link on the way": lambda home: (home / "cargo").mkdir(),
    "another file": lambda home: (home / "other").rename(home / ".netrc"),
    "another owner's rights": lambda home: (home / ".local").chmod(0o700),
}


@pytest.mark.parametrize("appears", APPEARS)
def test_what_appears_later_is_a_new_fact(tmp_path: Path, appears: str) -> None:
    """No stored plan holds once a denied path appears or leads elsewhere. What grows is the same file."""
    (tmp_path / ".aws").symlink_to("target")
    (tmp_path / ".cargo").symlink_to("cargo")
    (tmp_path / ".local").mkdir(mode=0o755)
    for name in (".bash_history", ".netrc", "other"):
        (tmp_path / name).touch()
    with look.recording() as asked:
        Denylist(read_mounts(), homes=[str(tmp_path)])
    (tmp_path / ".bash_history").write_text("more")
    (tmp_path / "unrelated").touch()
    assert asked.facts.changed({}) == ""
    APPEARS[appears](tmp_path)
    assert asked.facts.changed({}) != ""


def test_below_a_folder_that_does_not_exist_nothing_is_asked(tmp_path: Path) -> None:
    with look.recording() as asked:
        Denylist(read_mounts(), homes=[str(tmp_path)])
    below = [path for path in asked.facts.identities if path.startswith(str(tmp_path / ".config"))]
    # .config is missing, which is asked once. Below it only the first path of each folder is looked up.
    assert [os.path.relpath(os.path.dirname(path), tmp_path) for path in below] == [
        ".config",
        *(f".config/{name}" for name in ("Claude", "cursor", "goose", "opencode", "containers")),
    ]
    assert len(asked.facts.places[f"{tmp_path}/.config"]) == 1


def only_policy(found: Denylist) -> Denylist:
    """Only folders of the policy are searched, not /root and others of this machine, which may hold any
    number of files."""
    found._roots = {root: entry for root, entry in found._roots.items() if entry.origin == "policy"}
    assert found._roots
    return found


def test_nothing_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    before = sorted(os.listdir("/proc/self/fd"))
    found = only_policy(Denylist(read_mounts(), policy=[str(tmp_path / "a"), str(tmp_path / "none")]))
    devices = {mount.device for mount in found.mounts.all}
    assert found.find_linked({(0, 0): "x"}, devices=devices, limit=10**7) is None
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_hard_links_are_found_among_denied_directories_within_bounds(tmp_path: Path) -> None:
    vault = tmp_path / "vault" / "deep"
    vault.mkdir(parents=True)
    for number in range(20):
        (vault / str(number)).touch()
    status = (vault / "7").stat()
    wanted = {(status.st_dev, status.st_ino): "its name"}
    device = next(read_mounts().covering(str(tmp_path.resolve()))).device

    def fresh() -> Denylist:
        return only_policy(Denylist(read_mounts(), policy=[str(tmp_path / "vault")]))

    found = fresh().find_linked(wanted, devices=[device], limit=21)
    assert found is not None
    assert found[0] == "its name" and found[1].denied.path == str(tmp_path / "vault")
    with pytest.raises(LinksUnproven):
        fresh().find_linked(wanted, devices=[device], limit=20)
    assert fresh().find_linked(wanted, devices=["0:0"], limit=0) is None  # another filesystem: no walk at all
    assert fresh().find_linked({(status.st_dev + 1, status.st_ino): "x"}, devices=[device], limit=21) is None


def test_every_hit_is_a_sentence() -> None:
    found = Denylist(read_mounts(), homes=[HOME], policy=["/srv/vault"], runner=["/var/lib/x"])
    for path in ("/root", "/root/x", "/etc", f"{HOME}/.ssh", "/srv/vault", "/var/lib/x/y", "/run", "/tmp"):
        hit = found.name_hit(path)
        assert hit is not None
        assert re.fullmatch(r"it (is|lies below|contains) /\S+, (which|where) .*", hit.sentence())


# --- cgroups: where limits are kept ---


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/sys", True),
        ("/sys/fs", True),
        ("/sys/fs/cgroup", True),
        ("/sys//fs/./cgroup/", True),
        ("/sys/fs/cgroup/user.slice/memory.max", True),
        ("/sys/fs/cgroups", False),
        ("/sys/fs/fuse", False),
    ],
)
def test_cgroups_are_denied_by_name(path: str, access: Access, refused: bool) -> None:
    assert (lexical_hit(path) is not None) is refused
    assert (Denylist(read_mounts()).name_hit(path, access) is not None) is refused


TABLE = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:50 / /srv/groups rw - {kind} none rw
3 1 0:50 /user.slice/mine /opt/a\\040b/mine ro - {kind} none rw
"""


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize(
    ("kind", "refused"),
    [("cgroup2", True), ("cgroup", True), ("fuse.lxcfs", True), ("tmpfs", False)],
)
def test_cgroups_are_denied_wherever_they_are_mounted(kind: str, access: Access, refused: bool) -> None:
    found = Denylist(parse_mountinfo(TABLE.format(kind=kind).encode()))
    for path in ("/srv/groups", "/srv/groups/x/y", "/srv", "/opt/a b/mine", "/opt/a b/mine/z", "/opt"):
        assert (found.name_hit(path, access) is not None) is refused
    assert found.name_hit("/srv/other", access) is None
    # A name that tells nothing: by what is mounted there, and by what is mounted below it.
    nothing = Place(("/innocent",), (0, 0), (), Inside("8:1", "/innocent"), ())
    shown = nothing._replace(inside=Inside("0:50", "/user.slice/mine/z"))
    below = nothing._replace(mounted_below=(Inside("0:50", "/elsewhere"),))
    assert found.hit(nothing, access) is None
    for place in (shown, below):
        assert (found.hit(place, access) is not None) is refused


def test_cgroups_are_not_searched_for_hard_links() -> None:
    found = Denylist(read_mounts())
    assert any(entry.origin == "cgroups" for entry in found.entries)
    assert all(entry.origin != "cgroups" for entry in found._roots.values())


RAISE = """\
#!/bin/sh
for file in "$@"; do
    [ -e "$file" ] && echo "seen $file"
    echo 1073741824 2>/dev/null > "$file" && echo "raised $file"
done
grep -E ' - cgroup2? ' /proc/self/mountinfo
exit 0
"""
MANIFEST = nexo("raise", "./raise") + SANDBOX
ANYTHING = 'version = 1\n[read]\nceiling = ["*"]\n[write]\nceiling = ["*"]\n'


@pytest.mark.needs("root")
def test_a_plugin_cannot_raise_its_own_limit(
    runner_as: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """It has the uid of the group's owner, and its policy allows everything."""
    site = survey(read_mounts()).site("memory")
    if site is None or site.enable:
        pytest.skip("needs a cgroup with the memory controller")
    folder, elsewhere, plain = (plugin_dir / name for name in ("plugin", "shared/deep/innocent", "plain"))
    write_file(folder / "raise", RAISE, 0o755)
    policy = write_file(plugin_dir / "policy.toml", ANYTHING)
    elsewhere.mkdir(parents=True)
    plain.mkdir()
    (plain / "limit").touch()
    plain.chmod(0o777)
    (plain / "limit").chmod(0o666)

    with make_cgroup((site,), Limits()) as cgroup:
        (group,) = (Path(each.path) for each in cgroup.groups)
        limit = group / ("memory.max" if site.version == 2 else "memory.limit_in_bytes")
        limit.write_text(str(256 << 20))
        before = limit.read_text()
        for path in (group, limit, group / "cgroup.procs"):
            os.chown(path, *((runner_as.uid,) * 2))
        names = {
            str(group): limit,
            str(group.parent): limit,
            "/sys/fs/cgroup": limit,
            "/sys": limit,
            str(elsewhere): elsewhere / limit.name,
            str(elsewhere.parent.parent): elsewhere / limit.name,  # what contains it
        }
        script = f'mount --bind {group} {elsewhere}; exec "$@"'
        prefix = ("/usr/bin/unshare", "--mount", "/bin/sh", "-ec", script, "sh")
        caller = replace(runner_as, prefix=(*prefix, *runner_as.prefix))

        # The control: in a loose cage, as the same user, by both names.
        for file in (limit, elsewhere / limit.name):
            loose = ["bwrap", "--dev-bind", "/", "/", str(folder / "raise"), str(file)]
            done = subprocess.run([*caller.prefix, *loose], capture_output=True, text=True, timeout=60)
            assert f"raised {file}" in done.stdout and limit.read_text() != before
            limit.write_text(before)

        # The control is the plain folder: the policy does allow it, and the plugin does write to it.
        rows = [
            (kind, name, file)
            for kind in ("read", "write")
            for name, file in {str(plain): plain / "limit", **names}.items()
        ]
        lines = []
        for number, (kind, name, file) in enumerate(rows):
            asking = plugin_dir / f"asking-{number}"
            write_file(asking / "raise", RAISE, 0o755)
            write_file(asking / "nexo-plugin.toml", f'{MANIFEST}fs_{kind}_paths = ["{name}"]\n')
            lines.append(Line(("exec", "--policy", policy, asking, "--", file)))

        def check(row: tuple[str, str, Path], said: Done) -> None:
            kind, name, file = row
            if name == str(plain):
                assert said.returncode == 0, said.stderr
                assert f"seen {file}" in said.stdout
                assert (f"raised {file}" in said.stdout) is (kind == "write")
                assert "cgroup" not in said.stdout  # none is mounted inside
            else:
                assert (said.returncode, said.stdout) == (126, ""), said.stderr
                assert "denylist" in said.stderr

        # Only who asks for the bind mount needs one.
        mounts = [name.startswith(str(elsewhere.parent.parent)) for _, name, _ in rows]
        for mounted in (False, True):
            chosen = [index for index, each in enumerate(mounts) if each is mounted]
            found = run_lines(caller if mounted else runner_as, [lines[index] for index in chosen])
            check_rows(zip([rows[index] for index in chosen], found, strict=True), check)
        assert limit.read_text() == before
