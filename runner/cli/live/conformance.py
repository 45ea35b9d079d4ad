"""The trial of a plugin, from the command line."""

from __future__ import annotations

from runner.cli.live.session import cancelled_by_signals, interrupted, run_on_trio
from runner.conformance.engine import try_plugin
from runner.conformance.report import Verdict
from runner.conformance.rules import RuleBook
from runner.conformance.subject import TrialSubject


def try_on_trio(book: RuleBook, subject: TrialSubject, seconds: float) -> tuple[Verdict, ...]:
    """The verdicts. Raises PluginFailure, also if a signal has ended the trial."""

    async def work() -> tuple[Verdict, ...]:
        verdicts: tuple[Verdict, ...] = ()
        async with cancelled_by_signals(lambda first: None) as numbers:
            verdicts = await try_plugin(book, subject, seconds)
        if numbers:
            raise interrupted(numbers[0])
        return verdicts

    return run_on_trio(work)
