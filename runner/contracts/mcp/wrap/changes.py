"""Applies the steps of `runner wrap` to the text of a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from runner.contracts.configurations import PLUGIN_PREFIX
from runner.contracts.mcp.hosts.entries import servers_of
from runner.contracts.mcp.hosts.find import MOST_BYTES, MOST_VALUES
from runner.contracts.mcp.hosts.host import HostServer
from runner.contracts.mcp.hosts.wrapping import (
    NO_FILE,
    is_outdated,
    plugin_env_file,
    record_of,
    split_wrapped,
    wrapped_argv,
)
from runner.contracts.mcp.wrap.configuration import Configuration, table_names, value_at
from runner.contracts.mcp.wrap.steps import ENV_FILE, Step
from sandbox.document.edit.change import (
    Change,
    DeleteKey,
    DropFirst,
    InsertList,
    Prepend,
    RenameKeys,
    SetNull,
    SetWord,
)
from sandbox.document.edit.edit import edit_text, read_spans
from sandbox.document.edit.span import EditRefused, EditSyntax, Spans
from sandbox.document.edit.words import encode_word
from sandbox.document.read import parse
from sandbox.spec import KeyPath, is_variable_name

_ARGS = "args"


def apply_steps(config: Configuration, steps: Sequence[Step], program: str) -> tuple[bytes, tuple[Step, ...]]:
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
    gone = [step for step in steps if step.does in ("undo", "rewrap")]
    if gone:
        text = _undone(text, config, gone)
    again = {step.server.keys: step.kept for step in steps if step.does == "rewrap"}
    wanted: list[tuple[HostServer, tuple[str, ...]]]
    wanted = [(step.server, ()) for step in steps if step.does == "wrap"]
    if again:
        document = parse(
            config.path,
            text.removeprefix("\ufeff").encode("utf-8"),
            config.syntax,
            limit=MOST_BYTES,
            most_values=MOST_VALUES,
        )
        config = config._replace(document=document, servers=servers_of(document, config.host))
        wanted += [(each, again[each.keys]) for each in config.servers if each.keys in again]
    if not wanted:
        return text
    body = text.removeprefix("\ufeff")
    spans = read_spans(body, config.syntax)[1]
    changes = [
        change
        for server, kept in wanted
        for change in wrap_changes(body, config, server, spans, program, kept)
    ]
    return edit_text(text, config.syntax, changes)


def _undone(text: str, config: Configuration, steps: Sequence[Step]) -> str:
    changes = [change for step in steps for change in undo_changes(config, step.server, config.syntax)]
    try:
        return edit_text(text, config.syntax, changes)
    except EditRefused:
        # --wrapped may differ from the entry by now.
        plainly = [change for step in steps for change in undo_changes(config, step.server, None)]
        if plainly == changes:
            raise
        return edit_text(text, config.syntax, plainly)


def wrap_changes(
    text: str,
    config: Configuration,
    server: HostServer,
    spans: Spans,
    program: str,
    more: Sequence[str],
) -> tuple[Change, ...]:
    """`more`: options that a person added."""

    def unusual(keys: KeyPath, word: str) -> str:
        """A word as the file spells it, if `encode_word` would spell it differently."""
        span = spans.get(keys)
        as_written = text[span.start : span.end] if span is not None else ""
        return "" if as_written == encode_word(word, config.syntax) else as_written

    keys = server.command_keys
    kept: dict[str, str] = {}
    if server.shape != "argv":
        if as_written := unusual(keys, server.argv[0]):
            kept["command"] = as_written
        if server.args_keys is None:
            kept["args"] = "absent"
        elif value_at(config.document.data, server.args_keys) is None:
            kept["args"] = "null"
    changes: list[Change] = []
    file_keys = (*server.keys, ENV_FILE)
    if server.env_file:
        if as_written := unusual(file_keys, server.env_file):
            kept[ENV_FILE] = as_written
        changes.append(SetWord(file_keys, NO_FILE))
    if names := table_names(config, server):
        changes.append(_renaming(server, [(name, PLUGIN_PREFIX + name) for name in names]))
    new = wrapped_argv(
        program,
        server.argv,
        file=config.path,
        name=server.name,
        scope=server.scope,
        passed=tuple(filter(is_variable_name, server.passed)),
        env_file=server.env_file,
        kept=kept,
        more=more,
    )
    before = new[1 : len(new) - len(server.argv)]
    if server.shape == "argv":
        return Prepend(keys, (program, *before)), *changes
    first = (*before, server.argv[0])
    if server.args_keys is None:
        return SetWord(keys, program), InsertList(keys, _ARGS, first), *changes
    return SetWord(keys, program), Prepend(server.args_keys, first), *changes


def _renaming(server: HostServer, names: Sequence[tuple[str, str]]) -> RenameKeys:
    return RenameKeys(server.env_keys or (), tuple(names))


def undo_changes(config: Configuration, server: HostServer, syntax: EditSyntax | None) -> tuple[Change, ...]:
    """`syntax`: in which words are written as they were before; None: as `wrap` writes words."""
    old = split_wrapped(server.argv)
    if old is None or (server.shape != "argv" and server.args_keys is None):
        raise EditRefused("the entry is not wrapped")
    kept = record_of(old.options)

    def word(keys: KeyPath, text: str, name: str) -> SetWord:
        as_before = kept.get(name, "")
        usable = syntax is not None and _is_only(as_before, text, syntax)
        return SetWord(keys, text, as_before if usable else "")

    changes: list[Change] = []
    if not is_outdated(old):
        prefixed = [name for name in table_names(config, server) if name.startswith(PLUGIN_PREFIX)]
        if prefixed:
            names = [(name, name.removeprefix(PLUGIN_PREFIX)) for name in prefixed]
            changes.append(_renaming(server, names))
        if server.env_file == NO_FILE and (file := plugin_env_file(server)):
            changes.append(word((*server.keys, ENV_FILE), file, ENV_FILE))
    end = server.argv.index("--")
    if server.shape == "argv":
        return DropFirst(server.command_keys, end + 1), *changes
    command = word(server.command_keys, old.argv[0], "command")
    args = server.args_keys or ()
    if len(old.argv) == 1 and kept.get("args") == "absent":
        return command, DeleteKey(args), *changes
    if len(old.argv) == 1 and kept.get("args") == "null":
        return command, SetNull(args), *changes
    return command, DropFirst(args, end + 1), *changes


def _is_only(text: str, word: str, syntax: EditSyntax) -> bool:
    """Whether the text is the word and nothing else: no comment, no blank, no control character. The text in
    --wrapped is untrusted."""
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
        and not span.obstacle
        and (span.kind, span.start, span.end) == ("scalar", len(before), len(before) + len(text))
    )
