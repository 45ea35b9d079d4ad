"""The tables of rules, and how answers are compared with patterns."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.conformance import rpc
from runner.conformance.rules import (
    PAD,
    Check,
    MissingFact,
    Say,
    See,
    TrialFacts,
    body_of,
    contains,
    fill,
    mismatch,
    within,
)
from runner.contracts.registry import contract_names, example_folder, find_contract, plugin_rules
from runner.manifest.load import load
from runner.protocol.dialect import Call

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("pattern", "value", "fault"),
    [
        (str, "x", ""),
        (str, 5, "the answer is 5, and not a string"),
        (int, True, "the answer is true, and not an integer"),
        (float, 1, ""),
        (None, None, ""),
        (object, [], ""),
        (False, 0, "the answer is 0, and not false"),
        ({"a": str}, {"a": "x", "b": 1}, ""),
        ({"a": str}, {}, "a is missing"),
        ({"a?": str}, {}, ""),
        ({"a": {"b?": str}}, {"a": {"b": None}}, "a.b is null, and not a string"),
        ({"a": str}, "\x1b[2J", 'the answer is "\\u001b[2J", and not an object'),
        ([int], [1, 2], ""),
        ({"a": [int]}, {"a": [1, "x"]}, 'a[1] is "x", and not an integer'),
        ([int], {}, "the answer is {}, and not an array"),
        ([], [], ""),
        ([], [1], "the answer is [1], and not []"),
        ((str, None), None, ""),
        ((str, None), 5, "the answer is 5, and not a string; the answer is 5, and not null"),
        ({"a": contains(["x", "y"])}, {"a": ["x"]}, 'a: "y" is missing'),
        ({"a": within(["x"])}, {"a": ["x", {"y": 1}]}, 'a: {"y":1} is not declared'),
        (within([]), 5, "the answer: it is not an array"),
    ],
)
def test_what_is_wrong_with_an_answer(pattern: Any, value: Any, fault: str) -> None:
    assert mismatch(pattern, value) == fault


def test_a_plugin_that_declares_tools_has_to_advertise_some() -> None:
    """nexo: an answer without the list is a fault, and not a rule that does not apply."""
    book = plugin_rules(find_contract("nexo"))
    assert book is not None
    (rule,) = [each for each in book.rules if each.rule.text.startswith("tools is there")]
    (step,) = rule.steps
    assert isinstance(step, Check) and step.fact in dict(book.handshake[-1].keep)  # type: ignore[union-attr]
    answers: tuple[tuple[Any, str], ...] = (
        ({"manifest": {}}, "tools is missing"),
        ({"tools": []}, "tools: it is no array with tools"),
        ({"tools": None}, "tools: it is no array with tools"),
        ({"tools": [{}]}, ""),
    )
    assert [mismatch(step.pattern, answer) for answer, _ in answers] == [fault for _, fault in answers]


def test_messages_are_filled_in() -> None:
    facts = TrialFacts({"tool": "greet"}, int)
    first = fill({"id": "#1", "name": "$tool", "more": ["#1", "#2", "$", "#"]}, facts)
    assert first["name"] == "greet" and first["more"][0] == first["id"] != first["more"][1]
    assert first["more"][2:] == ["$", "#"]
    facts.forget_ids()
    assert fill("#1", facts) not in (first["id"], first["more"][1])
    with pytest.raises(MissingFact, match="input"):
        fill("$input", facts)


@pytest.mark.parametrize("size", [40, 4096, 1 << 20])
def test_a_message_has_exactly_the_size_it_should_have(size: int) -> None:
    assert len(body_of(Say({"id": "#1", "deep": {"pad": PAD}}, size=size), TrialFacts({}, int))) == size


@given(JSON)
def test_no_message_of_a_plugin_breaks_the_judges(value: Any) -> None:
    rpc.shape(value)
    rpc.sort(value)


@pytest.mark.parametrize("name", contract_names())
class TestEachBook:
    def test_its_rules_are_numbered_and_say_where_they_stand(self, name: str) -> None:
        book = plugin_rules(find_contract(name))
        assert book is not None and 10 <= len(book.rules) <= 40
        assert [each.rule.id for each in book.rules] == [
            f"{name}-{number:02}" for number in range(1, len(book.rules) + 1)
        ]
        for each in book.rules:
            assert each.rule.text.endswith(".") and each.rule.text.isprintable()
            assert each.rule.place[:1].isalpha()  # it begins with the name of a text
            assert bool(each.steps) != bool(each.watch)
            assert all(need in book.missing for need in each.needs)
        assert {each.watch for each in book.rules} == {None, "message", "shape", "answer", *book.watches}
        assert all(watch in book.missing for watch in book.watches)

    @settings(max_examples=50)
    @given(value=JSON)
    def test_no_answer_of_a_plugin_breaks_a_pattern(self, name: str, value: Any) -> None:
        """Whatever a plugin answers, a pattern returns a text."""
        facts, patterns = _patterns(name)
        book = plugin_rules(find_contract(name))
        assert book is not None
        for pattern in patterns:
            try:
                filled = fill(pattern, facts)
            except MissingFact:
                continue
            assert isinstance(mismatch(filled, value), str)
            assert all(isinstance(mismatch(each, value), str) for each in _functions(filled))
        assert isinstance(book.shape(value), str)
        book.sort(value)


@functools.cache
def _patterns(name: str) -> tuple[TrialFacts, list[Any]]:
    """The patterns that are held against anything: those of several facts get facts that were checked."""
    contract = find_contract(name)
    book = plugin_rules(contract)
    plugin = load(example_folder(name)).plugin
    assert book is not None
    call = Call("tool", contract.example.call, {})
    facts = TrialFacts(book.facts(plugin, call), book.make_id)
    steps = [step for rule in book.rules for step in (*rule.steps, *book.handshake)]
    found = [step.pattern for step in steps if isinstance(step, See)]
    found += [step.pattern for step in steps if isinstance(step, Check) and isinstance(step.fact, str)]
    # Hundreds of steps have the same pattern.
    return facts, [
        each for each in {id(each): each for each in found}.values() if not _is_about_checked(each)
    ]


def _functions(pattern: Any) -> Iterator[Any]:
    """The functions in a pattern, which are reached only if all before them match."""
    if isinstance(pattern, dict):
        pattern = list(pattern.values())
    if isinstance(pattern, (list, tuple)):
        for each in pattern:
            yield from _functions(each)
    elif callable(pattern) and not isinstance(pattern, type):
        yield pattern


def _is_about_checked(pattern: Any) -> bool:
    """Functions about a value whose shape another pattern has checked before it was kept."""
    return callable(pattern) and getattr(pattern, "__name__", "") in ("_is_inside", "_names", "_schemas")
