"""Show the program's own folder under another path in the cage.

All other files of the host have the same path in the cage. For this one folder, paths below it (the program,
its script, folders of its PATH) are translated to paths in the cage.
"""

from __future__ import annotations

from sandbox import look
from sandbox.paths.executable import ProgramFault, follow
from sandbox.paths.mounts import contains, join, relative
from sandbox.paths.program import Program
from sandbox.paths.walk import Link
from sandbox.plan.plan import PlanRefused, PlanRequest
from sandbox.spec import Denial
from sandbox.speed.value import NamedTuple


class RootPart(NamedTuple):
    """The folder, or a part of it."""

    path: str  # on the host
    dest: str  # in the cage


class Relocation(NamedTuple):
    parts: tuple[RootPart, ...] = ()
    inside: str = ""  # path of the folder in the cage; '': the same as on the host
    # Paths of the folder and its parts on the host, each with its path in the cage. Longest first.
    names: tuple[tuple[str, str], ...] = ()
    real: str = ""  # the folder's real path: no part may lead out of it

    def place(self, path: str) -> str:
        """The path in the cage of an absolute path of the host."""
        for name, dest in self.names:
            if contains(name, path):
                return join(dest, relative(path, name))
        return path

    def moves(self, path: str) -> bool:
        return any(contains(name, path) for name, _ in self.names)

    def program(self, found: Program, request: PlanRequest) -> Program:
        """The program with paths of the cage. `files` and `scripts` stay paths of the host. Raises
        ProgramFault for what works only under its path on the host."""
        if not self.names:
            return found
        self._require_movable(found)
        scripts = frozenset(found.scripts)
        # Relative arguments stay valid if the working directory moves too.
        found_args = request.args if self.moves(request.directory) else found.argv[1:]
        args = (self.place(arg) if _is_script(arg, scripts) else arg for arg in found_args)
        return found._replace(
            argv=(self.place(found.argv[0]), *args),
            links=tuple(Link(self.place(link.path), self.place(link.target)) for link in found.links),
            path_dirs=tuple(map(self.place, found.path_dirs)),
        )

    def _require_movable(self, found: Program) -> None:
        program = found.argv[0]
        for link in follow(program)[1]:
            if link.target.startswith("/") and self.moves(link.target):
                raise ProgramFault(
                    f"{link.path} is a link to {link.target}, which has another name in the cage",
                    "make it a relative link",
                    found=True,
                )
        for file in found.files[1:]:
            if self.moves(file) and not any(map(self.moves, found.path_dirs)):  # else PATH leads to it
                raise ProgramFault(
                    f"{program} needs {file} under this name, and in the cage it is {self.place(file)}",
                    "let its #! line name an interpreter of the system, for example #!/usr/bin/env python3",
                    found=True,
                )


def _is_script(arg: str, scripts: frozenset[str]) -> bool:
    return arg.startswith("/") and look.realpath(arg) in scripts


def relocate(request: PlanRequest) -> Relocation:
    """Which parts of the program's folder are shown, and where. Raises PlanRefused for a part that is not a
    plain relative path."""
    root, inside = request.root, request.root_inside
    if root is None:
        return Relocation()
    if not inside and not request.root_parts:
        return Relocation((RootPart(root, root),))
    for part in request.root_parts:
        if part.startswith("/") or any(word in ("", ".", "..") for word in part.split("/")):
            reason = "a part of the plugin's folder is named relative to it, without '.' and '..'"
            raise PlanRefused([Denial("root_part", part, reason)])
    inside = inside or root
    real = look.realpath(root)
    parts = tuple(RootPart(join(root, part), join(inside, part)) for part in request.root_parts)
    names = {root: inside, real: inside}
    names |= {look.realpath(part.path): part.dest for part in parts}
    moved = sorted(names.items(), key=lambda pair: len(pair[0]), reverse=True) if inside != root else ()
    return Relocation(parts or (RootPart(root, inside),), inside, tuple(moved), real)
