"""`runner wrap --gateway`: entries of a host move to a file of the runner, and one entry takes their place.

The moved entries stay in the notation of their host, unwrapped: the gateway gives each a cage of its own, and
fills in what the host would have filled in. Beside the file stands what undo needs.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from runner.contracts.mcp.hosts.expand import references
from runner.contracts.mcp.hosts.find import GATEWAY_FOLDER, MOST_BYTES, gateway_file, known_files
from runner.contracts.mcp.hosts.host import HostServer
from runner.contracts.mcp.hosts.site import directory_of, site_of
from runner.contracts.mcp.hosts.wrapping import acts_on_runner, split_wrapped
from runner.contracts.mcp.wrap.changes import apply_steps
from runner.contracts.mcp.wrap.config_file import FileRefused, backups_folder, open_config
from runner.contracts.mcp.wrap.configuration import (
    Configuration,
    read_configuration,
    table_names,
    value_at,
)
from runner.contracts.mcp.wrap.steps import Step, undo_step, wrap_step
from sandbox.cache import fingerprint
from sandbox.document.diagnostic import DocumentError, cut, quoted
from sandbox.document.edit.change import SwapEntries
from sandbox.document.edit.edit import edit_text, read_spans
from sandbox.document.edit.span import EditRefused
from sandbox.document.read import read_bounded
from sandbox.files import replace_file
from sandbox.policy.load import trust_fault
from sandbox.spec import is_variable_name
from sandbox.speed.value import NamedTuple

NAME = "runner-gateway"
_UNDO_ENDING = ".undo"
_MOST_NAMES = 100
_MOST_TOLD = 10  # variables
_LATER = "is not among the gateway's: to move it too, run the command with --undo, and then again"
# Keys of an entry that say what kind of server it is. Some hosts start nothing without them.
_KIND_KEYS = ("type", "source")


class GatewayPlan(NamedTuple):
    """A configuration with one entry in the place of those that move."""

    steps: tuple[Step, ...]  # "wrap": it moves
    name: str  # of the one entry
    after: bytes  # of the configuration
    stored: bytes  # the moved entries
    undo: bytes


class GatewayUndo(NamedTuple):
    """What undo needs, as it was read."""

    file: str  # the configuration
    before: str  # its text
    after: str  # digest of its bytes, as the gateway's entry was written
    stored: str  # digest of the moved entries, as they were written
    names: tuple[str, ...]  # of the moved entries


def stored_path(config: Configuration) -> str:
    """Where the moved entries of a configuration are. Raises FileRefused if they cannot move."""
    if config.host is None or config.syntax not in ("json", "jsonc"):
        told = (
            f"--gateway changes only JSON of a known host, and this is {config.syntax} of {config.host_name}"
        )
        raise FileRefused(f"{told}; write one entry by hand: runner gateway --config FILE")
    if config.place is None or not config.place.own or config.path.startswith("/etc/"):
        told = (
            "--gateway is for your own configuration of a host, and this may be a project's or the system's"
        )
        raise FileRefused(f"{told}; runner wrap without --gateway wraps its entries one by one")
    name = gateway_file(config.host, fingerprint(os.fsencode(config.path))[:12])
    return os.path.join(os.path.expanduser(GATEWAY_FOLDER), name)


def find_gateway(config: Configuration) -> tuple[HostServer, str] | None:
    """The entry that starts a gateway with a file of ours, and the path of that file."""
    folder = os.path.expanduser(GATEWAY_FOLDER)
    for server in config.servers:
        argv = server.argv
        if os.path.basename(argv[0] if argv else "") == "runner" and argv[1:2] == ("gateway",):
            files = [argv[at + 1] for at, word in enumerate(argv[:-1]) if word == "--config"]
            if ours := [each for each in files if os.path.dirname(each) == folder]:
                return server, ours[0]
    return None


def entry_remark(path: str) -> str:
    """See Contract.gateway_remark: variables that were added to the gateway's entry reach no server. '' also
    if that cannot be read."""
    undo = _read_undo(path)
    if undo is None:
        return ""
    try:
        with open_config(undo.file) as file:
            config = read_configuration(file.path, file.read()[0], file.given)
        stored = read_bounded(path, limit=MOST_BYTES).decode("utf-8", "replace")
    except (FileRefused, DocumentError):
        return ""
    found = find_gateway(config)
    if found is None or found[1] != path:
        return ""
    # Those that act on the gateway itself may be meant, and the entries may name others: ${env:NAME}.
    names = [each for each in table_names(config, found[0]) if is_variable_name(each)]
    names = [each for each in names if not acts_on_runner(each) and each not in stored]
    if not names:
        return ""
    told = f"the entry {quoted(found[0].name)} of {undo.file} sets {_some(names)}, which no server gets"
    return f"{told}; move it to the env of the server in {path}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(cut(name, 60) for name in names[:_MOST_TOLD]) + more


def plan_gateway(
    config: Configuration,
    servers: Sequence[HostServer],
    program: str,
    given: str,
    *,
    as_fetched: bool,
    shared: bool,
) -> GatewayPlan:
    """`servers`: those that shall move, if they can. `as_fetched`: see wrap_step. `shared`: the entry is a
    client of the hub, which serves all hosts. Raises FileRefused."""
    path = stored_path(config)
    has_one = find_gateway(config) is not None
    if not has_one:
        _check_unused(config, path)
    own = {each.keys: wrap_step(config, each, program) for each in servers if split_wrapped(each.argv)}
    raw, _ = apply_steps(config, [undo_step(step.server) for step in own.values()], program)
    plain = read_configuration(config.path, raw, given)
    wanted = {each.keys for each in servers}
    steps = tuple(
        _step(plain, each, program, own.get(each.keys), as_fetched)
        for each in plain.servers
        if each.keys in wanted
    )
    if has_one:
        steps = tuple(Step(each.server, "leave", _LATER) if each.does == "wrap" else each for each in steps)
    moved = [step.server for step in steps if step.does == "wrap"]
    if not moved:
        return GatewayPlan(steps, "", config.raw, b"", b"")
    table = moved[0].keys[:-1]
    if strays := [each for each in moved if each.keys[:-1] != table]:  # opencode has two places for them
        told = f"{quoted(strays[0].label)} is in another table than {quoted(moved[0].label)}"
        raise FileRefused(f"{told}; choose with --server what moves")
    name = _free_name(value_at(plain.document.data, table))
    words = ("gateway", *(("--shared",) if shared else ()), "--config", path)
    entry = _entry(plain, moved[0], [program, *words])
    names = tuple(each.name for each in moved)
    try:
        swap = SwapEntries(table, names, ((name, json.dumps(entry), entry),))
        after = edit_text(raw.decode("utf-8"), config.syntax, [swap]).encode("utf-8")
    except EditRefused as refused:
        raise FileRefused(f"it cannot be changed: {refused.message}") from None
    inner: dict[str, Any] = {each.name: value_at(plain.document.data, each.keys) for each in moved}
    for key in reversed(table):
        inner = {str(key): inner}
    stored = json.dumps(inner, indent=2).encode() + b"\n"
    undo = GatewayUndo(
        config.path, config.raw.decode("utf-8"), fingerprint(after), fingerprint(stored), names
    )
    return GatewayPlan(steps, name, after, stored, json.dumps(undo._asdict()).encode())


def _step(plain: Configuration, server: HostServer, program: str, own: Step | None, as_fetched: bool) -> Step:
    """What happens to an entry. `own`: its step as it is written, if it is wrapped."""
    if own is not None and (own.does != "leave" or own.otherwise or own.unsafe):
        told = "; ".join((*own.otherwise, *own.unsafe)) or "it is wrapped, but not as runner wrap does it"
        return Step(
            own.server, "leave", f"is wrapped, but {told}; look at it with runner check, and undo that"
        )
    step = wrap_step(plain, server, program, as_fetched=as_fetched)
    reason = _host_reason(plain, server) if step.does == "wrap" else step.reason
    return Step(server, "leave", reason) if reason else step


def _host_reason(config: Configuration, server: HostServer) -> str:
    """Returns why only the host itself can start it, as the second half of a sentence, or ''."""
    if server.disabled:
        return "is switched off, and a gateway would leave it out"
    if server.scope:
        return f"is for the project {quoted(server.scope, 200)}, and a gateway does not know which is open"
    assert config.host is not None  # stored_path has refused it
    words = (*server.argv, server.cwd, server.env_file, *(value for _, value in server.env))
    for reference in (each for word in words for each in references(word, config.host.rules)):
        if reference.kind != "env" and reference.name != "userHome":
            return f"names {quoted(reference.name)}, which only {config.host_name} can fill in"
    home = os.path.expanduser("~")
    site = site_of(config.path, server, config.host, home)
    folder = directory_of(server, site, config.host.rules, home)
    for word in (server.cwd, server.env_file):
        if word and not word.startswith(("/", "~", "$")):
            return f"names {quoted(word)} in {folder}; write the whole path"
    if not server.cwd:
        for word in server.argv:
            here = word and not word.startswith(("/", "~", "$", "-"))
            if here and (word.startswith(".") or os.path.lexists(os.path.join(folder, word))):
                return f"names {quoted(word)} in {folder}; write the whole path"
    return ""


def _free_name(table: object) -> str:
    taken = table if isinstance(table, dict) else {}
    names = (NAME, *(f"{NAME}-{number}" for number in range(2, _MOST_NAMES)))
    found = next((name for name in names if name not in taken), "")
    if not found:
        raise FileRefused(f"it has an entry for each of the names {NAME} to {names[-1]}; remove one")
    return found


def _entry(config: Configuration, like: HostServer, argv: list[str]) -> dict[str, Any]:
    """The gateway's entry, in the shape of another one."""
    written = value_at(config.document.data, like.keys)
    assert isinstance(written, dict)
    entry = {key: written[key] for key in _KIND_KEYS if isinstance(written.get(key), str)}
    if written.get("tools") == ["*"]:  # Copilot shows no tool without it
        entry["tools"] = ["*"]
    match like.shape:
        case "argv":
            return {**entry, "command": argv}
        case "nested":
            return {**entry, "command": {"path": argv[0], "args": argv[1:]}}
        case _:
            return {**entry, "command": argv[0], "args": argv[1:]}


# --- undo ---------------------------------------------------------------------------------------------------


def undo_gateway(config: Configuration, gateway: HostServer, undo: GatewayUndo) -> bytes:
    """The configuration with its own entries: byte for byte, if nobody changed it since. Otherwise the text
    of each entry, in the place of the gateway's. Raises FileRefused."""
    if fingerprint(config.raw) == undo.after:
        return undo.before.encode("utf-8")
    text = undo.before.removeprefix("\ufeff")
    table = gateway.keys[:-1]
    try:
        data, spans = read_spans(text, config.syntax)
        new = tuple(
            (
                name,
                text[spans[(*table, name)].start : spans[(*table, name)].end],
                value_at(data, (*table, name)),
            )
            for name in undo.names
        )
        swap = SwapEntries(table, (gateway.name,), new)
        return edit_text(config.raw.decode("utf-8"), config.syntax, [swap]).encode("utf-8")
    except (EditRefused, KeyError) as error:
        told = error.message if isinstance(error, EditRefused) else "its servers are elsewhere now"
        raise FileRefused(f"it changed since, and its entries cannot be put back: {told}") from None


def read_undo(config: Configuration, path: str) -> GatewayUndo:
    """What undo needs for this configuration. Raises FileRefused."""
    undo = _read_undo(path)
    if undo is None:
        backups = os.path.join(backups_folder(os.environ), os.path.basename(config.path) + "-*")
        told = f"{path} and the file beside it with the ending {_UNDO_ENDING} are gone, or damaged"
        raise FileRefused(f"{told}; the configurations as they were before each change are {backups}")
    if undo.file != config.path:
        told = f"the gateway's file {path} has the entries of {undo.file}"
        raise FileRefused(f"{told}; undo that one, and take the entry out of this one by hand")
    others = [
        each.path for each in known_files(os.environ, os.path.expanduser("~"), "/") if _names(each.path, path)
    ]
    if others := [each for each in others if os.path.realpath(each) != config.path]:
        raise FileRefused(f"{others[0]} starts the same gateway; take the entry out of it first")
    return undo


def _names(file: str, path: str) -> bool:
    try:
        with open(file, "rb") as opened:
            return json.dumps(path).encode() in opened.read(MOST_BYTES)
    except OSError:
        return False


def _read_undo(path: str) -> GatewayUndo | None:
    try:
        found = GatewayUndo(**json.loads(read_bounded(path + _UNDO_ENDING, limit=4 * MOST_BYTES)))
    except Exception:  # noqa: BLE001 -- whatever is wrong with it, it cannot be used
        return None
    texts = (found.file, found.before, found.after, found.stored, *found.names)
    return found if all(isinstance(each, str) for each in texts) else None


# --- files --------------------------------------------------------------------------------------------------


def _check_unused(config: Configuration, path: str) -> None:
    if not os.path.lexists(path):
        return
    undo = _read_undo(path)
    if undo is None or undo.before.encode("utf-8") != config.raw:  # else: an earlier run did not end
        told = f"{path} has entries of an earlier gateway, and no entry of this file starts it"
        raise FileRefused(f"{told}; copy what you need out of it, and remove it")


@contextmanager
def locked_folder() -> Iterator[int]:
    """The folder of gateways, in which no other `runner wrap` changes anything meanwhile."""
    folder = os.path.expanduser(GATEWAY_FOLDER)
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        if (fault := trust_fault(folder, "the folder of gateways")) is not None:
            raise FileRefused(f"{folder} is not used: {fault[0]}; {fault[1]}")
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise FileRefused(f"{folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield fd
    except BlockingIOError:
        raise FileRefused("another runner wrap --gateway is at work; try again when it has ended") from None
    finally:
        os.close(fd)


def write_stored(folder: int, path: str, plan: GatewayPlan) -> None:
    """Entries hold tokens: only the owner may read the files. Raises FileRefused."""
    name = os.path.basename(path)
    try:
        replace_file(folder, name + _UNDO_ENDING, plan.undo, sync=True)
        replace_file(folder, name, plan.stored, sync=True)
    except OSError as error:
        raise FileRefused(f"{path} cannot be written: {error.strerror}") from None


def remove_stored(path: str, undo: GatewayUndo | None = None) -> bool:
    """`undo`: keep a file that somebody changed since. Returns whether it is gone."""
    with suppress(DocumentError):  # there is none
        if undo is not None and fingerprint(read_bounded(path, limit=MOST_BYTES)) != undo.stored:
            return False
    for each in (path, path + _UNDO_ENDING):
        with suppress(FileNotFoundError):
            os.unlink(each)
    return True
