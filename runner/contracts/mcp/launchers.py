"""Commands that start a server through another program: `npx`, `uvx`, `docker run`.

A launcher such as npx asks its registry at every start. In a cage it retries for 72 seconds and then fails,
so such a command is refused before anything starts, unless its packages were fetched by `runner install`:
then `launch_of` says which, and they start from the store.
Everything here is decided by the words of the command line alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from runner.contracts.mcp.docker_run import container_of
from runner.install.image_reference import NOT_INSTALLED
from runner.install.request import Request, UnusableSpec, npm_request, pypi_request
from runner.plugin import LaunchFault
from sandbox.spec import Network
from sandbox.speed.value import NamedTuple

FETCHES = "launcher_needs_network"
CONTAINER = "launcher_is_container"
WINDOWS = "launcher_is_windows"

_MOST_WRAPPERS = 8  # such as env in sh in env
_LONGEST_SHOWN = 200
_LONGEST_SCRIPT = 8192
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash", "fish"))
_WINDOWS_SHELLS = frozenset(("cmd", "powershell"))
IMAGE_RUNNERS = ("docker", "podman")  # whose `run` is understood
_CONTAINERS = {"docker": "docker", "podman": "podman", "nerdctl": "nerdctl"}
_CONTAINER_VERBS = frozenset(("run", "exec", "start", "create", "compose", "container", "mcp"))
_CONTAINER_VALUES = frozenset(("-H", "--host", "-c", "--context", "--connection", "--config", "-l", "--url"))
# Programs that start the command behind them: options that are followed by a value, and how many words come
# before the command.
_PREFIXES: dict[str, tuple[tuple[str, ...], int]] = {
    "nice": (("-n", "--adjustment"), 0),
    "timeout": (("-k", "--kill-after", "-s", "--signal"), 1),
    "nohup": ((), 0),
    "stdbuf": (("-i", "--input", "-o", "--output", "-e", "--error"), 0),
    "setsid": ((), 0),
    "ionice": (("-c", "--class", "-n", "--classdata"), 0),
}
# The hosts of a grant with which a launcher can do its work.
_REGISTRIES = frozenset(("registry.npmjs.org", "*.npmjs.org", "pypi.org"))
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_SCRIPT_OF_NPM = re.compile(r"/np(x|m)-cli\.js$")


class _Words(NamedTuple):
    """The arguments of a launcher that matter here."""

    packages: tuple[str, ...]  # named by an option: --package, --from, --spec
    extra: tuple[str, ...]  # named by --with
    python: str
    first: str  # the first word that is no option: a program, or a package
    offline: bool
    rest: tuple[str, ...] = ()  # the words behind it: the program's own
    script: bool = False  # a line of shell takes the place of the program
    registry: str = ""  # the option that names one, if there is one
    unknown: str = ""  # an option whose meaning is not known here


class _Fetcher(NamedTuple):
    """How one launcher writes its options."""

    package: tuple[str, ...]
    values: tuple[str, ...]  # other options that are followed by a value
    # Options without a value. One that is neither here nor there may change what is fetched, or the word
    # behind it may be its value and not the package: npx --tag next server.
    flags: tuple[str, ...]
    before: tuple[str, ...] = ()  # such options with a value that may stand before `tool run`


_NPM_VALUES = ("-c", "--call", "--prefix", "--cache", "--registry", "--userconfig", "--loglevel")
_NPM_FLAGS = tuple(
    (
        "-y --yes --no --no-install --offline --prefer-offline --prefer-online --no-color -q --quiet -s"
        " --silent -d --verbose --no-progress --no-audit --no-fund --ignore-scripts --no-update-notifier"
        " --legacy-peer-deps --shell-mode --no-color"
    ).split()
)
_NPM = _Fetcher(("-p", "--package"), _NPM_VALUES, _NPM_FLAGS)
_UV_VALUES = tuple(
    (
        "--index-url -i --extra-index-url --index --default-index -f --find-links --cache-dir --config-file"
        " --refresh-package -P --upgrade-package --link-mode -b --keyring-provider --color"
        " --reinstall-package"
    ).split()
)
_UV_FLAGS = tuple(
    (
        "-q --quiet -v --verbose --offline --no-progress -n --no-cache --no-config --isolated --no-project"
        " --no-sync --frozen --locked --refresh -U --upgrade --reinstall --compile-bytecode --no-build"
        " --no-env-file --native-tls --system-certs --managed-python --no-managed-python"
        " --no-python-downloads --preview --no-color"
    ).split()
)
_UV_BEFORE = ("--directory", "--project", "--allow-insecure-host")
_UV = _Fetcher(("--from",), _UV_VALUES, _UV_FLAGS, _UV_BEFORE)
_PIPX_FLAGS = ("--no-cache", "-q", "--quiet", "-v", "--verbose", "--fetch-missing-python")
_PIPX = _Fetcher(("--spec",), ("--index-url", "-i", "--pip-args"), _PIPX_FLAGS)
_BUN_FLAGS = ("--bun", "-b", "-y", "--yes", "--no-install", "--offline", "--silent", "--verbose")
_BUN = _Fetcher(("-p", "--package"), (), _BUN_FLAGS)
_REGISTRY_OPTIONS = tuple(
    (
        "--registry --userconfig --index-url -i --extra-index-url --index --default-index -f --find-links"
        " --config-file --pip-args"
    ).split()
)
# Variables that do the same; npm takes its own in any case.
_REGISTRY_VARIABLES = re.compile(
    r"npm_config_(?:registry|userconfig|globalconfig|@.*|//.*)|bun_config_registry|yarn_npm_registry_server"
    r"|uv_(?:default_index|index|index_url|extra_index_url|find_links|config_file|override|constraint)"
    r"|(?:pip|uv)_(?:index_url|extra_index_url|find_links|config_file)",
    re.IGNORECASE,
)

# The words that begin a command line, without options between them -> how the rest is written.
_FETCHERS: dict[tuple[str, ...], _Fetcher] = {
    ("npx",): _NPM,
    ("npm", "exec"): _NPM,
    ("npm", "x"): _NPM,
    ("pnpx",): _NPM,
    ("pnpm", "dlx"): _NPM,
    ("yarn", "dlx"): _NPM,
    ("bunx",): _BUN,
    ("bun", "x"): _BUN,
    ("uvx",): _UV,
    ("uv", "tool", "run"): _UV,
    ("uv", "x"): _UV,
    ("pipx", "run"): _PIPX,
}
_UV_RUN = "uv run --with"
_MANAGERS = frozenset(words[0] for words in _FETCHERS)
# The names of programs that begin such a command line. A caller can rule out all others without this module.
NAMES = _MANAGERS | _SHELLS | _WINDOWS_SHELLS | set(_CONTAINERS) | {"env"} | set(_PREFIXES)


def launcher_fault(
    argv: Sequence[str], network: Network | None = None, variables: Iterable[str] = ()
) -> LaunchFault | None:
    """Returns why a command that starts a server through a launcher is refused, or None.

    `network`: what is asked for the command. A launcher that can reach its registry is not refused.
    `variables`: the names of those that its entry sets.
    """
    found = _fault(tuple(argv), 0)
    if found is None or found.cause not in (FETCHES, NOT_INSTALLED):
        return found
    if network is not None and found.cause == FETCHES:
        asked = {host.rpartition(":")[0] for host in network.hosts}
        if network.mode == "host" or not asked.isdisjoint(_REGISTRIES):
            return None
    try:
        require_no_registry(variables)
    except UnusableSpec as fault:
        return found._replace(hint=_by_hand(fault, _name(argv)))
    try:
        is_direct = launch_of(argv) is not None
    except UnusableSpec:
        is_direct = True
    if is_direct:
        return found
    return found._replace(
        hint=f"write the launcher itself as the command, without {_name(argv)}; then {found.hint}"
    )


def _name(argv: Sequence[str]) -> str:
    name = program_name(argv[0])
    return name if _is_shown(name) else "the program before it"


class Launch(NamedTuple):
    """The command line of a launcher: what it fetches, and what the program gets."""

    written: str  # the launcher as people write it
    request: Request
    args: tuple[str, ...]


def launch_of(argv: Sequence[str]) -> Launch | None:
    """What a launcher is asked for; None if the command is none of a launcher that fetches. Raises
    UnusableSpec."""
    line = command_line(argv)
    if not line:
        return None
    name = program_name(line[0])
    if name in IMAGE_RUNNERS and _makes_container(line[1:]):
        found_run = container_of(line)
        return Launch(f"{name} run", found_run.request, found_run.image.args)
    line = _behind_interpreter(name, line[1:]) or (name, *line[1:])
    found = _fetcher(line) if line[0] in _MANAGERS else None
    if found is None:
        return None
    return _understand(*found)


def command_line(argv: Sequence[str]) -> tuple[str, ...]:
    """The words; some entries have the whole line in `command`."""
    return _split(argv[0]) if len(argv) == 1 and " " in argv[0].strip() else tuple(argv)


def require_no_registry(variables: Iterable[str]) -> None:
    """Raises UnusableSpec if a variable that an entry sets names a registry. Packages of the same names from
    the person's own registries may be a stranger's."""
    if name := next(filter(_REGISTRY_VARIABLES.fullmatch, variables), ""):
        raise UnusableSpec(f"names a registry (the variable {name}), which only your own configuration may")


def _understand(written: str, fetcher: _Fetcher, rest: Sequence[str]) -> Launch:
    """Raises UnusableSpec."""
    words = _read_words(fetcher, rest)
    if words.unknown:
        shown = words.unknown if _is_shown(words.unknown.lstrip("-")) else "of unusual characters"
        raise UnusableSpec(f"has an option ({shown}) that may change which package it means")
    if not words.first:
        raise UnusableSpec("names no program")
    if words.registry:
        own = "npm" if fetcher in (_NPM, _BUN) else "pip"
        raise UnusableSpec(f"names a registry ({words.registry}), which only your {own} configuration may")
    if fetcher in (_NPM, _BUN):
        if words.script:
            raise UnusableSpec("runs a line of shell (-c)")
        # npm itself takes the first `--` away; npx and the others pass it on.
        at = words.rest.index("--") if written.startswith("npm ") and "--" in words.rest else -1
        args = words.rest if at < 0 else (*words.rest[:at], *words.rest[at + 1 :])
        request = npm_request(words.packages or (words.first,), words.first if words.packages else "")
        return Launch(written, request, args)
    if written == _UV_RUN:
        is_script = words.first.endswith(".py")
        request = pypi_request(words.extra, "python" if is_script else words.first, words.python)
        return Launch(written, request, (words.first, *words.rest) if is_script else words.rest)
    package = words.packages[-1] if words.packages else words.first
    request = pypi_request((package, *words.extra), words.first if words.packages else "", words.python)
    return Launch(written, request, words.rest)


def _fault(argv: tuple[str, ...], depth: int) -> LaunchFault | None:
    if not argv or depth > _MOST_WRAPPERS:
        return None
    name = program_name(argv[0])
    if (line := command_line(argv)) != argv:
        return _fault(line, depth + 1)
    if " " in name and program_name(first := argv[0].split()[0]) in NAMES and "/" not in first:
        return _fault((*_split(argv[0]), *argv[1:]), depth + 1)
    if name in _WINDOWS_SHELLS:
        return _windows(argv, depth)
    if name == "env":
        return _fault(_behind_env(argv[1:]), depth + 1)
    if name in _PREFIXES:
        return _fault(_behind_prefix(name, argv[1:]), depth + 1)
    if name in _SHELLS:
        return next(filter(None, (_fault(each, depth + 1) for each in _behind_shell(argv[1:]))), None)
    if name in _CONTAINERS:
        return _container(name, argv[1:])
    inner = _behind_interpreter(name, argv[1:])
    if inner:
        return _fault(inner, depth + 1)
    if name not in _MANAGERS:
        return None
    found = _fetcher((name, *argv[1:]))
    return None if found is None else _fetching(*found)


def program_name(command: str) -> str:
    """The name of a program, without its folder and without the ending that it has on Windows."""
    name = os.path.basename(command.strip().replace("\\", "/")).lower()
    return name.removesuffix(".exe").removesuffix(".cmd").removesuffix(".bat").removesuffix(".ps1")


# --- launchers that fetch -----------------------------------------------------------------------------------


def _fetcher(argv: Sequence[str]) -> tuple[str, _Fetcher, tuple[str, ...]] | None:
    """The launcher as people write it, its options, and the words behind its name."""
    for key, fetcher in _FETCHERS.items():
        if key[0] != argv[0]:
            continue
        rest = list(argv[1:])
        before: list[str] = []  # options of the program itself: `uv --offline tool run`
        for word in key[1:]:
            before += _options(rest, (*fetcher.values, *fetcher.before, *fetcher.package))
            if not rest or rest.pop(0) != word:
                break
        else:
            return " ".join(key), fetcher, (*before, *rest)
    # `uv run` works in a project that is installed. What it adds to the project is fetched.
    if argv[0] == "uv" and "run" in argv[1:]:
        rest = list(argv[1:])
        valued = (*_UV_VALUES, *_UV_BEFORE)
        before = _options(rest, valued)
        added = [word for word in _options(rest[1:], valued) if word.partition("=")[0] == "--with"]
        if rest[:1] == ["run"] and added:
            return _UV_RUN, _UV, (*before, *rest[1:])
    return None


def _options(words: list[str], valued: Sequence[str]) -> list[str]:
    """Take the options from the front of `words`."""
    taken: list[str] = []
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        option = words.pop(0)
        taken.append(option)
        if option in (*valued, "--with", "--python", "-p") and words:
            taken.append(words.pop(0))
    return taken


def _fetching(written: str, fetcher: _Fetcher, rest: tuple[str, ...]) -> LaunchFault:
    from shlex import join, quote

    words = _read_words(fetcher, rest)
    what = quote(words.first) if words.first and _is_shown(words.first) else "its package"
    if words.offline:
        message = f"{written} starts {what} from a cache in the home directory, which is not in the cage"
    else:
        message = f"{written} needs the network at every start, so it cannot start {what} in a cage"
    try:
        request = _understand(written, fetcher, rest).request
    except UnusableSpec as fault:
        return LaunchFault(FETCHES, message, _by_hand(fault, written))
    hint = f"fetch it once: {join(('runner', 'install', '--', *request.command))}; it starts from there then"
    return LaunchFault(FETCHES, message, hint)


def _by_hand(fault: UnusableSpec, written: str) -> str:
    return f"it {fault}: install it by hand, and give the program's own path in place of {written}"


def _read_words(fetcher: _Fetcher, rest: Sequence[str]) -> _Words:
    packages: list[str] = []
    extra: list[str] = []
    python = first = ""
    registry = unknown = ""
    offline = script = False
    words = list(rest)
    while words:
        word = words.pop(0)
        if word == "--":
            continue
        if not word.startswith("-") or word == "-":
            first = word
            break
        option, equals, value = word.partition("=")
        option_of_package = option in fetcher.package
        is_python = fetcher in (_UV, _PIPX)
        adds = option in ("--with", "-w") and is_python
        takes = option_of_package or adds or option in fetcher.values
        takes = takes or (is_python and option in ("--python", "-p"))
        if takes and not equals:
            value = words.pop(0) if words else ""
        if option_of_package and value:
            packages.append(value)
        elif adds and value:
            extra += value.split(",")
        elif option in ("--python", "-p") and is_python:
            python = value
        offline = offline or option in ("--offline", "--no-install", "--no")
        script = script or (fetcher is _NPM and option in ("-c", "--call"))
        registry = option if option in _REGISTRY_OPTIONS else registry
        is_known = takes or option in fetcher.flags or option in _REGISTRY_OPTIONS
        unknown = unknown if is_known or unknown else option
    return _Words(
        tuple(packages), tuple(extra), python, first, offline, tuple(words), script, registry, unknown
    )


def _is_shown(word: str) -> bool:
    """Whether a word of the command line may stand in a command that a person copies."""
    return word.isprintable() and len(word) <= _LONGEST_SHOWN and not word.startswith("-")


# --- containers, and Windows --------------------------------------------------------------------------------


def _makes_container(words: Sequence[str]) -> bool:
    return tuple(words[:1]) == ("run",) or tuple(words[:2]) == ("container", "run")


def container_fault(argv: Sequence[str], image: str, *, has_env_file: bool) -> LaunchFault | None:
    """Why a `docker run` does not go together with what else its entry asks for, or None. `image`: another
    one, or ''. `has_env_file`: the entry itself names a file of variables."""
    line = command_line(argv)
    name = program_name(line[0]) if line else ""
    if name not in IMAGE_RUNNERS or not _makes_container(line[1:]):
        return None
    try:
        run = container_of(line)
    except UnusableSpec:
        return None  # `launcher_fault` tells it
    if image:
        message = f"{name} run starts in an image of its own, and {image} is asked for as well"
        return LaunchFault(
            CONTAINER, message, "leave one out: --image, image of x-sandbox, or the docker run"
        )
    if has_env_file and run.env_files:
        message = f"{name} run has --env-file, and its entry has a file of variables as well"
        return LaunchFault(CONTAINER, message, "write all variables into one of them, and take the other out")
    return None


def _container(name: str, rest: Sequence[str]) -> LaunchFault | None:
    words = list(rest)
    if name in IMAGE_RUNNERS and _makes_container(rest):
        try:
            request = container_of((name, *rest)).request
            message = f"the image {request} of {name} run is not installed, and no launch fetches one"
            hint = f"fetch it once: runner install {request.command[0]}; it starts in a cage then"
            return LaunchFault(NOT_INSTALLED, message, hint)
        except UnusableSpec as fault:
            message = f"{name} run starts as an image in a cage, and this one cannot: it {fault}"
            return LaunchFault(
                CONTAINER, message, "change that, or leave this entry as it is, without runner"
            )
    while words and words[0].startswith("-"):
        if words.pop(0) in _CONTAINER_VALUES and words:
            words.pop(0)
    if not words or words[0] not in _CONTAINER_VERBS:
        return None
    if name == "podman":
        why = "it makes namespaces, which no plugin may"
    else:
        why = f"it commands {name}'s daemon, whose socket would give the plugin all rights of root"
    message = f"{name} {words[0]} starts a container already, and a cage cannot hold it: {why}"
    hint = f"leave this entry as it is, without runner; or install the server without {name} and give the "
    return LaunchFault(CONTAINER, message, f"{hint}path of its program")


def _windows(argv: tuple[str, ...], depth: int) -> LaunchFault:
    name = program_name(argv[0])
    rest = argv[1:]
    while rest and rest[0][:1] in ("/", "-"):
        rest = rest[1:]
    inner = _fault(rest, depth + 1)
    message = f"{name} is a program of Windows: this entry is written for Windows"
    if inner is None:
        begin = f" ({rest[0]} …)" if rest and _is_shown(rest[0]) else ""
        return LaunchFault(WINDOWS, message, f"write the command without {name} and its options{begin}")
    return LaunchFault(WINDOWS, f"{message}; what it starts cannot run in a cage either", inner.hint)


# --- programs that start another one ------------------------------------------------------------------------


def _behind_env(words: Sequence[str]) -> tuple[str, ...]:
    rest = list(words)
    while rest:
        word = rest[0]
        if word in ("-S", "--split-string") and len(rest) > 1:
            return (*_behind_env(_split(rest[1])), *rest[2:])
        if word.startswith(("-S", "--split-string=")):
            joined = word.removeprefix("--split-string=") if word.startswith("--") else word[2:]
            return (*_behind_env(_split(joined)), *rest[1:])
        if word in ("-u", "--unset", "-C", "--chdir"):
            del rest[:2]
        elif word.startswith("-") or _VARIABLE.match(word):
            del rest[0]
        else:
            break
    return tuple(rest)


def _behind_prefix(name: str, words: Sequence[str]) -> tuple[str, ...]:
    valued, before = _PREFIXES[name]
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        if option in valued and rest:
            rest.pop(0)
    return tuple(rest[before:])


def _behind_shell(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The commands of `sh -c "cd x && exec npx …"`, as far as quotes and separators tell."""
    rest = list(words)
    while rest and rest[0].startswith(("-", "+")):
        option = rest.pop(0)
        if "c" in option.lstrip("-") and not option.startswith("--") and rest:
            for line in rest[0][:_LONGEST_SCRIPT].splitlines():
                yield from _commands(_split(line, separators=True))
            return
        if option in ("-o", "+o", "-O", "+O") and rest:
            rest.pop(0)


def _commands(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    command: list[str] = []
    for word in (*words, ";"):
        if word and not word.strip("();<>|&"):
            yield tuple(command)
            command = []
        elif command or not (_VARIABLE.match(word) or word in ("exec", "command", "nohup", "time", "sudo")):
            command.append(word)


def _behind_interpreter(name: str, words: Sequence[str]) -> tuple[str, ...]:
    """`python -m pipx run x`, and `node …/npx-cli.js x`."""
    rest = list(words)
    if name.rstrip("0123456789.") == "python":
        while rest and rest[0] in ("-u", "-B", "-E", "-I", "-s"):
            rest.pop(0)
        return tuple(rest[1:]) if rest[:1] == ["-m"] and rest[1:2] in (["uv"], ["pipx"]) else ()
    if name in ("node", "nodejs") and rest and (script := _SCRIPT_OF_NPM.search(rest[0])):
        return (f"np{script[1]}", *rest[1:])
    return ()


def _split(text: str, *, separators: bool = False) -> tuple[str, ...]:
    """The words of a line. One whose quotes do not match has the words between its blanks."""
    from shlex import shlex

    lexer = shlex(text[:_LONGEST_SCRIPT], posix=True, punctuation_chars="();<>|&" if separators else "")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return tuple(lexer)
    except ValueError:
        return tuple(text.split())
