"""The Debian package and the wheel, installed and tried in clean roots of each release that they are for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import runner
from runner.build import build_version
from scripts.releasing.deb import ARCHITECTURES, SUITES, build_deb
from scripts.releasing.distributions import build, copy_sources

HERE = Path(__file__).parent
EPOCH = 1_700_000_000
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
KEYRINGS = "usr/share/keyrings"
DEBIAN = "http://deb.debian.org/debian"
# Ubuntu has the packages of each kind of machine at a place of its own.
UBUNTU = {"amd64": "http://archive.ubuntu.com/ubuntu", "arm64": "http://ports.ubuntu.com/ubuntu-ports"}
pytestmark = [
    *(pytest.mark.needs("root", "registry"), pytest.mark.launches),
    *(pytest.mark.broad, pytest.mark.bound(3000)),
]


def architecture() -> str:
    return next(name for name, machine in ARCHITECTURES.items() if machine == os.uname().machine)


def mirror(suite: str) -> str:
    return UBUNTU[architecture()] if suite == "noble" else DEBIAN


@pytest.fixture(scope="module", params=SUITES)
def suite(request: pytest.FixtureRequest) -> str:
    """A release whose packages for this machine the mirror has."""
    name = str(request.param)
    index = f"{mirror(name)}/dists/{name}/main/binary-{architecture()}/Packages.xz"
    try:
        with urllib.request.urlopen(urllib.request.Request(index, method="HEAD"), timeout=60):
            return name
    except OSError as error:
        pytest.skip(f"needs {index}: {error}")


@pytest.fixture(scope="module")
def base(suite: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    assert shutil.which("mmdebstrap"), "apt-get install mmdebstrap (scripts/setup all)"
    root = tmp_path_factory.mktemp("base") / suite
    parts = "main,universe" if suite == "noble" else "main"  # pipx is in universe
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", f"--components={parts}"]
    if suite == "noble":
        argv.append(f"--keyring={ubuntu_keys(root.with_name('keys'))}")
    subprocess.run([*argv, suite, str(root), mirror(suite)], check=True, timeout=1200)
    yield root
    shutil.rmtree(root)


def ubuntu_keys(folder: Path) -> Path:
    """Ubuntu's keys, from a package of Debian 13 (12 has none) that is checked with Debian's keys."""
    argv = ["mmdebstrap", "--quiet", "--variant=extract", "--include=ubuntu-keyring", "trixie", str(folder)]
    subprocess.run([*argv, DEBIAN], check=True, timeout=600)
    return folder / KEYRINGS / "ubuntu-archive-keyring.gpg"


def try_in(base: Path, folder: Path, script: str, files: dict[str, Path]) -> dict[str, str]:
    """Run a script in a copy of the root. Returns what it printed, by the first word of each line."""
    root = folder / "root"
    subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(root)], check=True)
    if os.path.exists(CERTIFICATES):  # pip asks the same registry as this machine
        files = {**files, "certificates": Path(CERTIFICATES)}
    for name, path in {**files, script: HERE / script}.items():
        shutil.copyfile(path, root / "opt" / name)
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", str(HERE / "enter.sh"), str(root)]
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PIP_CERT": "/opt/certificates", "LANG": "C.UTF-8"}
    env |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    try:
        done = subprocess.run(
            [*argv, "bash", f"/opt/{script}"], env=env, capture_output=True, text=True, timeout=2400
        )
    finally:
        shutil.rmtree(root)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return {name: rest for name, _, rest in (line.partition(" ") for line in done.stdout.splitlines())}


def older_deb(deb: Path, folder: Path) -> Path:
    """The package with a lower version, and with a module that later ones do not have."""
    subprocess.run(["dpkg-deb", "--raw-extract", str(deb), str(folder)], check=True)
    control = folder / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"Version: {runner.__version__}-", "Version: 0.0.9-"))
    [package] = (folder / "usr/lib/plugin-runner/lib").glob("python3*/site-packages/runner")
    (package / "withdrawn.py").write_text("")
    older = folder.with_suffix(".deb")
    subprocess.run(["dpkg-deb", "-Znone", "--build", str(folder), str(older)], check=True)
    return older


def test_the_debian_package(suite: str, base: Path, tmp_path: Path) -> None:
    deb = build_deb(suite, architecture(), tmp_path / "one", EPOCH)
    assert deb.read_bytes() == build_deb(suite, architecture(), tmp_path / "two", EPOCH).read_bytes()
    older = older_deb(deb, tmp_path / "older")
    found = try_in(base, tmp_path, "try_deb.sh", {"package.deb": deb, "older.deb": older})
    assert found["version"] == f"runner {build_version()}"
    assert found["doctor"].startswith("Every layer that the default policy requires can be enforced here.")
    for who in ("root", "person"):
        assert json.loads(found[who]) == {"greeting": f"Hello, {who}!"}
    assert found["kept"] == '{"calls": 2} {"calls": 2}'
    assert found["man"].startswith("RUNNER(1)") and found["bash"] == "conformance"
    assert "nats://127.0.0.1:1" in found["fleet"], found
    assert found["gateway"] and ("apparmor" in found) == SUITES[suite].apparmor
    assert found["left"] == ""


def test_the_wheel_with_pipx(base: Path, tmp_path: Path) -> None:
    build(copy_sources(tmp_path / "sources"), tmp_path / "dist", EPOCH, "build_wheel")
    [wheel] = (tmp_path / "dist").glob("*.whl")
    found = try_in(base, tmp_path, "try_wheel.sh", {wheel.name: wheel})
    assert found["version"] == f"runner {build_version()}"
    assert json.loads(found["root"]) == {"greeting": "Hello, root!"}
