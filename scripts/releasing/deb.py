"""Build the Debian package of one release of Debian or Ubuntu.

    scripts/build-deb [--suite NAME] [--architecture NAME] [--out FOLDER]

The package has an environment of its own in /usr/lib/plugin-runner, with the dependencies of the lock. Each
has a wheel or is plain Python, so that nothing is compiled, and no root of that release is needed: any
machine builds for all. Only the registry is asked, and what it gives has to have a hash of the lock.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import runner
from scripts.releasing.distributions import NotReleasable, build, copy_sources, source_date
from scripts.releasing.lock import ROOT, Pin, read_lock
from scripts.releasing.manual import output_of, write_man_pages
from scripts.releasing.sbom import BUILD_ONLY, sbom

NAME = "plugin-runner"
PREFIX = f"usr/lib/{NAME}"
# python-prctl would have to be compiled; without it sandbox/process.py makes the same calls through ctypes.
LEFT_OUT = BUILD_ONLY | {"python-prctl"}
NO_WHEEL = frozenset({"nkeys"})  # the registry has only the sources, which are plain Python
# Wheels are named after the oldest C library they run with. Debian 12 has 2.36.
_GLIBC = range(36, 16, -1)


class Suite(NamedTuple):
    python: str
    mark: str  # in the package's version: a newer release of the distribution has a newer package
    apparmor: bool  # whether its AppArmor knows the rule `userns` (4.0 and later)
    subgroup: bool  # whether its systemd knows DelegateSubgroup= (254 and later)


SUITES = {
    "bookworm": Suite("3.11", "deb12", False, False),
    "trixie": Suite("3.13", "deb13", True, True),
    "noble": Suite("3.12", "ubuntu24.04", True, True),
}
ARCHITECTURES = {"arm64": "aarch64", "amd64": "x86_64"}  # Debian's name and that of wheels


def build_deb(suite: str, architecture: str, out: Path, epoch: int) -> Path:
    """Build the package. Returns its file, the same bit for bit for the same sources and date."""
    kind = SUITES[suite]
    version = f"{runner.__version__}-1~{kind.mark}"
    out.mkdir(parents=True, exist_ok=True)
    deb = out / f"{NAME}_{version}_{architecture}.deb"
    with TemporaryDirectory() as folder:
        work, tree = Path(folder), Path(folder, "tree")
        build(copy_sources(work / "sources"), work / "wheels", epoch, "build_wheel")
        _fetch(kind.python, ARCHITECTURES[architecture], work / "wheels", epoch)
        packages = tree / PREFIX / f"lib/python{kind.python}/site-packages"
        for wheel in sorted((work / "wheels").glob("*.whl")):
            _unpack(wheel, packages, tree / PREFIX)
        _make_environment(tree, kind.python)
        _add_system_files(tree, kind, epoch)
        _add_pages(tree, packages, version, suite, epoch)
        _add_control(tree, kind, version, architecture)
        _settle(tree, epoch)
        env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
        # One thread: several would cut the data into blocks of another size.
        pack = ["dpkg-deb", "--root-owner-group", "--threads-max=1", "-Zxz", "--build", str(tree), str(deb)]
        done = subprocess.run(pack, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotReleasable(f"dpkg-deb failed: {done.stderr}")
    return deb


def _fetch(python: str, machine: str, wheels: Path, epoch: int) -> None:
    pins = [pin for pin in read_lock() if pin.name not in LEFT_OUT]
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in _GLIBC]
    platforms.append(f"--platform=manylinux2014_{machine}")
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    _pip(
        "download",
        [pin for pin in pins if pin.name not in NO_WHEEL],
        wheels,
        epoch,
        f"--dest={wheels}",
        *target,
    )
    # With the setuptools of this environment, and never with a wheel that pip kept of an earlier build.
    sources = ["--no-binary=:all:", "--no-build-isolation", "--no-cache-dir", f"--wheel-dir={wheels}"]
    _pip("wheel", [pin for pin in pins if pin.name in NO_WHEEL], wheels, epoch, *sources)
    found = [wheel.name for wheel in wheels.glob("*.whl")]
    if len(found) != len(pins) + 1:
        raise NotReleasable(f"pip fetched other wheels than the {len(pins)} of the lock")
    for name in NO_WHEEL:
        if not any(each.startswith(f"{name}-") and each.endswith("-py3-none-any.whl") for each in found):
            raise NotReleasable(f"{name} is not plain Python any more: it would have to be compiled")


def _pip(verb: str, pins: Sequence[Pin], wheels: Path, epoch: int, *options: str) -> None:
    wanted = wheels / "wanted.txt"
    wanted.write_text("".join(f"{pin.as_text()}\n" for pin in pins))
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", verb, "--quiet", "--no-deps"]
    argv += ["--require-hashes", f"--requirement={wanted}", *options]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, umask=0o022)
    if done.returncode:
        raise NotReleasable(f"pip could not fetch the dependencies:\n{done.stderr[-2000:]}")


def _unpack(wheel: Path, packages: Path, prefix: Path) -> None:
    """Install a wheel as pip does, but for the commands of dependencies: nobody calls them."""
    is_ours = wheel.name.startswith("plugin_runner-")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            part = re.fullmatch(r"[^/]+\.data/(\w+)/(.+)", name)
            if part is None or part[1] in ("purelib", "platlib"):
                target = packages / (part[2] if part else name)
            elif is_ours:
                target = prefix / ("bin" if part[1] == "scripts" else "") / part[2]
            else:
                continue
            if ".." in target.parts:
                raise NotReleasable(f"{wheel.name} holds {name}")
            if not name.endswith("/"):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def _make_environment(tree: Path, python: str) -> None:
    prefix = tree / PREFIX
    (prefix / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {python}\n"
    )
    (prefix / "bin/python").symlink_to(f"/usr/bin/python{python}")
    (tree / "usr/bin").mkdir()
    (tree / "usr/bin/runner").symlink_to(f"../lib/{NAME}/bin/runner")
    # Where Debian has documentation. The runner finds it through the link.
    (tree / "usr/share/doc").mkdir(parents=True)
    (prefix / f"share/doc/{NAME}").rename(tree / f"usr/share/doc/{NAME}")
    (prefix / f"share/doc/{NAME}").symlink_to(f"../../../../share/doc/{NAME}")


def _add_system_files(tree: Path, kind: Suite, epoch: int) -> None:
    """Units, the AppArmor profile, completion and man pages."""
    units = {
        "runner-serve.service": "usr/lib/systemd/system/runner-serve.service",
        "runner-serve.socket": "usr/lib/systemd/system/runner-serve.socket",
        "runner-serve-user.service": "usr/lib/systemd/user/runner-serve.service",
        "runner-worker.service": "usr/lib/systemd/system/runner-worker.service",
        "runner-door.service": "usr/lib/systemd/system/runner-door.service",
        "plugin-host.service": f"usr/share/doc/{NAME}/examples/plugin-host.service",
    }
    for name, place in units.items():
        text = (ROOT / "policies/systemd" / name).read_text()
        # Comments say how to install a unit by hand.
        lines = text.splitlines() if name == "plugin-host.service" else _without_head(text)
        unit = re.sub(r"(?m)^ExecStart=\S*/bin/runner ", "ExecStart=/usr/bin/runner ", "\n".join(lines))
        _write(tree / place, unit if kind.subgroup else without_delegate_subgroup(unit))
    if kind.apparmor:
        _write(tree / "etc/apparmor.d/runner", (ROOT / "policies/apparmor/runner").read_text())
    for shell, place in (
        ("bash", "bash-completion/completions/runner"),
        ("zsh", "zsh/vendor-completions/_runner"),
        ("fish", "fish/vendor_completions.d/runner.fish"),
    ):
        _write(tree / "usr/share" / place, output_of("completion", shell))
    pages = tree / "usr/share/man/man1"
    pages.mkdir(parents=True)
    write_man_pages(pages, epoch)
    for page in pages.iterdir():
        _compress(page)


def without_delegate_subgroup(unit: str) -> str:
    """The unit for a systemd that ignores DelegateSubgroup=: the command enters that group itself. Otherwise
    no plugin would start, because a group with processes in it cannot hand its controllers down."""
    found = re.search(r"(?m)^DelegateSubgroup=(\w+)\n", unit)
    if found is None or "ExecStart=/usr/bin/runner " not in unit:
        return unit
    enter = (
        f'group=/sys/fs/cgroup"$(sed -n s/^0:://p /proc/self/cgroup)"/{found[1]};'
        ' mkdir -p "$$group" && echo 0 >"$$group/cgroup.procs"; exec "$$@"'
    )
    told = "# Before systemd 254 there is no DelegateSubgroup=: ExecStart= enters a group below this one.\n"
    told += "SyslogIdentifier=runner\n"  # in the journal, where it would be sh
    return re.sub(
        r"(?m)^ExecStart=(.*)$",
        lambda line: f"ExecStart=/bin/sh -c '{enter}' sh {line[1]}",
        unit.replace(found[0], told),
    )


def _without_head(text: str) -> list[str]:
    lines = text.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line and line[0] != "#") :]


def _add_pages(tree: Path, packages: Path, version: str, suite: str, epoch: int) -> None:
    """What Debian wants to know of the package, and what is in it."""
    pages = tree / f"usr/share/doc/{NAME}"
    pins = [pin for pin in read_lock() if pin.name not in LEFT_OUT]
    document = sbom(pins, epoch, [packages])
    _write(pages / "sbom.cdx.json", json.dumps(document, indent=1) + "\n")
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(epoch))
    log = f"{NAME} ({version}) {suite}; urgency=medium\n\n  * See CHANGELOG.md.\n\n"
    _write(pages / "changelog.Debian", f"{log} -- {_maintainer()}  {date}\n")
    _compress(pages / "changelog.Debian")
    bundled = "".join(
        f"  {each['name']} {each['version']}: {_licence_of(each)}\n" for each in document["components"]
    )
    text = "runner is licensed under the Apache License 2.0: /usr/share/common-licenses/Apache-2.0\n\n"
    text += f"/{PREFIX} also has these packages. Their licences are in site-packages/*.dist-info:\n{bundled}"
    _write(pages / "copyright", text)


def _licence_of(component: dict[str, object]) -> str:
    licences = component.get("licenses", [])
    assert isinstance(licences, list)
    return ", ".join(each.get("expression") or each["license"]["name"] for each in licences) or "see there"


def _maintainer() -> str:
    name = os.environ.get("DEBFULLNAME", "The plugin-runner project")
    return f"{name} <{os.environ.get('DEBEMAIL', 'plugin-runner@localhost')}>"


def _add_control(tree: Path, kind: Suite, version: str, architecture: str) -> None:
    control = tree / "DEBIAN"
    control.mkdir()
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    size = sum(path.stat().st_size // 1024 + 1 for path in files)
    major, _, minor = kind.python.partition(".")
    fields = {
        "Package": NAME,
        "Version": version,
        "Architecture": architecture,
        "Maintainer": _maintainer(),
        "Installed-Size": size,
        # The environment is for exactly this Python: compiled modules are.
        "Depends": f"bubblewrap (>= 0.8), libc6 (>= 2.36), python{kind.python},"
        f" python3 (>= {kind.python}~), python3 (<< {major}.{int(minor) + 1}~)",
        "Section": "admin",
        "Priority": "optional",
        "Description": "run plugins you do not trust in a cage\n"
        " The command runner starts a plugin in a cage made of Linux namespaces, seccomp,\n"
        " cgroups and a uid of its own. Its host notices nothing: the streams are the\n"
        " same byte for byte, and so is the exit code.",
    }
    _write(control / "control", "".join(f"{name}: {value}\n" for name, value in fields.items()))
    sums = (f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n" for path in files)
    _write(control / "md5sums", "".join(sums))
    if kind.apparmor:
        _write(control / "conffiles", "/etc/apparmor.d/runner\n")
    for name in ("postinst", "prerm", "postrm"):
        shutil.copyfile(ROOT / "scripts/releasing/debian" / name, control / name)


def _settle(tree: Path, epoch: int) -> None:
    """Give everything the modes and times that it has in the package."""
    programs = {tree / PREFIX / "bin" / name for name in ("runner", "runner-start")}
    programs |= {tree / "DEBIAN" / name for name in ("postinst", "prerm", "postrm")}
    for path in sorted((tree, *tree.rglob("*")), reverse=True):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path in programs else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.endswith("\n") else f"{text}\n")


def _compress(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()


def main(argv: Sequence[str]) -> int:
    here = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True)
    parser = argparse.ArgumentParser(prog="scripts/build-deb", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="without it: all, one after the other"
    )
    parser.add_argument(
        "--architecture", choices=ARCHITECTURES, default=here.stdout.strip(), help="default: this one's"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    asked = parser.parse_args(argv)
    try:
        for suite in asked.suite or SUITES:
            deb = build_deb(suite, asked.architecture, asked.out, source_date())
            print(f"{deb}: {deb.stat().st_size / 1e6:.1f} MB")
    except NotReleasable as error:
        print(f"build-deb: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
