"""When a read-only mount proves that nobody but root can change a file, and when it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.paths.mounts import Mount, Mounts, parse_mountinfo
from sandbox.policy.read_only import is_fixed
from tests.conftest import ROOT, SPARE_UID
from tests.tables import check_rows

# As in the mountinfo of a container: its root, and a ConfigMap at /etc/runner.
OVERLAY = "20 1 0:50 / / {} - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w"
VOLUME = "30 20 8:1 /var/lib/kubelet/pods/1/volumes/c /etc/runner {} - ext4 /dev/sda1 {}"
FILE = "/etc/runner/policy.toml"
HOST = "1 0 8:1 / / {} - ext4 /dev/sda1 rw"


def table(*lines: str) -> Mounts:
    return parse_mountinfo("\n".join(lines).encode())


def judged(ours: Mounts, first: Mounts, *, contained: bool, path: str = FILE) -> bool:
    mount: Mount = max(ours.covering(path), key=lambda each: len(each.point))
    return is_fixed(mount, mount.inside(path), (ours, first), contained=contained)


def test_which_mounts_prove_it() -> None:
    root = OVERLAY.format("rw")
    volume = VOLUME.format("ro", "rw")
    pod = table(root, volume)
    read_only = table(OVERLAY.format("ro"))
    strict = table(HOST.format("ro"))
    # The same files a second time, at another name: the folder itself, one above, one below, a neighbour.
    second = "31 20 8:1 {} /data rw - ext4 /dev/sda1 rw"
    above, same = second.format("/var/lib/kubelet"), second.format("/var/lib/kubelet/pods/1/volumes/c")
    beside = second.format("/var/lib/kubelet/pods/1/volumes/cc")
    tmpfs = "30 20 0:77 / /etc/runner ro - tmpfs tmpfs {}"
    check_rows(
        {
            "a ConfigMap": (pod, pod, True, True),
            "a file of the image, whose root is read-only": (read_only, read_only, True, True),
            "a secret": ((alone := table(root, tmpfs.format("rw"))), alone, True, True),
            "writable": ((open_one := table(root, VOLUME.format("rw", "rw"))), open_one, True, False),
            "writable at another name": (table(root, volume, same), pod, True, False),
            "writable from above": (table(root, volume, above), pod, True, False),
            "beside, with a name that begins alike": (table(root, volume, beside), pod, True, True),
            "writable for process 1, as with the host's pids": (pod, table(HOST.format("rw")), True, False),
            "a unit with ProtectSystem=strict": (strict, table(HOST.format("rw")), False, False),
            "the same, with pids of its own": (strict, strict, False, False),
            "a filesystem that is read-only itself": (
                (ro := table(HOST.format("rw"), VOLUME.format("ro", "ro").replace("8:1", "8:2"))),
                ro,
                False,
                True,
            ),
            "a file as a disk": (
                (loop := table(root, volume.replace("/dev/sda1", "/dev/loop0"))),
                loop,
                True,
                False,
            ),
            "a program as a filesystem": (
                (fuse := table(root, volume.replace("ext4", "fuse.sshfs"))),
                fuse,
                True,
                False,
            ),
            "a server": ((nfs := table(root, volume.replace("ext4", "nfs4"))), nfs, True, False),
            "another overlay than the root": (
                (two := table(root, volume.replace("8:1", "0:60").replace("ext4", "overlay"))),
                two,
                True,
                False,
            ),
        },
        _check,
    )


def _check(_name: str, row: tuple[Mounts, Mounts, bool, bool]) -> None:
    ours, first, contained, expected = row
    assert judged(ours, first, contained=contained) is expected


@pytest.mark.needs("root")
@pytest.mark.launches
def test_a_real_mount(tmp_path: Path) -> None:
    """A policy of somebody else, in a folder that everybody may write, by links as a ConfigMap has them."""
    script = f"""
cd {tmp_path} && mkdir m bound && mount -t tmpfs -o mode=777 none m && mkdir m/..1
echo [] > m/..1/approval && ln -s ..data/approval m/approval
echo 'version = 1' > m/..1/policy.toml && ln -s ..1 m/..data && ln -s ..data/policy.toml m/policy.toml
chown -R {SPARE_UID}:{SPARE_UID} m/..1 && mount --bind m bound
ask() {{ "{sys.executable}" -c '
import sys
sys.path.insert(0, "{ROOT}")
from sandbox.policy.load import trust_fault
print(trust_fault(sys.argv[1]))' $1; }}
read() {{ "{sys.executable}" -c '
import sys
sys.path.insert(0, "{ROOT}")
from runner.approvals import files
try:
    files.read_file(sys.argv[1])
except files.ApprovalsUnusable as unusable:
    print(unusable)' $1; }}
ask {tmp_path}/m/policy.toml
read {tmp_path}/m/approval
mount -o remount,bind,ro bound && ask {tmp_path}/bound/policy.toml
mount -o remount,ro m && ask {tmp_path}/m/policy.toml
read {tmp_path}/m/approval
"""
    tmp_path.chmod(0o755)
    argv = ["/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec", script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    writable, refused, bound, fixed, read = done.stdout.splitlines()
    assert "can be written by its group or by everybody" in writable and "chmod go-w" in writable
    # Read-only here, and writable beside it. Nobody can follow a chmod on a read-only mount.
    assert "can be written" in bound and "copy it" in bound and "chmod" not in bound
    assert fixed == "None", done.stderr
    # An approval too: it is read, and found to be none.
    assert "can be written" in refused and "is damaged" in read, (refused, read)
