"""requirements.txt: every dependency of a release, in one version with the hashes of its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
LOCK = ROOT / "requirements.txt"
_PIN = re.compile(r"([a-z0-9-]+)==([^\s;]+) \\\n((?: {4}--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)")


class Pin(NamedTuple):
    name: str
    version: str
    hashes: tuple[str, ...]  # SHA-256 of each file that the registry has

    def as_text(self) -> str:
        """The entry as pip reads it."""
        return " \\\n    ".join(
            (f"{self.name}=={self.version}", *(f"--hash=sha256:{h}" for h in self.hashes))
        )


class LockError(Exception):
    """An entry of the lock has no version or no hash."""


def read_lock(path: Path = LOCK) -> tuple[Pin, ...]:
    """Returns all entries. Whatever is neither an entry nor a comment is an error: pip would read it too."""
    text = "".join(
        f"{line}\n" for line in path.read_text().splitlines() if line and not line.lstrip().startswith("#")
    )
    if rest := _PIN.sub("", text).strip():
        raise LockError(f"{path}: this is not one version with hashes: {rest.splitlines()[0]}")
    return tuple(
        Pin(name, version, tuple(re.findall(r"[0-9a-f]{64}", hashes)))
        for name, version, hashes in _PIN.findall(text)
    )
