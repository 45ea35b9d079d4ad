"""The shapes of images that people publish, made by Debian's tools, in Debian's registry: a Debian system,
busybox alone, Python without a shell, and a single file."""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from sandbox.network.credentials import AUTHORITIES
from tests.conftest import Caller
from tests.root_store import empty_root_store
from tests.runner.oci.images import (
    BuiltImage,
    busybox_members,
    debian_members,
    push,
    python_members,
)
from tests.runner.oci.servers import docker_registry
from tests.runner.oci.umoci import image_of_tar, make_image, with_zstd, write_members

pytestmark = [
    pytest.mark.needs("umoci", "docker-registry"),
    *(pytest.mark.launches, pytest.mark.usefixtures("nothing_left")),
]
_DEBIAN = "http://deb.debian.org/debian"


class Shop(NamedTuple):
    """A person, and a registry that serves everybody."""

    caller: Caller
    registry: str

    def install(self, image: BuiltImage, name: str) -> str:
        reference = f"{self.registry}/shapes/{name}:1"
        push(reference, image)
        done = self.caller("install", "--yes", f"docker://{reference}", timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.caller("install", "--verify").stdout == f"{reference}: as it was fetched\n"
        return reference

    def run(self, *words: str, status: int = 0) -> str:
        """Returns what it wrote, and what the runner said of a failure."""
        done = self.caller("run", *words)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status < 100 else done.stderr


@pytest.fixture
def shop(runner_as: Caller, plugin_dir: Path, tmp_path: Path) -> Iterator[Shop]:
    with ExitStack() as stack:
        (tmp_path / "registry").mkdir()
        address = stack.enter_context(docker_registry(tmp_path / "registry"))
        caller = runner_as
        if caller.uid == 0:
            caller = stack.enter_context(empty_root_store(caller, plugin_dir))
        yield Shop(caller, address)


@pytest.mark.needs("busybox")
@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_busybox_alone(shop: Shop, tmp_path: Path, packing: str) -> None:
    """Layers that remove what is below them, as umoci says it."""

    def base(root: Path) -> None:
        write_members(root, busybox_members())
        for name in ("etc/old", "etc/conf/a", "etc/conf/b", "srv/was-a-folder/x"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("of the first layer\n")

    def change(root: Path) -> None:
        (root / "etc/old").unlink()
        shutil.rmtree(root / "etc/conf")
        shutil.rmtree(root / "srv/was-a-folder")
        (root / "srv/was-a-folder").write_text("a file now\n")
        os.rename(root / "bin/mv", root / "bin/moved")
        os.link(root / "bin/busybox", root / "bin/busybox-hard")

    def again(root: Path) -> None:
        (root / "etc/conf").mkdir()
        (root / "etc/conf/c").write_text("of the third layer\n")

    options = (
        *("--config.entrypoint", "/bin/sh", "--config.entrypoint", "-c"),
        *("--config.user", "app", "--config.workingdir", "/srv"),
        *("--config.env", "PATH=/bin", "--config.env", "OWN=x y"),
    )
    image = make_image(tmp_path, base, change, again, options=options)
    reference = shop.install(with_zstd(image) if packing == "zstd" else image, "busybox")
    asked = (
        "exec 2>&1; id -u; pwd; echo $OWN; cat was-a-folder; ls /etc/conf /bin/mv /etc/old; ls -l /bin/moved"
    )
    lines = shop.run(
        *("--image", reference, "--", f"{asked}; /bin/busybox-hard echo by a hard link")
    ).splitlines()
    assert lines[:4] == ["1000", "/srv", "x y", "a file now"]
    assert [line for line in lines if line.startswith("ls:")] == [
        "ls: /bin/mv: No such file or directory",
        "ls: /etc/old: No such file or directory",
    ]
    assert lines[lines.index("/etc/conf:") + 1] == "c" and "/bin/moved -> busybox" in "".join(lines)
    assert lines[-1] == "by a hard link"


def test_a_debian_system(shop: Shop, tmp_path: Path) -> None:
    """With Debian's links in place of /bin and /lib, and the state of its package manager."""
    programs = ("/bin/dash", "/bin/cat", "/bin/ls", "/usr/bin/dpkg-query")

    def base(root: Path) -> None:
        write_members(root, debian_members("base-files", "dash", "coreutils", "dpkg", libraries_of=programs))
        info = root / "var/lib/dpkg/info"
        info.mkdir(parents=True, exist_ok=True)
        shutil.copy("/var/lib/dpkg/status", root / "var/lib/dpkg/status")
        for path in Path("/var/lib/dpkg/info").glob("base-files.*"):
            shutil.copy(path, info)

    def trim(root: Path) -> None:
        shutil.rmtree(root / "usr/sbin")
        (root / "usr/sbin").mkdir()

    options = ("--config.cmd", "dash", "--config.cmd", "-c", "--config.cmd", _DEBIAN_QUESTIONS)
    reference = shop.install(make_image(tmp_path, base, trim, options=options), "debian")
    lines = shop.run("--image", reference).splitlines()
    told = subprocess.run(
        ["/usr/bin/dpkg-query", "-W", "base-files"], capture_output=True, text=True, check=True
    )
    assert lines[0] == told.stdout.strip()
    for name in ("bin", "lib"):
        assert f"{name} -> usr/{name}" in lines
    assert lines[-3:] == ["/etc/os-release", "0", "written"]


_DEBIAN_QUESTIONS = """
dpkg-query -W base-files
for name in bin lib; do test -h /$name && echo "$name -> $(readlink /$name)"; done
dpkg-query -S /etc/os-release | cut -d' ' -f2
ls /usr/sbin | wc -l
echo written >/var/lib/dpkg/status && cat /var/lib/dpkg/status
"""


@pytest.mark.broad
@pytest.mark.bound(1500)
@pytest.mark.needs("root", "registry")
@pytest.mark.skipif(not shutil.which("mmdebstrap"), reason="needs mmdebstrap (scripts/setup all)")
def test_debian_by_mmdebstrap(shop: Shop, tmp_path: Path) -> None:
    """All of a minimal Debian, of which its own package manager finds every file as it was packed."""
    try:
        urllib.request.urlopen(f"{_DEBIAN}/dists/stable/Release", timeout=60).close()
    except OSError as error:
        pytest.skip(f"needs {_DEBIAN}: {error}")
    tar = tmp_path / "debian.tar"
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", "stable", str(tar), _DEBIAN]
    subprocess.run(argv, check=True, timeout=1200)
    reference = shop.install(image_of_tar(tmp_path, tar, ("--config.cmd", "bash")), "whole")
    asked = "dpkg --verify 2>&1; dpkg-query -W | wc -l; apt-get --version | head -1"
    *changed, count, apt = shop.run("--image", reference, "--", "bash", "-c", asked).splitlines()
    # What the cage has of its own in these places.
    own = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs/ca-certificates.crt")
    assert [line for line in changed if not line.endswith(own)] == []
    assert int(count) > 50 and apt.startswith("apt ")


def test_python_without_a_shell(shop: Shop, tmp_path: Path) -> None:
    """The shape of distroless/python3."""

    def base(root: Path) -> None:
        write_members(root, python_members())

    options: tuple[str, ...] = ("--config.entrypoint", "python3", "--config.user", "65532:65532")
    options += ("--config.env", f"SSL_CERT_FILE={AUTHORITIES[0]}")
    reference = shop.install(make_image(tmp_path, base, options=options), "distroless")
    asked = (
        "import os, ssl, subprocess, sys\n"
        "trusted = ssl.create_default_context().get_ca_certs()\n"
        "print(os.getuid(), os.getgid(), os.path.exists('/bin/sh'), len(trusted) > 0)\n"
        "try: subprocess.run('true', shell=True)\n"
        "except OSError as error: print(error)\n"
    )
    found = shop.run("--image", reference, "--", "-c", asked)
    assert found.splitlines() == [
        f"65532 65532 False {any(map(os.path.isfile, AUTHORITIES))}",
        "[Errno 2] No such file or directory: '/bin/sh'",
    ]


@pytest.mark.needs("gcc")
def test_one_static_program(shop: Shop, tmp_path: Path) -> None:
    """The shape of an image from scratch: one file."""
    source = tmp_path / "own.c"
    source.write_text(
        "#include <stdio.h>\n#include <unistd.h>\nint main(int n, char **words) {\n"
        'printf("%s %d %d\\n", words[n - 1], (int)getuid(), access("/etc/passwd", F_OK)); return 7; }\n'
    )
    subprocess.run(["/usr/bin/gcc", "-static", "-o", str(tmp_path / "own"), str(source)], check=True)

    def base(root: Path) -> None:
        shutil.copy(tmp_path / "own", root / "own")

    image = make_image(tmp_path, base, options=("--config.entrypoint", "/own"))
    reference = shop.install(image, "scratch")
    assert shop.run("--image", reference, "--", "word", status=7) == "word 0 -1\n"
    missing = shop.run("--image", reference, "--read", "/no/such/file", "--", "x", status=126)
    assert "/no/such/file" in missing
