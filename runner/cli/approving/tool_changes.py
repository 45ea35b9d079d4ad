"""What a gateway withholds of a plugin's tools, prompts and resources: the change, and the person's answer.

All of this text is the plugin's own, and a person decides by it. So no character of it acts on the terminal,
and none is invisible.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from textwrap import TextWrapper
from typing import Any

from runner.approvals.tools import INVISIBLE, ToolChange, ToolRecord, label, remote_identity, tools_folder
from runner.cli.shared.text import ask_person, say
from runner.outcome import EXIT
from sandbox.document.diagnostic import printable

_DECLINED = 1
_COLUMNS = 96
_MOST_COMPARED = 2000  # lines: difflib takes quadratic time
_FIRST_FIELDS = ("title", "description")
# The parts are together the whole line. A word is cut only if it is longer than a line.
_WRAP = TextWrapper(
    _COLUMNS, expand_tabs=False, replace_whitespace=False, drop_whitespace=False, break_on_hyphens=False
)


def withheld_tools(identity: str, environ: Mapping[str, str]) -> tuple[ToolChange, ...] | None:
    """What a gateway withholds. `identity`: the plugin's, in the record. None: no gateway has seen tools of
    this plugin. Raises ApprovalsUnusable."""
    return ToolRecord.at(tools_folder(environ)).proposed(identity)


def ask_about_remote(name: str, environ: Mapping[str, str], *, sure: bool) -> int:
    """The tools of a server elsewhere, by its name in the settings of gateways. Returns the exit status.
    Raises ValueError and ApprovalsUnusable."""
    urls = ToolRecord.at(tools_folder(environ)).urls_of(name)
    if not urls:
        raise ValueError(f"--remote {name}: no gateway has listed tools of a remote server of this name")
    status: int = EXIT["ok"]
    for url in urls:
        say(_visible(f"{name} ({url})"), sys.stdout)
        identity = remote_identity(name, url)
        if changes := withheld_tools(identity, environ):
            status = ask_about_tools(identity, changes, environ, sure=sure) or status
        else:
            say("  none of its tools is withheld", sys.stdout)
    return status


def ask_about_tools(
    identity: str, changes: tuple[ToolChange, ...], environ: Mapping[str, str], *, sure: bool
) -> int:
    """Show the changes, ask, and record a yes. `sure`: without a question. Returns the exit status. Raises
    ValueError and ApprovalsUnusable."""
    for change in changes:
        sys.stdout.writelines(f"{line}\n" for line in change_lines(change))
    # After the plugin's own text, however long that is.
    for what, which in (("changed", True), ("new", False)):
        if names := [each.name for each in changes if bool(each.before) is which]:
            say(f"{len(names)} {what}: {', '.join(_visible(label(name)) for name in names)}", sys.stdout)
    if not sure and not sys.stdin.isatty():
        raise ValueError("there is no terminal to ask on; --yes accepts what is shown without asking")
    if not sure and not ask_person("May a gateway show these as they are now?"):
        say("runner allow: nothing is recorded; they stay withheld")
        return _DECLINED
    ToolRecord.at(tools_folder(environ)).accept(identity, changes)
    say("Recorded. A gateway shows them from now on.", sys.stdout)
    return EXIT["ok"]


def change_lines(change: ToolChange) -> Iterator[str]:
    """A diff of each field that differs, in lines that can be printed."""
    yield f"{'changed' if change.before else 'new'}: {_visible(label(change.name))}"
    try:
        old = json.loads(change.before) if change.before else {}
        new = json.loads(change.after)
        names = sorted({*old, *new}, key=lambda name: (name not in _FIRST_FIELDS, name))
        parts = [(name, _lines(old, name), _lines(new, name)) for name in names]
    except RecursionError:  # nested deeply: shown as it is
        parts = [("JSON", _cut_lines(change.before), _cut_lines(change.after))]
    for name, before, after in parts:
        if before != after:
            yield f"  {_visible(name)}"
            yield from (f"    {line}" for line in _diff(before, after))


def _lines(tool: Mapping[str, Any], name: str) -> list[str]:
    if name not in tool:
        return []
    value = tool[name]
    # A text that looks like JSON is not shown like the JSON that it looks like.
    plain = isinstance(value, str) and name in _FIRST_FIELDS
    return _cut_lines(value if plain else json.dumps(value, indent=2, ensure_ascii=False))


def _cut_lines(text: str) -> list[str]:
    """Lines of a bounded width, which together are the whole text: no end of a line is out of sight."""
    return [part for line in map(_visible, text.split("\n")) for part in _WRAP.wrap(line) or [""]]


def _diff(before: list[str], after: list[str]) -> Iterator[str]:
    if len(before) + len(after) > _MOST_COMPARED or not (before and after):
        yield from (f"- {line}" for line in before)
        yield from (f"+ {line}" for line in after)
        return
    for line in [*unified_diff(before, after, n=1, lineterm="")][3:]:  # behind the first @@
        yield "..." if line.startswith("@@") else f"{line[:1]} {line[1:]}"


def _visible(text: str) -> str:
    return printable(INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], text))
