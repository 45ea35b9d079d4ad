"""`runner keygen`: make a key that signs packages."""

from __future__ import annotations

import argparse

from runner.cli.shared.text import say
from runner.outcome import EXIT, USAGE_ERROR
from runner.package.fault import PackageFault
from runner.package.keys import format_line, make_key
from sandbox.document.diagnostic import printable

NAME = "keygen"
EXAMPLE = "runner keygen ./release-key"

_NOT_WRITTEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a new file for the private key; FILE.pub gets the line for trust files",
    )
    parser.add_argument(
        "--key-id", metavar="ID", default="", help="the key's name in signatures; default: made from the key"
    )
    parser.add_argument("--comment", metavar="TEXT", default="", help="for people: stands behind the key")


def run(args: argparse.Namespace) -> int:
    comment = " ".join(args.comment.split())
    if not comment.isprintable():
        say("runner keygen: --comment has characters that cannot be printed; use plain text")
        return USAGE_ERROR
    try:
        key = make_key(args.file, args.key_id, comment)
    except PackageFault as fault:
        say(f"runner keygen: {printable(str(fault))}; {fault.hint}")
        return USAGE_ERROR
    except OSError as error:
        say(f"runner keygen: {printable(args.file)}: {error.strerror}; nothing was made, name another FILE")
        return _NOT_WRITTEN
    file = printable(args.file)
    print(f"{file}: the private key; keep it secret, it signs with: runner package sign DIR --key {file}")
    print(f"{file}.pub: for trust files; to trust the key, add this line to a trust file:")
    print(format_line(key))
    return EXIT["ok"]
