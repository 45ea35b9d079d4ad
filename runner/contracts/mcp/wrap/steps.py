"""What `runner wrap` does with each server of a configuration, decided from the text alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from shutil import which
from typing import Literal

from runner.contracts.configurations import PLUGIN_PREFIX
from runner.contracts.mcp.hosts.host import HostServer
from runner.contracts.mcp.hosts.wrapping import (
    NO_FILE,
    WrappedLine,
    acting_names,
    acts_at_start,
    acts_on_runner,
    env_names,
    is_outdated,
    only_limits,
    option_names,
    own_options,
    plugin_env_file,
    record_of,
    run_name,
    split_wrapped,
)
from runner.contracts.mcp.installed import find_stored
from runner.contracts.mcp.launchers import FETCHES, launch_of, launcher_fault, require_no_registry
from runner.contracts.mcp.wrap.configuration import Configuration, image_of, table_names, value_at
from runner.contracts.mcp.wrap.program import is_this_runner
from runner.contracts.mcp.wrap.redact import shown_line
from runner.install.image_reference import NOT_INSTALLED, image_request
from runner.install.request import Request, UnusableSpec
from runner.install.roots import main_store_root
from runner.install.store import Store, StoreRefused
from sandbox.document.diagnostic import cut, printable, quoted
from sandbox.spec import is_variable_name
from sandbox.speed.value import NamedTuple

NOT_WRAPPED = "is not wrapped"
WRAPPED = "is wrapped already"
IS_GATEWAY = "starts the gateway, which has a cage for each of its plugins"
OUTDATED = "an earlier version wrapped it, so its variables act on the runner itself"
_AGAIN = "runner wrap --undo, then runner wrap, writes it anew"
ENV_FILE = "envFile"
_MOST_SHOWN = 400  # characters of options
# Options of an entry that somebody wrote by hand which ask for something, and are shown. All others name a
# place of the runner's, a secret or a file that it reads: a policy decides whether there is a cage at all.
_GIVES_NOTHING = ("--name", "--server", "--contract", "--inspect")
_BY_HAND = (
    *"--read --write --net --env --project --cwd --memory --pids --cpu --cpu-time --deadline --limit".split(),
    *_GIVES_NOTHING,
)


class Step(NamedTuple):
    """What `wrap` does with one server."""

    server: HostServer
    does: Literal["wrap", "rewrap", "undo", "leave"]
    reason: str = ""  # of "leave", as the second half of a sentence
    # Of an entry that is wrapped: how it differs from what `wrap` would write, each as a part of a sentence.
    otherwise: tuple[str, ...] = ()
    # Why an entry that looks wrapped, or has the runner in it, is not as safe as it looks: each is an error.
    unsafe: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    acting: tuple[str, ...] = ()  # names of the entry's variables that act on the runner itself
    kept: tuple[str, ...] = ()  # of "rewrap": options that a person added
    is_ours: bool = True  # of an entry that looks wrapped: it starts this runner
    added: tuple[str, ...] = ()  # names that its host passes on since it was wrapped
    by_hand: str = ""  # of an entry that somebody wrote with the runner in it: what its options say
    fetches: tuple[Request, ...] = ()  # what is not in the store, and `wrap` offers to fetch

    @property
    def fetched(self) -> str:
        """What it fetches, for a sentence."""
        return " and ".join(map(str, self.fetches))


def chosen(config: Configuration, names: Sequence[str]) -> tuple[HostServer, ...]:
    """The servers that --server names; all without a name. ValueError: there is none of that name."""
    if not names:
        return config.servers
    found: dict[HostServer, None] = {}
    for name in names:
        matching = [each for each in config.servers if name in _called(each)]
        if not matching:
            known = ", ".join(quoted(each.label) for each in config.servers[:20]) or "none"
            raise ValueError(f"--server {printable(name)}: there is no such server; there are {known}")
        found.update(dict.fromkeys(matching))
    return tuple(found)


def _called(server: HostServer) -> tuple[str, ...]:
    """What --server may call it: also the name that its wrapped entry has for the runner."""
    run = run_name(server.name)
    return server.name, server.label, run, f"{server.scope}:{run}" if server.scope else run


def wrap_step(config: Configuration, server: HostServer, program: str, *, as_fetched: bool = False) -> Step:
    """The step for one server. `program`: the path of this runner; empty: unknown, so no entry counts as
    starting it. `as_fetched`: what `wrap` offers to fetch counts as fetched."""
    old = split_wrapped(server.argv)
    if old is not None:
        step = _step_of_wrapped(config, server, old, program)
        return step._replace(fetches=_to_fetch(config, server, old.argv))
    by_hand = _caged_by_hand(config, server, program)
    if by_hand is not None:
        return by_hand
    fetches = _to_fetch(config, server, server.argv)
    reason = _no_cage_reason(config, server, fetches)
    if reason:
        return Step(server, "leave", reason)
    step = Step(server, "wrap", notes=_notes(config, server), fetches=fetches)
    if fetches and not as_fetched:
        verb = "is" if len(fetches) == 1 else "are"
        return Step(server, "leave", f"needs {step.fetched}, which {verb} not installed", fetches=fetches)
    return step


def requests_of(config: Configuration, server: HostServer, argv: Sequence[str]) -> tuple[Request, ...]:
    """What has to be in the store before an entry can start: what its launcher would fetch, and the image of
    its `x-sandbox`. `argv`: its own command line. Raises UnusableSpec."""
    if server.remote or not argv:
        return ()
    launch, image = launch_of(argv), image_of(config, server)
    if launch is not None:
        # Those of a wrapped entry begin otherwise.
        require_no_registry(name.removeprefix(PLUGIN_PREFIX) for name in table_names(config, server))
        if launch.request.registry == "image" and image:
            raise UnusableSpec(f"starts in an image of its own, and x-sandbox names {image[:80]!r}")
    asked = (image_request(image),) if image else ()
    return asked if launch is None else (launch.request, *asked)


def _to_fetch(config: Configuration, server: HostServer, argv: Sequence[str]) -> tuple[Request, ...]:
    """What an entry needs that is not in the store and can be put there."""
    store = Store(main_store_root(os.environ))
    try:
        return tuple(each for each in requests_of(config, server, argv) if store.find(each) is None)
    except (UnusableSpec, StoreRefused):
        return ()


def _notes(config: Configuration, server: HostServer) -> tuple[str, ...]:
    found = ["it is switched off in the configuration, and stays so"] if server.disabled else []
    if odd := [quoted(name) for name in table_names(config, server) if not is_variable_name(name)]:
        found.append(f"it does not get {', '.join(odd)}: not every program takes such a name for a variable")
    return tuple(found)


def _step_of_wrapped(config: Configuration, server: HostServer, old: WrappedLine, program: str) -> Step:
    own = _own_options(config, server, old)
    limits = only_limits(own)
    otherwise = (f"it has {_shown_options(limits)}",) if limits else ()
    early = tuple(name for name in server.passed if acts_at_start(name))
    acting = (*acting_names(server, table_names(config, server)), *early)
    is_ours = _starts_this_runner(server, old.program, program)
    unsafe: list[str] = []
    if not is_ours:
        unknown = "" if program else ", as far as anybody can tell: the path of this runner is not known"
        unsafe.append(f"it starts another program: {quoted(old.program, 200)}{unknown}")
    elif is_outdated(old):
        unsafe.append(OUTDATED)
    elif acting:
        unsafe.append(f"these act on the runner itself: {', '.join(map(quoted, acting))}")
    unsafe += _foreign(config, server, old)
    if own != limits:
        unsafe.append(f"it does not start with {_shown_options(own)}")
    fault = server.fault or _variables_fault(config, server)
    if fault and not unsafe:
        unsafe.append(f"it {fault}")
    names = env_names(old.options)
    added = tuple(name for name in filter(is_variable_name, server.passed) if name not in names)
    if not unsafe and not added:
        again = (_AGAIN,) if otherwise else ()
        return Step(server, "leave", "; ".join((WRAPPED, *otherwise, *again)), otherwise)
    # A person's own limits stay. An entry that was written elsewhere gets only our options.
    kept = limits if is_ours and not _foreign(config, server, old) else ()
    new = (f"it will get what its host passes on since: {', '.join(added)}",) if added else ()
    notes = (*unsafe, *otherwise, *new, *_notes(config, server))
    if fault:
        return Step(server, "leave", fault, otherwise, tuple(unsafe), acting=acting, is_ours=is_ours)
    return Step(server, "rewrap", "", otherwise, tuple(unsafe), notes, acting, kept, is_ours, added=added)


def _foreign(config: Configuration, server: HostServer, old: WrappedLine) -> tuple[str, ...]:
    """Differences that a cloned project could cause: an entry that claims to be of another configuration."""
    found: list[str] = []
    record = record_of(old.options)
    file = record.get("file", "")
    if file != config.path:
        found.append(f"it was wrapped for another configuration: {quoted(file, 200)}")
    if record.get("scope", "") != server.scope:
        found.append(f"it was wrapped for another project: {quoted(record.get('scope', ''), 200)}")
    return tuple(found)


def _own_options(config: Configuration, server: HostServer, old: WrappedLine) -> tuple[str, ...]:
    passed = server.passed
    if is_outdated(old):  # each variable had an option, also those of its file
        passed = (*passed, *table_names(config, server), *(env_names(old.options) if server.env_file else ()))
    return own_options(old.options, server.name, passed, server.env_file)


def _shown_options(options: Sequence[str]) -> str:
    line = shown_line(options)
    if len(line) > _MOST_SHOWN:  # no long value hides the name of an option
        names = dict.fromkeys(cut(name, 40) for name in option_names(options))
        line = f"{' '.join(names)} (in full: {cut(line, _MOST_SHOWN)})"
    return f"options of its own: {line}"


def _starts_this_runner(server: HostServer, command: str, program: str) -> bool:
    """Whether a host that starts the command starts this very runner: by its absolute path, or by the
    person's own PATH where the entry sets none."""
    if os.path.isabs(command):
        return is_this_runner(command, program)
    sets_path = server.env_file not in ("", NO_FILE) or any(name == "PATH" for name, _ in server.env)
    if command != "runner" or sets_path:
        return False
    return is_this_runner(os.path.abspath(which(command) or "/"), program)


def _caged_by_hand(config: Configuration, server: HostServer, program: str) -> Step | None:
    """The step for an entry that starts this runner by hand: a cage in a cage cannot be made. Another program
    of that name is a program like all others."""
    argv = server.argv
    verbs = ("run", "exec", "gateway")
    if len(argv) < 2 or argv[1] not in verbs or not _starts_this_runner(server, argv[0], program):
        return None
    options = argv[2 : argv.index("--")] if "--" in argv else argv[2:]
    told = "runs in a cage already"
    if argv[1] == "gateway":
        told = IS_GATEWAY
    elif argv[1] == "exec" or only_limits(options) != options:
        words = options if argv[1] == "run" else argv[1:]
        told = f"starts this runner by {_shown_options(words)}; runner wrap cannot judge them"
    elif options:
        told += f"; it has {_shown_options(options)}"
    unsafe: list[str] = []
    # In a file that came with a project, its author chose the options.
    is_own = config.place is not None and config.place.own
    allowed = _BY_HAND if is_own else (*_GIVES_NOTHING, *option_names(only_limits(options)))
    if argv[1] == "gateway":
        allowed = (*allowed, "--config", "--client", "--list-wait", *(("--settings",) if is_own else ()))
    if names := [name for name in dict.fromkeys(option_names(options)) if name not in allowed]:
        shown = ", ".join(cut(name, 40) for name in names)
        unsafe.append(f"the configuration chooses what only you should choose: {shown}")
    acting = tuple(name for name in (*table_names(config, server), *server.passed) if acts_on_runner(name))
    acting += (ENV_FILE,) if server.env_file else ()
    if acting:
        unsafe.append(f"these act on the runner itself: {', '.join(map(quoted, acting))}")
    advice = ("write the command itself into the entry, and wrap it",) if unsafe else ()
    reason = "; ".join((told, *unsafe, *advice))
    by_hand = "" if told == IS_GATEWAY else told
    return Step(server, "leave", reason, unsafe=tuple(unsafe), acting=acting, by_hand=by_hand)


def undo_step(server: HostServer) -> Step:
    if split_wrapped(server.argv) is None:
        return Step(server, "leave", NOT_WRAPPED)
    return Step(server, "undo")


def _no_cage_reason(config: Configuration, server: HostServer, fetches: tuple[Request, ...]) -> str:
    """Returns why an entry cannot be wrapped, as the second half of a sentence, or ''. `fetches`: what can be
    fetched for it."""
    if server.remote:
        return "is reached over the network: there is no program to run in a cage"
    if server.skipped or server.fault:
        return server.skipped or server.fault
    if reason := _variables_fault(config, server):
        return reason
    if not server.argv:
        return "has no command"
    command = server.argv[0]
    fault = launcher_fault(server.argv, variables=table_names(config, server))
    if fault is not None:
        try:
            # What can be fetched was understood: launch_of does not raise then.
            launch = launch_of(server.argv) if fetches else None
            has_program = (launch is not None and launch.request in fetches) or (
                find_stored(server.argv, os.environ, main_only=True) is not None
            )
        except StoreRefused as refused:
            return f"cannot start from the store: {refused}; {refused.hint}".removesuffix("; ")
        if fault.cause not in (FETCHES, NOT_INSTALLED) or not has_program:
            return f"cannot run in a cage: {fault.message}; {fault.hint}"
    if any(c in " \t\n" for c in command) and not os.path.isfile(os.path.expanduser(command)):
        return (
            "has a whole command line in its command, and hosts do not split it;"
            " write the program into the command and the rest into the arguments"
        )
    switch = config.host.sandbox_switch if config.host is not None else ""
    entry = value_at(config.document.data, server.keys)
    if switch and isinstance(entry, dict) and entry.get(switch) is True:
        return (
            f"runs in {config.host_name}'s own sandbox ({switch}), inside of which no cage can be made;"
            f" set {switch} to false to wrap it"
        )
    return ""


def _variables_fault(config: Configuration, server: HostServer) -> str:
    """Returns why the entry's variables would reach the runner itself, or ''."""
    for name in table_names(config, server):
        if not name or "=" in name or "\0" in name:
            return f"has a variable {quoted(name)}, which is the name of none"
    entry = value_at(config.document.data, server.keys)
    files = [key for key in entry if _is_env_file(key)] if isinstance(entry, dict) else []
    tables = [key for key in entry if _is_env_table(key)] if isinstance(entry, dict) else []
    if other := [str(key) for key in tables if (*server.keys, key) != server.env_keys]:
        return f"has {quoted(other[0])}, and {config.host_name} may take it for variables too; remove it"
    if files and (not server.env_file or files != [ENV_FILE]):
        return (
            f"has {quoted(str(files[0]))}, and it is not known what {config.host_name} does with it; remove"
            " it, or write its variables into the entry"
        )
    return _passed_fault(server)


def _is_env_file(key: str) -> bool:
    return key.replace("_", "").lower() == ENV_FILE.lower()


def _is_env_table(key: str) -> bool:
    return key.replace("_", "").lower() in (
        "env",
        "envs",
        "environment",
        "environmentvariables",
        "envvariables",
    )


def _passed_fault(server: HostServer) -> str:
    if found := [quoted(name) for name in server.passed if acts_at_start(name)]:
        return (
            f"has its host pass on {', '.join(found)}, which acts on the runner before that can drop it;"
            " take it out of the entry to wrap it"
        )
    return ""


def plugin_words(config: Configuration, server: HostServer) -> object:
    """The command line, variables and variables file of a server's program, wrapped or not. Variables are
    compared as written: some hosts accept values that are not strings."""
    old = split_wrapped(server.argv)
    table = value_at(config.document.data, server.env_keys) if server.env_keys is not None else None
    if old is None or is_outdated(old):
        return (server.argv if old is None else old.argv), table, server.env_file
    if isinstance(table, dict):
        table = {name.removeprefix(PLUGIN_PREFIX): value for name, value in table.items()}
    return old.argv, table, plugin_env_file(server) or server.env_file


def is_safe(config: Configuration, server: HostServer) -> bool:
    """Whether nothing of an entry acts on the runner that it starts."""
    return split_wrapped(server.argv) is not None and not acting_names(server, table_names(config, server))
