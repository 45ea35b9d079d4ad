"""Assemble the sources in sandbox/spawn/assembly, and write their bytes into sandbox/spawn/machine_code.py.

    .venv/bin/python -m scripts.machine_code

Run it after a change of a source; a test fails if that was forgotten. It needs the binutils of both machines,
which scripts/setup installs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sandbox.seccomp import syscalls
from sandbox.spawn import machine_code

FOLDER = Path(machine_code.__file__).with_name("assembly")
_LINE_BYTES = 32


class Assembled(NamedTuple):
    instructions: bytes
    symbols: Mapping[str, int]  # labels, offsets and constants


def assemble(source: Path, folder: Path = FOLDER) -> Assembled:
    """Assemble NAME.MACHINE.s, with the headers in `folder` and the numbers of the system calls it names."""
    machine = source.suffixes[-2][1:]
    numbers = syscalls.load(machine)
    named = sorted(set(re.findall(r"\bSYS_(\w+)", source.read_text())))
    with tempfile.TemporaryDirectory() as work:

        def run(tool: str, *words: str | Path) -> str:
            argv = [f"{machine}-linux-gnu-{tool}", *words]
            return subprocess.run(argv, cwd=work, check=True, stdout=subprocess.PIPE, text=True).stdout

        definitions = [f"--defsym=SYS_{name}={numbers[name]}" for name in named]
        run("as", "--fatal-warnings", *definitions, "-I", folder.resolve(), "-o", "object", source.resolve())
        run("ld", "--entry=0", "-Ttext=0", "-o", "linked", "object")  # it refuses a name that nobody defines
        run("objcopy", "--output-target=binary", "--only-section=.text", "linked", "bytes")
        told = [line.split() for line in run("nm", "linked").splitlines()]
        symbols = {name: int(value, 16) for value, _, name in told}
        return Assembled((Path(work) / "bytes").read_bytes(), symbols)


def main() -> None:
    path = Path(machine_code.__file__)
    head, found, _ = path.read_text().partition("INSTRUCTIONS = {\n")
    assert found
    text = head + found
    for source in sorted(FOLDER.glob("*.s")):
        made = assemble(source).instructions.hex()
        lines = [made[at : at + 2 * _LINE_BYTES] for at in range(0, len(made), 2 * _LINE_BYTES)]
        text += "\n        ".join([f'    "{source.stem}": """', *lines]) + '\n    """,\n'
        print(f"{source.stem:17} {len(made) // 2:4} bytes")
    path.write_text(text + "}\n")


if __name__ == "__main__":
    main()
