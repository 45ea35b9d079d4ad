"""runner check: every fault of a manifest or a policy, with its line and column."""

from __future__ import annotations

import os
import sys

from runner import __version__
from runner.cli.shared.options import (
    add_config,
    add_contract_options,
    add_manifest_choice,
    config_of,
    contract_options_of,
)
from runner.cli.shared.text import print_diagnostics, say
from runner.contracts.registry import all_contracts
from runner.manifest.load import ManifestRead, load_all
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import Diagnostic, printable
from sandbox.speed.plain import read_plain_check
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

NAME = "check"
EXAMPLE = "runner check ./my-plugin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "manifests", nargs="+", metavar="MANIFEST", help="a manifest, a directory with one, or a policy"
    )
    parser.add_argument("--format", choices=("text", "json", "sarif"), default="text", help="default: text")
    add_manifest_choice(parser)
    add_config(parser)
    add_contract_options(parser)


def read_usual(words: list[str]) -> argparse.Namespace | None:
    """Parse a common command line without argparse. None: argparse has to read it."""
    return read_plain_check(words)


def run(args: argparse.Namespace) -> int:
    try:
        options, config = dict(contract_options_of(args)), config_of(args.config)
    except ValueError as error:
        say(f"runner check: {error}")
        return USAGE_ERROR
    policies = [path for path in args.manifests if args.contract is None and _is_policy(path)]
    files = [
        (
            path,
            _read_policy(path)
            if path in policies
            else tuple(
                _with_refused_network(each)
                for each in load_all(
                    path, contract=args.contract, server=args.server, options=options, config=config
                )
            ),
        )
        for path in args.manifests
    ]
    shown = [(path, loaded, _diagnostics(path, loaded, args.config)) for path, loaded in files]
    found = [diagnostic for _, _, diagnostics in shown for diagnostic in diagnostics]
    errors = sum(diagnostic.severity == "error" for diagnostic in found)
    if args.format == "json":
        _print_json(shown, errors, len(found) - errors)
    elif args.format == "sarif":
        _print_document(sarif(found))
    else:
        print_diagnostics(found, sys.stdout)
        _print_policies(policies, found)
        _print_summary(shown, errors, len(found) - errors)
    if errors and len(policies) == len(args.manifests):
        return EXIT["policy_invalid"]
    return EXIT["manifest_invalid" if errors else "ok"]


def _is_policy(path: str) -> bool:
    # Asked here, because the rest of the question takes longer than to check a known manifest.
    if not path.endswith(".toml") or any(
        os.path.basename(path) in contract.file_names for contract in all_contracts()
    ):
        return False
    from runner.cli.shared.policy_file import is_policy

    return is_policy(path)


def _read_policy(path: str) -> tuple[ManifestRead, ...]:
    from runner.cli.shared.policy_file import policy_faults

    return (ManifestRead(None, policy_faults(path)),)


def _with_refused_network(read: ManifestRead) -> ManifestRead:
    """With an error if the plugin asks for the host's network and a launch here would refuse it. All else
    that a policy refuses is up to `explain`: a manifest is also checked where it does not run."""
    plugin = read.plugin
    network = None if plugin is None else plugin.spec.network
    if plugin is None or network is None or network.mode != "host" or not network.required:
        return read
    from runner.launch.prepare import hold_against_policy
    from runner.launch.stages import Invocation, Loaded
    from runner.manifest.load import position
    from runner.outcome import Failure

    try:
        grant = hold_against_policy(Loaded(Invocation(plugin.manifest), plugin), os.environ).grant
    except Failure:  # of the policy: `runner check` is not about it
        return read
    told = [each for each in grant.denials if each.rule == "network_ceiling" and each.required]
    others = tuple(each for each in read.diagnostics if each.rule != "host_network_needs_operator")
    if not told:
        return read._replace(diagnostics=others)
    hint = next((each.hint for each in read.diagnostics if each not in others), told[0].hint)
    message = f"a launch refuses {told[0].asked}: {told[0].reason}"
    found = Diagnostic(plugin.manifest, *position(plugin, network.where), "network_refused", message, hint)
    return ManifestRead(None, (*others, found))


def _print_policies(policies: list[str], found: list[Diagnostic]) -> None:
    faulty = {os.path.abspath(d.file) for d in found if d.severity == "error"}
    for path in policies:
        if os.path.abspath(path) not in faulty:
            say(f"{printable(path)}: ok: a policy", sys.stdout)


def _diagnostics(given: str, loaded: tuple[ManifestRead, ...], config: str | None) -> list[Diagnostic]:
    """The diagnostics, with the path as the caller wrote it: a relative path stays relative. A fault of the
    configuration is one of the file that --config names."""
    found = [diagnostic for each in loaded for diagnostic in each.diagnostics]
    if config is not None and config.startswith("@"):
        found = [d._replace(file=config[1:]) if d.file == "--config" else d for d in found]
    if os.path.isabs(given):
        return found
    here = os.getcwd().rstrip("/") + "/"
    return [d._replace(file=d.file.removeprefix(here)) for d in found]


def _print_summary(
    shown: list[tuple[str, tuple[ManifestRead, ...], list[Diagnostic]]], errors: int, warnings: int
) -> None:
    for path, loaded, _ in shown:
        faulty = {d.file for each in loaded for d in each.diagnostics if d.severity == "error"}
        sound = [each for each in loaded if each.plugin is not None and each.plugin.manifest not in faulty]
        if not sound:
            continue
        names = ", ".join(printable(_plugin_name(each)) for each in sound)
        origin = f", of {printable(sound[0].origin)}" if sound[0].origin else ""
        say(f"{printable(path)}: ok: {names}{origin}", sys.stdout)
    if errors or warnings:
        print(f"{_count(errors, 'error')}, {_count(warnings, 'warning')}")


def _plugin_name(loaded: ManifestRead) -> str:
    plugin = loaded.plugin
    if plugin is None:
        return ""
    version = f" {plugin.version}" if plugin.version else ""
    return f"{plugin.id}{version} ({plugin.contract})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _print_json(
    shown: list[tuple[str, tuple[ManifestRead, ...], list[Diagnostic]]], errors: int, warnings: int
) -> None:
    files = [
        {
            "file": path,
            "origin": next((each.origin for each in loaded if each.origin), ""),
            "plugins": [
                {"id": each.plugin.id, "version": each.plugin.version, "contract": each.plugin.contract}
                for each in loaded
                if each.plugin is not None
            ],
            "diagnostics": [diagnostic._asdict() for diagnostic in diagnostics],
        }
        for path, loaded, diagnostics in shown
    ]
    document = {"schema": "runner.check.v1", "ok": not errors, "errors": errors, "warnings": warnings}
    _print_document({**document, "files": files})


def _print_document(document: dict[str, Any]) -> None:
    import json

    print(json.dumps(document, indent=2))


def sarif(diagnostics: list[Diagnostic]) -> dict[str, Any]:
    """The diagnostics as SARIF 2.1.0, which code hosts show beside the lines."""
    # Reversed, so that the first diagnostic of a rule describes it.
    described = {found.rule: _description(found) for found in reversed(diagnostics)}
    rules = sorted(described)
    driver = {
        "name": "runner",
        "version": __version__,
        "rules": [{"id": rule, "shortDescription": {"text": described[rule]}} for rule in rules],
    }
    run_object = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(diagnostic, rules) for diagnostic in diagnostics],
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return {"$schema": schema, "version": "2.1.0", "runs": [run_object]}


def _description(diagnostic: Diagnostic) -> str:
    """The rule of a diagnostic as a sentence: its message without quoted parts of this manifest."""
    import re

    text = re.sub(r"(?<!\w)'[^']*'(?!\w)", "…", diagnostic.message)
    return f"{text[:1].upper()}{text[1:]}."


def _result(diagnostic: Diagnostic, rules: list[str]) -> dict[str, Any]:
    from urllib.parse import quote

    uri = quote(os.fsencode(diagnostic.file))
    if diagnostic.file.startswith("/"):
        uri = "file://" + uri
    location: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if diagnostic.line:
        location["region"] = {"startLine": diagnostic.line, "startColumn": diagnostic.column}
    text = diagnostic.message + (f" ({diagnostic.hint})" if diagnostic.hint else "")
    return {
        "ruleId": diagnostic.rule,
        "ruleIndex": rules.index(diagnostic.rule),
        "level": diagnostic.severity,
        "message": {"text": text},
        "locations": [{"physicalLocation": location}],
    }
