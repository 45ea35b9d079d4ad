"""Fills in the placeholders of an entry at the launch, as its host would."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from runner.contracts.mcp.hosts.expand import Reference, expand_text, folder_of, references
from runner.plugin import Plugin
from sandbox import surroundings
from sandbox.spec import EnvRequest, KeyPath, is_variable_name

if TYPE_CHECKING:
    from runner.manifest.table import Item
    from sandbox.document.faults import Faults

_MOST_VARIABLES = 1000  # of a file of variables
_LINE = re.compile(r"[ \t]*+(?:export[ \t]++)?([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+(.*)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def fill(
    plugin: Plugin, variable: Callable[[str], str | None], read_file: Callable[[str, KeyPath], str]
) -> tuple[Plugin, tuple[str, ...]]:
    """See Contract.fill."""
    template, entrypoint = plugin.template, plugin.entrypoint
    if template is None or entrypoint is None:
        return plugin, ()
    folder = template.folder or surroundings.working_folder()
    home = os.path.expanduser("~")
    questions: dict[str, None] = {}

    def text(word: str, where: KeyPath) -> str:
        def value(reference: Reference) -> str | None:
            if (known := folder_of(reference, folder, home)) is not None:
                return known
            if reference.kind == "ask":
                questions[reference.name] = None
            elif reference.kind == "file":
                # By the file that names it, not by the project: that is where hosts look.
                base = os.path.dirname(plugin.manifest)
                return read_file(joined(base, reference.name, home), where).strip()
            elif reference.kind == "env":
                return variable(reference.name)
            return None

        return expand_text(word, template.rules, value)

    env = [
        request if request.value is None else request._replace(value=text(request.value, request.where))
        for request in plugin.spec.env
    ]
    if template.env_file:
        where = template.env_file_where
        path = joined(folder, text(template.env_file, where), home)
        named = {request.name for request in env if not request.fills}
        found = parse_dotenv(read_file(path, where))
        env += [EnvRequest(name, value, where=where) for name, value in found.items() if name not in named]
    words = [text(word, ()) for word in (entrypoint.command, *entrypoint.args)]
    filled = plugin._replace(
        entrypoint=entrypoint._replace(command=words[0], args=tuple(words[1:])),
        spec=plugin.spec._replace(env=tuple(env)),
    )
    return filled, tuple(questions)


def argument_files(
    faults: Faults, words: Iterable[Item], rules: str, manifest: str, home: str, *, own: bool
) -> tuple[str, ...]:
    """Files whose text becomes part of the command line. The author of a project could change them after an
    approval. `own`: the manifest is the user's own."""
    folder = os.path.dirname(manifest)
    found = [
        (word.keys, joined(folder, reference.name, home))
        for word in words
        for reference in references(word.text, rules)
        if reference.kind == "file"
    ]
    if found and not own:
        message = "the text of a file would decide what runs, and this configuration can come with a project"
        hint = "write the text itself here, or let a variable of env hold it"
        faults.error(found[0][0], "argument_file", message, hint)
    return tuple(path for _, path in found)


def joined(folder: str, path: str, home: str) -> str:
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return "/" + os.path.normpath(os.path.join(folder, path)).lstrip("/")


def parse_dotenv(text: str) -> dict[str, str]:
    """The variables of a file of lines NAME=VALUE. Other lines mean nothing, as for the hosts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is not None and is_variable_name(match[1]) and len(found) < _MOST_VARIABLES:
            found[match[1]] = _value(match[2].strip())
    return found


def _value(text: str) -> str:
    quote = text[:1]
    if quote in ("'", '"', "`") and (end := _closing(text, quote)) > 0:
        inner = text[1:end]
        if quote != '"':
            return inner
        return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), inner)
    return text.partition(" #")[0].rstrip() if not text.startswith("#") else ""


def _closing(text: str, quote: str) -> int:
    at = 1
    while at < len(text):
        if text[at] == "\\" and quote == '"':
            at += 1
        elif text[at] == quote:
            return at
        at += 1
    return -1
