"""Man pages, from what `runner --help` and `runner VERB --help` print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import runner
from runner.cli import WITH_ACTIONS, all_verbs, verb_help
from runner.serve.client import default_socket
from scripts.releasing.lock import ROOT

_SOCKETS = "/run/runner/serve.sock for root, $XDG_RUNTIME_DIR/runner/serve.sock for others"
_TITLES = {"positional arguments": "ARGUMENTS"}
# "  --name VALUE   what it does", or the name alone if it is long: then the text begins in the next line.
_ITEM = re.compile(r" {2}(?P<term>\S+(?: \S+)*)(?: {2,}(?P<text>\S.*))?")


def output_of(*words: str) -> str:
    """What this checkout's `runner` prints, 98 columns wide on any terminal."""
    argv = [sys.executable, "-m", "runner", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout


_ACTIONS = """
import sys
from runner.cli import verb_parser
from runner.cli.shared.actions import actions_of
print("\\f".join(each.format_help() for each in actions_of(verb_parser(sys.argv[1])).values()), end="")
"""


def actions_of(verb: str) -> list[str]:
    """What `runner VERB ACTION --help` prints, for each action: one process for all."""
    argv = [sys.executable, "-c", _ACTIONS, verb]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\f")


def man_page(verb: str, text: str, epoch: int, actions: Sequence[str] = ()) -> str:
    """The page `runner` (no verb) or `runner-VERB` in roff, from the text of --help, and of each action's."""
    name, summary = (f"runner-{verb}", verb_help(verb)) if verb else ("runner", "run plugins in a cage")
    day = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    usage, _, rest = text.partition("\n\n")
    others = ", ".join(f"\\fBrunner\\-{other}\\fR(1)" for other in all_verbs())
    page = [
        *(f'.TH {name.upper()} 1 {day} "runner {runner.__version__}"', ".SH NAME"),
        *(f"{_plain(name)} \\- {_plain(summary)}", ".SH SYNOPSIS"),
        *(_plain(" ".join(usage.removeprefix("usage:").split())), ".SH DESCRIPTION"),
        *_body(rest),
        *(line for each in actions for line in _action(each)),
        *(".SH SEE ALSO", "\\fBrunner\\fR(1)" if verb else others),
        *(".PP", "/usr/share/doc/plugin\\-runner/docs", ""),
    ]
    return "\n".join(page)


def _body(text: str) -> list[str]:
    blocks = re.split(r"\n\n+", text.strip("\n"))
    return [line for block in blocks for line in _block(block.splitlines())]


def _action(text: str) -> list[str]:
    """A section about one action: its usage, then the rest, with titles of the second level."""
    usage, _, rest = text.partition("\n\n")
    usage = " ".join(usage.removeprefix("usage:").split())
    title = re.split(r" [^a-z]", usage)[0]
    body = (line.replace(".SH ", ".SS ", 1) for line in _body(rest))
    return [f'.SH "{_plain(title).upper()}"', _plain(usage), *body]


def _block(lines: list[str]) -> list[str]:
    """A paragraph of the text in roff: a title, sentences, or terms with what they mean."""
    out = [".PP"]
    if lines[0].endswith(":") and not lines[0].startswith(" "):
        title = lines.pop(0).removesuffix(":")
        out = [f'.SH "{_plain(_TITLES.get(title, title)).upper()}"']
        if title == "example":
            return [*out, ".nf", *(_plain(line.strip()) for line in lines), ".fi"]
    told: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        item = _ITEM.fullmatch(line)
        if item is not None and (item["text"] or following.startswith("   ")):
            out += [_told(told), ".TP", f"\\fB{_plain(item['term'])}\\fR"]
            told = [item["text"] or ""]
        else:
            told.append(line.strip())
    return [line for line in (*out, _told(told)) if line]


def _told(lines: list[str]) -> str:
    """The lines as one, with what depends on who builds the page in words for everybody."""
    text = " ".join(filter(None, lines))
    return _plain(text.replace(default_socket(os.environ), _SOCKETS))


def _plain(text: str) -> str:
    """Text in which roff sees no command of its own."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in ("'", ".") else text


def write_man_pages(folder: Path, epoch: int) -> None:
    for verb in ("", *all_verbs()):
        actions = actions_of(verb) if verb in WITH_ACTIONS else ()
        page = man_page(verb, output_of(*filter(None, (verb, "--help"))), epoch, actions)
        (folder / f"{f'runner-{verb}' if verb else 'runner'}.1").write_text(page)
