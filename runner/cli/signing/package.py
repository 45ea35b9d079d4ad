"""`runner package`: check the folder of a plugin before it is published, sign it, verify its signature, push
it to a registry, pull it from there, inspect it there. Sign and inspect images there. And packages of a
daemon's control plane, which runner/cli/serving/packages.py asks for."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from runner.cli.serving import packages as control
from runner.cli.shared.actions import Actions, add_actions, argument
from runner.cli.shared.install_image import is_image
from runner.cli.shared.registry import add_registry, given_options, status_of
from runner.cli.shared.text import print_diagnostics, say, warn
from runner.cli.signing.images import inspect_image, sign_image
from runner.cli.signing.transfer import inspect_reference, pull_folder, push_folder
from runner.manifest.load import lint as lint_manifest
from runner.outcome import EXIT, USAGE_ERROR
from runner.package.fault import PackageFault
from runner.package.findings import find_faults
from runner.package.keys import KeySearch, load_key, load_trusted
from runner.package.listing import list_package
from runner.package.signature import read_signature, sign, verify, write_signature
from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic, DocumentError, printable
from sandbox.paths.mounts import contains

NAME = "package"
EXAMPLE = "runner package verify ./my-plugin --trust /etc/runner/trusted-keys"

SCHEMA = "runner.package.v1"

_NOT_WRITTEN = 1


class _Refused(Exception):
    """The message for people, and the exit status."""

    def __init__(self, message: str, hint: str, status: int, rule: str) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status
        self.rule = rule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_actions(parser, ACTIONS)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the plugin's folder")
    _CONTRACT(parser)


def _add_registry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deadline", metavar="TIME", default="10m", help="of a registry (default: 10m)")
    add_registry(parser)


def _add_trust_of_pull(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--trust", metavar="FILE", help=_TRUST)
    which.add_argument(
        "--unsigned",
        action="store_true",
        help="take a package whose signature is not checked, or missing",
    )


_CONTRACT = argument("--contract", None, "of the manifest, if its name does not tell")
_TRUST = "the keys that are trusted"
_REF = argument("folder", "REF", "oci://HOST/NAME:TAG")
_FORMAT = argument("--format", None, "default: text", choices=("text", "json"), default="text")
_OF_FOLDERS: Actions = {
    "lint": ("list all that check finds, and what is unwise to publish", (_add_source,)),
    "sign": (
        "lint, then sign; or sign an image in its registry",
        (
            argument("folder", "DIR", "the plugin's folder, or docker://IMAGE"),
            _CONTRACT,
            argument("--key", "FILE", "the private key that runner keygen made", required=True),
            argument("--key-id", "ID", "the key's name; default: that in FILE.pub", default=""),
            _add_registry,
        ),
    ),
    "verify": (
        "say whether a trusted key signed exactly these files",
        (_add_source, argument("--trust", "FILE", _TRUST, required=True)),
    ),
    "push": (
        "lint, then copy a folder and its signature to a registry",
        (_add_source, argument("other", "REF", "oci://HOST/NAME:TAG"), _add_registry),
    ),
    "pull": (
        "copy a package from a registry into a new folder",
        (
            _REF,
            argument("other", "DIR", "the new folder", nargs="?", default=None),
            *(_add_trust_of_pull, _CONTRACT, _add_registry),
        ),
    ),
    "inspect": (
        "say what a registry has under a name",
        (
            argument("folder", "REF", "oci://HOST/NAME:TAG or docker://IMAGE"),
            argument("--trust", "FILE", _TRUST),
            _add_registry,
        ),
    ),
}
ACTIONS: Actions = {
    name: (line, (*arguments, _FORMAT))
    for name, (line, arguments) in {**_OF_FOLDERS, **control.ACTIONS}.items()
}


def run(args: argparse.Namespace) -> int:
    if args.action in control.ACTIONS:
        return control.run_control(args, getattr(args, "folder", ""))
    in_registry = args.action in ("pull", "inspect") or (args.action == "sign" and is_image(args.folder))
    found, plugin = ((), None) if in_registry else _lint(args)
    errors = sum(diagnostic.severity == "error" for diagnostic in found)
    document: dict[str, Any] = {"schema": SCHEMA, "action": args.action, "folder": args.folder, "ok": True}
    lines: list[str] = []
    status = EXIT["ok"]
    try:
        if args.action != "verify" and errors:
            told = "errors" if errors > 1 else "error"
            done = {"sign": "; nothing was signed", "push": "; nothing was pushed"}
            hint = "correct what is listed" + done.get(args.action, "")
            raise _Refused(f"the package has {errors} {told}", hint, EXIT["manifest_invalid"], "lint")
        if args.action == "sign" and not in_registry:
            if any(given for _, given in given_options(args)):
                message = "--ca, --plain-http and --allow-host go with docker://IMAGE"
                raise _Refused(message, "leave them out", USAGE_ERROR, "usage")
            lines = _sign(args, plugin, document)
        elif args.action == "verify":
            lines = _verify(args, plugin, found, document)
        elif args.action != "lint":
            lines = _transfer(args, plugin, document)
        else:
            lines = [f"{printable(args.folder)}: ok: {_plugin_name(plugin)}"]
    except _Refused as refused:
        status = refused.status
        document |= {"ok": False, "rule": refused.rule, "message": str(refused), "hint": refused.hint}
        lines = [
            f"{printable(args.folder)}: NOT ok: {printable(str(refused))}",
            f"    {printable(refused.hint)}",
        ]
    if args.format == "json":
        shown = [] if args.action == "verify" else [diagnostic._asdict() for diagnostic in found]
        print(json.dumps({**document, "diagnostics": shown}, indent=2))
        return status
    if args.action != "verify":
        print_diagnostics(found, sys.stdout)
    say("\n".join(filter(None, map(str.rstrip, lines))), sys.stdout)
    return status


def _transfer(args: argparse.Namespace, plugin: Plugin | None, document: dict[str, Any]) -> list[str]:
    try:
        if is_image(args.folder) and args.action != "pull":
            return (sign_image if args.action == "sign" else inspect_image)(args, document)
        if args.action == "push":
            assert plugin is not None  # or there would be an error
            return push_folder(args, plugin, document)
        return (pull_folder if args.action == "pull" else inspect_reference)(args, document)
    except PackageFault as fault:
        raise _Refused(str(fault), fault.hint, status_of(fault), fault.rule) from None
    except ValueError as error:
        raise _Refused(f"--deadline: {error}", "", USAGE_ERROR, "usage") from None


def _lint(args: argparse.Namespace) -> tuple[tuple[Diagnostic, ...], Plugin | None]:
    """Everything that is wrong with the package, and its plugin if there is exactly one."""
    reads = lint_manifest(args.folder, contract=args.contract)
    plugin = reads[0].plugin if len(reads) == 1 else None
    found = tuple(diagnostic for read in reads for diagnostic in read.diagnostics)
    if len(reads) > 1:
        message = "a package is one plugin, and here are several"
        found += (
            Diagnostic(args.folder, 0, 0, "package_several", message, "give the folder of one of them"),
        )
    elif (
        plugin is not None
        and plugin.root is None
        # Who names only a configuration does not mean everything beside it.
        and not (args.action == "push" and os.path.isdir(args.folder))
    ):
        message = "the manifest is a configuration for other people's programs, and no part of a package"
        found += (Diagnostic(plugin.manifest, 0, 0, "package_none", message, "give the folder of a plugin"),)
    root = args.folder if plugin is None else plugin.root or (args.folder if args.action == "push" else None)
    if args.action != "verify" and root is not None and os.path.isdir(root):
        found += find_faults(root)
    return found, plugin


def _require_package(plugin: Plugin | None, found: tuple[Diagnostic, ...]) -> tuple[Plugin, str]:
    if plugin is None or plugin.root is None:
        errors = [diagnostic for diagnostic in found if diagnostic.severity == "error"]
        reason = errors[0].text() if errors else "there is no plugin with a folder of its own"
        hint = "runner package lint DIR lists everything"
        raise _Refused(reason, hint, EXIT["manifest_invalid"], "manifest")
    return plugin, plugin.root


def _sign(args: argparse.Namespace, plugin: Plugin | None, document: dict[str, Any]) -> list[str]:
    plugin, root = _require_package(plugin, ())
    try:
        key = load_key(args.key, args.key_id)
    except PackageFault as fault:
        raise _Refused(str(fault), fault.hint, USAGE_ERROR, fault.rule) from None
    if contains(os.path.realpath(root), os.path.realpath(args.key)):
        message = f"the private key {args.key} lies in the package, and everybody who has it could sign"
        raise _Refused(message, f"move it out of {root}", USAGE_ERROR, "key_exposed")
    try:
        listing = list_package(root, KeySearch(key))
        signature = sign(listing, plugin.id, plugin.version, key, time.time())
        write_signature(root, signature)
    except PackageFault as fault:
        status = USAGE_ERROR if fault.rule == "key_exposed" else EXIT["manifest_invalid"]
        raise _Refused(str(fault), fault.hint, status, fault.rule) from None
    except OSError as error:
        message = f"the signature cannot be written to {root}: {error.strerror}"
        raise _Refused(
            message, "let the user who signs write there", _NOT_WRITTEN, "signature_unwritten"
        ) from None
    document |= {"signature": signature._asdict(), "files": len(listing.files), "bytes": listing.size}
    return [
        f"{printable(args.folder)}: signed: {_plugin_name(plugin)}",
        f"  files      {len(listing.files)}, {listing.size} bytes",
        f"  digest     {signature.digest}",
        f"  key        {signature.key_id}",
        f"  signed at  {signature.signed_at}",
    ]


def _verify(
    args: argparse.Namespace,
    plugin: Plugin | None,
    found: tuple[Diagnostic, ...],
    document: dict[str, Any],
) -> list[str]:
    plugin, root = _require_package(plugin, found)
    try:
        trusted = load_trusted(args.trust)
    except DocumentError as error:
        first = error.diagnostics[0]
        more = f" (and {len(error.diagnostics) - 1} more)" if len(error.diagnostics) > 1 else ""
        raise _Refused(first.text() + more, first.hint, EXIT["policy_invalid"], first.rule) from None
    try:
        signed = verify(
            read_signature(root),
            plugin.id,
            plugin.version,
            trusted,
            args.trust,
            time.time(),
            lambda: list_package(root),
        )
    except PackageFault as fault:
        raise _Refused(str(fault), fault.hint, EXIT["policy_denied"], fault.rule) from None
    if signed.warning:
        warn(signed.warning)
    document |= {"signed": signed._asdict()}
    comment = f" ({printable(signed.comment)})" if signed.comment else ""
    return [
        f"{printable(args.folder)}: ok: {_plugin_name(plugin)}",
        "  signature  present, schema 1",
        f"  key        {signed.key_id}{comment}, trusted by {printable(args.trust)}",
        "  identity   the manifest's",
        f"  files      {signed.files}, {signed.digest}",
        f"  signed at  {signed.signed_at}",
    ]


def _plugin_name(plugin: Plugin | None) -> str:
    assert plugin is not None  # or there would be an error
    return printable(f"{plugin.id} {plugin.version}".rstrip() + f" ({plugin.contract})")
