"""Launch cost of `runner exec` of /usr/bin/true against raw bwrap with the same arguments.

Interleaved in one run, because the machine's mood changes over minutes: both see the same one.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROUNDS = 60
WARM_UP = 5

MANIFEST = """\
[plugin]
id = "bench"
version = "1.0.0"
name = "Bench"
description = "Does nothing, as fast as it can."
min_nexo_version = ">=0.1"

[plugin.entrypoint]
command = "/usr/bin/true"
"""


class Command(NamedTuple):
    argv: list[str]
    files: dict[int, str]  # to be open, under these numbers


def main() -> int:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    runner = str(Path(sys.executable).with_name("runner"))
    # Not TMPDIR's choice: the plugin's uid must be able to reach its own folder.
    folder = Path(tempfile.mkdtemp(prefix="runner-bench.", dir="/tmp"))
    try:
        folder.chmod(0o755)
        manifest = folder / "nexo-plugin.toml"
        manifest.write_text(MANIFEST)
        manifest.chmod(0o644)
        explain = [runner, "explain", "--format", "argv", str(manifest)]
        explained = subprocess.run(explain, stdout=subprocess.PIPE, text=True)
        if explained.returncode:
            return explained.returncode
        commands = {
            "runner exec": Command([runner, "exec", str(manifest)], {}),
            "raw bwrap": without_shell(explained.stdout, folder),
            "python -c 0": Command([sys.executable, "-I", "-c", "0"], {}),
        }
        samples: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(WARM_UP + rounds):
            for name, command in commands.items():
                taken = measure(command)
                if turn >= WARM_UP:
                    samples[name].append(taken)
    finally:
        shutil.rmtree(folder)
    machine = f"{platform.machine()}, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, uid {os.geteuid()}")
    print(f"{rounds} launches of /usr/bin/true each, interleaved, in milliseconds:")
    for name, taken_all in samples.items():
        p50, p90 = statistics.median(taken_all), statistics.quantiles(taken_all, n=10)[-1]
        print(f"  {name:12} p50 {p50:7.1f}   p90 {p90:7.1f}   min {min(taken_all):7.1f}")
    ratio = statistics.median(samples["runner exec"]) / statistics.median(samples["raw bwrap"])
    print(f"runner exec / raw bwrap = {ratio:.2f}")
    return 0


def without_shell(line: str, folder: Path) -> Command:
    """The line `explain` prints for bash, as what bash would start: its own start is not bwrap's cost.

    Redirections become numbered files; `<(printf %s TEXT)` becomes a file that holds TEXT.
    """
    argv: list[str] = []
    files: dict[int, str] = {}
    number: int | None = None  # of a redirection whose file is the next word
    words = iter(shlex.split(line))
    for word in words:
        if word == "<(printf":
            next(words)
            text = folder / f"text-{len(argv)}-{len(files)}"
            text.write_text(next(words).removesuffix(")"))
            word = str(text)
        elif redirection := re.fullmatch(r"(\d+)<(.*)", word):
            number, word = int(redirection[1]), redirection[2]
            if not word:
                continue
        if number is None:
            argv.append(word)
        else:
            files[number], number = word, None
    return Command(argv, files)


def measure(command: Command) -> float:
    for number, path in command.files.items():
        # Anew each time: bwrap reads them to the end.
        fd = os.open(path, os.O_RDONLY)
        os.dup2(fd, number)
        os.close(fd)
    start = time.perf_counter()
    done = subprocess.run(
        command.argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=tuple(command.files),
    )
    taken = (time.perf_counter() - start) * 1000
    for number in command.files:
        os.close(number)
    if done.returncode:  # a failed launch is a quick one, and no measurement
        said = done.stderr.decode(errors="replace")
        sys.exit(f"bench: {shlex.join(command.argv)} ended with {done.returncode}:\n{said}")
    return taken


if __name__ == "__main__":
    sys.exit(main())
