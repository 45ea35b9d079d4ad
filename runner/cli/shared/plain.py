"""The usual words of `runner exec`, read without argparse.

Most hosts start `runner exec MANIFEST`, and argparse takes 9 ms of a launch with what it imports. Whatever is
not understood here is left to argparse, which knows all options and says what is wrong. What is understood
means the same to both: tests compare them.
"""

from __future__ import annotations

from sandbox.typed import TYPE_CHECKING, Any, Sequence

if TYPE_CHECKING:
    import argparse

_DECIDING = ("policy", "contract", "server", "state_dir")
_WITH_VALUE = {
    "--report": "report",
    "--policy": "policy",
    "--contract": "contract",
    "--server": "server",
    "--state-dir": "state_dir",
}


class PlainArguments:
    """Stands for argparse.Namespace."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def read_plain(words: Sequence[str]) -> argparse.Namespace | None:
    """The arguments of `runner exec` in front of `--`; None if argparse has to read them."""
    found: dict[str, Any] = {
        "contract": None,
        "server": None,
        "policy": None,
        "state_dir": None,
        "env": [],
        "limits": [],
        "arguments": [],
        "config": None,
        "secret": [],
        "inspect": False,
        "report": None,
        "events": False,
        "tty": False,
    }
    manifest = None
    waiting = ""  # for its value: the key of an option
    for word in words:
        if not word or (waiting and word.startswith("-")):
            return None
        if waiting:
            found[waiting], waiting = word, ""
        elif not word.startswith("-"):
            if manifest is not None:
                return None
            manifest = word
        else:
            option, equals, value = word.partition("=")
            key = _WITH_VALUE.get(option)
            if key is None or (equals and not value):
                return None
            if equals:
                found[key] = value
            else:
                waiting = key
    if manifest is None or waiting:
        return None
    return PlainArguments(manifest=manifest, **found)  # type: ignore[return-value]  # it has the attributes of one


def deciding_words(args: argparse.Namespace) -> list[str]:
    """What of the words decides the plan of a launch: not where its report goes."""
    chosen = [f"{name}={getattr(args, name)}" for name in _DECIDING if getattr(args, name) is not None]
    return ["exec", args.manifest, *chosen]
