"""runner conformance: try a plugin by each rule of its contract."""

from __future__ import annotations

import argparse
import sys

from runner.cli.call import add_sent_secrets, configured, read_secrets
from runner.cli.shared.json_option import read_json_option
from runner.cli.shared.options import (
    add_command_invocation,
    add_config,
    add_contract_options,
    add_launch,
    add_secrets,
    contract_at_args,
    invocation_of,
    is_command,
)
from runner.cli.shared.text import say
from runner.conformance.report import ConformanceReport, Verdict, as_json, as_junit, as_text
from runner.conformance.rules import RuleBook
from runner.contracts.contract import Contract
from runner.contracts.registry import contract_names, find_contract, plugin_rules
from runner.exceptions import PluginError, PluginFailure
from runner.outcome import EXIT, USAGE_ERROR
from runner.protocol.dialect import Call
from runner.protocol.secrets import Secrets
from sandbox.document.diagnostic import did_you_mean, printable, quoted
from sandbox.units import parse_limit

NAME = "conformance"
EXAMPLE = """runner conformance CONTRACT ./my-plugin --call greet --input '{"name": "you"}'"""
PASSES_ARGUMENTS = True

_TIMEOUT = "10s"
_BROKEN = 1  # exit status: at least one rule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_rules(parser, nargs="?")
    parser.add_argument("manifest", metavar="MANIFEST", help="the plugin's manifest, or the folder it is in")
    parser.add_argument(
        "--server", metavar="NAME", help="which plugin of a manifest that lists several servers"
    )
    add_launch(parser)
    add_config(parser)
    add_secrets(parser)
    add_sent_secrets(parser)
    add_contract_options(parser, "call")
    parser.usage = f"{parser.prog} [options] [CONTRACT] MANIFEST [-- ARGS]"
    parser.usage += f"\n       {parser.prog} [options] CONTRACT -- COMMAND"


def add_command_arguments(parser: argparse.ArgumentParser) -> None:
    _add_rules(parser)
    add_command_invocation(parser)
    parser.set_defaults(secrets=None)


def _add_rules(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    names = ", ".join(contract_names())
    usual = "" if nargs is None else " (default: the contract of the manifest)"
    parser.add_argument(
        "rules", metavar="CONTRACT", nargs=nargs, help=f"whose rules: {names}; see runner contracts{usual}"
    )
    parser.add_argument(
        "--call", metavar="NAME", help="a call that succeeds, for the rules about calls: a tool, …"
    )
    parser.add_argument("--input", metavar="JSON|@FILE|-", help="its input")
    parser.add_argument("--kind", metavar="KIND", help="what NAME names, as for runner call")
    parser.add_argument(
        "--timeout", metavar="TIME", help=f"for each answer and for the exit; default: {_TIMEOUT}"
    )
    parser.add_argument("--format", choices=("text", "json", "junit"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    try:
        args.contract = args.rules
        args.rules = args.rules or contract_at_args(args)
        if args.rules is None:
            message = f"the contract of {quoted(args.manifest)} is not clear"
            raise ValueError(f"{message}; write runner conformance CONTRACT MANIFEST")
        contract, book = _rules(args.rules)
        args.contract = None if is_command(args) else args.rules
        invocation, config = configured(invocation_of(args))
        seconds = _seconds(_TIMEOUT if args.timeout is None else args.timeout)
        call = _call(args, contract)
        secrets = read_secrets(args)
    except ValueError as error:
        say(f"runner conformance: {printable(str(error))}")
        return USAGE_ERROR
    from runner.cli.live.conformance import try_on_trio
    from runner.conformance.engine import prepare_subject

    try:
        subject = prepare_subject(invocation, contract, call, config, secrets)
        verdicts = try_on_trio(book, subject, seconds)
    except (PluginError, PluginFailure) as failed:
        lines = failed.explanation if isinstance(failed, PluginFailure) else ()
        outcome = failed.outcome
        told = f"runner: {outcome.code}: {outcome.message}" + (f"; {outcome.hint}" if outcome.hint else "")
        say("\n".join(lines or (printable(told),)))
        return EXIT[outcome.code]
    name = " ".join(args.arguments) if is_command(args) else args.manifest
    report = ConformanceReport(contract.name, name, without_secrets(subject.secrets, verdicts))
    print_report(report, args.format)
    return EXIT["ok"] if report.ok else _BROKEN


def print_report(report: ConformanceReport, form: str) -> None:
    if form == "json":
        print(as_json(report))
    elif form == "junit":
        print(as_junit(report), end="")
    else:
        say("\n".join(as_text(report)), sys.stdout)


def _rules(name: str) -> tuple[Contract, RuleBook]:
    """Raises ValueError."""
    contract = find_contract(_known(name))
    book = plugin_rules(contract)
    if book is None:
        raise ValueError(f"the contract {name} has no rules that a plugin can be tried by")
    return contract, book


def _known(name: str) -> str:
    """The name of a contract. Raises ValueError."""
    known = contract_names()
    if name not in known:
        near = did_you_mean(name, known)
        raise ValueError(
            f"there is no contract {quoted(name)}; {near or 'there are'} {', '.join(known)}; write"
            " runner conformance CONTRACT MANIFEST"
        )
    return name


def _seconds(word: str) -> float:
    """Raises ValueError."""
    try:
        return float(parse_limit("call", word))
    except ValueError as error:
        raise ValueError(f"--timeout {word}: {error}") from None


def _call(args: argparse.Namespace, contract: Contract) -> Call | None:
    """Raises ValueError."""
    given = read_json_option("--input", args.input)
    kind = args.kind or next(iter(contract.calls))
    if args.call is None:
        if given is not None or args.kind is not None:
            raise ValueError("--input and --kind belong to a call: name it with --call")
        return None
    if not args.call:
        raise ValueError("--call: its value is empty; is a variable unset?")
    if kind not in contract.calls:
        raise ValueError(f"--kind {kind}: the contract {contract.name} has {', '.join(contract.calls)}")
    return Call(kind, args.call, given)


def without_secrets(secrets: Secrets, verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    """The verdicts, with no secret in what was said."""
    if not secrets:
        return verdicts
    return tuple(
        each._replace(
            reason=secrets.hide(each.reason),
            exchange=tuple(line._replace(text=secrets.hide(line.text)) for line in each.exchange),
        )
        for each in verdicts
    )
