"""Sizes, durations and limits as people write them: in a manifest, in a policy, on a command line.

Suffixes of sizes are powers of 1024 whether or not they are spelled with an "i": `256M`, `256MB` and
`256MiB` are equal, as in systemd units and `docker run --memory`. A plain number is bytes, or seconds.
Every number may also be given as text, as on a command line.
"""

from __future__ import annotations

import math

from sandbox.spec import DURATIONS, SIZES
from sandbox.speed.typed import TYPE_CHECKING

if TYPE_CHECKING:
    import re

SIZE_MAX = (1 << 63) - 1
DURATION_MAX = 10 * 365 * 86400.0  # larger values overflow some timers of the kernel and of Python

# Not compiled here: who only writes a limit does without re, whose import takes half as long as
# an interpreter.
_SIZE = r"(?ai)\s*(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgtp])i?)?b?\s*"
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}

_COUNT = r"(?a)\s*(\d{1,20})\s*"
_CORES = r"(?a)\s*(\d{1,6}(?:\.\d{1,6})?)\s*(%?)\s*"
_NUMBER = r"(?a)\s*(\d{1,12}(?:\.\d{1,12})?)\s*"
_PART = r"(?a)\s*(\d{1,12}(?:\.\d{1,12})?)\s*(ms|s|m|h|d)\s*"
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

CORES_MAX = 10_000.0
_MOST = {"pids": 1 << 22, "open_files": 1 << 20}  # PID_MAX_LIMIT, the default of fs.nr_open

# Lower limits cannot be enforced, or no plugin could start with them. Most often a unit was forgotten.
_LEAST: dict[str, tuple[float, str]] = {
    "memory": (1 << 20, "no program starts with less"),
    "cpu": (0.01, "the kernel gives no smaller share"),
    "open_files": (16, "the cage itself needs as many to start"),
    "file_size": (4096, "the cage itself has files of that size"),
    **dict.fromkeys(("io", "disk", "tmp", "shm", "locked_memory"), (4096, "it is counted in pages")),
    **dict.fromkeys(DURATIONS, (0.001, "no clock here is finer")),
}


def parse_limit(name: str, value: object) -> int | float:
    """Parse one limit. The result is a whole number, except for times and `cpu`.

    Raises ValueError. Its message is meant to follow the name of the limit and a colon.
    """
    amount: int | float
    if name in SIZES:
        amount = parse_size(value)
    elif name in DURATIONS:
        amount = parse_duration(value)
    elif name == "cpu":
        amount = parse_cores(value)
    else:
        amount = parse_count(value)
        if amount > _MOST.get(name, SIZE_MAX):
            raise ValueError(
                f"{_shown(value)} is more than the largest possible value ({_MOST.get(name, SIZE_MAX)})"
            )
    if amount <= 0:
        raise ValueError("it has to be more than 0")
    least, why = _LEAST.get(name, (0, ""))
    if amount < least:
        guess = f"; did you mean {int(amount)}M?" if name in SIZES and _is_bare(value) else ""
        raise ValueError(f"{_shown(value)} is less than {format_limit(name, least)}, and {why}{guess}")
    return amount


def _is_bare(value: object) -> bool:
    """Whether this is a number without a unit, so small that megabytes were probably meant."""
    return (isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit())) and int(
        value
    ) < 10_000


def parse_count(value: object) -> int:
    """`64`, also as text; otherwise ValueError with a readable message."""
    if isinstance(value, int) and not isinstance(value, bool):
        count = value
    elif isinstance(value, str) and len(value) < 64 and (match := _fullmatch(_COUNT, value)):
        count = int(match[1])
    else:
        raise ValueError(f"{_shown(value)} is not a whole number")
    if count < 0:
        raise ValueError(f"{_shown(value)} is negative")
    return count


def parse_cores(value: object) -> float:
    """Cores of `0.5`, `2`, or `50%` of one core; otherwise ValueError with a readable message."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        cores = float(value) if abs(value) <= CORES_MAX else math.inf
    elif isinstance(value, str) and len(value) < 64 and (match := _fullmatch(_CORES, value)):
        cores = float(match[1]) / (100 if match[2] else 1)
    else:
        raise ValueError(f'{_shown(value)} is not a number of cores: write 0.5, 2, or "50%" of one core')
    if not 0 <= cores <= CORES_MAX:  # also NaN
        raise ValueError(f"{_shown(value)} is not a possible number of cores")
    return cores


def parse_size(value: object) -> int:
    """Bytes of `256M`, `1.5GiB`, `4096`; otherwise ValueError with a readable message."""
    if isinstance(value, int) and not isinstance(value, bool):
        size: float = value
    elif isinstance(value, str) and len(value) < 64 and (match := _fullmatch(_SIZE, value)):
        factor = 1024 ** _POWERS[match[2].lower()] if match[2] else 1
        size = round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    else:
        raise ValueError(
            f"{_shown(value)} is not a size: write bytes as a number, or as in 512K, 256M, 1.5GiB"
        )
    if not 0 <= size <= SIZE_MAX:
        raise ValueError(f"{_shown(value)} is not a possible size")
    return int(size)


def parse_duration(value: object) -> float:
    """Seconds of `30s`, `500ms`, `1h30m`, `2.5`; otherwise ValueError with a readable message."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= DURATION_MAX else math.inf
    elif isinstance(value, str) and len(value) < 64 and (match := _fullmatch(_NUMBER, value)):
        seconds = float(match[1])
    elif isinstance(value, str) and len(value) < 64 and (parts := _parts(value)):
        seconds = sum(parts)
    else:
        raise ValueError(
            f"{_shown(value)} is not a duration: write seconds as a number, or as in 500ms, 30s, 2m, 1h30m"
        )
    if not 0 <= seconds <= DURATION_MAX:
        raise ValueError(f"{_shown(value)} is not a possible duration")
    return seconds


def _parts(text: str) -> list[float]:
    """The seconds of each part of `1h30m`; [] unless the whole text is parts, with the largest unit first."""
    import re

    seconds: list[float] = []
    previous = math.inf
    at, part = 0, re.compile(_PART)
    while at < len(text):
        match = part.match(text, at)
        if match is None or _SECONDS[match[2]] >= previous:
            return []
        previous = _SECONDS[match[2]]
        seconds.append(float(match[1]) * previous)
        at = match.end()
    return seconds


def _fullmatch(pattern: str, text: str) -> re.Match[str] | None:
    import re

    return re.fullmatch(pattern, text)


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "so large a number"  # Python refuses to spell out the largest
    text = repr(value) if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:39] + "…"


def format_size(size: int) -> str:
    """`256 MiB`, `1.5 GiB`: two decimals at most."""
    if size < 1024:
        return f"{size} B"
    unit, value = "B", float(size)
    for name in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        unit, value = name, value / 1024
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def format_duration(seconds: float) -> str:
    """`500ms`, `1.25s`, `2m`, `1h30m`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    whole = round(seconds)
    parts = [
        (whole // 86400, "d"),
        (whole % 86400 // 3600, "h"),
        (whole % 3600 // 60, "m"),
        (whole % 60, "s"),
    ]
    return "".join(f"{count}{unit}" for count, unit in parts if count)


def format_limit(name: str, value: float | None) -> str:
    """A limit's value as people write it."""
    if value is None:
        return "unlimited"
    if name in SIZES:
        return format_size(int(value))
    return format_duration(value) if name in DURATIONS else f"{value:g}"
