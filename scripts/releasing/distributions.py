"""The wheel and the sdist: from the same sources the same bits, wherever and whenever they are built."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.container.image import copied, read_dockerfile
from scripts.releasing.lock import ROOT
from scripts.releasing.manual import write_man_pages

_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[2])(sys.argv[1])"


class NotReleasable(Exception):
    """The checkout, or what was built from it, is not fit for a release."""


def source_date(root: Path = ROOT) -> int:
    """SOURCE_DATE_EPOCH, or the time of the last commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    argv = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"{root} is no git checkout: set SOURCE_DATE_EPOCH to the time of the release")
    return int(done.stdout)


def copy_sources(target: Path, root: Path = ROOT) -> Path:
    """Copy what the image is built from, with modes that no umask has changed. Returns `target`."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.egg-info")
    for name in dict.fromkeys(copied(read_dockerfile((root / "Dockerfile").read_text()))):
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=unwanted, dirs_exist_ok=True)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return target


def build(sources: Path, out: Path, epoch: int, *steps: str) -> None:
    """Build with the setuptools of this environment: nothing is downloaded. setuptools writes build/ and
    *.egg-info beside the sources, so `sources` is a copy."""
    out.mkdir(parents=True, exist_ok=True)
    env = {"PATH": os.defpath, "SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    for step in steps or ("build_sdist", "build_wheel"):
        argv = [sys.executable, "-I", "-c", _BUILD, str(out), step]
        done = subprocess.run(
            argv, cwd=sources, env=env, capture_output=True, text=True, umask=0o022, check=False
        )
        if done.returncode:
            raise NotReleasable(f"setuptools failed:\n{done.stderr[-2000:]}")
    for path in out.glob("*.tar.gz"):
        _settle(path, epoch)


def _settle(path: Path, epoch: int) -> None:
    """Write the sdist anew, without the times, owners and order that setuptools took from this machine."""
    with tarfile.open(path) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member in members:
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                member.mtime, member.pax_headers = epoch, {}
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, epoch) as packed:
        packed.write(held.getvalue())


def build_twice(out: Path, epoch: int, root: Path = ROOT) -> list[Path]:
    """Build wheel and sdist, with man pages, in two folders, and the wheel of the sdist. Returns the first
    two files if all are the same, bit for bit."""
    with TemporaryDirectory() as folder:
        first, second, third = (
            Path(folder, name) for name in ("one", "a second, of another length", "three")
        )
        pages = copy_sources(first / "in", root) / "man"
        pages.mkdir()
        write_man_pages(pages, epoch)
        for page in (pages, *pages.iterdir()):
            page.chmod(0o755 if page == pages else 0o644)
        build(pages.parent, out, epoch)
        # Other times and another order of the folders' entries.
        shuffled = copy_sources(second / "in", root)
        shutil.copytree(pages, shuffled / "man")
        for path in sorted(shuffled.rglob("*"), reverse=True):
            os.utime(path, (1_000_000_000, 1_000_000_000))
        build(shuffled, second / "out", epoch)
        [sdist], [wheel] = sorted(out.glob("*.tar.gz")), sorted(out.glob("*.whl"))
        third.mkdir()
        subprocess.run(["tar", "-xzf", str(sdist), "-C", str(third)], check=True)
        [unpacked] = third.iterdir()
        build(unpacked, third / "out", epoch, "build_wheel")
        for path, others in ((sdist, (second,)), (wheel, (second, third))):
            for other in others:
                if path.read_bytes() != (other / "out" / path.name).read_bytes():
                    raise NotReleasable(f"{path.name} differs between two builds of the same sources")
    return [wheel, sdist]
