"""The command line: one module per verb, imported when it is the one asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from runner.contracts.contract import Verb

# In the order people meet them. Contracts may bring further ones along: see all_verbs().
VERBS = ("exec", "call", "tools", "check", "explain", "doctor", "state", "schema", "completion")


def entry() -> NoReturn:
    """The process `runner`. Leaves without Python's farewell: taking every module apart again costs as much
    as starting bubblewrap, and the kernel does it better."""
    import os

    _mend_streams()
    try:
        status = main()
    except SystemExit as leaving:  # argparse, after it has said why
        status = leaving.code if isinstance(leaving.code, int) else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads any more, or the disk is full
            # These say how the plugin fared, and know by themselves if their result was not taken. Of the
            # others the output was the purpose.
            status = status if sys.argv[1:2] in (["exec"], ["call"], ["tools"]) else status or 1
    os._exit(status)


def _mend_streams() -> None:
    """Descriptors 0-2 exist and can be written to, whatever the caller did.

    A closed one would be the first thing we open, and so the plugin's; and print() to a missing stderr goes
    to stdout, which is the plugin's too.
    """
    import os

    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # lands on the lowest free one: this
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 -- for the rest of the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a file, not a stand-in


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in all_verbs(words[0]):
            if words[0] in ("exec", "call", "tools"):
                import gc

                # A launch makes little garbage, and looking for it takes milliseconds. Who stays longer than
                # that switches it on again.
                gc.disable()
            return _run(words[0], words[1:])
        return _top(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; closing stdout again at exit would complain.
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        if not _is_full_disk(error):
            return accident(error)
        print(f"runner: stdout does not take the output: {error.strerror}", file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 -- our fault: one line for people, no traceback
        return accident(error)


def _is_full_disk(error: OSError) -> bool:
    """Of where our output leads. What we open ourselves has a name."""
    import errno

    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) and error.filename is None


def accident(error: Exception) -> int:
    """A fault of the runner's own, in one line. RUNNER_DEBUG=1 shows where."""
    import os

    if os.environ.get("RUNNER_DEBUG"):
        raise error
    from sandbox.document.diagnostic import printable

    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        print(f"runner: internal: {printable(text)}; with RUNNER_DEBUG=1 it says where", file=sys.stderr)
    except OSError:
        pass  # nobody reads it
    return 70


def all_verbs(asked: str = "") -> tuple[str, ...]:
    """Ours, then those of the contracts. If `asked` is one of ours, no contract is looked at."""
    if asked in VERBS:
        return VERBS
    from runner.contracts.registry import contract_verbs

    return (*VERBS, *(verb for verb in contract_verbs() if verb not in VERBS))


def verb_module(verb: str) -> Verb:
    from importlib import import_module

    if verb in VERBS:
        name = f"runner.cli.{verb}"
    else:
        from runner.contracts.registry import contract_verbs

        name = contract_verbs()[verb].module
    module: Verb = import_module(name)
    return module


def verb_help(verb: str) -> str:
    """One line. That of a contract's verb does not import its module."""
    if verb in VERBS:
        return verb_module(verb).HELP
    from runner.contracts.registry import contract_verbs

    return contract_verbs()[verb].help


def verb_parser(verb: str) -> argparse.ArgumentParser:
    import argparse

    module = verb_module(verb)

    class Parser(argparse.ArgumentParser):
        """Wrong usage is one line that says what to do."""

        def error(self, message: str) -> NoReturn:
            advice = getattr(module, "advice", None)
            told = (advice(message) if advice is not None else "") or f"try {self.prog} --help"
            self.exit(2, f"{self.prog}: {message} ({told})\n")

    parser = Parser(
        prog=f"runner {verb}",
        description=module.HELP,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    """With the width told: asked for its own, argparse imports shutil on every start."""
    import argparse
    import os

    try:
        width = os.get_terminal_size(1).columns
    except OSError:
        width = 100
    return argparse.RawDescriptionHelpFormatter(prog, width=max(40, min(width, 110)) - 2)


def _run(verb: str, words: list[str]) -> int:
    module = verb_module(verb)
    parser = verb_parser(verb)
    if getattr(module, "PASSES_ARGUMENTS", False) and "--" in words:
        # Split by hand: what follows is the plugin's, also if it looks like an option of ours.
        at = words.index("--")
        args = parser.parse_args(words[:at])
        args.arguments = words[at + 1 :]
    elif getattr(module, "MIXES_ARGUMENTS", False):
        args = parser.parse_intermixed_args(words)
    else:
        args = parser.parse_args(words)
    return module.run(args)


def _top(words: list[str]) -> int:
    if words and words[0] in ("--version", "-V"):
        from runner import __version__

        print(f"runner {__version__}")
        return 0
    if words and words[0] in ("--help", "-h", "help"):
        print(_overview())
        return 0
    if not words:
        print(_overview(), file=sys.stderr)
        return 2
    import difflib

    verbs = all_verbs()
    near = difflib.get_close_matches(words[0], verbs, n=1)
    guess = f"did you mean {near[0]}?" if near else f"the verbs are {', '.join(verbs)}"
    print(f"runner: there is no verb {words[0]!r}; {guess} (runner --help)", file=sys.stderr)
    return 2


def _overview() -> str:
    lines = ["usage: runner VERB …", "", "Runs a plugin you do not trust in a cage.", "", "verbs:"]
    lines += [f"  {verb:<11} {verb_help(verb)}" for verb in all_verbs()]
    lines += [
        "",
        "example:",
        f"  {verb_module('exec').EXAMPLE}",
        "",
        "runner VERB --help tells more; runner --version.",
    ]
    return "\n".join(lines)
