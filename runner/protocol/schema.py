"""JSON Schema as strangers write it: checked offline, and never at more cost than is known before.

On jsonschema-rs, which is fast and whose regular expressions take linear time, but which trusts its schemas:
a chain of references overflows the stack, two references side by side double the work at every level, and
each fault keeps a copy of what it is about. So a schema is read here first. What is applied to the same place
of a value ("in place": allOf, $ref, …) and what is applied to its members makes a graph; from it and from a
value the number of steps is counted before a single one is taken.

References stay inside the document. Nothing is ever fetched.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

from sandbox.value import NamedTuple

MOST_FAULTS = 10

MOST_DEPTH = 128  # of a schema, and of a value: 100 000 levels crash jsonschema-rs
MOST_NODES = 20_000  # of a schema: 5 µs and 2 kB each when it is compiled
MOST_TEXT = 1024 * 1024  # of a schema, in characters
_NODE, _CHARACTER, _PATTERN = 2048, 4, 40 << 10  # bytes of one, compiled
MOST_PATTERNS = 256
MOST_PATTERN_TEXT = 32 * 1024  # of all of them
MOST_CLASSES = 500  # \w, \p{…} and their like in them: half a thousand characters each, 0.3 ms to compile
MOST_PATTERN_SIZE = 64 * 1024  # of a compiled regular expression, bytes: at most 8 µs for each character
MOST_IN_PLACE = 32  # one after the other. 1000, with a value 128 deep, overflow the stack
MOST_STEPS = 10_000_000  # of one check: 25 to 250 ns each
MOST_COUNTED = 100_000  # places of a value times what applies there, when steps must be counted one by one
MOST_COPIED = 100_000_000  # bytes, when all faults are asked for: each has a copy of its value

# A character that a regular expression reads, in steps. By the length of its source, or this if it can repeat
# a part a number of times, for then the source says nothing.
_SOURCE_PER_STEP = 16
_COUNTED_REPETITION = 50

_DRAFTS = {
    "draft-04": "Draft4Validator",
    "draft-06": "Draft6Validator",
    "draft-07": "Draft7Validator",
    "2019-09": "Draft201909Validator",
}

_CLASSES = tuple("\\" + letter for letter in "wWpPbBdDsS")

_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("not", "if", "then", "else")
_IN_PLACE_MAPS = ("dependentSchemas", "dependencies")
_MEMBERS = ("additionalProperties", "unevaluatedProperties")
_ELEMENTS = ("items", "additionalItems", "contains", "unevaluatedItems")
_COMPARED = ("enum", "required", "properties", "dependentRequired", "dependencies", "dependentSchemas")
_COMPARED_PER_STEP = 8
_DIVISION = 400  # steps: multipleOf is exact, and 1e308 by 1e-308 is a long division
_ELSEWHERE = ("$dynamicRef", "$recursiveRef")  # where they lead depends on how one got there

_T = TypeVar("_T")


class SchemaFault(ValueError):
    """A schema that is not used, and why: one sentence."""


class Schema:
    """Default draft: 2020-12; `$schema` may name an older one.

    `unchecked`: regular expressions that have no linear time (look-around, back references) and are left out.
    Libraries write them for every e-mail address, so refusing them would refuse honest schemas.
    """

    def __init__(self, document: Any) -> None:
        measured = _measured(document, MOST_NODES, MOST_TEXT, "the schema")
        patterns, self._data = _contents(document)
        # Bytes that it takes, for who keeps several.
        self.size = _NODE * measured.nodes + _CHARACTER * measured.text + _PATTERN * len(patterns)
        if len(patterns) > MOST_PATTERNS:
            raise SchemaFault(
                f"the schema has {len(patterns)} regular expressions; {MOST_PATTERNS} are allowed"
            )
        text = "".join(patterns)
        if len(text) > MOST_PATTERN_TEXT or sum(map(text.count, _CLASSES)) > MOST_CLASSES:
            raise SchemaFault(
                "the schema has too long regular expressions, or too many classes like \\w in them"
            )
        self._graph = _Graph(document)
        self.unchecked, document = self._graph.without_patterns(lambda pattern: not _is_linear(pattern))
        self._validator = _guarded(lambda: _compiled(document))

    def faults(self, value: Any) -> tuple[str, ...]:
        """What is wrong: a sentence with a JSON pointer each, at most MOST_FAULTS. Nothing if all is well."""
        try:
            size = _measured(value, MOST_STEPS, MOST_STEPS * 10, "the value")
            applied = self._graph.applied(value, size)
            if _guarded(lambda: self._validator.is_valid(value)):
                return ()
            if applied * (size.bytes + self._data) > MOST_COPIED:
                return ("(the value): it does not fit its schema; it is too large to say where",)
            found = _guarded(lambda: list(self._validator.iter_errors(value)))
        except SchemaFault as fault:
            return (f"(the value): it cannot be checked: {fault}",)
        return tuple(_sentence(fault) for fault in found[:MOST_FAULTS])


def _compiled(document: Any) -> Any:
    import jsonschema_rs

    return getattr(jsonschema_rs, _draft(document))(
        document,
        validate_formats=False,  # an annotation, says 2020-12
        retriever=_refuse_to_fetch,
        pattern_options=jsonschema_rs.RegexOptions(size_limit=MOST_PATTERN_SIZE),
        mask="it",  # faults do not repeat what was sent: it may be long, or a secret
    )


def _draft(document: Any) -> str:
    wanted = document.get("$schema") if isinstance(document, dict) else None
    known = (name for mark, name in _DRAFTS.items() if isinstance(wanted, str) and mark in wanted)
    return next(known, "Draft202012Validator")


def _is_linear(pattern: str) -> bool:
    try:
        _guarded(lambda: _compiled({"pattern": pattern}))
    except SchemaFault:
        return False
    return True


def _refuse_to_fetch(uri: str) -> Any:
    raise ValueError("references lead nowhere outside of the schema")


def _guarded(act: Callable[[], _T]) -> _T:
    try:
        return act()
    except ValueError as error:
        raise SchemaFault(
            _sentence(error) if hasattr(error, "instance_path") else _shown(str(error))
        ) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust: no Exception, and cannot be imported
            raise
        raise SchemaFault("the validator has failed") from None


# --- how large? ------------------------------------------------------------------------------------------


class _Size(NamedTuple):
    nodes: int
    text: int  # characters of all strings and keys

    @property
    def bytes(self) -> int:
        """About, in jsonschema-rs."""
        return 64 * self.nodes + self.text


def _measured(document: Any, most_nodes: int, most_text: int, what: str) -> _Size:
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
                    raise SchemaFault(f"{what} is no JSON: a key is no string")
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
            return _Size(nodes, text)
        level = inner
    raise SchemaFault(f"{what} is nested more than {MOST_DEPTH} deep")


def _contents(document: Any) -> tuple[list[str], int]:
    """Regular expressions anywhere in it, and the bytes of what a fault may take a copy of."""
    patterns: list[str] = []
    data = 256
    for value in _walk(document):
        if not isinstance(value, dict):
            continue
        if isinstance(value.get("pattern"), str):
            patterns.append(value["pattern"])
        patterns += _mapped(value.get("patternProperties"))
        for key in ("enum", "const", "not"):
            if key in value:
                inside = list(_walk(value[key]))
                data = max(
                    data, 64 * len(inside) + sum(len(text) for text in inside if isinstance(text, str))
                )
    return patterns, data


def _walk(document: Any) -> Iterator[Any]:
    todo = [document]
    while todo:
        value = todo.pop()
        yield value
        if isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)


# --- how many steps? -------------------------------------------------------------------------------------


class _Node:
    """One schema object, and what it applies where. Edges are numbers of nodes."""

    def __init__(self) -> None:
        self.in_place: list[int] = []
        self.named: dict[str, int] = {}  # member -> node
        self.members: list[int] = []  # to any member
        self.names: list[int] = []  # to the name of any member
        self.placed: list[int] = []  # to the first element, to the second, …
        self.elements: list[int] = []  # to any element
        self.steps = 1  # to apply it once
        self.per_character = 0  # of a string
        self.per_name_character = 0
        self.looks_again = False  # unevaluated…: what is in place is tried for every member
        self.rank = 0  # longest way in place from here

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


class _Graph:
    def __init__(self, document: Any) -> None:
        self._document = document
        self._id_keyword = "id" if _draft(document) == "Draft4Validator" else "$id"
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
        self._most, self._most_per_character = self._expanded()

    def applied(self, value: Any, size: _Size) -> int:
        """How often a schema object is applied to a place of `value`, at most. SchemaFault: too much."""
        most = self._most * size.nodes
        read = self._most_per_character * size.text if size.text else 0
        return int(most) if most + read <= MOST_STEPS else self._counted(value)

    def without_patterns(self, refused: Callable[[str], bool]) -> tuple[tuple[str, ...], Any]:
        """The patterns that were refused, and the document without them."""
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
                    f"the regular expression {_shown(found[number])} is where it cannot be left out; "
                    "look-around, back references and large repetitions are not supported"
                )
        bare = {id(self._schemas[number]) for number in found}
        return tuple(found.values()), _copied(self._document, bare)

    # --- the graph ----------------------------------------------------------------------------------------

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
            raise SchemaFault(
                f"the schema has an {self._id_keyword} inside: references below it are not its own"
            )
        compared = sum(len(schema[key]) for key in _COMPARED if isinstance(schema.get(key), (list, dict)))
        node.steps += compared // _COMPARED_PER_STEP + _DIVISION * ("multipleOf" in schema)
        for keyword in _ELSEWHERE:
            if keyword in schema:
                raise SchemaFault(f"the schema uses {keyword}, which is not supported")
        if isinstance(schema.get("$ref"), str):
            node.in_place.append(self._number(self._target(schema["$ref"])))
        for keyword in _IN_PLACE_LISTS:
            node.in_place.extend(map(self._number, _listed(schema.get(keyword))))
        node.in_place.extend(self._number(schema[keyword]) for keyword in _IN_PLACE if keyword in schema)
        for keyword in _IN_PLACE_MAPS:
            # A list there names members, and is no schema.
            several = (
                inner for inner in _mapped(schema.get(keyword)).values() if not isinstance(inner, list)
            )
            node.in_place.extend(map(self._number, several))
        for name, inner in _mapped(schema.get("properties")).items():
            node.named[name] = self._number(inner)
        patterns = _mapped(schema.get("patternProperties"))
        node.members.extend(map(self._number, patterns.values()))
        node.members.extend(self._number(schema[keyword]) for keyword in _MEMBERS if keyword in schema)
        if "propertyNames" in schema:
            node.names.append(self._number(schema["propertyNames"]))
        node.placed.extend(map(self._number, _listed(schema.get("prefixItems"))))
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
            raise SchemaFault(f"the schema refers to {_shown(reference)}, outside of itself")
        fragment = unquote(reference[1:])
        if fragment in self._anchors:
            return self._anchors[fragment]
        if fragment and not fragment.startswith("/"):
            raise SchemaFault(f"the schema refers to {_shown(reference)}, which is not there")
        place = self._document
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isdecimal() and len(key) < 9 and int(key) < len(place):
                place = place[int(key)]
            else:
                raise SchemaFault(f"the schema refers to {_shown(reference)}, which is not there")
        return place

    def _rank(self, number: int, above: tuple[int, ...]) -> int:
        """The longest way in place. As deep as MOST_IN_PLACE at most: then it is a fault."""
        node = self._nodes[number]
        if node.rank:
            return node.rank
        if number in above:
            raise SchemaFault("the schema has a reference that leads back to itself")
        if len(above) >= MOST_IN_PLACE:
            raise SchemaFault(f"the schema refers on more than {MOST_IN_PLACE} times without going deeper")
        here = (*above, number)
        node.rank = 1 + max((self._rank(inner, here) for inner in node.in_place), default=0)
        if node.rank > MOST_IN_PLACE:
            raise SchemaFault(f"the schema refers on more than {MOST_IN_PLACE} times without going deeper")
        return node.rank

    # --- the count ----------------------------------------------------------------------------------------

    def _expanded(self) -> tuple[float, float]:
        """Steps for each place of a value, and for each character, at most. Infinite if it is recursive."""
        # Nodes in an order in which edges point forward (Kahn's); what is left over is in a circle.
        incoming = [0] * len(self._nodes)
        for node in self._nodes:
            for inner in node.edges():
                incoming[inner] += 1
        times = [0] * len(self._nodes)
        times[0] = 1
        ready = [number for number, count in enumerate(incoming) if not count]
        steps = per_character = done = 0
        while ready:
            number = ready.pop()
            node = self._nodes[number]
            if node.looks_again:
                return math.inf, math.inf
            done += 1
            steps += times[number] * node.steps
            per_character += times[number] * (node.per_character + node.per_name_character)
            for inner in node.edges():
                times[inner] += times[number]
                incoming[inner] -= 1
                if not incoming[inner]:
                    ready.append(inner)
        if done < len(self._nodes) or steps > MOST_STEPS or per_character > MOST_STEPS:
            return math.inf, math.inf
        return steps, per_character

    def _counted(self, value: Any) -> int:
        """Place by place: how often is each node applied there?"""
        steps = applied = counted = 0
        places: list[tuple[Any, dict[int, int]]] = [(value, {0: 1})]
        while places:
            value, times = places.pop()
            inner: dict[Any, tuple[Any, dict[int, int]]] = {}
            names: dict[int, int] = {}
            # Those from which the way in place is longest come first: then each is complete when it is read.
            todo = [(-self._nodes[number].rank, number) for number in times]
            heapq.heapify(todo)
            while todo:
                _, number = heapq.heappop(todo)
                node, count = self._nodes[number], times[number]
                applied += count
                steps += count * (node.steps + _length(value, node))
                again = (
                    count * (1 + len(value))
                    if node.looks_again and isinstance(value, (dict, list))
                    else count
                )
                for further in node.in_place:
                    if further not in times:
                        times[further] = 0
                        heapq.heappush(todo, (-self._nodes[further].rank, further))
                    times[further] += again
                for place, below, further in _below(value, node):
                    counted += 1
                    reached = inner.setdefault(place, (below, {}))[1]
                    reached[further] = reached.get(further, 0) + again
                    if counted > MOST_COUNTED:
                        break
                if isinstance(value, dict):
                    for further in node.names:
                        names[further] = names.get(further, 0) + count
                counted += 1
                if steps > MOST_STEPS or counted > MOST_COUNTED:
                    raise SchemaFault("there is too much to check with a schema like this")
            places.extend(inner.values())
            if names:
                places.extend((name, dict(names)) for name in value)
        return applied


def _below(value: Any, node: _Node) -> Iterator[tuple[Any, Any, int]]:
    """(place, what is there, node that applies)"""
    if isinstance(value, dict):
        for name, further in node.named.items() if len(node.named) < len(value) else ():
            if name in value:
                yield name, value[name], further
        for name, below in value.items():
            if name in node.named and len(node.named) >= len(value):
                yield name, below, node.named[name]
            for further in node.members:
                yield name, below, further
    elif isinstance(value, (list, tuple)):
        for place, (below, further) in enumerate(zip(value, node.placed, strict=False)):
            yield place, below, further
        for place, below in enumerate(value):
            for further in node.elements:
                yield place, below, further


def _length(value: Any, node: _Node) -> int:
    if isinstance(value, str):
        return len(value) * node.per_character
    if isinstance(value, dict) and node.per_name_character:
        return sum(map(len, value)) * node.per_name_character
    return 0


def _per_character(pattern: str) -> int:
    by_source = 1 + len(pattern) // _SOURCE_PER_STEP
    return max(by_source, _COUNTED_REPETITION) if "{" in pattern else by_source


def _anchors(document: Any) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for value in _walk(document):
        if not isinstance(value, dict):
            continue
        texts = [text for key in ("$id", "id") if isinstance(text := value.get(key), str)]
        names = [text[1:] for text in texts if text.startswith("#")]
        if isinstance(value.get("$anchor"), str):
            names.append(value["$anchor"])
        for name in filter(None, names):
            if name in found:
                raise SchemaFault(f"the schema has two places with the name {_shown(name)}")
            found[name] = value
    return found


def _copied(document: Any, bare: set[int]) -> Any:
    if isinstance(document, dict):
        left_out = "pattern" if id(document) in bare else None
        return {key: _copied(inner, bare) for key, inner in document.items() if key != left_out}
    return [_copied(inner, bare) for inner in document] if isinstance(document, (list, tuple)) else document


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapped(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- for people ------------------------------------------------------------------------------------------


def _sentence(fault: Any) -> str:
    path = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in fault.instance_path)
    return f"{_shown(path) or '(the value)'}: {_shown(fault.message)}"


def _shown(text: str) -> str:
    """In one line, and nothing that draws on a terminal."""
    plain = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:300])
    return plain if len(text) <= 300 else plain + "…"
