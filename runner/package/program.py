"""Checks that a launch of a signed package starts only files of the package and of the system.

A signature covers the files of its package. But the caller's PATH decides which interpreter a `#!` line or a
bare command means, and a path may lead anywhere. So the plan of a launch is checked: every program that it
starts lies in the package or below one of RUNTIME_PATHS, by the name that is used and by its real path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from runner.package.fault import PackageFault
from sandbox.document.diagnostic import printable
from sandbox.paths.mounts import contains, join, relative
from sandbox.plan.plan import Bind, LaunchPlan, Symlink
from sandbox.policy.policy import RUNTIME_PATHS

RULE = "package_program"
_HINT = "put the program into the package and sign it again, or install it below /usr"
_SHEBANG_BYTES = 256  # the kernel reads no more of a #! line

# Programs of the system that run a file which an argument names. Others take arguments for data.
_RUN_FILES = frozenset(
    (
        "python pypy node nodejs bun deno ruby perl php java lua tclsh bash sh dash zsh ksh busybox awk gawk"
        " mawk env timeout nice setsid nohup stdbuf xargs ld-linux-x86-64.so ld-linux-aarch64.so"
    ).split()
)
_MODULE_OPTIONS = ("-m",)  # from the working directory, which is the package's, or from the system
_TEXT_OPTIONS = ("-c", "-e", "-E", "--eval", "-p", "--print")
_OPTION_PATH = re.compile(r"-[\w-]*=?(/.*)", re.DOTALL)


class CodePlaces(NamedTuple):
    """Where the code of a launch may lie."""

    package: str  # the folder that is mounted, by its real path
    inside: str  # its name in the cage
    shown: str  # its name in messages
    directory: str  # the working directory, by its name in the cage

    def absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.directory, path))

    def has(self, path: str) -> bool:
        """Whether the package or the system has it. `path`: real, or a name in the cage."""
        return self.packs(path) or any(contains(place, path) for place in RUNTIME_PATHS)

    def packs(self, path: str) -> bool:
        return contains(self.package, path) or contains(self.inside, path)

    def holds(self, path: str) -> bool:
        """Whether a path, as written, is a file or folder of the package."""
        path = self.absolute(path)
        if contains(self.inside, path):
            path = join(self.package, relative(path, self.inside))
        return contains(self.package, path) and os.path.lexists(path)

    def leads_out(self, path: str) -> bool:
        """Whether a path, as written, leads out of the package. A package has no links."""
        path = self.absolute(path)
        if self.packs(path):
            return False
        return not self.has(path) or not self.has(os.path.realpath(path))

    def fault(self, what: str, path: str) -> PackageFault:
        neither = f"which is neither in the plugin's folder {self.shown} nor of the system"
        return PackageFault(RULE, f"{what} {printable(self.absolute(path))}, {neither}", _HINT)


def require_own_program(plan: LaunchPlan, places: CodePlaces, *, links: bool) -> None:
    """Raises PackageFault. `links`: also look at the names under which the cage shows what it starts."""
    for path in (plan.argv[0], *plan.program_files, *_trees(plan), *(_links(plan) if links else ())):
        if not places.has(path):
            raise places.fault("it starts", path)
    for file in plan.program_files:
        if contains(places.package, file):
            for path in _shebang_paths(file):
                if places.leads_out(path):
                    raise places.fault(f"the #! line of {printable(os.path.basename(file))} names", path)
    for folder in dict(plan.env).get("PATH", "").split(":"):
        if folder.startswith("/") and places.leads_out(folder) and _is_shown(folder, plan, places):
            raise places.fault("its PATH has", folder)
    if not contains(places.package, plan.program_files[0]):
        for path in (*plan.scripts, *_run_paths(plan, places)):
            if places.leads_out(path):
                raise places.fault(f"{printable(os.path.basename(plan.argv[0]))} would run", path)


def require_image_program(plan: LaunchPlan, places: CodePlaces, tree: str) -> None:
    """For a launch in an image. All of the cage is the image's or the package's, but for what of the host is
    shown. `tree`: the image, on the host. Raises PackageFault."""
    own = os.path.realpath(tree)
    strange = [
        op.dest
        for op in plan.operations
        if isinstance(op, Bind) and not (places.packs(op.real) or contains(own, op.real))
    ]
    program, *args = plan.argv
    words = list(takewhile(lambda word: not places.holds(word), args))
    words += dict(plan.env).get("PATH", "").split(":")
    for path in (program, *(path for word in words for path in (word, *_paths_in(word)))):
        if any(contains(dest, places.absolute(path)) for dest in strange):
            reason = "which is neither in the plugin's folder nor of its image"
            raise PackageFault(RULE, f"it may run {printable(places.absolute(path))}, {reason}", _HINT)


def _trees(plan: LaunchPlan) -> Iterator[str]:
    """Folders that the cage shows because the program needs them, such as installations."""
    return (path.path for path in plan.shown if path.origin == "the program")


def _links(plan: LaunchPlan) -> Iterator[str]:
    return (link.dest for link in plan.operations if isinstance(link, Symlink))


def _is_shown(folder: str, plan: LaunchPlan, places: CodePlaces) -> bool:
    """Whether the cage has something of the host there."""
    folder = os.path.normpath(folder)
    return any(
        contains(op.dest, folder) or (contains(folder, op.dest) and not places.has(op.dest))
        for op in plan.operations
        if isinstance(op, Bind | Symlink)
    )


def _shebang_paths(file: str) -> Iterator[str]:
    try:
        with open(file, "rb") as script:
            line = script.read(_SHEBANG_BYTES).split(b"\n", 1)[0]
    except OSError:
        return  # then it cannot be started
    if line.startswith(b"#!"):
        for word in os.fsdecode(line[2:]).split():
            yield from _paths_in(word)


def _paths_in(word: str) -> Iterator[str]:
    """The paths of a word such as `/a`, `../a`, `--require=/a`, `-I/a` or `PATH=/a:/b`."""
    option = _OPTION_PATH.fullmatch(word)
    name, equals, value = word.partition("=")
    if option is not None:
        yield from option[1].split(":")
    elif equals and "/" not in name:
        yield from (each for each in value.split(":") if "/" in each)
    elif "/" in word and not word.startswith("-"):
        yield word


def _run_paths(plan: LaunchPlan, places: CodePlaces) -> Iterator[str]:
    """Existing paths among the arguments before a file of the package. Later arguments are for that file."""
    names = {os.path.basename(path).rstrip("0123456789.") for path in (plan.argv[0], plan.program_files[0])}
    if names.isdisjoint(_RUN_FILES):
        return
    args: Sequence[str] = plan.argv[1:]
    for number, arg in enumerate(args):
        if arg in _MODULE_OPTIONS:
            return
        if arg in _TEXT_OPTIONS:  # code; its first word may be a program
            words = args[number + 1].split() if number + 1 < len(args) else []
            yield from (path for word in words[:1] for path in _paths_in(word))
            return
        if not arg.startswith("-") and places.holds(arg):
            return
        bare = [arg] if "/" not in arg and not arg.startswith("-") else []
        for path in (*bare, *_paths_in(arg)):
            if os.path.lexists(places.absolute(path)):
                yield path
