"""runner new: write the example of a contract into a folder, as a plugin to start from."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial

from runner.cli.shared.text import failure, say
from runner.contracts.registry import contract_names, example_folder, find_contract
from runner.launch.rehearse import rehearse
from runner.launch.stages import Invocation
from runner.manifest.load import load, load_all
from runner.outcome import EXIT, USAGE_ERROR, Failure
from sandbox.document.diagnostic import did_you_mean, printable, quoted
from sandbox.paths.walk import LinkRefused, Step, TooManyLinks, close, resolve, unmake, walk, walk_below

NAME = "new"
EXAMPLE = "runner new CONTRACT ./my-plugin"

_NOT_WRITTEN = 1

# Checked before the contract's own rules: the name is put into strings of several languages without quoting.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_PLAIN_NAME_HINT = "use letters, digits, '.', '_' and '-', at most 64 of them"

Files = Mapping[str, bytes]  # by path, relative to the plugin's folder


class NotWritten(Exception):
    def __init__(self, message: str, status: int = USAGE_ERROR) -> None:
        super().__init__(message)
        self.status = status


class Unfit(NotWritten):
    """The contract finds a fault in a plugin of this name, in this folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "contract", metavar="CONTRACT", help=f"{', '.join(contract_names())}: see runner contracts"
    )
    parser.add_argument("folder", metavar="DIR", help="the plugin's folder: a new one, or an empty one")
    parser.add_argument(
        "--name",
        help="the plugin's id; default: the name of DIR, or what comes near it and is a valid id",
    )


def run(args: argparse.Namespace) -> int:
    try:
        known = contract_names()
        if args.contract not in known:
            near = did_you_mean(args.contract, known)
            guess = f"{near} There are" if near else "there are"
            raise NotWritten(f"there is no contract {quoted(args.contract)}; {guess} {', '.join(known)}")
        _check_place(args.folder)
        example = _read_example(args.contract)
        own_name = _example_id(args.contract)
        name, files = _write_named(args.contract, example, own_name, args.name, args.folder)
    except NotWritten as refused:
        say(f"runner new: {printable(str(refused))}")
        return refused.status
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else args.folder
        say(f"runner new: {printable(where)}: {error.strerror}; nothing was written, name another DIR")
        return _NOT_WRITTEN
    _tell(args.contract, args.folder, files, name, own_name)
    return EXIT["ok"]


def _check_place(folder: str) -> None:
    """Refuse a folder that has something in it, and a path that cannot become a folder."""
    if not folder or "\0" in folder:
        raise NotWritten("the path of DIR is empty or contains a NUL character")
    place = os.path.abspath(folder)
    while not os.path.isdir(place):
        if os.path.islink(place) and not os.path.exists(place):
            target = os.readlink(place)
            raise NotWritten(f"{place} is a link to {target}, which does not exist; remove the link")
        if os.path.lexists(place):
            raise NotWritten(f"{place} is not a folder; name a new folder, or an empty one")
        place = os.path.dirname(place)
    if os.path.isdir(folder) and os.listdir(folder):
        raise NotWritten(f"{folder} is not empty, and nothing is overwritten; name a new folder")


def _read_example(contract: str) -> Files:
    top = example_folder(contract)
    found: dict[str, bytes] = {}
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(each for each in folders if each != "__pycache__")
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, top)] = file.read()
    if not found:
        raise NotWritten(f"the contract {contract} has no example: {top} does not exist", _NOT_WRITTEN)
    return found


def _example_id(contract: str) -> str:
    read = load(example_folder(contract), contract=contract)
    if read.plugin is None:
        raise NotWritten(
            f"the example of {contract} has a fault: {read.diagnostics[0].message}", _NOT_WRITTEN
        )
    return read.plugin.id.removeprefix(find_contract(contract).example.namespace)


def _judge(contract: str, folder: str, name: str) -> None:
    """Raise Unfit with the first fault of the plugin in the folder, as `runner check` finds it."""
    [read, *_] = load_all(folder, contract=contract)
    if read.plugin is None or read.diagnostics:
        fault = read.diagnostics[0]
        raise Unfit("; ".join(text for text in (fault.message, fault.hint) if text))
    if read.plugin.id.removeprefix(find_contract(contract).example.namespace) != name:
        raise Unfit("it is read differently there")


def _write_named(
    contract: str, example: Files, own_name: str, asked: str | None, folder: str
) -> tuple[str, Files]:
    """Write the plugin under the id `asked`, or the name of the folder in the first spelling that the
    contract takes, or the example's. Returns the id and the files. Raises NotWritten."""
    if asked is not None and not _PLAIN_NAME.match(asked):
        raise NotWritten(f"--name {quoted(asked)} is not possible; {_PLAIN_NAME_HINT}")
    base = os.path.basename(os.path.abspath(folder))
    plain = re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-") if base.isascii() else ""
    real = os.path.basename(os.path.realpath(folder))
    spellings = (base, plain, plain.replace("-", "_"), real, own_name) if asked is None else (asked,)
    faults: list[str] = []
    for name in dict.fromkeys(each for each in spellings if _PLAIN_NAME.match(each)):
        files = _rename(example, own_name, name)
        try:
            if len(files) < len(example):
                raise Unfit(f"{quoted(name)} names another file of the plugin")
            _write(folder, files, partial(_judge, contract, folder, name))
        except Unfit as unfit:
            faults.append(str(unfit))
            continue
        if asked is None and name == own_name and own_name not in spellings[:-1]:
            cannot = f"{quoted(base)} cannot be the id of a {contract} plugin"
            say(f"runner new: {cannot}; --name chooses another id")
        return name, files
    what = f"--name {quoted(asked)}" if asked is not None else f"the folder {quoted(base)}"
    raise NotWritten(f"{what} does not fit a plugin of {contract}: {faults[0]}")


def _rename(files: Files, old: str, new: str) -> Files:
    return {
        path.replace(old, new): content.replace(old.encode(), new.encode()) for path, content in files.items()
    }


def _write(folder: str, files: Files, judge: Callable[[], None]) -> None:
    """Write all files, or none: on an error, also one that `judge` raises at the end, the files made so far
    are removed. A plugin may be able to change the parent folder meanwhile, so all work is relative to open
    directory descriptors."""
    mask = os.umask(0o077)
    os.umask(mask)
    if os.geteuid() == 0:
        mask = 0o022  # root's plugins run as another user, who has to read their files
    made: list[Step] = []
    try:
        with ExitStack() as held, ExitStack() as undo:

            def keep(steps: list[Step]) -> int:
                held.callback(close, steps)
                undo.callback(unmake, steps)
                made.extend(step for step in steps if step.made)
                return steps[-1].fd

            place = resolve(os.path.abspath(folder), follow="own")
            top = keep(walk(place, follow="none", make=0o700))
            for path, content in files.items():
                above, _, name = path.rpartition("/")
                _write_file(name, keep(walk_below(top, above, make=True)), content, mask, undo)
            for step in made:
                os.chmod(".", 0o777 & ~mask, dir_fd=step.fd)
            judge()
            undo.pop_all()
    except LinkRefused as refused:
        raise NotWritten(f"{refused}; use the path it leads to: {refused.leads_to}") from None
    except TooManyLinks as refused:
        raise NotWritten(f"{folder}: {refused}") from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, folder) from None


def _write_file(name: str, parent: int, content: bytes, mask: int, undo: ExitStack) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
    undo.callback(_unlink, name, parent)
    with open(fd, "wb") as file:
        file.write(content)
        # A wheel does not keep the executable bit.
        os.fchmod(fd, (0o755 if content.startswith(b"#!") else 0o644) & ~mask)


def _unlink(name: str, parent: int) -> None:
    with suppress(OSError):  # somebody else has removed it
        os.unlink(name, dir_fd=parent)


def _tell(contract: str, folder: str, files: Files, name: str, own_name: str) -> None:
    word = shlex.quote(folder if not folder.startswith("-") else f"./{folder}")
    example = find_contract(contract).example
    tool = example.call.replace(own_name, name)
    lines = [
        f"{printable(folder)} is now the {contract} plugin {name}: {', '.join(sorted(files))}",
        "",
        "Check it, list its tools, call one:",
        f"  runner check {word}",
        f"  runner tools {word}",
        f"  runner call {word} {tool} --input {shlex.quote(example.input)}",
        "Let your host start it with this command, in place of its own:",
        f"  runner exec {word}",
    ]
    # Not wrapped: people copy the commands.
    print("\n".join(lines), flush=True)
    try:
        rehearse(Invocation(folder), os.environ)
    except Failure as refused:
        say("\nIt would not be launched there:")
        failure(refused.stage, refused.outcome)
