"""The command line: one module per verb. Only the module of the given verb is imported."""

from __future__ import annotations

import sys

from sandbox.speed.bundle import load, renew
from sandbox.speed.typed import Any, Callable, Mapping, NoReturn, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Protocol, TypeGuard

    from runner.contracts.contract import Verb

    ReadUsual = Callable[[list[str]], argparse.Namespace | None]

    class CommandVerb(Verb, Protocol):
        """The module of a verb that takes a command in place of a manifest."""

        def add_command_arguments(self, parser: argparse.ArgumentParser) -> None: ...


# Each verb with one line about it, grouped by task; README.md has the same groups. Contracts may add verbs to
# these groups: see all_verbs().
GROUPS: Mapping[str, Mapping[str, str]] = {
    "run": {
        "exec": "run a plugin in its cage, with the runner's own stdin, stdout and stderr",
        "run": "run any command in a cage, with the runner's own stdin, stdout and stderr",
        "call": "call a plugin's tool in its cage and print the result as JSON",
        "tools": "start a plugin in its cage and list what it exposes; with --json also the schemas",
    },
    "serve": {
        "serve": "keep plugins alive and serve calls to them on a socket",
        "gateway": "serve the tools of many plugins, of all contracts, as one MCP server on stdin and stdout",
        "worker": "take calls for plugins from a fleet (NATS JetStream), and run them here",
        "ps": "list the plugins of a daemon (runner serve) and their states",
        "logs": "show what a plugin of a daemon (runner serve) or of a fleet's workers wrote to its stderr",
        "ctl": "start, stop, reset or reload a plugin of a daemon (runner serve), list calls, drain it, or"
        " open its page",
        "binding": "create, list, change, check, roll back or call bindings of a daemon's control plane",
    },
    "look": {
        "check": "list everything that is wrong with a manifest or a policy",
        "conformance": "try a plugin, in its cage, by each rule of its contract",
        "explain": "show what a plugin asks for, what it would get, what it is refused and why",
        "plan": "make the plan of a launch, store it for later launches of runner exec, and show it",
        "contracts": "list the contracts whose plugins can be run, and what each supports",
    },
    "allow": {
        "allow": "show what a plugin asks for, and allow it once and for all",
        "learn": "run a plugin in its cage, say what it missed there, and propose what to allow",
    },
    "take": {
        "changes": "list the changes of runs with staged writes that wait for you",
        "diff": "show what such a run changed",
        "apply": "take such changes over into your folders",
        "discard": "throw such changes away",
    },
    "write": {
        "new": "write a small plugin to start from",
        "schema": "print the JSON Schema of a contract's manifest or of a policy, for editors",
        "package": "check and sign a plugin's folder; push it to a registry, pull it; import it into a"
        " control plane",
        "keygen": "make a key that signs packages",
    },
    "operate": {
        "doctor": "say which layers of the cage this machine can enforce",
        "state": "list the state directories of plugins, or remove some",
        "completion": "print a completion script for bash, zsh or fish",
    },
}
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)
# Verbs with actions, as `runner ctl drain`. Each module has the lines about its actions.
WITH_ACTIONS = ("ctl", "binding", "package")
# Verbs that end soon, or start a process that lives longer.
_SHORT = ("exec", "run", "call", "tools", "learn", "check", "explain", "contracts", "doctor")
# Of `runner exec`, which `runner --help` shows too.
EXAMPLE = "runner exec --deadline 30 --report report.json ./my-plugin -- --verbose"
# Verbs whose module is in a folder below this one.
_FOLDERS = {
    "allow": "approving",
    "learn": "learning",
    "package": "signing",
    "keygen": "signing",
    **dict.fromkeys(("changes", "diff", "apply", "discard"), "staging"),
    **dict.fromkeys(("serve", "gateway", "worker", "ps", "logs", "ctl", "binding"), "serving"),
}


def entry() -> NoReturn:
    """The process `runner`. It ends with os._exit: Python's own shutdown takes every module apart, which
    costs as much as starting bubblewrap."""
    import os

    _mend_streams()
    try:
        status = main()
    except SystemExit as exited:  # by argparse, after its message
        status = exited.code if isinstance(exited.code, int) else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader has closed the pipe, or the disk is full
            # exec, run, call and tools check themselves whether their result was written. Any other verb
            # has failed if its output is lost.
            status = status if sys.argv[1:2] in (["exec"], ["run"], ["call"], ["tools"]) else status or 1
    renew()
    os._exit(status)


def console_entry() -> NoReturn:
    """The console script `runner-console`. scripts/entry/runner says when it starts this one."""
    sys.argv[0] = sys.argv[0].removesuffix("-console")
    entry()


def _mend_streams() -> None:
    """Make sure that descriptors 0 to 2 are open and that Python can write to 1 and 2.

    The next file we open would take the number of a closed one, and the plugin would inherit it as its own
    stream. And print() to a missing stderr writes to stdout, which is the plugin's too.
    """
    import os

    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # open() takes the lowest free number: fd
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 -- for the rest of the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a real file, not a test's replacement


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and not words[0].startswith("-") and words[0] in all_verbs(words[0]):
            if words[0] in _SHORT:
                import gc

                # A launch makes little garbage, and a collection takes milliseconds. Sessions, which run
                # longer, switch it on again.
                gc.disable()
            return _run(words[0], words[1:])
        return _top(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has closed the pipe. Without this, closing stdout at exit would fail too.
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        if not _is_full_disk(error):
            return report_bug(error)
        from runner.cli.shared.text import say

        say(f"runner: the output cannot be written to stdout: {error.strerror}")
        return 1
    except Exception as error:  # noqa: BLE001 -- our fault: one line for people, no traceback
        return report_bug(error)


def _is_full_disk(error: OSError) -> bool:
    """Whether the error is about writing our output. An error about another file has a file name, and only
    verbs print: what trio raises is about the machine."""
    import errno

    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    prints = where is not None and not where.tb_frame.f_globals.get("__name__", "").startswith("trio.")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return full and error.filename is None and prints


def report_bug(error: Exception) -> int:
    """Print one line about an unexpected exception. RUNNER_DEBUG=1 shows the traceback instead."""
    import os

    if os.environ.get("RUNNER_DEBUG"):
        raise error
    from runner.cli.shared.text import say
    from sandbox.document.diagnostic import printable

    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        say(f"runner: internal: {printable(text)}; set RUNNER_DEBUG=1 to see the traceback")
    except OSError:
        pass  # stderr is closed
    return 70


def all_verbs(asked: str = "") -> tuple[str, ...]:
    """Our verbs, then those of contracts. If `asked` is one of ours, no contract is imported."""
    if asked in VERBS:
        return VERBS
    from runner.contracts.registry import contract_verbs

    return (*VERBS, *(verb for verb in contract_verbs() if verb not in VERBS))


def verb_module(verb: str) -> Verb:
    from importlib import import_module

    if verb in VERBS:
        name = f"runner.cli.{_FOLDERS[verb]}.{verb}" if verb in _FOLDERS else f"runner.cli.{verb}"
    else:
        from runner.contracts.registry import contract_verbs

        name = contract_verbs()[verb].module
    module: Verb = import_module(name)
    return module


def verb_help(verb: str) -> str:
    """One line. No module of a verb is imported."""
    for verbs in GROUPS.values():
        if verb in verbs:
            return verbs[verb]
    from runner.contracts.registry import contract_verbs

    return contract_verbs()[verb].help


def verb_parser(
    verb: str, *, of_command: bool = False, refuse: Callable[[str], NoReturn] | None = None
) -> argparse.ArgumentParser:
    """`of_command`: for `runner VERB … -- COMMAND`, where the verb takes a command in place of a manifest.
    `refuse`: called in place of printing or exiting, with the message if there is one; it has to raise."""
    import argparse

    module = verb_module(verb)
    example = f"example:\n  {module.EXAMPLE}"

    class Parser(argparse.ArgumentParser):
        """A usage error is one line that says what to do."""

        def print_help(self, file: Any = None) -> None:
            if refuse is not None:
                refuse("")
            super().print_help(file)

        def format_help(self) -> str:
            if not of_command and _takes_command(module):
                self.epilog = f"{_command_help()}\n{example}"
            return super().format_help()

        def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
            if refuse is not None:
                refuse(message or "")
            super().exit(status, message)

        def error(self, message: str) -> NoReturn:
            if refuse is not None:
                refuse(message)
            advice = getattr(module, "advice", None)
            told = _events_advice(message) or (advice(message) if advice is not None else "")
            told = told or _allow_advice(message) or f"try {self.prog} --help"
            if self.prog != f"runner {verb}":
                from runner.cli.shared.actions import usage_advice

                told = usage_advice(self, message)
            from runner.cli.shared.text import say
            from sandbox.document.diagnostic import printable

            say(printable(f"{self.prog}: {message} ({told})"))
            self.exit(2)

    parser = Parser(
        prog=f"runner {verb}",
        description=verb_help(verb),
        epilog=example,
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    if of_command and _takes_command(module):
        module.add_command_arguments(parser)
    else:
        module.add_arguments(parser)
    return parser


def _command_help() -> str:
    """The options that go with a command, and not with a manifest, as --help shows them."""
    import argparse

    from runner.cli.shared.command import add_command

    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=_formatter)
    add_command(parser)
    return parser.format_help().lstrip()


def _allow_advice(message: str) -> str:
    """A hint if options for a command were given with a manifest."""
    words = message.removeprefix("unrecognized arguments: ").split()
    if words == message.split() or words[0].partition("=")[0] not in ("--read", "--write", "--net"):
        return ""
    return f"{words[0]} goes with a command behind --; for a manifest use runner allow MANIFEST {words[0]} …"


def _events_advice(message: str) -> str:
    """A hint if --events has no value, so that the manifest was taken for it."""
    taken = "--events" in sys.argv and message.endswith(("required: MANIFEST", "required: NAME"))
    if not taken and not message.startswith("argument --events:"):
        return ""
    return "--events takes where to write: a file, or the number of an open descriptor, as in --events 3"


def _formatter(prog: str) -> argparse.HelpFormatter:
    """The width is given here: to find it out, argparse would import shutil on every start."""
    import argparse

    return argparse.RawDescriptionHelpFormatter(prog, width=_help_width())


def _help_width() -> int:
    import os

    try:
        width = os.get_terminal_size(1).columns
    except OSError:
        width = 100
    return max(40, min(width, 110)) - 2


def _run(verb: str, words: list[str]) -> int:
    if words[-1:] in (["--help"], ["-h"]) and len(words) <= 1 + (verb in WITH_ACTIONS):
        from runner.cli.shared.stored_help import help_of

        named = " ".join((verb, *words[:-1]))
        sys.stdout.write(help_of(named, _help_width(), lambda: _make_help(verb, words)))
        sys.stdout.flush()  # here, where it is told that a disk is full
        return 0
    if any(word.startswith("oci://") for word in words) and verb not in ("package", "install"):
        found = _localize(verb, words)
        if isinstance(found, int):
            return found
        words = found
    if verb == "exec" and (usual := _usual_exec(words)) is not None:
        from runner.cli.shared.stored_plan import launch_stored

        status = launch_stored(usual, usual.request)
        if status is None:
            load("decide")
            return verb_module(verb).run(usual)
        return status
    carried: Mapping[str, Any] = {}
    given = drop_environment() if verb == "run" and is_wrapped(words) else None
    if verb == "run" and (plain := _usual_run(words, given)) is not None:
        from runner.cli.shared.stored_plan import launch_stored

        status = launch_stored(plain, plain.request, verb)
        if status is not None:
            return status
        carried = vars(plain)
    if verb == "call" and is_via(words):
        from runner.cli.serving.via import call_via

        return call_via(words)
    if verb == "gateway" and not {"--help", "-h"} & set(words):
        from runner.cli.serving.hub_entry import gateway_via, is_thin

        if is_thin(words):
            return gateway_via(words)
    if verb == "call" and is_via(words, "--fleet"):
        from runner.cli.serving.fleet_call import call_fleet

        return call_fleet(words)
    if verb in ("exec", "run", "learn"):
        load("decide")
    module = verb_module(verb)
    read_usual: ReadUsual | None = getattr(module, "read_usual", None)
    if read_usual is not None and (usual := read_usual(words)) is not None:
        usual.words = words
        return module.run(usual)
    parser = verb_parser(verb)
    if getattr(module, "PASSES_ARGUMENTS", False) and "--" in words:
        # Split here: what follows -- is for the plugin, even if it looks like an option of ours.
        at = words.index("--")
        args = _of_command(module, verb, words[:at]) or parser.parse_args(words[:at])
        args.arguments = words[at + 1 :]
    else:
        args = _parse(verb, parser, words)
    args.words = words
    args.host_environ = given
    for name in ("request", "began", "report_file"):
        if name in carried:
            setattr(args, name, carried[name])
    return module.run(args)


def _make_help(verb: str, words: Sequence[str]) -> str:
    """`words`: an action if the verb has some, then --help."""
    if len(words) == 1:
        return verb_parser(verb).format_help()
    from runner.cli.shared.actions import action_help

    return action_help(verb_parser(verb), words[0])


def _parse(verb: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    if verb in WITH_ACTIONS:
        from runner.cli.shared.actions import parse_action

        return parse_action(parser, words)
    if getattr(verb_module(verb), "MIXES_ARGUMENTS", False):
        return parser.parse_intermixed_args(words)
    return parser.parse_args(words)


def _localize(verb: str, words: list[str]) -> list[str] | int:
    """The words with folders in place of references to packages in registries. Returns the exit status if one
    cannot be had."""
    options = words[: words.index("--")] if "--" in words else words
    if is_via(words) or not any(word.startswith("oci://") for word in options):
        return words
    args = _parse(verb, verb_parser(verb), options)
    from runner.cli.shared.registry import localize, say_fault, status_of
    from runner.outcome import EXEC_REFUSED
    from runner.package.fault import PackageFault

    try:
        return localize(words, args)
    except PackageFault as fault:
        say_fault(verb, fault)
        return EXEC_REFUSED if verb == "exec" else status_of(fault)


def is_wrapped(words: Sequence[str]) -> bool:
    """Whether a command line of `runner run` has --wrapped, as `runner wrap` writes it into an entry."""
    options = words[: words.index("--")] if "--" in words else words
    return any(word == "--wrapped" or word.startswith("--wrapped=") for word in options)


def is_via(words: Sequence[str], option: str = "--via") -> bool:
    """Whether a command line of `runner call` goes to a daemon, or to a fleet."""
    options = words[: words.index("--")] if "--" in words else words
    return any(word == option or word.startswith(f"{option}=") for word in options)


# PATH finds the plugin's program, which is part of an approval's key. SUDO_USER adds a home to the denylist.
# At SSH_AUTH_SOCK an agent is asked for keys that a person allowed: another agent does not have them.
_KEPT_VARIABLES = ("PATH", "SUDO_USER", "SSH_AUTH_SOCK")


def drop_environment() -> dict[str, str]:
    """Drop this process's environment and set HOME from the password database. Returns the old environment.

    A host puts the variables of an entry there, and an entry may have come with a project. It must not decide
    where policy, approvals, cache, state or bubblewrap are."""
    import os

    given = dict(os.environ)
    for name in given:
        if name and name not in _KEPT_VARIABLES:  # one without a name cannot be removed
            del os.environ[name]  # also for libraries in C
    from sandbox.paths.homes import own_home

    if home := own_home():
        os.environ["HOME"] = home
    return given


def _usual_exec(words: list[str]) -> argparse.Namespace | None:
    """Parse a common command line of `exec` without argparse. None: argparse has to read it."""
    from sandbox.speed.plain import deciding_words, read_plain

    at = words.index("--") if "--" in words else len(words)
    args = read_plain(words[:at])
    if args is not None:
        import os

        from runner.launch.stored.entry import request_of

        args.arguments = words[at + 1 :]
        args.request = request_of(deciding_words(args), args.arguments, os.environ)
    return args


def _usual_run(words: list[str], host: Mapping[str, str] | None) -> argparse.Namespace | None:
    """What decides about the cage of a common command line of `run`. None: there is no stored plan for it.
    `host`: the variables of the host that started an entry."""
    from sandbox.speed.plain import read_plain_run

    at = words.index("--") if "--" in words else len(words)
    args = read_plain_run(words[:at])
    if args is None or not "".join(words[at + 1 : at + 2]):
        return None
    import os

    from runner.launch.stored.entry import request_of

    program = words[at + 1]
    if host is not None and "/" not in program:
        from sandbox.facts import search_path_of

        if search_path_of(os.getppid()) not in ("", host.get("PATH", "")):
            return None  # an entry that sets PATH may have another program: that is looked at each time
    # An entry is held against its configuration word by word.
    options = args.deciding if host is None else words[:at]
    # The program is no argument, whose text would not be stored.
    args.request = request_of(["run", *options, program], words[at + 2 :], os.environ, host)
    return args


def _of_command(module: Verb, verb: str, words: list[str]) -> argparse.Namespace | None:
    """Parse the options in front of a command. None: there is a manifest, so arguments follow --."""
    if not _takes_command(module):
        return None
    args, rest = verb_parser(verb, of_command=True).parse_known_args(words)
    return None if rest else args


def _takes_command(module: Verb) -> TypeGuard[CommandVerb]:
    return hasattr(module, "add_command_arguments")


def _top(words: list[str]) -> int:
    if words and words[0] in ("--version", "-V"):
        from runner.build import build_version

        print(f"runner {build_version()}")
        return 0
    from runner.cli.shared.text import say

    if words and words[0] in ("--help", "-h", "help"):
        say(_overview(), sys.stdout)
        return 0
    if not words:
        say(_overview())
        return 2
    import difflib

    verbs = all_verbs()
    near = difflib.get_close_matches(words[0], verbs, n=1)
    guess = f"did you mean {near[0]}?" if near else f"the verbs are {', '.join(verbs)}"
    say(f"runner: there is no verb {words[0]!r}; {guess} (runner --help)")
    return 2


def verb_groups() -> dict[str, list[str]]:
    """Every verb under its group, those of contracts last."""
    from runner.contracts.registry import contract_verbs

    groups = {group: list(verbs) for group, verbs in GROUPS.items()}
    for name, verb in contract_verbs().items():
        if name not in VERBS:
            groups[verb.group].append(name)
    return groups


def _overview() -> str:
    lines = ["usage: runner VERB …", "", "Runs a plugin you do not trust in a cage."]
    for group, verbs in verb_groups().items():
        lines += ["", f"{group}:", *(f"  {verb:<12} {verb_help(verb)}" for verb in verbs)]
    lines += [
        "",
        "example:",
        f"  {EXAMPLE}",
        "",
        "runner VERB --help shows the options of a verb, runner --version the version.",
    ]
    return "\n".join(lines)
