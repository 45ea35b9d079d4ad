"""Launch cost of `runner exec` of /usr/bin/true against raw bwrap with the same arguments.

Interleaved in one run, because the machine's mood changes over minutes: both see the same one.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
        explained = subprocess.run(
            [runner, "explain", "--format", "argv", str(manifest)], stdout=subprocess.PIPE
        )
        if explained.returncode:
            return explained.returncode
        commands = {
            "runner exec": [runner, "exec", str(manifest)],
            "raw bwrap": shlex.split(explained.stdout.decode()),
            "python -c 0": [sys.executable, "-I", "-S", "-c", "0"],
        }
        samples: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(WARM_UP + rounds):
            for name, argv in commands.items():
                taken = measure(argv)
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


def measure(argv: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    taken = (time.perf_counter() - start) * 1000
    if done.returncode:  # a failed launch is a quick one, and no measurement
        sys.exit(
            f"bench: {shlex.join(argv)} ended with {done.returncode}:\n{done.stderr.decode(errors='replace')}"
        )
    return taken


if __name__ == "__main__":
    sys.exit(main())
