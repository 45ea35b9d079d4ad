"""Finds the files that a plugin's command needs: its program, its interpreter, and their installations.

All of them appear in the cage under their host paths, because virtual environments, node_modules and scripts
find their parts by path. So this module only decides which trees to show. It follows the command link by link
and `#!` by `#!`. A step that is in no tree shown so far adds its own tree.
"""

from __future__ import annotations

import os

from sandbox import look
from sandbox.paths import packages, shims
from sandbox.paths.denied_paths import lexical_hit
from sandbox.paths.executable import (
    ProgramFault,
    follow,
    interpreter_words,
    is_executable,
    loader_of,
    proc_fault,
    read_head,
)
from sandbox.paths.installation import DISPENSABLE_PARTS, home_of, is_runtime, package_of, parts_of, venv_base
from sandbox.paths.mounts import contains
from sandbox.paths.walk import Link
from sandbox.speed.typed import Callable, Mapping, Sequence
from sandbox.speed.value import NamedTuple

# The fallback of execvp(3), and the folders where distributions put programs.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_MAX_INTERPRETERS = 4  # the recursion limit of binfmt_script


class Program(NamedTuple):
    argv: tuple[str, ...]
    trees: tuple[str, ...]  # real paths to show, in addition to the given roots
    links: tuple[Link, ...]  # symbolic links on the way that are in no tree
    path_dirs: tuple[str, ...]  # directories to put in front of PATH
    files: tuple[str, ...]  # real paths of programs, which must be executable
    scripts: tuple[str, ...]  # real paths of scripts, which must be readable
    notes: tuple[str, ...]  # messages about how the program was chosen
    env: tuple[tuple[str, str], ...] = ()  # variables by which the program finds its parts
    chosen: tuple[str, ...] = ()  # as in LocatedProgram


class LocatedProgram(NamedTuple):
    """The program that a command starts."""

    program: str = ""  # its name in its real folder; empty if there is none
    # Other files that decide which program runs: a link outside of the system's folders, and an interpreter
    # there that the `env` of a #! line finds. Each is listed by its name in its real folder and by its real
    # path.
    chosen: tuple[str, ...] = ()
    code: tuple[str, ...] = ()  # all files that are executed or interpreted, by the names that lead to them


class ShowRules(NamedTuple):
    """Which real paths may be shown in the cage."""

    denied: Callable[[str], str | None]  # why no plugin may see the path; None if one may
    allowed: Callable[[str], bool]  # whether the policy lets a plugin read the path on request


class _ProgramSearch:
    """The state of one search. `roots`: real paths that the cage shows anyway.

    A command, a #! line, an ELF header or a pyvenv.cfg may come from an untrusted project. Then it can only
    add the installation of a language: otherwise it could name any folder, and the plugin could read it.
    """

    def __init__(self, roots: Sequence[str], rules: ShowRules, search_path: str) -> None:
        self.roots = tuple(roots)
        self.search_path = search_path
        self.rules = rules
        self.trees: list[str] = []
        self.prefixes: set[str] = set()  # installations whose parts are among the trees
        self.links: list[Link] = []
        self.path_dirs: list[str] = []
        self.files: list[str] = []
        self.scripts: list[str] = []
        self.notes: list[str] = []
        self.env: dict[str, str] = {}
        self.chosen: list[str] = []
        self.code: list[str] = []
        # Working directory and variables, by which a shim chooses its program. Only for a command of the
        # operator: for others shims are not followed.
        self.shim_rules: tuple[str, Mapping[str, str]] | None = None
        # The project that the command's name is in. Its links must not lead out of it.
        self.project: str | None = None

    def note_choice(self, path: str) -> None:
        """Record a path that decides which program runs (`chosen`)."""
        if os.path.dirname(path) not in SYSTEM_PATH.split(":"):  # only root can change links there
            try:
                self.chosen += [_with_real_folder(path), look.realpath(path)]
            except OSError:
                pass  # an unreadable link of /proc: no program can be started by it

    def covered(self, path: str) -> bool:
        return path in self.prefixes or any(contains(tree, path) for tree in (*self.roots, *self.trees))

    def show(self, path: str, *, trusted: bool, project: str | None = None) -> str:
        """Add what is needed so that `path` resolves in the cage as it does here. Returns the real file it
        leads to. `project`: links may lead out of it only to the installation of a language."""
        real, links = follow(path)
        if any(contains("/proc", passed) for passed in (path, *(link.path for link in links), real)):
            raise proc_fault(path)
        for link in links:
            # bin/python of a virtual environment is a link to another folder: the environment is needed too.
            if not self.covered(link.path):
                home = home_of(link.path)
                if home is None:
                    self.links.append(link)
                else:
                    packages.require_own(project, home, path, link.path)
                    self.add(home, path, trusted=trusted)
        home = home_of(real)
        if home is not None and not self.covered(real):
            packages.require_own(project, home, path, real)
            self.add(home, path, trusted=trusted)
        if not self.covered(real):  # for example in sbin, which is no part of an installation
            packages.require_own(project, real, path, real)
            self.add(real, path, trusted=trusted)
        self.files.append(real)
        return real

    def add(self, tree: str, what: str, *, trusted: bool) -> None:
        """Show a file, a folder, or the parts of an installation that its programs need."""
        parts = parts_of(tree)
        hint = "use a program below /usr, or in the plugin's own folder"
        reason = None
        if not (trusted or is_runtime(tree) or self.rules.allowed(tree)):
            reason = "it is outside of the plugin's folder, and the policy does not let plugins read there"
        for path in (f"{tree}/{part}" for part in parts) if parts else (tree,):
            denied = self.rules.denied(path)
            if denied is not None and path.endswith(DISPENSABLE_PARTS) and parts:
                self.notes.append(f"{path} is not shown: {denied}")
                continue
            if denied is None and reason is not None:  # a policy cannot change the denylist
                hint += f", or add {tree} to ceiling under [read] in the policy"
            reason = denied or reason
            if reason is not None:
                at = "" if contains(tree, what) else f" needs {tree}, which"
                said = f"{what}{at} cannot be shown to the plugin: {reason}"
                raise ProgramFault(said, hint, found=True, denied=True)
            if parts and look.islink(path):
                # lib64 is mostly a link to lib. One that leads elsewhere is not part of the installation.
                if contains(tree, look.realpath(path)):
                    self.links.append(Link(path, look.readlink(path)))
            elif not parts or look.exists(path):
                self.trees.append(path)
        if parts:
            self.prefixes.add(tree)
        base = venv_base(tree)
        if base is not None and not self.covered(base):
            # Not trusted: pyvenv.cfg comes with the environment and may name any folder.
            self.add(base, f"the virtual environment {tree}", trusted=False)
        if trusted and "pyvenv.cfg" in parts:
            found = packages.editable_of(tree)
            self.notes.extend(found.notes)
            self.add_folders(found.folders)

    def add_folders(self, folders: Sequence[str]) -> None:
        """Show folders that the packages of a trusted program need. A denied folder only gets a note."""
        for folder in folders:
            if self.covered(folder):
                continue
            if (denied := self.rules.denied(folder)) is not None:
                self.notes.append(f"{folder} is not shown: {denied}")
            else:
                self.trees.append(folder)

    def find_behind_shim(self, path: str, manager: str) -> str | None:
        """The program that a shim runs, if it may be shown; else None."""
        if self.shim_rules is None:
            return None
        target = shims.target_of(path, manager, *self.shim_rules)
        if target is None or self.rules.denied(look.realpath(target)) is not None:
            return None
        self.notes.append(f"{path} is a shim of {manager}; it runs {target}")
        return target


def resolve(
    command: str,
    args: Sequence[str],
    *,
    directory: str,
    search_path: str,
    roots: Sequence[str],
    rules: ShowRules,
    trusted: bool,
    environ: Mapping[str, str] | None = None,
) -> Program:
    """Find the trees that must be shown so that `command` runs in the cage as it does outside.

    `roots`: real paths that the cage shows anyway. `trusted`: the command line is the operator's own.
    """
    search = _ProgramSearch(roots, rules, search_path)
    search.shim_rules = (directory, environ or {}) if trusted else None
    for root in roots:
        base = venv_base(root)
        if base is not None and not search.covered(base):
            search.add(base, f"the virtual environment {root}", trusted=False)
    found, on_path = _find_program(command, directory, search)
    if trusted and not on_path:
        search.project = packages.project_of(found, directory, search_path, environ or {})
    path = _with_real_folder(found)
    search.note_choice(path)
    if contains("/proc", path):
        raise proc_fault(command)
    # A program that was found on PATH is the operator's. A program that a command line names by its path may
    # have come with the project.
    _show_executable(path, search, trusted=trusted or on_path, deep=on_path)
    if on_path and os.path.dirname(path) not in SYSTEM_PATH.split(":"):
        search.path_dirs.append(os.path.dirname(path))
    interprets = trusted and _is_interpreter(path, search.files[0])
    if trusted:
        _show_neighbours(path, search)
        _show_user_site(path, args if interprets else (), search, environ or {})
    script = _show_script(args, directory, search, trusted=interprets, environ=environ or {})
    if script is not None and not search.covered(look.realpath(directory)):
        # The program starts in another folder, where a relative name would not work.
        number, name = script
        args = (*args[:number], name, *args[number + 1 :])
    return Program(
        (path, *args),
        tuple(_outermost(search.trees)),
        # Links in a folder that was added later are left out: they are shown with it.
        tuple(dict.fromkeys(link for link in search.links if not search.covered(link.path))),
        tuple(dict.fromkeys(search.path_dirs)),
        tuple(dict.fromkeys(search.files)),
        tuple(search.scripts),
        tuple(search.notes),
        tuple(search.env.items()),
        _unique(search.chosen, path),
    )


def locate(
    command: str,
    args: Sequence[str] = (),
    *,
    directory: str,
    search_path: str,
    trusted: bool,
    environ: Mapping[str, str],
    roots: Sequence[str] = (),
) -> LocatedProgram:
    """The program that `resolve` would start. It skips what is denied on every machine, such as root's home;
    all else may be shown. `roots`: as in `resolve`."""
    search = _ProgramSearch(
        roots, ShowRules(_denied_everywhere, lambda path: True), search_path or SYSTEM_PATH
    )
    search.shim_rules = (directory, environ) if trusted else None
    try:
        path = _with_real_folder(_find_program(command, directory, search)[0])
    except (ProgramFault, OSError, ValueError):
        return LocatedProgram()
    search.note_choice(path)
    try:
        _show_executable(path, search, trusted=False, deep=False)
    except (ProgramFault, OSError, ValueError):
        pass  # the launch will fail and report it
    search.code += _scripts(path, args, directory)
    return LocatedProgram(path, _unique(search.chosen, path), tuple(dict.fromkeys(search.code)))


def program_fault(command: str, *, directory: str, search_path: str) -> ProgramFault | None:
    """Why there is no such program, as a launch would say it; None if it is found. For verbs that do not
    launch."""
    rules = ShowRules(_denied_everywhere, lambda path: True)
    try:
        _find_program(command, directory, _ProgramSearch((), rules, search_path or SYSTEM_PATH))
    except ProgramFault as fault:
        return fault
    except (OSError, ValueError):
        pass  # the launch will report it
    return None


def _denied_everywhere(path: str) -> str | None:
    """Why no policy can show it, by its name alone; None if one may."""
    hit = lexical_hit(path)
    return None if hit is None else f"it {hit.clause()}"


def _unique(chosen: Sequence[str], program: str) -> tuple[str, ...]:
    return tuple(each for each in dict.fromkeys(chosen) if each != program)


def _scripts(program: str, args: Sequence[str], directory: str) -> list[str]:
    """The files of code among the arguments: those with the ending of a script, the first path that an
    interpreter gets, and the script behind a launcher of pnpm."""
    words = [text for arg in args for text in (arg, arg.partition("=")[2]) if text and "\0" not in text]
    paths = [os.path.normpath(os.path.join(directory, word)) for word in words]
    found = [path for path in paths if path.endswith(_SCRIPTS) and look.lexists(path)]
    if os.path.basename(program).rstrip("0123456789.") in _INTERPRETERS:
        found += [path for path in paths if look.lexists(path)][:1]
    behind = packages.script_behind(look.realpath(program))
    return [*found, behind] if behind is not None else found


def _find_program(command: str, directory: str, search: _ProgramSearch) -> tuple[str, bool]:
    """The path of the program, and whether it was found on PATH."""
    if "/" not in command:
        return _on_path(command, search.search_path, search), True
    path = os.path.normpath(os.path.join(directory, command))
    if not look.lexists(path):
        raise ProgramFault(
            f"{command} does not exist" + ("" if command.startswith("/") else f" in {directory}"),
            "correct the command"
            + ("" if command.startswith("/") else f"; a relative path starts at {directory}"),
            found=False,
        )
    if not (manager := shims.manager_of(path)):
        return path, False
    if target := search.find_behind_shim(path, manager):
        return target, True  # counts as found on PATH, because the shim would search it too
    raise ProgramFault(
        f"{path} is a shim of {manager}, whose files are not in the cage",
        shims.remedy(os.path.basename(path), manager),
        found=True,
    )


def _with_real_folder(path: str) -> str:
    """`path` with its folder resolved. The last component may stay a link: the python of a virtual
    environment finds its home by that name."""
    return os.path.join(look.realpath(os.path.dirname(path)), os.path.basename(path))


def _on_path(command: str, search_path: str, search: _ProgramSearch) -> str:
    """The first usable program of that name. A program that may not be shown, or a shim that would not work
    in a cage, is skipped; the message names it."""
    refused: list[tuple[str, str]] = []
    hint = f"install {command} below /usr or /opt, or give the path of one there"
    for folder in search_path.split(":"):
        if not folder.startswith("/"):
            continue  # "" and "." mean the caller's directory, from which no program is taken
        path = os.path.join(folder, command)
        if not is_executable(path):
            continue
        reason = search.rules.denied(look.realpath(path))
        if reason is None and (manager := shims.manager_of(path)):
            if (target := search.find_behind_shim(path, manager)) is not None:
                return target
            reason = f"it is a shim of {manager}, whose files are not in the cage"
            hint = shims.remedy(command, manager)
        if reason is None:
            if refused:
                search.notes.append(f"{refused[0][0]} is skipped ({refused[0][1]}); {path} is used instead")
            return path
        refused.append((path, reason))
    if refused:
        raise ProgramFault(
            f"{command} is {refused[0][0]} on this machine, which cannot be shown to a plugin: "
            f"{refused[0][1]}",
            hint,
            found=True,
            denied=True,
        )
    told = f"{command} is not on PATH ({search_path})"
    raise ProgramFault(told, "install it, or write its full path", found=False)


def _show_executable(path: str, search: _ProgramSearch, *, trusted: bool, deep: bool, depth: int = 0) -> None:
    """Show a program, with its loader or its interpreter. `trusted`: the operator chose the path. `deep`: the
    content of the file is the operator's as well."""
    # The rule about links of a project does not apply to interpreters, hence `depth`.
    search.code.append(path)
    real = search.show(path, trusted=trusted, project=search.project if depth == 0 else None)
    head = read_head(path, real)
    if head.startswith(b"\x7fELF"):
        if (loader := loader_of(path, real, head)) is not None:
            search.code.append(loader)
            search.show(loader, trusted=deep)
    else:
        words = interpreter_words(path, head)
        if depth == _MAX_INTERPRETERS:
            raise ProgramFault(
                f"{path}: its #! lines lead in a circle",
                "name a program that is no script on the first line",
                found=True,
            )
        _show_interpreter(path, words, search, deep=deep, depth=depth + 1)


def _show_interpreter(
    script: str, words: list[str], search: _ProgramSearch, *, deep: bool, depth: int
) -> None:
    interpreter = words[0]
    if not look.lexists(interpreter):
        raise ProgramFault(
            f"{script}: its interpreter {interpreter} does not exist",
            "install it, or change the first line of the script",
            found=False,
        )
    _show_executable(interpreter, search, trusted=deep, deep=deep, depth=depth)
    if os.path.basename(interpreter) == "env":
        name = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), None)
        if name is not None and "/" not in name:
            # In the cage env searches the PATH that we set: first the system's, then the folder of this
            # program. A program of a shown installation (nvm, conda) runs with the interpreter beside it.
            path = os.path.join(os.path.dirname(script), name)
            prefix = home_of(path)
            if prefix not in search.prefixes or not is_runtime(prefix or "/") or not is_executable(path):
                path = _on_path(name, f"{SYSTEM_PATH}:{search.search_path}", search)
            search.note_choice(path)
            _show_executable(path, search, trusted=True, deep=True, depth=depth)
            if os.path.dirname(path) not in SYSTEM_PATH.split(":"):
                search.path_dirs.append(os.path.dirname(path))


_SCRIPTS = (".py", ".pyz", ".js", ".mjs", ".cjs", ".ts", ".jar", ".rb", ".pl", ".php", ".sh")
# Options that are allowed before a script. With others, such as `python -c CODE /their/app.py`, the folder of
# app.py would be shown to CODE, which may come with an untrusted project.
_HARMLESS_OPTIONS = frozenset(("-u", "-B", "-E", "-I", "-s", "--no-warnings", "--enable-source-maps", "-jar"))


# By name, and only in /usr or in the installation of a language: another program could misuse the folder.
_INTERPRETERS = (
    "python",
    "pypy",
    "node",
    "nodejs",
    "bun",
    "deno",
    "ruby",
    "perl",
    "php",
    "bash",
    "sh",
    "java",
)


def script_of(words: Sequence[str]) -> str:
    """The script that an interpreter's command line names first, or ''. Judged by names alone."""
    name = os.path.basename(words[0]).rstrip("0123456789.") if words else ""
    return words[1] if name in _INTERPRETERS and len(words) > 1 and not words[1].startswith("-") else ""


def _is_interpreter(path: str, real: str) -> bool:
    if os.path.basename(path).rstrip("0123456789.") not in _INTERPRETERS:
        return False
    return contains("/usr", real) or is_runtime(os.path.dirname(os.path.dirname(real)))


def _show_script(
    args: Sequence[str],
    directory: str,
    search: _ProgramSearch,
    *,
    trusted: bool,
    environ: Mapping[str, str],
) -> tuple[int, str] | None:
    """Show the script that an interpreter runs, as in `node /opt/server/dist/index.js`. Returns the number of
    the argument and the path; None if no script is shown."""
    number, arg = next(((n, arg) for n, arg in enumerate(args) if arg not in _HARMLESS_OPTIONS), (0, ""))
    path = os.path.normpath(os.path.join(directory, arg))
    if arg.startswith("-") or not arg.endswith(_SCRIPTS) or not look.isfile(path):
        return None
    real, links = follow(path)
    if not search.covered(real):
        if not trusted or not real.endswith(_SCRIPTS):
            return None
        packages.require_own(
            packages.project_of(path, directory, search.search_path, environ), real, path, real
        )
        package = package_of(real)
        search.add(real if search.rules.denied(package) else package, path, trusted=True)
        search.add_folders(packages.workspace_of((path, *(link.path for link in links), real)))
    search.links.extend(link for link in links if not search.covered(link.path))
    search.scripts.append(real)
    return number, path


def _show_neighbours(path: str, search: _ProgramSearch) -> None:
    """For a program that npm or pnpm installed, such as the link node_modules/.bin/server: show the same as
    for `node` with the script behind it."""
    real, links = follow(path)
    if not any("/node_modules/" in each for each in (path, real, *(link.path for link in links))):
        behind = packages.script_behind(real)
        if behind is None:
            return
        path, (real, links) = behind, follow(behind)
    if any(contains(root, real) for root in search.roots):
        return
    package = package_of(real)
    if not search.rules.denied(package):
        search.add(package, path, trusted=True)
    search.add_folders(packages.workspace_of((path, *(link.path for link in links), real)))
    search.scripts.append(real)


def _show_user_site(
    path: str, args: Sequence[str], search: _ProgramSearch, environ: Mapping[str, str]
) -> None:
    """Show the packages of `pip install --user`, for a script that it made and for `python3 -m` with such a
    package. The cage has another home, so PYTHONUSERBASE names the place."""
    interpreter = next((file for file in search.files if packages.is_python(file)), "")
    if args:
        words = [arg for arg in args if arg not in _HARMLESS_OPTIONS]
        base = environ.get("PYTHONUSERBASE") or os.path.join(environ.get("HOME") or "/", ".local")
        module = words[1] if words[:1] == ["-m"] and len(words) > 1 else ""
    else:
        base, module = os.path.dirname(os.path.dirname(path)), ""
    base = look.realpath(base)
    site = packages.user_site(base, interpreter)
    if site is None or search.covered(site) or home_of(path) is not None:
        return
    if not args or packages.has_module(site, module):
        search.add_folders((site,))
        search.env["PYTHONUSERBASE"] = base


def _outermost(trees: Sequence[str]) -> list[str]:
    return [
        tree
        for i, tree in enumerate(trees)
        if not any(
            contains(other, tree) and (other != tree or j < i) for j, other in enumerate(trees) if j != i
        )
    ]
