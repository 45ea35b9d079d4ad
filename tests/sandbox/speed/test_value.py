"""Our named tuples compared with the standard ones: every operation has the same result."""

from __future__ import annotations

import copy
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest

from sandbox.speed import value


class Ours(value.NamedTuple):
    """Doc."""

    a: int
    b: str = "x"
    c: tuple[str, ...] = ()

    @property
    def twice(self) -> int:
        return self.a * 2


class Standard(typing.NamedTuple):
    """Doc."""

    a: int
    b: str = "x"
    c: tuple[str, ...] = ()

    @property
    def twice(self) -> int:
        return self.a * 2


def outcome(act: Callable[[Any], Any], kind: Any) -> Any:
    try:
        result = act(kind)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        return type(error)
    return repr(result).replace("Ours", "It").replace("Standard", "It")


def matched(kind: Any) -> Any:
    match kind(1, "y"):
        case kind(a, b, _):
            return a, b


ACTS: dict[str, Callable[[Any], Any]] = {
    "positional": lambda kind: kind(1, "b", ("c",)),
    "defaults": lambda kind: kind(1),
    "one default": lambda kind: kind(1, "b"),
    "made": lambda kind: kind._make((1, "b", ("c",))),
    "keywords": lambda kind: kind(c=("z",), a=3),
    "missing": lambda kind: kind(),
    "unknown keyword": lambda kind: kind(1, d=2),
    "given twice": lambda kind: kind(1, a=2),
    "too many": lambda kind: kind(1, "", (), 4),
    "attributes": lambda kind: (kind(1).a, kind(1).b, kind(1).twice),
    "no such attribute": lambda kind: kind(1).d,
    "frozen": lambda kind: setattr(kind(1), "a", 2),
    "no new attributes": lambda kind: setattr(kind(1), "d", 2),
    "item": lambda kind: kind(1)[1],
    "length": lambda kind: len(kind(1)),
    "unpacked": lambda kind: [*kind(1)],
    "equal to a tuple": lambda kind: kind(1) == (1, "x", ()),
    "hash": lambda kind: hash(kind(1)) == hash((1, "x", ())),
    "ordered": lambda kind: sorted([kind(2), kind(1)]),
    "replaced": lambda kind: kind(1)._replace(b="q"),
    "as a dict": lambda kind: kind(1)._asdict(),
    "fields": lambda kind: (kind._fields, kind._field_defaults),
    "matched": matched,
    "match arguments": lambda kind: kind.__match_args__,
    "doc": lambda kind: kind.__doc__,
    "a tuple": lambda kind: isinstance(kind(1), tuple),
    "copied": lambda kind: copy.deepcopy(kind(1, c=("d",))),
    "pickled": lambda kind: pickle.loads(pickle.dumps(kind(1, "p"))),
}


@pytest.mark.parametrize("act", ACTS)
def test_the_same_as_the_standard_one(act: str) -> None:
    assert outcome(ACTS[act], Ours) == outcome(ACTS[act], Standard)


def test_replacing_an_unknown_field_is_a_type_error() -> None:
    """As the standard one does since Python 3.13; ours in every Python."""
    with pytest.raises(TypeError, match="Ours has no field z"):
        Ours(1)._replace(z=1)  # type: ignore[call-arg]


def test_the_error_names_the_fault() -> None:
    with pytest.raises(TypeError, match=r"Ours\(\) takes a, b, c; not right: a"):
        Ours(b="x")  # type: ignore[call-arg]
