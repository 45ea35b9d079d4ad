"""What is kept of a plan, once it runs."""

from __future__ import annotations

import marshal
import os
import sys

from runner.launch.stages import has_start_notes
from runner.launch.stored.entry import FORMAT, Gap, PlanEntry, Told, say
from runner.launch.stored.unit import GAPS, Unit, facts_without_unit, marks, unit_of_plan, without_unit
from sandbox import CODE_ROOT, cache
from sandbox.facts import Facts
from sandbox.look import Questions
from sandbox.speed import codec
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.launch.stages import Planned

# Variables whose values are no secrets. They occur in paths.
_PUBLIC = frozenset(
    (
        *("HOME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "SUDO_USER", "TERM", "TMPDIR", "USER"),
        *("LC_ALL", "LC_CTYPE", "RUNNER_BWRAP", "RUNNER_CACHE", "RUNNER_DEBUG", "RUNNER_POLICY"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
    )
)
# A shorter text is part of others by accident. As where secrets are hidden (docs/report.md).
SHORTEST_SECRET = 8
_SHORTEST_NAME = 4
_PACKAGES = ("runner", "sandbox", "policies")


# A plugin with many folders would fill the cache, and reading all of it takes as long as to decide anew.
_MOST_BYTES = 1 << 20
_LEAST_BYTES = 48  # of each path that it rests on


class NotKept(Exception):
    """This plan is not kept; the message says why."""


class PlanKeeper:
    """Holds the plan of a launch and what it rests on, and keeps both once the plugin runs."""

    planned: Planned | None = None
    asked: Questions | None = None

    def __init__(self, told: Told) -> None:
        self._told = told
        self._raw: bytes | None = None
        self._is_prepared = False

    def prepare(self) -> None:
        """Everything but the write. Called before the start: while the plugin runs, its limits are watched,
        and how long this takes depends on the plugin's folders."""
        assert self.planned is not None and self.asked is not None
        self._is_prepared = True
        try:
            self._raw = kept_bytes(self.planned, self.asked, self._told)
        except NotKept as refused:
            say(f"the plan is not kept: {refused}")
        except Exception as error:  # noqa: BLE001 -- nothing of this may end the launch
            say(f"the plan is not kept: {error!r}")

    def keep(self) -> None:
        if not self._is_prepared:
            self.prepare()
        if self._raw is not None and self._told.name is not None:
            try:
                cache.store(self._told.name, self._raw)
            except Exception as error:  # noqa: BLE001 -- the plugin runs: nothing of this may end it
                say(f"the plan is not kept: {error!r}")


def keep(planned: Planned, asked: Questions, told: Told) -> str:
    """Keep a plan for the next launch like this one. The answer: why it is not kept; empty if it is, as far
    as the cache can be written."""
    try:
        raw = kept_bytes(planned, asked, told)
    except NotKept as refused:
        return str(refused)
    if told.name is not None:
        cache.store(told.name, raw)
    return ""


def kept_bytes(planned: Planned, asked: Questions, told: Told) -> bytes:
    """The file of a plan that may be kept. Raises NotKept."""
    if told.name is None:
        raise NotKept("the caller has no home or no working directory")
    if cache.directory() is None:
        raise NotKept("the cache is off")
    _require_keepable(planned)
    if _LEAST_BYTES * len(asked.facts.places) > _MOST_BYTES:
        raise NotKept(f"it rests on too much: on {len(asked.facts.places)} paths")
    try:
        raw = written(planned, asked, told)
    except TypeError as refused:
        raise NotKept(str(refused)) from None
    if why := asked.storing_fault():
        raise NotKept(why)
    if len(raw) > _MOST_BYTES:
        raise NotKept(f"it rests on too much: it would have {len(raw)} bytes")
    return raw


def _require_keepable(planned: Planned) -> None:
    """Raises NotKept."""
    decided, plan = planned.decided, planned.plan
    if planned.grant.unsandboxed:
        raise NotKept("the plugin runs without a cage")
    if decided.signed is not None or decided.copy:
        raise NotKept("its package is copied and checked at each launch")
    if plan.owners is not None or plan.guards or plan.idmapped:
        raise NotKept("it writes to folders of the host, which are looked at each time")
    if plan.memory_files:
        raise NotKept("it gets secrets, or files that exist only in memory")
    if planned.invocation.overrides.env or planned.invocation.config:
        raise NotKept("the command line holds values that may be secret")


def written(planned: Planned, asked: Questions, told: Told) -> bytes:
    """The file. Raises NotKept if a secret would be in it."""
    _note_code(asked)
    unit = unit_of_plan(planned, asked.facts)
    if unit is not None:
        raw = _written(planned, asked, told, unit)
        if unit.name.encode() not in raw:
            return raw
        # A message tells it, or the manifest: the plan is for this unit only.
    return _written(planned, asked, told, None)


def _written(planned: Planned, asked: Questions, told: Told, unit: Unit | None) -> bytes:
    gaps: list[tuple[str, str]] = []
    numbers: dict[str, int] = {}
    for number, word in enumerate(told.arguments):
        _add(Gap("word", str(number)), word, gaps, numbers)
    for name in asked.facts.variables:
        value = told.environ.get(name)
        if value and may_be_secret(name):
            _add(Gap("variable", name), value, gaps, numbers)
    secrets = [text for text in numbers if len(text) >= SHORTEST_SECRET]
    _require_public_paths(asked.facts, secrets)
    facts = asked.facts
    if unit is not None:
        planned, facts = without_unit(planned, unit), facts_without_unit(facts, unit)
        numbers.update(marks(len(gaps)))
        gaps += GAPS
    # `decided`, the first field, is kept apart: only messages and reports need it.
    decided = _with_gaps(codec.as_plain(planned.decided), numbers, secrets)
    plan = _with_gaps(codec.as_plain(tuple(planned)[1:]), numbers, secrets)
    rest = marshal.dumps(decided, codec.MARSHAL_FORMAT)
    entry = PlanEntry(FORMAT, tuple(facts), tuple(gaps), has_start_notes(planned), plan, rest)
    return marshal.dumps(tuple(entry), codec.MARSHAL_FORMAT)


def _require_public_paths(facts: Facts, secrets: list[str]) -> None:
    """No secret in a path that was asked about, and no such path out of a secret: something with slashes in
    it is looked for as if it were a path. The names of what exists are on the disk anyway. Raises NotKept."""
    for path in (*facts.places, *facts.listed, *facts.contents, *facts.identities):
        name = path.rpartition("/")[2]
        if len(facts.places.get(path, ())) > 1 or path in facts.identities:
            continue
        for secret in secrets:
            if secret in path or (len(name) >= _SHORTEST_NAME and name in secret):
                raise NotKept("the value of a variable, or an argument, is part of a path")


def _add(gap: Gap, text: str, gaps: list[tuple[str, str]], numbers: dict[str, int]) -> None:
    if text and text not in numbers:
        numbers[text] = len(gaps)
        gaps.append((gap.kind, gap.name))


def _with_gaps(plain: Any, numbers: dict[str, int], secrets: list[str]) -> Any:
    """The same with a gap for each text that is not kept. Raises NotKept if one is part of another text."""
    if isinstance(plain, str):
        if plain in numbers:
            return [codec.GAP, numbers[plain]]
        if any(secret in plain for secret in secrets):
            raise NotKept("the value of a variable, or an argument, is part of another text")
        return plain
    if isinstance(plain, list):
        # The first item is the name of a class.
        return [plain[0], *(_with_gaps(item, numbers, secrets) for item in plain[1:])]
    if isinstance(plain, dict):
        if any(secret in key for key in plain for secret in secrets):
            raise NotKept("the value of a variable, or an argument, is part of another text")
        return {key: _with_gaps(item, numbers, secrets) for key, item in plain.items()}
    return plain


def _note_code(asked: Questions) -> None:
    """Our own code decided it: in a checkout it changes without a new version."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES:
            file = getattr(module, "__file__", None)
            if file and file.startswith(f"{CODE_ROOT}{os.sep}"):
                asked.place(file)


def may_be_secret(name: str) -> bool:
    """Whether the value of this variable is never kept or shown."""
    return name not in _PUBLIC
