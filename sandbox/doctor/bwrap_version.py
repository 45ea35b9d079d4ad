"""The version of bwrap, and its published flaws."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

from sandbox.doctor.finding import Finding


class Flaw(NamedTuple):
    """A published flaw of some bwrap versions, and why it does not affect the cage."""

    cve: str
    since: tuple[int, ...]
    fixed: tuple[int, ...]
    what: str
    why_not_ours: str


_FLAWS = (
    Flaw(
        "CVE-2026-87766",
        (0,),
        (0, 12),
        "follows links in mount destinations onto the host",
        "the runner never mounts below a folder that a plugin can write",
    ),
    Flaw(
        "CVE-2026-41163",
        (0, 11),
        (0, 11, 2),
        "a setuid bwrap can be traced and made to mount overlays",
        "a setuid bwrap is refused",
    ),
    Flaw(
        "CVE-2020-5291",
        (0, 4),
        (0, 4, 1),
        "a setuid bwrap keeps its privileges",
        "a setuid bwrap is refused",
    ),
)


def flaws_of(version: tuple[int, ...]) -> list[Flaw]:
    return [flaw for flaw in _FLAWS if flaw.since <= version < flaw.fixed]


def read_version(path: str) -> str:
    done = subprocess.run(
        [path, "--version"],
        env={},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=5,
        check=False,
    )
    return done.stdout.strip().removeprefix("bubblewrap ")


def version_numbers(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.split("-")[0].split("."))
    except ValueError:
        return ()


def bwrap_version(path: str) -> Finding:
    version = read_version(path)
    numbers = version_numbers(version)
    flaws = flaws_of(numbers)
    if not numbers:
        return Finding(
            "bwrap_version",
            "degraded",
            f"{path} --version says {version!r}",
            remedy="install bubblewrap from the distribution",
        )
    if not flaws:
        return Finding("bwrap_version", "ok", f"{version}, no known flaws")
    return Finding(
        "bwrap_version",
        "degraded",
        f"{version} has {', '.join(flaw.cve for flaw in flaws)}; the cage is not affected",
        "\n".join(f"{flaw.cve}: {flaw.what}; {flaw.why_not_ours}" for flaw in flaws),
        f"update bubblewrap to {'.'.join(map(str, max(flaw.fixed for flaw in flaws)))} or newer "
        "(distributions also patch older versions without changing the number)",
    )
