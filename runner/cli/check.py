"""runner check: every fault of a manifest or a policy, with its line and column."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any

from runner import __version__
from runner.cli.shared.options import (
    add_config,
    add_contract_options,
    add_manifest_choice,
    config_of,
    contract_options_of,
)
from runner.cli.shared.text import print_diagnostics, say
from runner.manifest.load import ManifestRead, load_all
from runner.outcome import EXIT, USAGE_ERROR
from sandbox.document.diagnostic import Diagnostic, DocumentError, printable
from sandbox.document.read import read_bounded
from sandbox.policy.load import policy_names, trust_fault
from sandbox.policy.parse import parse_policy
from sandbox.policy.schema import policy_schema

NAME = "check"
HELP = "list everything that is wrong with a manifest or a policy"
EXAMPLE = "runner check ./my-plugin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "manifests", nargs="+", metavar="MANIFEST", help="a manifest, a directory with one, or a policy"
    )
    parser.add_argument("--format", choices=("text", "json", "sarif"), default="text", help="default: text")
    add_manifest_choice(parser)
    add_config(parser)
    add_contract_options(parser)


def run(args: argparse.Namespace) -> int:
    try:
        options, config = dict(contract_options_of(args)), config_of(args.config)
    except ValueError as error:
        say(f"runner check: {error}")
        return USAGE_ERROR
    policies = [path for path in args.manifests if args.contract is None and is_policy(path)]
    files = [
        (
            path,
            (ManifestRead(None, policy_faults(path)),)
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
        print(json.dumps(sarif(found), indent=2))
    else:
        print_diagnostics(found, sys.stdout)
        _print_policies(policies, found)
        _print_summary(shown, errors, len(found) - errors)
    if errors and len(policies) == len(args.manifests):
        return EXIT["policy_invalid"]
    return EXIT["manifest_invalid" if errors else "ok"]


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
    print(json.dumps({**document, "files": files}, indent=2))


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


# --- a policy -----------------------------------------------------------------------------------------------


_FILE_NAME = "policy.toml"
# Tables that other files do not have: without a version, a policy is known by them, or by keys in the others.
_OWN_TABLES = ("approvals", "capabilities", "cgroups", "layers", "limits", "read", "seccomp", "write")
_VERSION = re.compile(rb"^[ \t]*version[ \t]*=[ \t]*1[ \t]*(#.*)?\r?$", re.MULTILINE)
_TABLE = re.compile(rb"^[ \t]*\[[ \t]*([A-Za-z_]+)[ \t]*[.\]]", re.MULTILINE)
_KEY = re.compile(rb"^[ \t]*([a-z_]+)[ \t]*=", re.MULTILINE)


def is_policy(path: str) -> bool:
    """Whether a file is a policy: by its name, by its version and most of its tables, or by all of them. It
    may have faults, so only its lines are looked at."""
    if not path.endswith(".toml") or os.path.isdir(path):
        return False
    folder, name = os.path.split(os.path.realpath(path))
    if name == _FILE_NAME or (name.removesuffix(".toml") in policy_names() and folder.endswith("/policies")):
        return True
    from runner.manifest.load import contract_at

    try:
        raw = read_bounded(path)
    except DocumentError:
        return False  # reading it as a manifest reports why
    tables = {each.decode() for each in _TABLE.findall(raw)}
    # A table that no policy has means another kind of file, unless other tables are those of a policy.
    schema = policy_schema()["properties"]
    known = tables & set(schema)
    if _VERSION.search(raw):
        likely = len(known) * 2 > len(tables)
    else:
        own = {*_OWN_TABLES, *(key for table in known for key in schema[table].get("properties", ()))}
        keys = {each.decode() for each in _KEY.findall(raw)}
        likely = known == tables and not own.isdisjoint(tables | keys)
    return likely and contract_at(path) is None


def policy_faults(path: str) -> tuple[Diagnostic, ...]:
    """All faults, and a warning if a launch would not trust the file."""
    absolute = os.path.abspath(path)
    try:
        parse_policy(absolute, read_bounded(absolute), name=absolute)
    except DocumentError as error:
        return error.diagnostics
    fault = trust_fault(absolute)
    if fault is None:
        return ()
    reason, hint = fault
    return (Diagnostic(absolute, 0, 0, "policy_untrusted", reason, hint, "warning"),)
