"""Semantic versions, and the requirements Cargo writes about them (`>=0.1.0`, `^0.2`, `1.*`).

Our own code, because no library reads them as Cargo does. semantic-version 2.10 reads a bare `1.2.3` as
exactly that version where Cargo reads `^1.2.3`, refuses `>=0.1.0, <0.3` and `>= 0.1.0` for their spaces, and
reads `^0.0` (SimpleSpec) or `=0.2.0-rc1` (NpmSpec) as other versions. packaging reads only Python's.
"""

from __future__ import annotations

import re

Triple = tuple[int, int, int]

_NUMBER = r"(?:0|[1-9]\d{0,17})"
_TAIL = r"[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*"
_VERSION = re.compile(rf"({_NUMBER})\.({_NUMBER})\.({_NUMBER})(?:-({_TAIL}))?(?:\+(?:{_TAIL}))?", re.ASCII)
_COMPARATOR = re.compile(
    rf"(\^|~|=|>=|<=|>|<)?\s*({_NUMBER}|[*xX])(?:\.({_NUMBER}|[*xX]))?(?:\.({_NUMBER}|[*xX]))?"
    rf"(-(?:{_TAIL}))?(?:\+(?:{_TAIL}))?",
    re.ASCII,
)
_MOST_COMPARATORS = 32
_END: Triple = (1 << 64, 0, 0)


def is_version(text: str) -> bool:
    return len(text) <= 256 and _VERSION.fullmatch(text) is not None


def is_older(one: str, other: str) -> bool:
    """Whether `one` comes before `other`. False if one of them is not a version."""
    if not is_version(one) or not is_version(other):
        return False
    return _order(one) < _order(other)


def _order(version: str) -> tuple[object, ...]:
    found = _VERSION.fullmatch(version)
    assert found is not None
    # A release is above its pre-releases, and there a number is below a word.
    parts = [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in (found[4] or "").split(".")]
    return int(found[1]), int(found[2]), int(found[3]), not found[4], parts


def admits(requirement: str, version: Triple) -> bool:
    """Whether a released `version` meets the requirement; ValueError if it is not one."""
    if not requirement.strip() or len(requirement) > 1024:
        raise ValueError("is not a version requirement")
    parts = requirement.split(",")
    if len(parts) > _MOST_COMPARATORS:
        raise ValueError(f"has more than {_MOST_COMPARATORS} parts")
    met = [low <= version < high for low, high in map(_interval, parts)]
    return all(met)


def _interval(comparator: str) -> tuple[Triple, Triple]:
    """The lowest version, and the first version that is too high."""
    match = _COMPARATOR.fullmatch(comparator.strip())
    if match is None:
        raise ValueError("is not a version requirement")
    operator, major, minor, patch, pre = match.groups()
    given = [part for part in (major, minor, patch) if part is not None]
    numbers = [int(part) for part in given if part not in "*xX"]
    if any(part not in "*xX" for part in given[len(numbers) :]):
        raise ValueError("has a number behind a wildcard")
    if len(numbers) < len(given) and operator is None:
        operator = "="
    if not numbers:
        return (0, 0, 0), _END
    low = _padded(numbers)
    if pre and len(numbers) < 3:
        raise ValueError("has a pre-release behind an incomplete version")
    # A released version never equals a pre-release and is greater than its own.
    if operator == "=":
        return (low, low) if pre else (low, _next(numbers))
    if operator == ">":
        return (low if pre else _next(numbers)), _END
    if operator == ">=":
        return low, _END
    if operator == "<":
        return (0, 0, 0), low
    if operator == "<=":
        return (0, 0, 0), (low if pre else _next(numbers))
    if operator == "~":
        return low, _next(numbers[:2])
    fixed = next((i for i, n in enumerate(numbers) if n), len(numbers) - 1)
    return low, _next(numbers[: fixed + 1])


def _padded(numbers: list[int]) -> Triple:
    major, minor, patch = (*numbers, 0, 0)[:3]
    return major, minor, patch


def _next(numbers: list[int]) -> Triple:
    """The first version after all that start with these numbers."""
    return _padded([*numbers[:-1], numbers[-1] + 1])
