"""The program that a manifest names: can it be started here? For `runner check`, which finds what a launch
would refuse."""

from __future__ import annotations

import os
import stat

from sandbox import look, surroundings
from sandbox.document.diagnostic import quoted
from sandbox.document.faults import Faults
from sandbox.spec import KeyPath


def check_program(faults: Faults, keys: KeyPath, command: str, directory: str, rule: str) -> None:
    """Report a program that a launch would not find or could not execute. `rule`: the contract's own word."""
    command = command.strip()
    if not command or "\0" in command or "$" in command:
        return  # reported already, or known only at the launch
    if "/" not in command:
        if not any(_mode(os.path.join(place or ".", command)) & 0o111 for place in _path()):
            message = f"the program {quoted(command)} is not on PATH here"
            faults.error(keys, rule, message, "install it, or write its full path")
        return
    path = os.path.normpath(os.path.join(directory, command))
    mode = _mode(path)
    hint = "" if command.startswith("/") else f"a relative path starts at {directory}"
    if not mode:
        faults.error(keys, rule, f"the program {quoted(command)} does not exist", hint)
    elif not stat.S_ISREG(mode):
        faults.error(keys, rule, f"the program {quoted(command)} is not a file", hint)
    elif not mode & 0o111:
        message = f"the program {quoted(command)} is not executable"
        faults.error(keys, "program_not_executable", message, f"chmod a+x {path}")
    else:
        check_format(faults, keys, path)


def check_format(faults: Faults, keys: KeyPath, path: str) -> None:
    """Report a file that the kernel would not execute, although its mode allows it."""
    from sandbox.paths.executable import ProgramFault, interpreter_words, read_head

    try:
        head = read_head(path, path)
        if not head.startswith(b"\x7fELF"):
            interpreter_words(path, head)
    except ProgramFault as fault:
        faults.error(keys, "program_not_executable", str(fault), fault.hint)


def _path() -> list[str]:
    return look.environment(surroundings.variables()).get("PATH", os.defpath).split(os.pathsep)


def _mode(path: str) -> int:
    """0: there is no such file, or it cannot be looked at."""
    try:
        return look.stat(path).st_mode
    except (OSError, ValueError):
        return 0
