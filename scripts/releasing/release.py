"""Make a release: everything that people download, with notes, checksums and a signature.

    scripts/release --key FILE [--out FOLDER]      a key of ssh-keygen: its .pub is what people check against
    scripts/release --dry-run [--out FOLDER]       everything but the signature and the tag
    scripts/release --check FOLDER --signers FILE  check a release: the signature, then each file

The folder has wheel, sdist, Debian packages, sbom.cdx.json, NOTES.md, SHA256SUMS and SHA256SUMS.sig.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import runner
from scripts.releasing.audit import audit
from scripts.releasing.deb import ARCHITECTURES, SUITES, build_deb
from scripts.releasing.distributions import NotReleasable, build_twice, source_date
from scripts.releasing.lock import ROOT, LockError, read_lock
from scripts.releasing.sbom import sbom

SUMS = "SHA256SUMS"
# ssh-keygen binds a signature to what it is for: one of something else does not pass for that of a release.
NAMESPACE = "plugin-runner-release"
IDENTITY = "plugin-runner"


def notes(changelog: str, number: str, *, dry_run: bool = False) -> str:
    """What the newest heading of the changelog says. It has to be this version's; in a dry run, it may be
    that of changes that have no version yet."""
    found = re.search(r"(?ms)^## \[([^\]]+)\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog)
    if found is None:
        raise NotReleasable("CHANGELOG.md has no heading: ## [VERSION] - DATE")
    heading, text = found[1], found[2].strip()
    if heading != number and not (dry_run and heading == "Unreleased"):
        raise NotReleasable(
            f"the newest heading of CHANGELOG.md is [{heading}], and runner.__version__ is {number}: write"
            f" ## [{number}] - DATE over what is released"
        )
    if not text:
        raise NotReleasable(f"CHANGELOG.md says nothing under [{heading}]")
    return f"# runner {number}\n\n{text}\n"


def faults_of_checkout() -> list[str]:
    """Why nobody else could build the same files from this checkout, a line each."""
    faults = []
    done = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        faults.append("this is no git checkout")
    elif done.stdout:
        faults.append(f"{len(done.stdout.splitlines())} files are not as in the last commit: git status")
    tag = f"refs/tags/v{runner.__version__}"
    if not subprocess.run(
        ["git", "rev-parse", "--quiet", "--verify", tag], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
    ).returncode:
        faults.append(f"v{runner.__version__} is tagged already: a version is released once")
    pinned = {pin.name: pin.version for pin in read_lock()}["setuptools"]
    if version("setuptools") != pinned:
        faults.append(
            f"setuptools is {version('setuptools')}, and requirements.txt has {pinned}:"
            f" .venv/bin/pip install setuptools=={pinned}"
        )
    return faults


def write_sums(folder: Path) -> Path:
    """Write the checksums of all files. Returns their file."""
    files = sorted(path for path in folder.iterdir() if path.name not in (SUMS, f"{SUMS}.sig"))
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / SUMS).write_text("".join(lines))
    return folder / SUMS


def sign(sums: Path, key: Path) -> None:
    sums.with_name(f"{SUMS}.sig").unlink(missing_ok=True)  # ssh-keygen would ask
    argv = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(sums)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"ssh-keygen did not sign with {key}: {done.stderr.strip()}")


def check(folder: Path, signers: Path) -> list[str]:
    """What is wrong with a release, a line each. `signers`: lines of "plugin-runner KEYTYPE KEY"."""
    sums = (folder / SUMS).read_bytes()
    argv = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", IDENTITY, "-n", NAMESPACE]
    argv += ["-s", str(folder / f"{SUMS}.sig")]
    done = subprocess.run(argv, input=sums, capture_output=True, check=False)
    if done.returncode:
        told = (done.stderr or done.stdout).decode(errors="replace").strip()
        return [f"{SUMS} is not signed by a key of {signers}: {told}"]
    wanted = {
        name: digest for digest, _, name in (line.partition("  ") for line in sums.decode().splitlines())
    }
    faults = []
    for path in sorted(folder.iterdir()):
        if path.name not in (SUMS, f"{SUMS}.sig") and path.name not in wanted:
            faults.append(f"{path.name} is not part of the release")
    for name, digest in wanted.items():
        if "/" in name or not (folder / name).is_file():
            faults.append(f"{name} is missing")
        elif hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            faults.append(f"{name} is not as it was released")
    return faults


def make(out: Path, suites: Sequence[str], key: Path | None) -> None:
    """Make the release in a new folder, which is removed if there is none. Without a key, a dry run. Raises
    NotReleasable."""
    dry_run = key is None
    # What is wrong with the folder or the key is said before the work of minutes.
    if key is not None:
        argv = ["ssh-keygen", "-l", "-f", str(key)]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotReleasable(f"--key: {key} is no key: {(done.stderr or done.stdout).strip()}")
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise NotReleasable(f"--out: {out} exists: remove it, or name another folder") from None
    except OSError as error:
        raise NotReleasable(f"--out: {out} cannot be made: {error.strerror}") from None
    try:
        _fill(out, suites, dry_run=dry_run)
        if key is None:
            print(f"release: dry run: {SUMS} is not signed, v{runner.__version__} is not tagged")
            return
        sign(out / SUMS, key)
        tag = ["git", "tag", "-m", f"runner {runner.__version__}", f"v{runner.__version__}"]
        done = subprocess.run(tag, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotReleasable(f"git made no tag: {done.stderr.strip()}")
    except BaseException:
        shutil.rmtree(out)
        raise
    print(f"release: signed and tagged. Publish {out}, and: git push origin v{runner.__version__}")


def _fill(out: Path, suites: Sequence[str], *, dry_run: bool) -> None:
    text = notes((ROOT / "CHANGELOG.md").read_text(), runner.__version__, dry_run=dry_run)
    for fault in faults_of_checkout():
        if not dry_run:
            raise NotReleasable(fault)
        print(f"release: it would be refused: {fault}")
    if (code := audit(read_lock())) and not dry_run:
        raise NotReleasable(
            f"scripts/audit ended with {code}: mend that, or release from where the registry answers"
        )
    epoch = source_date()
    for path in build_twice(out, epoch):
        print(f"release: {path.name}, the same bit for bit in two builds")
    for suite in suites:
        for architecture in ARCHITECTURES:
            print(f"release: {build_deb(suite, architecture, out, epoch).name}")
    (out / "sbom.cdx.json").write_text(json.dumps(sbom(read_lock(), epoch), indent=1) + "\n")
    (out / "NOTES.md").write_text(text)
    print(write_sums(out).read_text(), end="")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="the private key, or the .pub of one that ssh-agent has"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="neither sign nor tag; go on where a release would be refused"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=ROOT / "dist" / runner.__version__,
        help="a new folder (default: dist/VERSION)",
    )
    parser.add_argument(
        "--suite",
        action="append",
        choices=(*SUITES, "none"),
        help="only these Debian packages (default: all)",
    )
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="check a release that was downloaded")
    parser.add_argument(
        "--signers", type=Path, metavar="FILE", help=f"for --check: a line '{IDENTITY} KEYTYPE KEY'"
    )
    asked = parser.parse_args(argv)
    modes = [asked.key is not None, asked.dry_run, asked.check is not None]
    if modes.count(True) != 1 or (asked.check is None) != (asked.signers is None):
        parser.error("say --key FILE, --dry-run, or --check FOLDER --signers FILE")
    try:
        if asked.check is not None:
            faults = check(asked.check, asked.signers)
            print(
                "\n".join(faults)
                if faults
                else f"{asked.check}: signed, and every file is as it was released"
            )
            return int(bool(faults))
        suites = [suite for suite in asked.suite or SUITES if suite != "none"]
        make(asked.out, suites, asked.key)
    except (NotReleasable, LockError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
