"""What `runner wrap` does with each server of a configuration, decided from the text alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from runner.contracts.mcp.hosts.entries import servers_of
from runner.contracts.mcp.hosts.expand import references, with_folders
from runner.contracts.mcp.hosts.fill import dotenv, joined
from runner.contracts.mcp.hosts.find import MOST_BYTES, MOST_VALUES, Place, host_by_content, place_of
from runner.contracts.mcp.hosts.host import Host, HostServer
from runner.contracts.mcp.hosts.wrapping import (
    Unwrapped,
    env_names,
    own_options,
    record_of,
    unwrapped,
    wrapped_argv,
)
from runner.contracts.mcp.launchers import launcher_fault
from runner.contracts.mcp.wrap.hidden import shown_line
from runner.contracts.mcp.wrap.program import is_same_program
from runner.manifest.fill import NamedFileRefused, read_named
from sandbox.document.diagnostic import DocumentError, printable, quoted
from sandbox.document.edit.change import Change, DeleteKey, DropFirst, InsertList, Prepend, SetNull, SetWord
from sandbox.document.edit.edit import edited, read_spans
from sandbox.document.edit.span import EditRefused, EditSyntax, Spans
from sandbox.document.edit.words import written
from sandbox.document.read import Document, Format, parse
from sandbox.paths.homes import homes
from sandbox.spec import is_variable_name
from sandbox.value import NamedTuple

_ENDINGS: tuple[tuple[str, Format], ...] = (
    (".toml", "toml"),
    (".yaml", "yaml"),
    (".yml", "yaml"),
)
_MARK = b"\xef\xbb\xbf"
_ARGS = "args"
NOT_WRAPPED = "is not wrapped"
WRAPPED = "is wrapped already"
_AGAIN = "runner wrap --undo, then runner wrap, writes it anew"


class Step(NamedTuple):
    """One server, and what becomes of it."""

    server: HostServer
    does: Literal["wrap", "add", "undo", "leave"]
    reason: str = ""  # of "leave", as the second half of a sentence
    # Of an entry that is wrapped: how it differs from what `wrap` would write, each as a part of a sentence.
    otherwise: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    added: tuple[str, ...] = ()  # of "add": names of variables that are new since it was wrapped


class Configuration(NamedTuple):
    """A configuration as it stands in a file."""

    path: str  # real and absolute
    raw: bytes
    document: Document
    host: Host | None
    servers: tuple[HostServer, ...]
    place: Place | None = None

    @property
    def host_name(self) -> str:
        return self.host.name if self.host is not None else "an unknown host"

    @property
    def syntax(self) -> EditSyntax:
        return self.document.format


def configuration(
    path: str, raw: bytes, home: str, environ: dict[str, str], given: str = ""
) -> Configuration:
    """Raises DocumentError. `given`: the path by which people know the file, if it is a link."""
    place = place_of(given or path, home, environ)
    body = raw.removeprefix(_MARK)
    if place is not None:
        try:
            document = parse(path, body, place.host.syntax, limit=MOST_BYTES, most_values=MOST_VALUES)
        except DocumentError:
            # Some hosts take comments although their documentation does not say so.
            if place.host.syntax != "json":
                raise
            document = parse(path, body, "jsonc", limit=MOST_BYTES, most_values=MOST_VALUES)
    else:
        syntax: Format = next((each for ending, each in _ENDINGS if path.lower().endswith(ending)), "jsonc")
        document = parse(path, body, syntax, limit=MOST_BYTES, most_values=MOST_VALUES)
    host = place.host if place is not None else None
    servers = servers_of(document, host)
    if not servers:
        # A copy in another place, or a file that two hosts share.
        other = host_by_content(document)
        host, servers = (other, servers_of(document, other)) if other is not None else (host, servers)
    return Configuration(path, raw, document, host, servers, place)


def chosen(config: Configuration, names: Sequence[str]) -> tuple[HostServer, ...]:
    """The servers that --server names; all without a name. ValueError: there is none of that name."""
    if not names:
        return config.servers
    found: dict[HostServer, None] = {}
    for name in names:
        matching = [each for each in config.servers if name in (each.name, each.label)]
        if not matching:
            known = ", ".join(quoted(each.label) for each in config.servers[:20]) or "none"
            raise ValueError(f"--server {printable(name)}: there is no such server; there are {known}")
        found.update(dict.fromkeys(matching))
    return tuple(found)


def wrap_step(config: Configuration, server: HostServer, program: str = "") -> Step:
    """`program`: the runner that is to be started; empty: any."""
    notes = ("it is switched off in the configuration, and stays so",) if server.disabled else ()
    old = unwrapped(server.argv)
    if old is not None:
        names = variables(config, server)
        added = tuple(name for name in names if name not in env_names(old.options))
        otherwise = _differences(config, server, old, names, program)
        if added:
            return Step(server, "add", notes=(*notes, *otherwise), added=added, otherwise=otherwise)
        again = (_AGAIN,) if otherwise else ()
        return Step(server, "leave", "; ".join((WRAPPED, *otherwise, *again)), otherwise=otherwise)
    reason = _caged_by_hand(server, program) or _uncageable(config, server)
    return Step(server, "leave", reason) if reason else Step(server, "wrap", notes=notes)


def _differences(
    config: Configuration, server: HostServer, old: Unwrapped, names: Sequence[str], program: str
) -> tuple[str, ...]:
    """A project that was cloned may bring entries along that only look like ours: name every difference."""
    found: list[str] = []
    if program and not is_same_program(program, old.program):
        found.append(f"it starts another program: {quoted(old.program, 200)}")
    record = record_of(old.options)
    file = record.get("file", "")
    if file != config.path:
        found.append(f"it was wrapped for another configuration: {quoted(file, 200)}")
    if record.get("scope", "") != server.scope:
        found.append(f"it was wrapped for another project: {quoted(record.get('scope', ''), 200)}")
    if own := own_options(old.options, server.name, names):
        found.append(f"it has options of its own: {shown_line(own)[:400]}")
    return tuple(found)


def _caged_by_hand(server: HostServer, program: str) -> str:
    """An entry that somebody wrote with the runner in it: a cage in a cage cannot be made."""
    argv = server.argv
    if len(argv) < 2 or os.path.basename(argv[0]) != "runner" or argv[1] not in ("run", "exec"):
        return ""
    if program and os.path.isabs(argv[0]) and not is_same_program(program, argv[0]):
        return (
            f"starts another program that is called runner: {quoted(argv[0], 200)};"
            " write the command itself into the entry to wrap it"
        )
    return "runs in a cage already, by options of its own"


def undo_step(server: HostServer) -> Step:
    if unwrapped(server.argv) is None:
        return Step(server, "leave", NOT_WRAPPED)
    return Step(server, "undo")


def _uncageable(config: Configuration, server: HostServer) -> str:
    """Why an entry is left as it is, as the second half of a sentence."""
    if server.remote:
        return "is reached over the network: there is no program to run in a cage"
    if server.skipped or server.fault:
        return server.skipped or server.fault
    if not server.argv:
        return "has no command"
    command = server.argv[0]
    fault = launcher_fault(server.argv)
    if fault is not None:
        return f"cannot run in a cage: {fault.message}; {fault.hint}"
    if any(c in " \t\n" for c in command) and not os.path.isfile(os.path.expanduser(command)):
        return (
            "has a whole command line in its command, and hosts do not split it;"
            " write the program into the command and the rest into the arguments"
        )
    switch = config.host.sandbox_switch if config.host is not None else ""
    entry = value_at(config.document.data, server.keys)
    if switch and isinstance(entry, dict) and entry.get(switch) is True:
        return (
            f"runs in {config.host_name}'s own sandbox ({switch}), inside of which no cage can be made;"
            f" set {switch} to false to wrap it"
        )
    return ""


def variables(config: Configuration, server: HostServer) -> tuple[str, ...]:
    """The names that the entry gives its server a value for."""
    found: dict[str, None] = {}
    table = value_at(config.document.data, server.env_keys) if server.env_keys is not None else None
    for name in (
        *(table if isinstance(table, dict) else ()),
        *server.passed,
        *_names_in_file(config, server),
    ):
        if is_variable_name(name):
            found[name] = None
    return tuple(found)


def _names_in_file(config: Configuration, server: HostServer) -> tuple[str, ...]:
    """Of an envFile, as far as its path needs nothing that only the host knows, and by the rules by which a
    launch reads it: a line of a key can look like a variable, and the names are shown and written."""
    if not server.env_file or config.host is None:
        return ()
    place, rules, home = config.place, config.host.rules, os.path.expanduser("~")
    folder = place.project if place is not None else ""
    folder = server.scope if server.scope.startswith("/") else folder or os.path.dirname(config.path)
    path = with_folders(server.env_file, rules, folder, home)
    if next(references(path, rules), None) is not None:
        return ()
    own = place is not None and place.own
    try:
        return tuple(dotenv(read_named(joined(folder, path, home), folder, homes(os.environ), own=own)))
    except (OSError, ValueError, NamedFileRefused):
        return ()


def value_at(data: object, keys: Sequence[str | int]) -> object:
    for key in keys:
        match data:
            case dict():
                data = data.get(key)
            case list() if isinstance(key, int) and key < len(data):
                data = data[key]
            case _:
                return None
    return data


# --- from steps to a text ---------------------------------------------------------------------------------


def carried_out(config: Configuration, steps: Sequence[Step], program: str) -> tuple[bytes, tuple[Step, ...]]:
    """The bytes with all steps done, and the steps. One that cannot be done becomes "leave"."""
    text = config.raw.decode("utf-8")
    try:
        return _with_steps(text, config, steps, program).encode("utf-8"), tuple(steps)
    except EditRefused:
        pass
    done: list[Step] = []
    for step in steps:
        try:
            text = _with_steps(text, config, (step,), program)
            done.append(step)
        except EditRefused as refused:
            done.append(Step(step.server, "leave", f"cannot be changed: {refused.message}"))
    return text.encode("utf-8"), tuple(done)


def _with_steps(text: str, config: Configuration, steps: Sequence[Step], program: str) -> str:
    body = text.removeprefix("\ufeff")
    spans = read_spans(body, config.syntax)[1] if any(step.does == "wrap" for step in steps) else {}
    changes: list[Change] = []
    plainly: list[Change] = []  # in case --wrapped does not say the same as the command any more
    for step in steps:
        match step.does:
            case "wrap":
                new = wrap_changes(body, config, step.server, spans, program)
            case "add":
                new = add_changes(step.server, step.added)
            case "undo":
                new = undo_changes(step.server, config.syntax)
            case _:
                new = ()
        changes += new
        plainly += undo_changes(step.server, None) if step.does == "undo" else new
    if not changes:
        return text
    try:
        return edited(text, config.syntax, changes)
    except EditRefused:
        if plainly == changes:
            raise
        return edited(text, config.syntax, plainly)


def wrap_changes(
    text: str, config: Configuration, server: HostServer, spans: Spans, program: str
) -> tuple[Change, ...]:
    keys = server.command_keys
    kept: dict[str, str] = {}
    if server.shape != "argv":
        span = spans.get(keys)
        as_written = text[span.start : span.end] if span is not None else ""
        if as_written != written(server.argv[0], config.syntax):
            kept["command"] = as_written
        if server.args_keys is None:
            kept["args"] = "absent"
        elif value_at(config.document.data, server.args_keys) is None:
            kept["args"] = "null"
    new = wrapped_argv(
        program,
        server.argv,
        file=config.path,
        name=server.name,
        scope=server.scope,
        env=variables(config, server),
        kept=kept,
    )
    before = new[1 : len(new) - len(server.argv)]
    if server.shape == "argv":
        return (Prepend(keys, (program, *before)),)
    first = (*before, server.argv[0])
    if server.args_keys is None:
        return SetWord(keys, program), InsertList(keys, _ARGS, first)
    return SetWord(keys, program), Prepend(server.args_keys, first)


def add_changes(server: HostServer, names: Sequence[str]) -> tuple[Change, ...]:
    words = tuple(word for name in names for word in ("--env", name))
    end = server.argv.index("--")
    if server.shape == "argv":
        return (Prepend(server.command_keys, words, end),)
    if server.args_keys is None:
        raise EditRefused("the entry has no arguments")
    return (Prepend(server.args_keys, words, end - 1),)


def undo_changes(server: HostServer, syntax: EditSyntax | None) -> tuple[Change, ...]:
    """`syntax`: in which the command is written as it was before; None: as `wrap` writes words."""
    old = unwrapped(server.argv)
    if old is None or (server.shape != "argv" and server.args_keys is None):
        raise EditRefused("the entry is not wrapped")
    kept = record_of(old.options)
    end = server.argv.index("--")
    if server.shape == "argv":
        return (DropFirst(server.command_keys, end + 1),)
    as_before = kept.get("command", "")
    if syntax is None or not _is_only(as_before, old.argv[0], syntax):
        as_before = ""
    command = SetWord(server.command_keys, old.argv[0], as_before)
    args = server.args_keys or ()
    if len(old.argv) == 1 and kept.get("args") == "absent":
        return command, DeleteKey(args)
    if len(old.argv) == 1 and kept.get("args") == "null":
        return command, SetNull(args)
    return command, DropFirst(args, end + 1)


def _is_only(text: str, word: str, syntax: EditSyntax) -> bool:
    """Whether the text is the word, and nothing besides: no comment, no blank, no control character. Whoever
    wrote the file may have written any text into --wrapped."""
    if not all(c.isprintable() or c in word for c in text):
        return False
    before, after = {"toml": ("a = ", "\n"), "yaml": ("a: ", "\n")}.get(syntax, ('{"a": ', "}"))
    try:
        data, spans = read_spans(before + text + after, syntax)
    except EditRefused:
        return False
    span = spans.get(("a",))
    return (
        data == {"a": word}
        and span is not None
        and not span.odd
        and (span.kind, span.start, span.end) == ("scalar", len(before), len(before) + len(text))
    )
