"""Storing the plan of a launch, once its plugin runs."""

from __future__ import annotations

import marshal
import os
import sys

from runner.launch.stages import has_start_notes, with_host
from runner.launch.stored.entry import FORMAT, Blank, LaunchRequest, PlanEntry, say
from runner.launch.stored.unit import BLANKS, Unit, facts_without_unit, marks, unit_of_plan, without_unit
from sandbox import CODE_ROOT, cache
from sandbox.facts import HOST_VARIABLE, Facts
from sandbox.look import AskedFacts
from sandbox.spec import LITERAL, PLUGIN_DIR_TOKEN, STATE_DIR_TOKEN
from sandbox.speed import codec
from sandbox.speed.typed import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.launch.stages import Planned
    from sandbox.speed.typed import Iterator, Sequence

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


class NotStored(Exception):
    """This plan is not stored; the message says why."""


class PlanWriter:
    """Holds the plan of a launch and the facts it rests on, and stores both once the plugin runs."""

    planned: Planned | None = None

    def __init__(self, request: LaunchRequest) -> None:
        self.asked = AskedFacts()
        self._request = request
        self._raw: bytes | None = None
        self._is_prepared = False

    def prepare(self) -> None:
        """Everything but the write. Called before the start: while the plugin runs, its limits are watched,
        and how long this takes depends on the plugin's folders."""
        assert self.planned is not None
        self._is_prepared = True
        try:
            self._raw = plan_bytes(self.planned, self.asked, self._request)
        except NotStored as refused:
            say(f"the plan is not stored: {refused}")
        except Exception as error:  # noqa: BLE001 -- nothing of this may end the launch
            say(f"the plan is not stored: {error!r}")

    def store(self) -> None:
        if not self._is_prepared:
            self.prepare()
        if self._raw is not None and self._request.name is not None:
            try:
                cache.store(self._request.name, self._raw)
            except Exception as error:  # noqa: BLE001 -- the plugin runs: nothing of this may end it
                say(f"the plan is not stored: {error!r}")


def store_plan(planned: Planned, asked: AskedFacts, request: LaunchRequest) -> str:
    """Store a plan for the next launch like this one. Returns the reason it was not stored, or ''. A cache
    that cannot be written is no reason: the next launch is decided anew."""
    try:
        raw = plan_bytes(planned, asked, request)
    except NotStored as refused:
        return str(refused)
    if request.name is not None:
        cache.store(request.name, raw)
    return ""


def plan_bytes(planned: Planned, asked: AskedFacts, request: LaunchRequest) -> bytes:
    """Returns the content of the file, for a plan that may be stored. Raises NotStored."""
    if request.name is None:
        raise NotStored("the caller has no home or no working directory")
    if cache.directory() is None:
        raise NotStored("the cache is off")
    _require_storable(planned)
    if _LEAST_BYTES * len(asked.facts.places) > _MOST_BYTES:
        raise NotStored(f"it rests on too much: on {len(asked.facts.places)} paths")
    try:
        raw = encode_plan(planned, asked, request)
    except TypeError as refused:
        raise NotStored(str(refused)) from None
    if why := asked.storing_fault(looks_again=True):
        raise NotStored(why)
    if len(raw) > _MOST_BYTES:
        raise NotStored(f"it rests on too much: it would have {len(raw)} bytes")
    return raw


def _require_storable(planned: Planned) -> None:
    """Raises NotStored."""
    decided, plan = planned.decided, planned.plan
    if planned.grant.unsandboxed:
        raise NotStored("the plugin runs without a cage")
    if decided.signed is not None or decided.copy:
        raise NotStored("its package is copied and checked at each launch")
    if plan.owners is not None and (plan.owners.identity() or plan.owners.maps_state):
        raise NotStored("what it writes belongs to a uid that is reserved for it, or to an account")
    if plan.staged:
        raise NotStored("what it writes is kept apart, in a new place each time")
    if plan.memory_files:
        raise NotStored("it gets secrets, or files that exist only in memory")
    broker = None if plan.egress is None else plan.egress.broker
    if broker is not None:
        from runner.launch.hidden import literal_values

        literal = literal_values(planned)
        if any(each.source == LITERAL or each.name in literal for each in broker.credentials):
            raise NotStored("a credential that the plugin does not get is in its manifest")
    command = planned.invocation.command
    # Those of an entry are in the variables that its host gave.
    typed = () if command is None or command.host_environ is not None else command.spec.env
    given = (each for each in typed if each.value is not None)
    if planned.invocation.overrides.env or planned.invocation.config or any(given):
        raise NotStored("the command line holds values that may be secret")


def encode_plan(planned: Planned, asked: AskedFacts, request: LaunchRequest) -> bytes:
    """Returns the content of the file. Raises NotStored if it would contain a secret."""
    note_code(asked)
    unit = unit_of_plan(planned, asked.facts)
    if unit is not None:
        raw = _encode(planned, asked, request, unit)
        if unit.name.encode() not in raw:
            return raw
        # A message tells it, or the manifest: the plan is for this unit only.
    return _encode(planned, asked, request, None)


def _encode(planned: Planned, asked: AskedFacts, request: LaunchRequest, unit: Unit | None) -> bytes:
    blanks: list[tuple[str, str]] = []
    numbers: dict[str, int] = {}
    variables = request.variables
    if request.host is not None:
        planned = planned._replace(decided=with_host(planned.decided, {}))
    for number, word in enumerate(request.arguments):
        if not _is_name(word):
            _add(Blank("word", str(number)), word, blanks, numbers)
    for name in asked.facts.variables:
        value = variables.get(name)
        if value and may_be_secret(name) and not _is_name(value):
            _add(Blank("variable", name), value, blanks, numbers)
    _require_no_value_of_words(planned, request.arguments)
    values = {value for word in request.arguments for value in _values(word) if not _is_name(value)}
    parts = {part for text in {*numbers, *values} for part in _parts(text)}
    secrets = [part for part in parts if len(part) >= SHORTEST_SECRET]
    _require_public_paths(asked.facts, secrets)
    facts = asked.facts
    if unit is not None:
        planned, facts = without_unit(planned, unit), facts_without_unit(facts, unit)
        numbers.update(marks(len(blanks)))
        blanks += BLANKS
    # `decided`, the first field, stands apart: only messages and reports need it.
    decided = _with_blanks(codec.as_plain(planned.decided), numbers, secrets)
    plan = _with_blanks(codec.as_plain(tuple(planned)[1:]), numbers, secrets)
    rest = marshal.dumps(decided, codec.MARSHAL_FORMAT)
    entry = PlanEntry(FORMAT, tuple(facts), tuple(blanks), _tells(planned), plan, rest)
    return marshal.dumps(tuple(entry), codec.MARSHAL_FORMAT)


def _tells(planned: Planned) -> bool:
    """Whether the operator reads something before the plugin starts."""
    if not has_start_notes(planned):
        return False
    from runner.launch.report import notes

    # Those of the decision may be kept for `runner advice` at each start.
    return bool(planned.decided.notes) or any(note.urgent for note in notes(planned))


def _require_public_paths(facts: Facts, secrets: list[str]) -> None:
    """Refuse a path that contains a secret or is part of one: a value with slashes is looked up as if it were
    a path. Names of what exists are on the disk anyway. Raises NotStored."""
    for path in (*facts.places, *facts.listed, *facts.contents, *facts.identities):
        name = path.rpartition("/")[2]
        if len(facts.places.get(path, ())) > 1 or path in facts.identities:
            continue
        for secret in secrets:
            if secret in path or (len(name) >= _SHORTEST_NAME and name in secret):
                raise NotStored("the value of a variable, or an argument, is part of a path")


def _values(word: str) -> tuple[str, str]:
    """What an argument has behind = and behind the next one: --token=VALUE, --env=NAME=VALUE."""
    _, _, first = word.partition("=")
    return first, first.partition("=")[2]


def _parts(text: str) -> Iterator[str]:
    """What other texts may have of it: all, also quoted for a shell, and what is around a folder that is
    filled in."""
    yield text
    yield text.replace("'", "'\"'\"'")
    for part in text.split(STATE_DIR_TOKEN):
        yield from part.split(PLUGIN_DIR_TOKEN)


def _require_no_value_of_words(planned: Planned, arguments: Sequence[str]) -> None:
    """Refuse a variable whose value is in a word: `docker run -e NAME=VALUE`. Raises NotStored."""
    for each in planned.plugin.spec.env:
        if each.value and any(word.endswith(f"={each.value}") for word in arguments):
            raise NotStored("the value of a variable is in an argument")


def _is_name(text: str) -> bool:
    """Whether it is the path of something that exists: its name is on the disk anyway."""
    return text.startswith("/") and "\0" not in text and os.path.lexists(text)


def _add(blank: Blank, text: str, blanks: list[tuple[str, str]], numbers: dict[str, int]) -> None:
    if text and text not in numbers:
        numbers[text] = len(blanks)
        blanks.append((blank.kind, blank.name))


def _with_blanks(plain: Any, numbers: dict[str, int], secrets: list[str]) -> Any:
    """The same with a blank for each text that is not stored. Raises NotStored if one is part of another."""
    if isinstance(plain, str):
        if plain in numbers:
            return [codec.BLANK, numbers[plain]]
        if any(secret in plain for secret in secrets):
            raise NotStored("the value of a variable, or an argument, is part of another text")
        return plain
    if isinstance(plain, list):
        # The first item is the name of a class.
        return [plain[0], *(_with_blanks(item, numbers, secrets) for item in plain[1:])]
    if isinstance(plain, dict):
        if any(secret in key for key in plain for secret in secrets):
            raise NotStored("the value of a variable, or an argument, is part of another text")
        return {key: _with_blanks(item, numbers, secrets) for key, item in plain.items()}
    return plain


def note_code(asked: AskedFacts) -> None:
    """Our own code decided it: in a checkout it changes without a new version."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES:
            file = getattr(module, "__file__", None)
            if file and file.startswith(f"{CODE_ROOT}{os.sep}"):
                asked.place(file)


def may_be_secret(name: str) -> bool:
    """Whether the value of this variable is never stored or shown."""
    return name.removeprefix(HOST_VARIABLE) not in _PUBLIC
