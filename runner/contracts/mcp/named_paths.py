"""Host paths that an entry names in its arguments and variables, and those of them that do not exist.

These are guesses, for messages of `wrap` and `check`: a word that begins with a slash need not be a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from runner.contracts.mcp.hosts.expand import OURS, expand_home, references, with_folders
from sandbox import surroundings
from sandbox.paths.denied_paths import lexical_hit
from sandbox.paths.mounts import contains
from sandbox.paths.program import program_fault
from sandbox.plan.mentions import words_of
from sandbox.policy.policy import RUNTIME_PATHS
from sandbox.speed.value import NamedTuple

_OTHERS = (*RUNTIME_PATHS, "/proc", "/sys", "/dev", "/bin", "/sbin", "/lib", "/lib64")
# Programs that open such a file make others beside it, or replace it.
_DATABASES = (".db", ".sqlite", ".sqlite3", ".duckdb", ".jsonl")


class NamedPath(NamedTuple):
    path: str  # absolute
    variable: str = ""  # that names it; empty: an argument does

    @property
    def missing(self) -> str:
        """Returns the folder that has to be made first, or ''. A file can be made by the program itself."""
        is_file = bool(os.path.splitext(self.path)[1])
        needed = os.path.dirname(self.path) if is_file else self.path
        return "" if os.path.lexists(needed) else needed

    @property
    def options(self) -> tuple[str, str]:
        """The option of `runner allow` that most likely gives the program what it needs of the path."""
        if os.path.lexists(self.path) and not self.path.endswith(_DATABASES):
            return "--read", self.path
        return "--write", os.path.dirname(self.path)


def named_paths(
    args: Sequence[str], env: Iterable[tuple[str, str]], *, rules: str, project: str, home: str
) -> tuple[NamedPath, ...]:
    """The paths that the words of an entry name, without those of the system and those that no plugin may
    have. `rules`, `project`: of its host's placeholders."""
    found: dict[str, NamedPath] = {}
    for _, variable, word in words_of(args, env):
        text = expand_home(with_folders(word, rules, project, home), home).removeprefix("file://")
        if not text.startswith("/") or "\0" in text or next(references(text, rules), None):
            continue
        path = "/" + os.path.normpath(text).lstrip("/")
        top = "/" + path.split("/")[1]
        # `/v1/chat` is not a path of this machine.
        is_path = path != top and os.path.isdir(top) and not any(contains(each, path) for each in _OTHERS)
        if is_path and len(path) < 4096 and lexical_hit(path, (home,)) is None:
            found.setdefault(path, NamedPath(path, variable))
    return tuple(found.values())


def missing_program(
    command: str, env: Iterable[tuple[str, str]], *, directory: str, rules: str, project: str, home: str
) -> tuple[str, str]:
    """Returns why there is no such program, and what to do; two empty strings if there is one, or only the
    host knows what it fills in."""
    word = expand_home(with_folders(command, rules, project, home), home)
    if not word or any(ours in word for ours in OURS) or next(references(word, rules), None):
        return "", ""
    search_path = dict(env).get("PATH") or surroundings.variables().get("PATH", "")
    if next(references(search_path, rules), None):
        return "", ""
    fault = program_fault(word, directory=directory, search_path=search_path)
    return ("", "") if fault is None or fault.found else (str(fault), fault.hint)
