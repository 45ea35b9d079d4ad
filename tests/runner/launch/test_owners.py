"""Who owns what a plugin writes to a folder of the host: what `explain` says of it, and what a run leaves.

As root. Without root the plugin is the caller, and so is the owner: the last test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.identity import reservations, uid_range
from sandbox.identity.all_states import StateNotRemoved, list_states, remove_state
from sandbox.identity.idmap import FileOwner, IdmapUnavailable, idmapped_mount
from sandbox.identity.owner import Writing
from sandbox.identity.state import owned_state
from sandbox.identity.uid_range import RESERVATIONS
from tests.conftest import ROOT, SPARE_UID, TEMP_PREFIX, Caller
from tests.manifests import nexo

Write = Callable[..., Path]

needs_root = pytest.mark.needs("root")

# Accounts of these tests: nobody is called so, and no plugin has them.
ALICE, BOB, HOUSE = SPARE_UID + 27, SPARE_UID + 28, SPARE_UID + 29

MANIFEST = (
    nexo("{id}", "/usr/bin/python3")
    + """\
args = ["-I", "{folder}/acts.py"]
[plugin.sandbox]
enabled = true
fs_write_paths = [{paths}]
"""
)

# Each act is a line of Python. What it gives, or the errno it is refused with, is told in the order of acts.
ACTS = """\
import errno, json, os, stat, sys
def text(path, more=None):
    if more is not None:
        with open(path, "a") as file:
            file.write(more)
    with open(path) as file:
        return file.read()
told = []
for act in json.loads(sys.argv[1]):
    try:
        told.append(eval(act))
    except OSError as error:
        told.append(errno.errorcode[error.errno])
print(json.dumps(told))
"""


class Plugins:
    """Plugins of one caller, each with a folder of its own. What they have reserved is freed in the end."""

    def __init__(self, caller: Caller, place: Path, write_file: Write) -> None:
        self.caller = caller
        self.place = place
        self.write_file = write_file
        self.policy = self.policy_file("policy")

    def policy_file(self, name: str, more: str = "") -> Path:
        path = self.write_file(self.place / f"{name}.toml", f'version = 1\n[write]\nceiling = ["*"]\n{more}')
        self.caller.give(path)
        return path

    def write(self, name: str, *paths: Path | str) -> Path:
        folder = self.place / name
        self.write_file(folder / "acts.py", ACTS)
        asked = ", ".join(json.dumps(str(path)) for path in paths)
        text = MANIFEST.format(id=name, folder=folder, paths=asked)
        return self.write_file(folder / "nexo-plugin.toml", text)

    def explain(self, manifest: Path) -> dict[str, Any]:
        said = self.caller("explain", "--policy", self.policy, "--format", "json", manifest)
        document: dict[str, Any] = json.loads(said.stdout)
        return document

    def run(self, manifest: Path, *acts: str, options: Sequence[str | Path] = ()) -> list[Any]:
        done = self.exec(manifest, *acts, options=options)
        assert done.returncode == 0, done.stderr
        told: list[Any] = json.loads(done.stdout)
        return told

    def exec(
        self, manifest: Path, *acts: str, options: Sequence[str | Path] = ()
    ) -> subprocess.CompletedProcess[str]:
        return self.caller("exec", "--policy", self.policy, *options, manifest, "--", json.dumps(acts))

    def states(self) -> list[dict[str, Any]]:
        said = json.loads(self.caller("state", "list", "--json").stdout)
        own = f"{self.place}/"
        return [each for each in said["states"] if (each["manifest"] or "").startswith(own)]


@pytest.fixture
def plugins(
    runner_as_root: Caller, plugin_dir: Path, write_file: Write, nothing_left: None
) -> Iterator[Plugins]:
    made = Plugins(runner_as_root, plugin_dir, write_file)
    yield made
    for name in os.listdir(plugin_dir):
        if name.startswith("data"):
            path = plugin_dir / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    made.caller = runner_as_root
    for state in made.states():
        done = made.caller("state", "remove", state["path"])
        assert done.returncode == 0, done.stderr


def folder(place: Path, owner: int = 0, mode: int = 0o755, group: int | None = None) -> Path:
    place.mkdir()
    os.chown(place, owner, owner if group is None else group)
    place.chmod(mode)
    return place


def file(path: Path, owner: int, mode: int = 0o644, text: str = "theirs") -> Path:
    path.write_text(text)
    os.chown(path, owner, owner)
    path.chmod(mode)
    return path


@pytest.fixture
def mapping(plugin_dir: Path) -> None:
    """For tests of what only idmapped mounts can do."""
    fd = os.open(plugin_dir, os.O_PATH)
    try:
        os.close(idmapped_mount(fd, FileOwner(ALICE, ALICE), FileOwner(BOB, BOB)))
    except IdmapUnavailable as refused:
        pytest.skip(f"needs idmapped mounts: {refused}")
    finally:
        os.close(fd)


def behind(caller: Caller, script: str) -> Caller:
    """The same caller, in a mount namespace of its own that `script` has arranged."""
    words = ("/usr/bin/unshare", "--mount", "/bin/sh", "-ec", f'{script}\nexec "$@"', "sh")
    return replace(caller, prefix=(*words, *caller.prefix))


# --- what explain says is so -------------------------------------------------------------------------------


@needs_root
def test_a_folder_of_an_ordinary_user(plugins: Plugins, mapping: None) -> None:
    """What the plugin writes is the folder's owner's, its next run reads it, and nobody's uid is used up."""
    data = folder(plugins.place / "data", ALICE, 0o700)  # closed to everybody else
    file(data / "old", ALICE, 0o600, "old")
    manifest = plugins.write("writer", data)
    explained = plugins.explain(manifest)
    (owned,) = explained["grant"]["owners"]
    assert (owned["method"], owned["uid"], owned["why"], owned["others"]) == ("idmapped", ALICE, "", [])
    (row,) = (row for row in explained["asked"] if row["what"] == "write")
    assert row["verdict"] == "granted" and f"belongs to uid {ALICE}, the owner of the folder" in row["why"]
    text = plugins.caller("explain", "--policy", plugins.policy, manifest).stdout
    assert row["why"] in text and f"manifest; uid {ALICE}, idmapped\n" in text
    report = plugins.place / "report.json"
    acts = [f"text('{data}/old')", f"text('{data}/new', 'one')", f"os.mkdir('{data}/sub')"]
    assert plugins.run(manifest, *acts, options=("--report", report)) == ["old", "one", None]
    for name in ("new", "sub"):
        status = (data / name).stat()
        assert (status.st_uid, status.st_gid) == (ALICE, ALICE)
    assert json.loads(report.read_text())["grant"]["owners"] == explained["grant"]["owners"]
    # The second run, and another plugin at the same folder: both are its owner there.
    assert plugins.run(manifest, f"text('{data}/new', 'two')") == ["onetwo"]
    other = plugins.write("other", data)
    assert plugins.run(other, f"text('{data}/new', 'three')") == ["onetwothree"]
    assert plugins.states() == []


@needs_root
def test_a_folder_of_roots_is_refused_with_the_remedy(plugins: Plugins) -> None:
    data = folder(plugins.place / "data")
    manifest = plugins.write("writer", data)
    explained = plugins.explain(manifest)
    (row,) = (row for row in explained["asked"] if row["what"] == "write")
    assert row["verdict"] == "REFUSED" and "belongs to root, and root is never mapped" in row["why"]
    assert explained["outcome"]["code"] == "policy_denied" and explained["grant"]["owners"] == []
    (denial,) = explained["grant"]["denials"]
    assert denial["rule"] == "write_owner" and denial["where"].endswith(":12:19")
    done = plugins.exec(manifest, f"text('{data}/x', 'x')")
    assert (done.returncode, done.stdout, os.listdir(data)) == (126, "", [])
    assert denial["hint"] in done.stderr and "run_as under [user]" in denial["hint"]
    assert plugins.states() == []  # a refused launch has reserved nothing
    # The remedy, to the letter.
    words = denial["hint"].split()
    assert words[0] == "chown" and words[2] == str(data)
    os.chown(data, int(words[1]), -1)
    (owned,) = plugins.explain(manifest)["grant"]["owners"]
    assert (owned["method"], owned["uid"]) == ("reserved", int(words[1]))
    assert plugins.run(manifest, f"text('{data}/x', 'x')") == ["x"]
    assert (data / "x").stat().st_uid == int(words[1])


@needs_root
def test_a_folder_everybody_may_write(plugins: Plugins) -> None:
    """The plugin's files are its own, in the next run too, and never another's."""
    data = folder(plugins.place / "data", mode=0o1777)
    manifest, other = plugins.write("writer", data), plugins.write("other", data)
    (owned,) = plugins.explain(manifest)["grant"]["owners"]
    assert owned["method"] == "reserved" and "root, and root is never mapped" in owned["why"]
    assert plugins.states() == []  # to explain changes nothing
    assert plugins.run(manifest, f"text('{data}/x', 'one')") == ["one"]
    status = (data / "x").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (owned["uid"], 0o644)
    assert plugins.run(manifest, f"text('{data}/x', 'two')") == ["onetwo"]
    # By the caller's umask another one that has the folder can read it, and not change it.
    acts = (f"text('{data}/x', 'no')", f"text('{data}/x')", f"text('{data}/y', 'y')")
    assert plugins.run(other, *acts) == ["EACCES", "onetwo", "y"]
    assert (data / "y").stat().st_uid != owned["uid"]
    # Nobody gets the uid while the files are there, whatever happens to the manifest.
    state = next(each for each in plugins.states() if each["uid"] == owned["uid"])
    assert state["write_paths"] == [str(data)] and not Path(state["path"]).exists()
    done = plugins.caller("state", "remove", manifest)
    assert done.returncode == 1 and f"{data}/x belongs to uid {owned['uid']}" in done.stderr
    (data / "x").unlink()
    assert plugins.caller("state", "remove", manifest).returncode == 0
    assert [each["manifest"] for each in plugins.states()] == [str(other)]


@needs_root
def test_a_command_of_another_folder_has_another_uid(plugins: Plugins) -> None:
    """One that names a file of its folder, such as a cloned project: also without a name."""
    data = folder(plugins.place / "data", mode=0o1777)
    policy = plugins.policy_file("commands", '[approvals]\nread = ["*"]\nwrite = ["*"]\n')
    folders = [plugins.place / name for name in ("own", "cloned")]
    for each in (*folders, folders[0]):
        plugins.write_file(each / "script", f"echo x >> {data}/{each.name}\n")
        words = ("--policy", policy, "--read", each, "--write", data, "--", "/bin/sh", "script")
        done = plugins.caller("run", *words, cwd=each)
        assert done.returncode == 0, done.stderr
    assert (data / "own").read_text() == "x\nx\n"
    assert (data / "own").stat().st_uid != (data / "cloned").stat().st_uid
    shutil.rmtree(data)
    found = json.loads(plugins.caller("state", "list", "--json").stdout)["states"]
    for state in (each for each in found if each["write_paths"] == [str(data)]):
        assert plugins.caller("state", "remove", state["path"]).returncode == 0


@needs_root
def test_no_plugin_ever_gets_a_uid_that_has_left_files(plugins: Plugins) -> None:
    """With two uids for all plugins that keep one, the third finds none: not even that of a plugin whose
    manifest is gone."""
    first = 2_140_000_000 + os.getpid() % 100_000 * 4
    plugins.policy = plugins.policy_file("narrow", f"[user]\nuids = [{first}, {first + 3}]\n")
    data = folder(plugins.place / "data", mode=0o777)
    manifests = [plugins.write(name, data) for name in ("one", "two", "three")]
    for manifest in manifests[:2]:
        plugins.run(manifest, f"text('{data}/{manifest.parent.name}', 'x')")
    owners = {(data / name).stat().st_uid for name in ("one", "two")}
    assert owners == {first, first + 1}
    manifests[0].unlink()
    done = plugins.exec(manifests[2], f"text('{data}/three', 'x')")
    assert done.returncode == 125 and "all uids for plugins with state are reserved" in done.stderr
    # The control: when nothing carries it any more, it is given again.
    (data / "one").unlink()
    done = plugins.caller("state", "remove", manifests[0])
    assert (done.returncode, done.stderr) == (0, "")
    plugins.run(manifests[2], f"text('{data}/three', 'x')")
    assert (data / "three").stat().st_uid in owners - {(data / "two").stat().st_uid}


@needs_root
def test_a_tmpfs(plugins: Plugins, request: pytest.FixtureRequest) -> None:
    """Since Linux 6.3 its owners can be mapped. Before, it is refused; whichever it is, explain says so."""
    place = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/dev/shm"))
    request.addfinalizer(lambda: shutil.rmtree(place))
    place.chmod(0o755)
    data = folder(place / "data", ALICE)
    manifest = plugins.write("writer", data)
    explained = plugins.explain(manifest)
    done = plugins.exec(manifest, f"text('{data}/x', 'x')")
    if explained["outcome"]["code"] == "ok":
        assert (done.returncode, (data / "x").stat().st_uid) == (0, explained["grant"]["owners"][0]["uid"])
    else:
        assert done.returncode == 126 and "does not support idmapped mounts" in done.stderr


@needs_root
def test_a_filesystem_whose_owners_cannot_be_mapped(plugins: Plugins) -> None:
    """An overlay. First as root's folder that everybody may write, then as a user's, which is refused."""
    data = folder(plugins.place / "data")
    layers = {name: folder(plugins.place / f"data-{name}", mode=0o777) for name in ("lower", "upper", "work")}
    options = ",".join(f"{name}dir={layers[name]}" for name in layers)
    plugins.caller = behind(plugins.caller, f"mount -t overlay -o {options} none {data}")
    manifest = plugins.write("writer", data)
    if "mount" in (tried := plugins.caller("state", "list")).stderr:
        pytest.skip(f"needs overlays: {tried.stderr}")
    (owned,) = plugins.explain(manifest)["grant"]["owners"]
    assert owned["method"] == "reserved"
    assert plugins.run(manifest, f"text('{data}/x', 'x')") == ["x"]
    assert (layers["upper"] / "x").stat().st_uid == owned["uid"]
    os.chown(layers["upper"], ALICE, ALICE)
    layers["upper"].chmod(0o755)
    explained = plugins.explain(manifest)
    (denial,) = explained["grant"]["denials"]
    assert denial["rule"] == "write_owner" and "does not support idmapped mounts" in denial["reason"]
    done = plugins.exec(manifest, f"text('{data}/y', 'y')")
    assert done.returncode == 126 and not (layers["upper"] / "y").exists()


@needs_root
def test_a_root_that_may_not_mount(plugins: Plugins) -> None:
    """As in a container: the owner cannot be mapped, and people are told what is missing."""
    data, everybodys = folder(plugins.place / "data", ALICE), folder(plugins.place / "data-all", ALICE, 0o777)
    prefix = ("/usr/bin/setpriv", "--bounding-set=-sys_admin")
    plugins.caller = replace(plugins.caller, prefix=prefix)
    (denial,) = plugins.explain(plugins.write("writer", data))["grant"]["denials"]
    assert denial["rule"] == "write_owner" and "lacks CAP_SYS_ADMIN" in denial["reason"]
    (owned,) = plugins.explain(plugins.write("other", everybodys))["grant"]["owners"]
    assert owned["method"] == "reserved" and "lacks CAP_SYS_ADMIN" in owned["why"]


@needs_root
def test_a_folder_that_cannot_be_written_at_all(plugins: Plugins) -> None:
    data = folder(plugins.place / "data", ALICE, 0o555)
    manifest = plugins.write("writer", data)
    (denial,) = plugins.explain(manifest)["grant"]["denials"]
    assert denial["hint"] in (f"chmod u+rwx {data}",) or "chown" in denial["hint"]
    data.chmod(0o755)
    plugins.caller = behind(plugins.caller, f"mount --bind {data} {data}; mount -o remount,ro,bind {data}")
    (denial,) = plugins.explain(manifest)["grant"]["denials"]
    assert "Read-only file system" in denial["reason"]


# --- attacks -----------------------------------------------------------------------------------------------


@needs_root
def test_others_in_the_tree_are_named_and_cannot_be_touched(plugins: Plugins, mapping: None) -> None:
    data = folder(plugins.place / "data", ALICE, 0o777, group=0)
    secret = file(data / "secret", 0, 0o600)
    shared = file(data / "shared", 0, 0o666)  # everybody may write it, by its mode
    group = file(data / "group", BOB, 0o660)
    os.chown(group, BOB, ALICE)  # and of this one the group is the owner's
    deep = folder(data / "deep", BOB, 0o777)
    file(deep / "mine", ALICE)
    manifest = plugins.write("writer", data)
    (owned,) = plugins.explain(manifest)["grant"]["owners"]
    assert {each["uid"]: each["path"] for each in owned["others"]}.keys() == {0, BOB}
    text = plugins.caller("explain", "--policy", plugins.policy, manifest).stdout
    assert f"note: {data} holds files of other owners, which the plugin cannot change" in text
    assert "uid 0" in text and f"uid {BOB}" in text
    acts = [
        f"text('{secret}')",
        *(f"text('{each}', 'x')" for each in (secret, shared, group)),
        *(f"os.truncate('{each}', 0)" for each in (shared, group)),
        *(f"os.unlink('{each}')" for each in (secret, shared, group)),
        f"os.rename('{shared}', '{data}/mine')",
        f"os.link('{shared}', '{data}/second')",
        f"os.chmod('{shared}', 0o777)",
        f"text('{deep}/new', 'x')",
        f"os.unlink('{deep}/mine')",
        f"os.rmdir('{deep}')",
    ]
    told = plugins.run(manifest, *acts, f"text('{data}/own', 'x')")
    assert told[-1] == "x"
    assert set(told[:-1]) <= {"EACCES", "EPERM", "EOVERFLOW"}, dict(zip(acts, told, strict=False))
    assert [path.read_text() for path in (secret, shared, group)] == ["theirs"] * 3
    # The control: the owner of the folder, without a cage, does most of it.
    told = as_user(ALICE, acts)
    assert told[2] == "theirsx" and told[6] is None and told.count("EACCES") < 5


def as_user(uid: int, acts: Sequence[str]) -> list[Any]:
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "/usr/bin/python3", "-c", ACTS]
    done = subprocess.run([*words, json.dumps(acts)], capture_output=True, text=True, timeout=60)
    told: list[Any] = json.loads(done.stdout)
    return told


@needs_root
def test_nothing_is_gained_by_being_the_owner(plugins: Plugins, mapping: None) -> None:
    """Neither an identity, nor a device, nor a program that gives its identity to others, nor a way out."""
    data = folder(plugins.place / "data", ALICE)
    shutil.copy("/usr/bin/id", data / "id")
    os.chown(data / "id", ALICE, ALICE)
    (data / "id").chmod(0o755)  # with 4755 the folder would be refused
    acts = [
        f"text('{data}/x', 'x')",
        f"os.chmod('{data}/x', 0o4755)",
        f"os.chmod('{data}/x', 0o2755)",
        f"os.close(os.open('{data}/y', os.O_CREAT | os.O_WRONLY, 0o4755))",
        f"os.chown('{data}/x', 0, 0)",
        f"os.chown('{data}/x', {BOB}, -1)",
        f"os.mknod('{data}/null', stat.S_IFCHR | 0o666, os.makedev(1, 3))",
        f"os.link('{data}/x', '/tmp/x')",
        f"os.link('/usr/bin/id', '{data}/id2')",
        "[line.split()[5] for line in open('/proc/self/mountinfo') if '" + str(data) + "' in line]",
        f"os.spawnv(os.P_WAIT, '{data}/id', ['id', '-u'])",
        "[int(fd) for fd in os.listdir('/proc/self/fd') if int(fd) > 3]",  # 3: the listing itself
    ]
    manifest = plugins.write("writer", data)
    done = plugins.exec(manifest, *acts)
    *_, last = done.stdout.splitlines()
    said = json.loads(last)
    assert said[0] == "x" and said[1:4] == ["EPERM"] * 3
    assert set(said[4:6]) <= {"EINVAL", "EPERM"} and said[6] == "EPERM" and said[7:9] == ["EXDEV"] * 2
    assert {"nosuid", "nodev"} <= set(said[9][0].split(",")) and said[11] == []
    assert "65534" in done.stdout.split()
    assert not (data / "y").exists() or (data / "y").stat().st_mode & 0o7000 == 0
    # The control: her own process gives her identity away.
    assert as_user(ALICE, acts[:4]) == ["xx", None, None, None]


@needs_root
def test_two_at_once_in_one_folder(plugins: Plugins, mapping: None) -> None:
    data = folder(plugins.place / "data", ALICE)
    one, two = plugins.write("one", data), plugins.write("two", data)
    waits = json.dumps([f"text('{data}/one', 'x')", "print('up', flush=True)", "sys.stdin.read()"])
    with plugins.caller.start("exec", "--policy", plugins.policy, one, "--", waits) as running:
        assert running.stdout is not None and running.stdout.readline() == b"up\n"
        assert plugins.run(two, f"text('{data}/one', 'y')", f"text('{data}/two', 'z')") == ["xy", "z"]
        running.communicate(timeout=60)
    assert {path.stat().st_uid for path in data.iterdir()} == {ALICE}


@needs_root
def test_a_file_of_its_own_and_a_link_that_leads_away(plugins: Plugins, mapping: None) -> None:
    """A grant of one file is a mount of one file; and a link in a granted folder leads nowhere."""
    data = folder(plugins.place / "data", ALICE)
    single = file(plugins.place / "data-file", ALICE, 0o600, "old")
    other = file(plugins.place / "data-other", ALICE, 0o666)
    (data / "link").symlink_to(other)
    manifest = plugins.write("writer", data, single)
    told = plugins.run(
        manifest, f"text('{single}', 'new')", f"text('{data}/link', 'x')", f"os.listdir('{data}')"
    )
    assert told[0] == "oldnew" and "link" in told[2]
    assert other.read_text() == "theirs" and single.stat().st_uid == ALICE
    # A file of root's that everybody may write stays root's.
    roots = file(plugins.place / "data-roots", 0, 0o666, "")
    manifest = plugins.write("other", roots)
    (row,) = (row for row in plugins.explain(manifest)["asked"] if row["what"] == "write")
    assert row["why"].startswith("the file keeps its owner, and the plugin writes it as uid ")
    assert plugins.run(manifest, f"text('{roots}', 'x')") == ["x"] and roots.stat().st_uid == 0


@needs_root
def test_mounts_stay_as_they_were(plugins: Plugins, mapping: None) -> None:
    """What the host mounts below the folder while the plugin runs does not appear inside. systemd makes every
    mount of a machine pass such things on."""
    data = folder(plugins.place / "data", ALICE)
    folder(data / "sub", ALICE)
    plugins.caller = behind(
        plugins.caller,
        f"""cd {data}
        mount --bind . .; cd {data}; mount --make-shared .
        (for try in $(seq 6000); do [ -e up ] && break; sleep 0.05; done
         mount -t tmpfs none sub; touch sub/late; ls sub > mounted) &
        cd /""",
    )
    told = plugins.run(
        plugins.write("writer", data),
        f"text('{data}/up', 'x')",
        f"[__import__('time').sleep(.05) for _ in range(6000) if not os.path.exists('{data}/mounted')] and 0",
        f"text('{data}/mounted')",
        f"os.listdir('{data}/sub')",
    )
    assert told[2:] == ["late\n", []]


# --- run_as ------------------------------------------------------------------------------------------------


@needs_root
def test_run_as(plugins: Plugins) -> None:
    """Where no owner can be mapped: the account of the policy, with all layers on."""
    plugins.policy = plugins.policy_file("house", f"[user]\nrun_as = {HOUSE}\n")
    data = folder(plugins.place / "data", mode=0o1777)
    alices = folder(plugins.place / "data-alices", ALICE, 0o777)  # also where she cannot be mapped
    manifest = plugins.write("writer", data, alices, "${state_dir}")
    explained = plugins.explain(manifest)
    owned = {each["path"]: each for each in explained["grant"]["owners"]}
    assert (owned[str(data)]["method"], owned[str(data)]["uid"]) == ("run_as", HOUSE)
    assert owned[str(alices)]["method"] in ("idmapped", "run_as")
    text = plugins.caller("explain", "--policy", plugins.policy, manifest).stdout
    assert f"run_as {HOUSE}, shown as 65534" in text and "other plugins under the same run_as" in text
    state = "os.environ['RUNNER_STATE_DIR'] + '/kept'"
    acts = [f"text('{data}/x', 'x')", f"text('{alices}/x', 'x')", f"text({state}, 'x')", "os.getuid()"]
    report = plugins.place / "report.json"
    options = ("--memory", "256M", "--pids", "16", "--report", report)
    assert plugins.run(manifest, *acts, options=options) == ["x", "x", "x", 65534]
    assert json.loads(report.read_text())["degraded"] == explained["degraded"]
    assert (data / "x").stat().st_uid == HOUSE
    assert (alices / "x").stat().st_uid == owned[str(alices)]["uid"]
    # Its state stays its own where it can be mapped: two plugins of one account do not share that.
    (kept,) = plugins.states()
    assert Path(kept["path"], "kept").stat().st_uid == kept["uid"]
    assert plugins.run(manifest, *acts[:3]) == ["xx", "xx", "xx"]
    # The uid is shared, and said to be.
    other = plugins.write("other", data)
    assert plugins.run(other, f"text('{data}/x')") == ["xx"]
    # Who keeps the account out is named.
    data.chmod(0o755)
    (denial,) = plugins.explain(other)["grant"]["denials"]
    assert denial["rule"] == "write_owner" and denial["hint"] == f"chown {HOUSE} {data}"


@needs_root
def test_run_as_with_state_where_nobody_can_be_mapped(plugins: Plugins) -> None:
    """As in a container: the state belongs to the account as well, is listed, and removed when it is idle."""
    plugins.policy = plugins.policy_file("house", f"[user]\nrun_as = {HOUSE}\n")
    caller = plugins.caller
    plugins.caller = replace(caller, prefix=("/usr/bin/setpriv", "--bounding-set=-sys_admin"))
    data = folder(plugins.place / "data", mode=0o777)
    manifest = plugins.write("writer", data, "${state_dir}")
    (owned,) = plugins.explain(manifest)["grant"]["owners"]
    assert (owned["method"], owned["uid"]) == ("run_as", HOUSE)
    state = "os.environ['RUNNER_STATE_DIR'] + '/kept'"
    for said in ("x", "xx"):
        assert plugins.run(manifest, f"text('{data}/x', 'x')", f"text({state}, 'x')") == [said, said]
    (kept,) = plugins.states()
    assert (kept["uid"], kept["running"]) == (HOUSE, False)
    waits = json.dumps(["print('up', flush=True)", "sys.stdin.read()"])
    words = ("exec", "--policy", plugins.policy, manifest, "--", waits)
    with plugins.caller.start(*words) as running:
        assert running.stdout is not None and running.stdout.readline() == b"up\n"
        assert [each["running"] for each in plugins.states()] == [True]
        assert caller("state", "remove", manifest).returncode == 21
        running.communicate(timeout=60)
    # A root that may map owners goes on with it. One with content that is somebody else's is refused.
    plugins.caller = caller
    assert plugins.run(manifest, f"text({state})") == ["xx"]
    os.chown(kept["path"], BOB, BOB)
    plugins.caller = replace(caller, prefix=("/usr/bin/setpriv", "--bounding-set=-sys_admin"))
    (denial,) = plugins.explain(manifest)["grant"]["denials"]
    assert denial["hint"].startswith(f"chown -R {HOUSE}:{HOUSE} {kept['path']}")
    assert plugins.exec(manifest, "1").returncode == 126
    os.chown(kept["path"], HOUSE, HOUSE)
    assert caller("state", "remove", manifest).returncode == 0 and plugins.states() == []


@needs_root
def test_run_as_is_never_root(plugins: Plugins) -> None:
    data = folder(plugins.place / "data", mode=0o777)
    manifest = plugins.write("writer", data)
    for value in ("0", '"0"', '"root"'):
        plugins.policy = plugins.policy_file("rooted", f"[user]\nrun_as = {value}\n")
        done = plugins.exec(manifest, "os.getuid()")
        assert (done.returncode, done.stdout) == (126, "")
        assert f"{plugins.policy}:5:1: policy_value: user.run_as is root" in done.stderr


# --- a session, and an ordinary user -----------------------------------------------------------------------


@needs_root
def test_a_call(plugins: Plugins, mapping: None) -> None:
    """The same for who speaks the protocol: the policy gives everybody a folder."""
    data = folder(plugins.place / "data", ALICE, 0o700)
    plugin = plugins.place / "rune"
    shutil.copytree(ROOT / "tests/plugins/rune_echo", plugin)
    text = (plugin / "plugin.py").read_text()
    tail = f"open({str(data / 'called')!r}, 'a').write('called')\n"
    (plugin / "plugin.py").write_text(text.replace("def echo(request):\n", f"def echo(request):\n    {tail}"))
    for path in (plugin, *plugin.iterdir()):
        path.chmod(0o755)
    rules = f'version = 1\n[write]\ndefault = ["{data}"]\nceiling = ["*"]\n'
    policy = plugins.write_file(plugins.place / "gives.toml", rules)
    report = plugins.place / "report.json"
    for _ in range(2):
        words = ("call", "--policy", policy, "--report", report, plugin / "rterm-plugin.json", "echo")
        done = plugins.caller(*words, "--input", "{}")
        assert done.returncode == 0, done.stderr
    assert (data / "called").read_text() == "calledcalled"
    assert (data / "called").stat().st_uid == ALICE
    assert json.loads(report.read_text())["grant"]["owners"][0]["method"] == "idmapped"


@pytest.mark.needs("user")
def test_an_ordinary_users_plugin_is_the_user(
    runner_as_user: Caller, plugin_dir: Path, write_file: Write, nothing_left: None
) -> None:
    plugins = Plugins(runner_as_user, plugin_dir, write_file)
    data = plugin_dir / "data"
    data.mkdir()
    runner_as_user.give(data)
    manifest = plugins.write("writer", data)
    explained = plugins.explain(manifest)
    assert explained["outcome"]["code"] == "ok" and explained["grant"]["owners"] == []
    for said in ("x", "xx"):
        assert plugins.run(manifest, f"text('{data}/x', 'x')") == [said]
    assert (data / "x").stat().st_uid == runner_as_user.uid


# --- holes that were found ---------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("state", ["with state", "without state"])
def test_an_interrupted_run_that_left_files_keeps_its_uid(plugins: Plugins, state: str) -> None:
    """A first run that is interrupted is undone, but for its uid if somebody could inherit files by it."""
    data = folder(plugins.place / "data", mode=0o777)
    manifest = plugins.write("writer", data)
    kept = str(plugins.place / "state")
    writing = Writing((str(data),), kept)
    for leaves in (False, True):
        held = owned_state(
            kept if state == "with state" else None,
            uid_range.DEFAULT_RANGE,
            manifest=str(manifest),
            writing=writing,
        )
        owner = held.__enter__()
        if leaves:
            file(data / "left", owner.uid)
        interrupt = KeyboardInterrupt()
        assert not held.__exit__(KeyboardInterrupt, interrupt, None)
        assert (reservations.read_reservation(RESERVATIONS, owner.uid) is not None) is leaves


@needs_root
def test_a_policy_with_other_uids_does_not_give_away_those_of_plugins(plugins: Plugins) -> None:
    data = folder(plugins.place / "data", mode=0o777)
    victim, thief = plugins.write("victim", data), plugins.write("thief", data)
    plugins.run(victim, f"text('{data}/secret', 's')")
    uid = (data / "secret").stat().st_uid
    os.chown(data, uid, uid)
    data.chmod(0o755)
    first = 2_141_000_000 + os.getpid() % 100_000 * 4
    plugins.policy = plugins.policy_file("narrow", f"[user]\nuids = [{first}, {first + 3}]\n")
    done = plugins.exec(thief, f"text('{data}/secret')")
    assert done.returncode == 126 and f"it belongs to uid {uid}, a uid that plugins are given" in done.stderr
    plugins.policy = plugins.policy_file("as", f'[user]\nuids = [{first}, {first + 3}]\nrun_as = "{uid}"\n')
    done = plugins.exec(thief, f"text('{data}/secret')")
    assert done.returncode == 126 and "is among the uids that plugins without it are given" in done.stderr


@needs_root
def test_set_id_programs_are_not_for_a_plugin_to_write(plugins: Plugins, mapping: None) -> None:
    data = folder(plugins.place / "data", ALICE)
    manifest = plugins.write("writer", data)
    program = file(data / "tool", ALICE, 0o4755)
    done = plugins.exec(manifest, f"text('{program}', 'x')")
    assert done.returncode == 126 and f"set_id: {program} is a set-id program" in done.stderr.replace(
        f"{data}: ", ""
    )
    program.chmod(0o755)  # the control
    assert plugins.run(manifest, f"text('{program}', 'x')") == ["theirsx"]


@needs_root
def test_a_state_is_removed_as_it_is_and_not_as_it_was_listed(plugins: Plugins) -> None:
    first, second = (folder(plugins.place / f"data{n}", mode=0o777) for n in (1, 2))
    manifest = plugins.write("writer", first)
    plugins.run(manifest, f"os.path.exists('{first}')")
    (listed,) = (each for each in list_states(os.environ) if each.manifest == str(manifest))
    plugins.write("writer", first, second)
    plugins.run(manifest, f"text('{second}/x', 'x')")
    with pytest.raises(StateNotRemoved, match=f"{second}/x belongs to uid"):
        remove_state(listed)
