"""Find host paths that a command line or a variable names and the cage does not show.

A server with the argument `--db-path /tmp/x.db` has a /tmp of its own in the cage: it starts and writes, and
its file is lost when it ends. It did not ask for that path, so nothing was refused. So a note tells people.

These notes are guesses, and not complete. Only words count that name something that exists on the host, or a
name in a folder that exists: `/v1/chat` is not taken for a path.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.document.diagnostic import quoted
from sandbox.paths.mounts import contains
from sandbox.spec import Note
from sandbox.speed.typed import Callable, Iterable, Iterator, Sequence

NOTES_SHOWN = 8
_LONGEST_WORD = 4096
# Every cage has folders of its own under these names.
_PRIVATE = ("/tmp", "/dev/shm")
_KERNELS = ("/proc", "/sys", "/dev")
_HERE = (".", "..")  # the only words without a slash that are paths for sure

# By who can ask for the path: the words of the command line, `runner allow`, or a manifest.
_HINT_OF_OPTIONS = "show it with --read PATH or --write PATH"
_HINT_OF_ALLOW = "show it with runner allow and --read PATH or --write PATH"
_HINT = (
    "let the manifest ask for that path, or use a path below ${state_dir}, which the plugin keeps "
    "between runs"
)


def unshown_path_notes(
    args: Sequence[str],
    env: Iterable[tuple[str, str]],
    *,
    directory: str,
    inside: str,
    home: str,
    visible: Callable[[str], bool],
    denied: Callable[[str], bool] = lambda path: False,
    by_options: bool = False,
    by_approval: bool = False,
) -> tuple[Note, ...]:
    """One note for each such word, at most NOTES_SHOWN.

    `visible`: whether an absolute path is shown. `denied`: whether no plugin may be shown it; then the hint
    names no option. `directory`: the folder that relative words refer to. `inside`: the working directory in
    the cage. `by_options`: paths are requested by options of the command line, not by a manifest.
    `by_approval`: the command is from a configuration of the operator's, whose servers are allowed more.
    """
    notes: dict[str, Note] = {}
    hidden = 0
    hint = _HINT_OF_ALLOW if by_approval else _HINT_OF_OPTIONS if by_options else _HINT
    for label, word in (*_of_args(args), *_of_env(env)):
        words = _split_list(word)
        effects = [_effect(each, directory, inside, home, visible) for each in words]
        effect, path = next((each for each in effects if each[0]), ("", ""))
        if not effect or label in notes:
            continue
        if len(notes) == NOTES_SHOWN:
            hidden += 1
            continue
        shown = label if label.isprintable() and len(label) < 200 else quoted(label)
        shown += f" ({path})" if word in _HERE and path.isprintable() else ""
        message = f"{shown} names a host path that is not in the cage; {effect}"
        notes[label] = Note("outside", message, "" if denied(path) else hint)
    found = tuple(notes.values())
    return (*found, Note("outside", f"{hidden} more words name such paths")) if hidden else found


def words_of(args: Sequence[str], env: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Each word that may be a path, with the option before it or the name of the variable: (option, name,
    word)."""
    for label, value in _of_args(args):
        option = label.replace("=", " ").partition(" ")[0] if label.startswith("-") else ""
        yield from ((option, "", word) for word in _split_list(value))
    for name, value in env:
        yield from (("", name, word) for word in _split_list(value))


def _split_list(word: str) -> list[str]:
    """Split a list such as PATH into its folders."""
    return word.split(":") if ":/" in word and "://" not in word else [word]


def _of_env(env: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Each variable that may be a path, with the label for messages. A value that is more than paths may hold
    a password, so only its name is shown."""
    for name, value in env:
        parts = _split_list(value)
        plain = all(part.startswith(("/", "~/", "./")) or part == "" for part in parts)
        yield (f"{name}={value}" if plain and not set(value) & set("?#@&= ") else name), value


def _of_args(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each argument that may be a path, with the label for messages: the argument and its option."""
    before = ""
    for arg in args:
        name, equals, value = arg.partition("=")
        if equals and "/" not in name:
            yield arg, value
        elif not arg.startswith("-"):
            yield f"{before} {arg}".lstrip(), arg
        before = arg if arg.startswith("-") and not equals else ""


def _effect(
    word: str, directory: str, inside: str, home: str, visible: Callable[[str], bool]
) -> tuple[str, str]:
    """What happens at the path, and the path; two empty strings if the word is not a path, or is shown."""
    path = word.removeprefix("file://").removeprefix("file:")
    if not path or len(path) > _LONGEST_WORD or "\0" in path or "\n" in path or "://" in path:
        return "", ""
    # No shell expands a ~ here. A program that expands it uses the HOME of the cage.
    private = path == "~" or path.startswith("~/")
    exists = False
    if private:
        path = home + path[1:] if home.startswith("/") else "/home"
    elif not path.startswith("/"):
        leads = "/" in path and _leads_somewhere(os.path.normpath(os.path.join(directory, path)))
        if not leads and path not in _HERE:
            return "", ""
        private = inside != directory and inside in _PRIVATE  # a relative path leads elsewhere from there
        # The program's folder may have another path in the cage.
        path, exists = os.path.join(directory if private else inside, path), True
    path = "/" + os.path.normpath(path).lstrip("/")
    if path in ("/", *_PRIVATE) or (visible(path) and not private):
        return "", ""
    private = private or any(contains(place, path) for place in _PRIVATE)
    exists = exists or _leads_somewhere(path)
    if not private and (any(contains(place, path) for place in _KERNELS) or not exists):
        return "", ""
    return ("what is written there is lost" if private else "the plugin can neither read nor write it"), path


def _leads_somewhere(path: str) -> bool:
    above = os.path.dirname(path)
    return look.lexists(path) or (above != "/" and look.isdir(above))
