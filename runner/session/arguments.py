"""What a Python program gives the library, checked: env, limits, options, context, seconds. Each raises
ValueError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandbox.spec import Limits, is_variable_name
from sandbox.units import parse_limit


def check_context(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError("context: it has to be a mapping of names to values")
    return given


def check_seconds(given: Any) -> None:
    """The time of a call; None: that of its contract."""
    if given is None or (isinstance(given, int | float) and not isinstance(given, bool) and given >= 0):
        return
    raise ValueError(f"seconds: {given!r} is not a time limit: a number of seconds, 0 or more")


def check_options(given: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    if not isinstance(given, Mapping):
        raise ValueError("options: it has to be a mapping of names to texts")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            message = f"options: the value of {name!r} is not a str"
            raise ValueError(f"{message}; of an option that names a file, give what the file says")
    return tuple(given.items())


def check_env(given: Mapping[Any, Any]) -> tuple[tuple[str, str], ...]:
    for name, value in given.items():
        if not isinstance(name, str) or not is_variable_name(name):
            raise ValueError(f"env: {name!r} is not the name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"env: the value of {name} must be a str without NUL")
    return tuple(given.items())


def check_limits(given: Mapping[str, str | float]) -> Limits:
    unknown = [name for name in given if name not in Limits._fields]
    if unknown:
        raise ValueError(
            f"limits: there is no limit {unknown[0]!r}; the limits are {', '.join(Limits._fields)}"
        )
    found: dict[str, Any] = {}
    for name, value in given.items():
        try:
            found[name] = parse_limit(name, value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return Limits(**found)
