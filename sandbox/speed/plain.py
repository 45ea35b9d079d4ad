"""The usual words of `runner exec`, `run`, `call`, `explain` and `check`, read without argparse.

Most hosts start `runner exec MANIFEST`, and argparse takes 9 ms of a launch with what it imports. Whatever is
not understood here is left to argparse, which knows all options and says what is wrong. What is understood
means the same to both: tests compare them.
"""

from __future__ import annotations

from sandbox.speed.typed import TYPE_CHECKING, Any, Mapping, Sequence

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
_LOOK_WITH_VALUE = {option: key for option, key in _WITH_VALUE.items() if key in _DECIDING}
_CALL_WITH_VALUE = {
    **_WITH_VALUE,
    "--events": "events",
    "--input": "input",
    "--timeout": "timeout",
    "--context": "context",
}
# Options of `runner run` that decide about its cage, and take a value.
_RUN_WITH_VALUE = frozenset(
    (
        "--name --read --write --net --cwd --env --policy --state-dir --wrapped --memory --pids --cpu"
        " --cpu-time --deadline --limit"
    ).split()
)
_RUN_FLAGS = ("--project", "--project=read", "--project=write")


class PlainArguments:
    """Stands for argparse.Namespace."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def read_plain(words: Sequence[str]) -> argparse.Namespace | None:
    """The arguments of `runner exec` in front of `--`; None if argparse has to read them."""
    found = _unset()
    found.update(secret=[], report=None, events=None, inspect=False, tty=False)
    return _read(words, found, ("manifest",), _WITH_VALUE, {})


def read_plain_run(words: Sequence[str]) -> argparse.Namespace | None:
    """Of the options of `runner run` in front of `--`: `deciding` are those that decide about the cage, one
    word each, and some that are needed besides. None if there are others. A launch that has to be decided
    reads all of them again, by argparse."""
    deciding = []
    found: dict[str, str | None] = {"--report": None, "--wrapped": None, "--name": None}
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if word in _RUN_FLAGS:
            deciding.append(word)
            continue
        if option != "--report" and option not in _RUN_WITH_VALUE:
            return None
        if not equals:
            value = next(rest, "")
        if value in ("", "--") or (value.startswith("-") and not equals):
            return None
        if option == "--env" and "=" in value:
            return None  # the value may be a secret
        if value.startswith("~") and value[1:2] not in ("", "/"):
            return None  # another account's home, which may change
        if option in found:
            found[option] = value
        if option != "--report":
            deciding.append(f"{option}={value}")
    report, wrapped, name = found.values()
    return PlainArguments(  # type: ignore[return-value]
        deciding=deciding, report=report, wrapped=wrapped, command_name=name
    )


def read_plain_call(words: Sequence[str]) -> argparse.Namespace | None:
    """The arguments of `runner call` without `--`; None if argparse has to read them."""
    found = _unset()
    found.update(secret=[], report=None, events=None)
    found.update(dict.fromkeys(("input", "kind", "timeout", "context", "secrets", "via", "key", "fleet")))
    found.update(json=False, durable=False, no_wait=False)
    return _read(words, found, ("manifest", "name"), _CALL_WITH_VALUE, {"--json": "json"})


def read_plain_explain(words: Sequence[str]) -> argparse.Namespace | None:
    """The arguments of `runner explain`; None if argparse has to read them."""
    found = _unset()
    found.update(format="text", network=False)
    return _read(words, found, ("manifest",), _LOOK_WITH_VALUE, {"--network": "network"})


def read_plain_check(words: Sequence[str]) -> argparse.Namespace | None:
    """The arguments of `runner check` for one manifest; None if argparse has to read them."""
    found: dict[str, Any] = {"contract": None, "server": None, "config": None, "format": "text"}
    with_value = {"--contract": "contract", "--server": "server"}
    args = _read(words, found, ("manifests",), with_value, {})
    if args is not None:
        args.manifests = [args.manifests]
    return args


def _unset() -> dict[str, Any]:
    """The options of a launch, as they are if they are not given."""
    return {
        "contract": None,
        "server": None,
        "policy": None,
        "state_dir": None,
        "env": [],
        "limits": [],
        "arguments": [],
        "config": None,
        "staged": False,
        "hide": [],
        "ssh_key": [],
        "ssh_host": [],
        "image": None,
        "user": None,
    }


def _read(
    words: Sequence[str],
    found: dict[str, Any],
    places: tuple[str, ...],
    with_value: Mapping[str, str],
    flags: Mapping[str, str],
) -> argparse.Namespace | None:
    """`places`: the keys of the words that are no options. `with_value` and `flags`: the keys of options."""
    given: list[str] = []
    waiting = ""  # for its value: the key of an option
    for word in words:
        if not word or (waiting and word.startswith("-")):
            return None
        if waiting:
            found[waiting], waiting = word, ""
        elif not word.startswith("-"):
            given.append(word)
        elif word in flags:
            found[flags[word]] = True
        else:
            option, equals, value = word.partition("=")
            key = with_value.get(option)
            # Some versions of argparse take the value -- for nothing.
            if key is None or (equals and value in ("", "--")):
                return None
            if equals:
                found[key] = value
            else:
                waiting = key
    if len(given) != len(places) or waiting:
        return None
    found.update(zip(places, given, strict=True))
    return PlainArguments(**found)  # type: ignore[return-value]  # it has the attributes of one


def deciding_words(args: argparse.Namespace) -> list[str]:
    """What of the words decides the plan of a launch: not where its report goes."""
    chosen = [f"{name}={getattr(args, name)}" for name in _DECIDING if getattr(args, name) is not None]
    return ["exec", args.manifest, *chosen]
