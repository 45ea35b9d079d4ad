"""runner learn: run a plugin in its cage, and say what it missed there.

What only the proposal needs is imported when the plugin has ended, so that it starts sooner.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from typing import IO, Any

from runner.approvals.record import ApprovalsUnusable
from runner.cli import drop_environment
from runner.cli.approving.ask_person import propose
from runner.cli.approving.subject import unwrap_subject
from runner.cli.call import configured, contents_of, read_secrets
from runner.cli.exec import secret_files
from runner.cli.learning.proposal_text import proposal_lines
from runner.cli.shared.json_option import read_json_option
from runner.cli.shared.launching import CommandLineHost, is_stderr_writable
from runner.cli.shared.launching import launch as launch_plugin
from runner.cli.shared.options import (
    add_command_invocation,
    add_invocation,
    contract_at_args,
    invocation_of,
    is_command,
    secrets_of,
)
from runner.cli.shared.report_file import ReportFile, ReportFileError
from runner.cli.shared.text import say
from runner.contracts.registry import command_contract, find_contract
from runner.install.roots import store_roots
from runner.launch.advice.scene import scene_of
from runner.launch.carry_out import judge_end
from runner.launch.command import environ_of_host
from runner.launch.denylist import make_denylist
from runner.launch.read import load
from runner.launch.rehearse import rehearse
from runner.launch.report import report
from runner.launch.run import run as run_plugin
from runner.launch.stages import Ended, Invocation, Planned, Started, Stopwatch
from runner.learn.judge import Lesson, propose_needs
from runner.learn.proposal import Proposal, emit
from runner.outcome import EXEC_REFUSED, EXIT, USAGE_ERROR, Failure, Outcome
from sandbox.document.diagnostic import printable
from sandbox.paths.mounts import read_mounts
from sandbox.spec import Access

NAME = "learn"
EXAMPLE = """runner learn ./my-plugin --call demo_echo --input '{"text": "hello"}'"""
PASSES_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_invocation(parser, launching=True)
    _add_learning(parser)
    parser.usage = f"{parser.usage}\n       {parser.prog} [options] -- COMMAND"


def add_command_arguments(parser: argparse.ArgumentParser) -> None:
    add_command_invocation(parser)
    _add_learning(parser)


def _add_learning(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "learning",
        "The cage is as shut as under runner exec. Without --call the plugin has the runner's own stdin and"
        " stdout, so that its host can talk to it; its end, or Ctrl-C, ends the run.",
    )
    group.add_argument(
        "--call", metavar="NAME", action=_Call, dest="calls", default=[], help="call this tool; repeatable"
    )
    group.add_argument(
        "--input", metavar="JSON|@FILE", action=_Input, dest="calls", help="the input of the --call before it"
    )
    group.add_argument(
        "--emit",
        choices=("x-sandbox", "options", "policy"),
        help="print the proposal in this form only, to copy or to pass on",
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        help="write the proposal there; without it, to stdout with --call and else to stderr",
    )
    group.add_argument("--apply", action="store_true", help="allow what is proposed, as runner allow does")
    group.add_argument("--yes", action="store_true", help="with --apply: do not ask")
    group.add_argument(
        "--report", metavar="PATH|FD", help="write what happened as one JSON document (runner.report.v1)"
    )
    parser.set_defaults(secrets=None)


class _Call(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.calls = [*namespace.calls, (values, None)]


class _Input(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if not namespace.calls or namespace.calls[-1][1] is not None:
            parser.error("--input: it belongs behind the --call that it is for")
        namespace.calls = [*namespace.calls[:-1], (namespace.calls[-1][0], values)]


def advice(message: str) -> str:
    if message.startswith("unrecognized arguments: "):
        return "a command goes behind --, as in runner learn -- ./server --port 8080"
    return ""


def run(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        try:
            _check(args)
            invocation = invocation_of(args)._replace(observe=True)
            report_file = ReportFile(args.report)
            # Opened before the plugin runs: it could put a link in the place of a file that is made later.
            output = None if args.output is None else stack.enter_context(_open_output(args.output))
            learned = _learn_by_calls(args, invocation, report_file) if args.calls else None
            learned = learned or _learn_attached(args, invocation, report_file)
            if isinstance(learned, int):
                return learned
            proposal = _propose(*learned)
            _print(args, invocation, proposal, output)
            return _apply(args, invocation, proposal) if args.apply and proposal.needs else EXIT["ok"]
        except (ReportFileError, ValueError) as error:
            say(f"runner learn: {printable(str(error))}")
            return USAGE_ERROR
        except Failure as failure:
            from runner.cli.shared import text as printing

            printing.failure(failure.stage, failure.outcome)
            return EXIT[failure.outcome.code]


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError if the options contradict each other."""
    if args.yes and not args.apply:
        raise ValueError("--yes: it goes with --apply")
    if args.apply and is_command(args) and not (args.command_name or args.wrapped):
        raise ValueError("--apply: a command is allowed by its name; add --name NAME, as for runner run")
    if args.output == "":
        raise ValueError("--output: its value is empty; is a variable unset?")


def _open_output(path: str) -> IO[str]:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {path}: {error.strerror}") from None


# --- the run ------------------------------------------------------------------------------------------------


class LearningHost(CommandLineHost):
    advises = False  # the proposal says it all
    is_quiet = False  # where only a form is printed

    def see_ready(self, planned: Planned) -> None:
        _require_cage(planned)
        super().see_ready(planned)

    def see_started(self, started: Started) -> Started:
        if not self.is_quiet and is_stderr_writable(0):
            with contextlib.suppress(OSError):
                say("runner learn: it runs, and what it asks for is noted; Ctrl-C ends it")
        return super().see_started(started)


def _require_cage(planned: Planned) -> None:
    if planned.grant.unsandboxed:
        message = "this plugin runs without a cage, so that there is nothing it could miss"
        hint = "leave `unsandboxed` out of its manifest, or use a policy that does not allow it"
        raise Failure(Outcome("policy_denied", "plan", message, "unsandboxed", hint), EXEC_REFUSED)


def _learn_attached(
    args: argparse.Namespace, invocation: Invocation, report_file: ReportFile
) -> tuple[Planned, Lesson] | int:
    """Run the plugin with our own streams. Returns the exit status if it never ran."""
    seen: list[Ended] = []
    secrets = secrets_of(args)
    contents = secret_files(secrets) if secrets else None

    def begin(host: Any) -> Ended:
        seen.append(run_plugin(invocation, os.environ, time.monotonic(), host, contents))
        return seen[0]

    host = LearningHost(keep_tail=True, secrets=secrets)
    host.is_quiet = args.emit is not None
    status = launch_plugin(NAME, begin, host, report_file)
    if not seen:
        return status

    [ended] = seen
    planned = ended.started.planned
    outcome, _ = judge_end(ended.end, planned.plan.limits, planned)
    relay = ended.started.plumbing.stderr
    document = report(ended, outcome, status)
    return planned, _lesson(planned, document, "" if relay is None else relay.text_tail())


def _learn_by_calls(
    args: argparse.Namespace, invocation: Invocation, report_file: ReportFile
) -> tuple[Planned, Lesson] | int:
    """Start the plugin, make the calls, and end it."""
    from runner.cli.live.learn_calls import talk

    name = command_contract() if is_command(args) else contract_at_args(args)
    contract = None if name is None else find_contract(name)
    if contract is not None and contract.prepared_calls is not None:
        raise ValueError(f"--call: a plugin of {contract.name} runs once for each call; leave --call out")
    kind = "tool" if contract is None else next(iter(contract.calls))
    calls = [(name, read_json_option("--input", given)) for name, given in args.calls]
    invocation, config = configured(invocation)
    secrets = read_secrets(args)
    planned = rehearse(invocation, os.environ)
    _require_cage(planned)
    heard = talk(invocation, kind, calls, config, secrets, contents_of(args, secrets))
    if report_file.wanted and heard.report is not None:
        report_file.write(heard.report)
    if heard.report is None or "observed" not in heard.report:
        return heard.status or EXIT["internal"]
    return planned, _lesson(planned, heard.report, heard.output)


def _lesson(planned: Planned, document: dict[str, Any], output: str) -> Lesson:
    environ = environ_of_host(planned.invocation.command, os.environ)
    return Lesson(
        scene_of(planned, environ),
        document,
        home=dict(planned.plan.env).get("HOME", ""),
        search_path=os.environ.get("PATH", ""),
        output=output,
        stores=tuple(map(os.path.realpath, store_roots(environ))),
    )


# --- the proposal -------------------------------------------------------------------------------------------


def _propose(planned: Planned, lesson: Lesson) -> Proposal:
    mounts = read_mounts()
    denylist = make_denylist(planned.decided, planned.bwrap, mounts, os.environ, writes=True)

    def denial(path: str, access: Access) -> str:
        hit = denylist.name_hit(path, access)
        return "" if hit is None else hit.sentence()

    return propose_needs(lesson, denial, mounts)


def _print(
    args: argparse.Namespace, invocation: Invocation, proposal: Proposal, output: IO[str] | None
) -> None:
    if args.emit is not None:
        told = emit(proposal, args.emit)
    else:
        told = "".join(f"{line}\n" for line in proposal_lines(proposal, load(invocation, Stopwatch())))
    stream = output or (sys.stdout if args.calls else sys.stderr)
    with contextlib.suppress(BrokenPipeError):
        stream.write(told)
        stream.flush()


def _apply(args: argparse.Namespace, invocation: Invocation, proposal: Proposal) -> int:
    """Record the proposal as an approval, by the same words and the same question as `runner allow`."""
    subject = unwrap_subject(load(invocation, Stopwatch()))
    if subject.entry is not None:
        drop_environment()
    # Without --call, stdout was the plugin's.
    with contextlib.redirect_stdout(sys.stdout if args.calls else sys.stderr):
        try:
            return propose(subject, proposal.approval, sure=args.yes, partly=True)
        except ApprovalsUnusable as unusable:
            say(f"runner learn: {printable(str(unusable))}\n  {printable(unusable.hint)}")
            return EXIT["policy_denied"]
