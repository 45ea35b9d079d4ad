"""The cost of checking a value against a schema, known before the first step.

A plugin writes its own schemas, and jsonschema-rs trusts them: a chain of references overflows the stack, and
two references side by side double the work at every level of a value. So a schema is read here first. The
schema objects make a graph: one kind of edge leads to schemas applied to the same place of a value (allOf,
$ref, …), the others to schemas applied to its members. Walking a value along the graph counts how often each
object is applied.

Why the steps are counted. jsonschema-rs has no limit of its own on steps or time, and a check that runs
cannot be interrupted: it holds its thread. A process apart could be killed, but every call would have to
send it the value, and it would need the bounds on depth all the same: a stack overflow ends a process.
Bounds on size and depth alone do not hold: a schema of 77 objects can take 4^15 steps for the value "a" (see
`doubling` in tests/runner/protocol/test_schema.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from sandbox.speed.value import NamedTuple

MOST_DEPTH = 128  # levels of a schema, and of a value: 100 000 levels crash jsonschema-rs
MOST_NODES = 20_000  # values in a schema: 5 µs and 2 kB each when it is compiled
MOST_TEXT = 1024 * 1024  # characters of a schema
MOST_IN_PLACE = 32  # objects applied to one place, each by the one before: 1000 of them, with a value 128
# levels deep, overflow the stack
MOST_STEPS = 10_000_000  # of one check: 25 to 250 ns each
MOST_COUNTED = 100_000  # edges of the graph that are followed to count them

# A character that a regular expression reads costs one step for this many characters of its source. With a
# repetition count ("{") the source does not show the cost: then it is the second number of steps.
_SOURCE_PER_STEP = 16
_COUNTED_REPETITION_STEPS = 50

_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("not", "if", "then", "else")
_IN_PLACE_MAPS = ("dependentSchemas", "dependencies")
_MEMBERS = ("additionalProperties", "unevaluatedProperties")
_ELEMENTS = ("items", "additionalItems", "contains", "unevaluatedItems")
_COMPARED = ("enum", "required", "properties", "dependentRequired", "dependencies", "dependentSchemas")
_COMPARED_PER_STEP = 8
_DIVISION_STEPS = 400  # multipleOf is exact, and 1e308 by 1e-308 is a long division
_ELSEWHERE = ("$dynamicRef", "$recursiveRef")  # their target depends on the path that led to them

_Times = dict[int, int]  # node -> how often it is applied


class SchemaFault(ValueError):
    """Why a schema is not used, or a value not checked: one sentence."""


# --- size ------------------------------------------------------------------------------------------------


class DocumentSize(NamedTuple):
    nodes: int
    text: int  # characters of all strings and keys

    @property
    def bytes(self) -> int:
        """An estimate of its size in jsonschema-rs."""
        return 64 * self.nodes + self.text


def measure(document: Any, most_nodes: int, most_text: int, what: str) -> DocumentSize:
    """Count values and characters. Raises SchemaFault if it has more, is nested too deep, or is not JSON."""
    nodes = text = 0
    level = [document]
    for _ in range(MOST_DEPTH + 1):
        inner: list[Any] = []
        nodes += len(level)
        for value in level:
            if isinstance(value, str):
                text += len(value)
            elif isinstance(value, dict):
                if not all(isinstance(key, str) for key in value):
                    raise SchemaFault(f"{what} is not JSON: a key is not a string")
                text += sum(map(len, value))
                inner.extend(value.values())
            elif isinstance(value, (list, tuple)):
                inner.extend(value)
            else:
                continue
            if nodes + len(inner) > most_nodes or text > most_text:
                raise SchemaFault(
                    f"{what} is too large: more than {most_nodes} values or {most_text} characters"
                )
        if not inner:
            return DocumentSize(nodes, text)
        level = inner
    raise SchemaFault(f"{what} is nested more than {MOST_DEPTH} levels deep")


def walk(document: Any) -> Iterator[Any]:
    """Every value in it."""
    todo = [document]
    while todo:
        value = todo.pop()
        yield value
        if isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)


# --- the graph -------------------------------------------------------------------------------------------


class _Node:
    """One schema object, and the schemas it applies. Edges are numbers of nodes."""

    def __init__(self) -> None:
        self.in_place: list[int] = []
        self.named: dict[str, int] = {}  # member -> node
        self.members: list[int] = []  # to any member
        self.names: list[int] = []  # to the name of any member
        self.placed: list[int] = []  # to the first element, to the second, …
        self.elements: list[int] = []  # to any element
        self.steps = 1  # to apply it once
        self.per_character = 0  # steps, of a string
        self.per_name_character = 0  # steps, of the name of a member
        self.looks_again = False  # unevaluated…: the schemas in place are tried once more for every member
        self.rank = 0  # the longest chain in place from here

    def edges(self) -> Iterator[int]:
        for several in (
            self.in_place,
            self.named.values(),
            self.members,
            self.names,
            self.placed,
            self.elements,
        ):
            yield from several


class SchemaGraph:
    def __init__(self, document: Any, *, id_keyword: str) -> None:
        """Raises SchemaFault for references that lead out of the document or back to themselves."""
        self._document = document
        self._id_keyword = id_keyword
        self._anchors = _anchors(document)
        self._numbers: dict[int, int] = {}  # id of a schema -> its node
        self._schemas: list[Any] = []
        self._nodes: list[_Node] = []
        self._turning: list[int] = []  # where "fits" below can mean "does not fit" above
        self._number(document)
        for schema in self._schemas:  # grows while it is read
            node = _Node()
            self._nodes.append(node)
            if isinstance(schema, dict):
                self._read(schema, node)
        for number in range(len(self._nodes)):
            self._rank(number, ())

    def without_patterns(self, refused: Callable[[str], bool]) -> tuple[tuple[str, ...], Any]:
        """The refused patterns, and the document without them."""
        found = {
            number: schema["pattern"]
            for number, schema in enumerate(self._schemas)
            if isinstance(schema, dict)
            and isinstance(schema.get("pattern"), str)
            and refused(schema["pattern"])
        }
        if not found:
            return (), self._document
        reached = set(self._turning)
        todo = list(reached)
        while todo:
            further = set(self._nodes[todo.pop()].edges()) - reached
            reached |= further
            todo.extend(further)
        for number in found:
            if number in reached:
                raise SchemaFault(
                    f"the regular expression {shown(found[number])} is where it cannot be left out; "
                    "look-around, back references and large repetitions are not supported"
                )
        bare = {id(self._schemas[number]) for number in found}
        return tuple(found.values()), _copy_without(self._document, bare)

    def _number(self, schema: Any) -> int:
        number = self._numbers.get(id(schema)) if isinstance(schema, dict) else None
        if number is None:
            number = len(self._schemas)
            self._schemas.append(schema)
            self._numbers[id(schema)] = number
        return number

    def _read(self, schema: dict[str, Any], node: _Node) -> None:
        name = schema.get(self._id_keyword)
        if schema is not self._document and isinstance(name, str) and not name.startswith("#"):
            raise SchemaFault(f"the schema has a nested {self._id_keyword}, which is not supported")
        compared = sum(len(schema[key]) for key in _COMPARED if isinstance(schema.get(key), (list, dict)))
        node.steps += compared // _COMPARED_PER_STEP + _DIVISION_STEPS * ("multipleOf" in schema)
        for keyword in _ELSEWHERE:
            if keyword in schema:
                raise SchemaFault(f"the schema uses {keyword}, which is not supported")
        if isinstance(schema.get("$ref"), str):
            node.in_place.append(self._number(self._target(schema["$ref"])))
        for keyword in _IN_PLACE_LISTS:
            node.in_place.extend(map(self._number, _as_list(schema.get(keyword))))
        node.in_place.extend(self._number(schema[keyword]) for keyword in _IN_PLACE if keyword in schema)
        for keyword in _IN_PLACE_MAPS:
            # A list there holds names of members; it is not a schema.
            several = (inner for inner in mapped(schema.get(keyword)).values() if not isinstance(inner, list))
            node.in_place.extend(map(self._number, several))
        for name, inner in mapped(schema.get("properties")).items():
            node.named[name] = self._number(inner)
        patterns = mapped(schema.get("patternProperties"))
        node.members.extend(map(self._number, patterns.values()))
        node.members.extend(self._number(schema[keyword]) for keyword in _MEMBERS if keyword in schema)
        if "propertyNames" in schema:
            node.names.append(self._number(schema["propertyNames"]))
        node.placed.extend(map(self._number, _as_list(schema.get("prefixItems"))))
        for keyword in _ELEMENTS:
            inner = schema.get(keyword)
            if isinstance(inner, list):
                node.placed.extend(map(self._number, inner))
            elif keyword in schema:
                node.elements.append(self._number(inner))
        if isinstance(schema.get("pattern"), str):
            node.per_character = _per_character(schema["pattern"])
        node.per_name_character = sum(map(_per_character, patterns))
        node.looks_again = "unevaluatedProperties" in schema or "unevaluatedItems" in schema
        if node.looks_again or "contains" in schema:
            self._turning.append(self._number(schema))
        self._turning.extend(self._number(schema[keyword]) for keyword in ("not", "if") if keyword in schema)

    def _target(self, reference: str) -> Any:
        if not reference.startswith("#"):
            raise SchemaFault(f"the schema refers to {shown(reference)}, outside of itself")
        fragment = unquote(reference[1:])
        if fragment in self._anchors:
            return self._anchors[fragment]
        if fragment and not fragment.startswith("/"):
            raise SchemaFault(f"the schema refers to {shown(reference)}, which is not there")
        place = self._document
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isdecimal() and len(key) < 9 and int(key) < len(place):
                place = place[int(key)]
            else:
                raise SchemaFault(f"the schema refers to {shown(reference)}, which is not there")
        return place

    def _rank(self, number: int, above: tuple[int, ...]) -> int:
        """The longest chain in place. The recursion stops at MOST_IN_PLACE levels with a fault."""
        node = self._nodes[number]
        if node.rank:
            return node.rank
        if number in above:
            raise SchemaFault("the schema has a reference that leads back to itself")
        if len(above) >= MOST_IN_PLACE:
            raise SchemaFault(f"the schema has a chain of more than {MOST_IN_PLACE} references")
        here = (*above, number)
        node.rank = 1 + max((self._rank(inner, here) for inner in node.in_place), default=0)
        if node.rank > MOST_IN_PLACE:
            raise SchemaFault(f"the schema has a chain of more than {MOST_IN_PLACE} references")
        return node.rank

    # --- the count ----------------------------------------------------------------------------------------

    def applied(self, value: Any) -> int:
        """How many times schema objects are applied to places of `value`. Raises SchemaFault if that takes
        too many steps.

        Values to which the same objects apply are counted together: all elements of an array, and all members
        whose names the schema does not tell apart. So a long array costs no more than a short one.
        """
        applied = steps = counted = 0
        groups: list[tuple[list[Any], _Times]] = [([value], {0: 1})]
        while groups:
            group = _Group(*groups.pop())
            # Nodes with the longest chain in place come first: each count is then complete when it is read.
            todo = [(-self._nodes[number].rank, number) for number in group.times]
            heapq.heapify(todo)
            while todo:
                _, number = heapq.heappop(todo)
                node, times = self._nodes[number], group.times[number]
                applied += times * len(group.values)
                steps += times * group.steps(node)
                again = times * (1 + group.longest) if node.looks_again else times
                for further in node.in_place:
                    if further not in group.times:
                        group.times[further] = 0
                        heapq.heappush(todo, (-self._nodes[further].rank, further))
                    group.times[further] += again
                counted += 1 + len(node.in_place) + group.descend(node, times, again)
                if steps > MOST_STEPS or counted > MOST_COUNTED:
                    raise SchemaFault("there is too much to check with a schema like this")
            groups.extend(group.inner())
        return applied


class _Group:
    """Values to which the same schema objects apply, and the schemas for the values inside them."""

    def __init__(self, values: list[Any], times: _Times) -> None:
        self.values = values
        self.times = times
        self._objects = [value for value in values if isinstance(value, dict)]
        self._arrays = [value for value in values if isinstance(value, (list, tuple))]
        self._text = sum(len(value) for value in values if isinstance(value, str))
        self._keys = {key for value in self._objects for key in value}
        self._key_text = sum(len(key) for value in self._objects for key in value)
        self.longest = max(map(len, (*self._objects, *self._arrays)), default=0)
        self._named: dict[str, _Times] = {}  # by the name of the member
        self._members: _Times = {}
        self._names: _Times = {}
        self._placed: dict[int, _Times] = {}  # by the index of the element
        self._elements: _Times = {}

    def steps(self, node: _Node) -> int:
        """Steps to apply a node once to each value."""
        text = self._text * node.per_character + self._key_text * node.per_name_character
        return len(self.values) * node.steps + text

    def descend(self, node: _Node, times: int, again: int) -> int:
        """Add the schemas that a node applies inside the values. Returns how many there were."""
        counted = 0
        if self._objects:
            fewer, other = sorted((node.named, self._keys), key=len)
            for name in fewer:
                if name in other:
                    _add(self._named.setdefault(name, {}), node.named[name], again)
            for further in node.members:
                _add(self._members, further, again)
            for further in node.names:
                _add(self._names, further, times)
            counted += len(fewer) + len(node.members) + len(node.names)
        if self._arrays:
            for index, further in enumerate(node.placed[: self.longest]):
                _add(self._placed.setdefault(index, {}), further, again)
            for further in node.elements:
                _add(self._elements, further, again)
            counted += len(node.placed) + len(node.elements)
        return counted

    def inner(self) -> Iterator[tuple[list[Any], _Times]]:
        """The groups inside, each with the nodes that apply there."""
        if self._named or self._members:
            members: dict[str | None, list[Any]] = {}
            for table in self._objects:
                for name, value in table.items():
                    members.setdefault(name if name in self._named else None, []).append(value)
            for name, values in members.items():
                yield values, _sum(self._members, self._named.get(name, {}) if name is not None else {})
        if self._names:
            yield [name for table in self._objects for name in table], self._names
        if self._placed or self._elements:
            elements: dict[int | None, list[Any]] = {}
            for array in self._arrays:
                for place in self._placed:
                    if place < len(array):
                        elements.setdefault(place, []).append(array[place])
                if len(array) > len(self._placed):
                    elements.setdefault(None, []).extend(array[len(self._placed) :])
            for index, values in elements.items():
                yield values, _sum(self._elements, self._placed.get(index, {}) if index is not None else {})


def _add(times: _Times, node: int, count: int) -> None:
    times[node] = times.get(node, 0) + count


def _sum(one: _Times, other: _Times) -> _Times:
    found = dict(one)
    for node, count in other.items():
        _add(found, node, count)
    return found


def _per_character(pattern: str) -> int:
    by_source = 1 + len(pattern) // _SOURCE_PER_STEP
    return max(by_source, _COUNTED_REPETITION_STEPS) if "{" in pattern else by_source


def _anchors(document: Any) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for value in walk(document):
        if not isinstance(value, dict):
            continue
        texts = [text for key in ("$id", "id") if isinstance(text := value.get(key), str)]
        names = [text[1:] for text in texts if text.startswith("#")]
        if isinstance(value.get("$anchor"), str):
            names.append(value["$anchor"])
        for name in filter(None, names):
            if name in found:
                raise SchemaFault(f"the schema has two places with the name {shown(name)}")
            found[name] = value
    return found


def _copy_without(document: Any, bare: set[int]) -> Any:
    if isinstance(document, dict):
        left_out = "pattern" if id(document) in bare else None
        return {key: _copy_without(inner, bare) for key, inner in document.items() if key != left_out}
    return (
        [_copy_without(inner, bare) for inner in document]
        if isinstance(document, (list, tuple))
        else document
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def mapped(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def shown(text: str) -> str:
    """The text in one line, without control characters."""
    plain = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:300])
    return plain if len(text) <= 300 else plain + "…"
