"""Marks: what identifies a command line, so that its state directory and its approvals are found again."""

from __future__ import annotations

import os

from runner.plugin import Plugin
from sandbox import look
from sandbox.cache import fingerprint
from sandbox.policy.policy import steers
from sandbox.spec import EnvRequest
from sandbox.speed.typed import Sequence

# Each takes up to six system calls: 19,000 arguments took 0.7 s, twice in a launch.
_MOST_LOOKED_AT = 1000  # arguments


def mark_entry(plugin: Plugin) -> Plugin:
    """An entry of a configuration, whose placeholders are filled in, with the marks that it has if its host
    starts it through the runner."""
    entrypoint, template = plugin.entrypoint, plugin.template
    assert entrypoint is not None  # `load` has refused it
    words = entrypoint.words
    folder = look.realpath(entrypoint.directory) if starts_below(words, entrypoint.directory) else ""
    mark = mark_of_words(words, plugin.spec.env, plugin.scope, folder)
    if template is None or not template.decided_by:
        return plugin._replace(former_marks=(mark,))
    # Its earlier state is not for the code of whatever project the caller is in.
    former = () if template.decided_by == "folder" else (plugin.mark,)
    return plugin._replace(mark=mark, former_marks=former)


def mark_of_words(words: Sequence[str], env: Sequence[EnvRequest], scope: str, folder: str) -> str:
    """The mark of a command line."""
    mark = arguments_digest(words, env)
    if scope or folder:
        mark = fingerprint(*(os.fsencode(part) for part in (mark, scope, folder)))[:32]
    return mark


def scope_mark(scope: str) -> str:
    """The mark of an entry whose file alone says what runs: its name, its file and its project identify
    it."""
    return fingerprint(os.fsencode(scope))[:32] if scope else ""


def arguments_digest(words: Sequence[str], env: Sequence[EnvRequest]) -> str:
    """Digest of a command line and of the variables that decide which code runs."""
    parts = [*words]
    if steering := sorted((each.name, each.value) for each in env if each.value and steers(each.name)):
        parts += ["", *(f"{name}={value}" for name, value in steering)]
    return fingerprint(*(os.fsencode(part) for part in parts))[:32]


def starts_below(words: Sequence[str], directory: str) -> bool:
    """Whether the code that a command line runs depends on the working directory: an argument is a relative
    path there, or the name of a module. True for a very long command line, without looking."""
    program, *args = words
    if len(args) > _MOST_LOOKED_AT:
        return True
    if "/" in program and not program.startswith("/"):
        return True
    candidates = [text for word in args for text in (word, word.partition("=")[2])]
    return any(_is_below(text, directory) for text in candidates if text and not text.startswith("/"))


def _is_below(text: str, directory: str) -> bool:
    module = text.partition(":")[0].replace(".", "/").strip("/")  # python3 -m name.part, uvicorn name:app
    names = (text, module, f"{module}.py") if module else (text,)
    try:
        return any(look.lexists(os.path.join(directory, name)) for name in names)
    except ValueError:  # it contains a NUL, so it names no file
        return False
