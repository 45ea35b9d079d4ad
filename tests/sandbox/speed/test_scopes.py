"""Our contextmanager, suppress and ExitStack behave as those of contextlib."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from sandbox.speed import scopes

MODULES = (contextlib, scopes)


def outcome(act: Callable[[Any], object], module: ModuleType) -> object:
    """What it returned, or what it raised, with the errors that were on their way before."""
    try:
        return act(module)
    except BaseException as error:  # noqa: BLE001 -- it is what is compared
        chain: list[str] = []
        at: BaseException | None = error
        while at is not None:
            chain.append(f"{type(at).__name__}: {at}")
            at = at.__context__
        return chain


def _scope(module: Any, log: list[str], name: str, act: Callable[[BaseException], None] | None = None) -> Any:
    @module.contextmanager
    def scope() -> Iterator[str]:
        log.append(f"enter {name}")
        try:
            yield name
        except BaseException as error:
            log.append(f"{name} sees {error!r}")
            if act is not None:
                act(error)
            else:
                raise
        finally:
            log.append(f"leave {name}")

    return scope()


def _raise(error: BaseException) -> None:
    raise error


def _swallow(error: BaseException) -> None:
    pass


def _other(error: BaseException) -> None:
    raise ValueError("another")


def _same(error: BaseException) -> None:
    raise error


def _no_yield(module: Any) -> Any:
    @module.contextmanager
    def scope() -> Iterator[None]:
        yield from ()

    return scope()


def _two_yields(module: Any) -> Any:
    @module.contextmanager
    def scope() -> Iterator[None]:
        yield
        yield

    return scope()


def _yields_again(module: Any) -> Any:
    @module.contextmanager
    def scope() -> Iterator[None]:
        try:
            yield
        except KeyError:
            yield

    return scope()


def _plain(module: Any) -> object:
    log: list[str] = []
    with _scope(module, log, "a") as name:
        log.append(name)
    return log


def _with_error(act: Callable[[BaseException], None] | None, error: BaseException) -> Callable[[Any], object]:
    def run(module: Any) -> object:
        log: list[str] = []
        with _scope(module, log, "a", act):
            _raise(error)
        return log

    return run


def _without_yield(module: Any) -> object:
    with _no_yield(module):
        return "inside"


def _with_two_yields(module: Any) -> object:
    with _two_yields(module):
        return "inside"


def _with_an_answer_that_yields(module: Any) -> object:
    with _yields_again(module):
        raise KeyError("x")


def _suppressed(module: Any) -> object:
    with module.suppress(OSError, KeyError):
        _raise(FileNotFoundError("x"))
    return "after"


def _not_suppressed(module: Any) -> object:
    with module.suppress(OSError):
        _raise(ValueError("x"))
    return "after"


def _stack(module: Any, *acts: Callable[[BaseException], None] | None, error: BaseException | None) -> object:
    log: list[str] = []
    with module.ExitStack() as stack:
        for number, act in enumerate(acts):
            log.append(stack.enter_context(_scope(module, log, str(number), act)))
            stack.callback(log.append, f"callback {number}")
        if error is not None:
            raise error
    return log


def _failing_callbacks(module: Any) -> object:
    with module.ExitStack() as stack:
        stack.callback(_raise, ValueError("first made"))
        stack.callback(_raise, KeyError("second made"))
        raise OSError("inside")


def _failing_callbacks_while_handling(module: Any) -> object:
    try:
        raise RuntimeError("outside")
    except RuntimeError:
        with module.ExitStack() as stack:
            stack.callback(_raise, ValueError("first made"))
            stack.callback(_raise, KeyError("second made"))
            raise OSError("inside") from None


def _moved(module: Any) -> object:
    log: list[str] = []
    with module.ExitStack() as stack:
        stack.callback(log.append, "left")
        kept = stack.pop_all()
        log.append("end")
    kept.close()
    return log


def _no_scope(module: Any) -> object:
    with module.ExitStack() as stack:
        stack.callback(lambda: None)
        try:
            stack.enter_context(object())
        except (TypeError, AttributeError):
            return "refused"
    return "taken"


CASES: dict[str, Callable[[Any], object]] = {
    "plain": _plain,
    "passes an error on": _with_error(None, KeyError("x")),
    "swallows": _with_error(_swallow, KeyError("x")),
    "raises another": _with_error(_other, KeyError("x")),
    "raises the same": _with_error(_same, KeyError("x")),
    "StopIteration": _with_error(None, StopIteration("x")),
    "StopIteration swallowed": _with_error(_swallow, StopIteration("x")),
    "RuntimeError": _with_error(None, RuntimeError("x")),
    "KeyboardInterrupt": _with_error(None, KeyboardInterrupt("x")),
    "GeneratorExit": _with_error(None, GeneratorExit("x")),
    "no yield": _without_yield,
    "two yields": _with_two_yields,
    "yields again": _with_an_answer_that_yields,
    "suppressed": _suppressed,
    "not suppressed": _not_suppressed,
    "stack": lambda module: _stack(module, None, None, error=None),
    "stack with an error": lambda module: _stack(module, None, None, error=KeyError("x")),
    "stack that swallows": lambda module: _stack(module, None, _swallow, None, error=KeyError("x")),
    "stack that raises another": lambda module: _stack(module, None, _other, None, error=KeyError("x")),
    "stack: another, then swallowed": lambda module: _stack(module, _swallow, _other, error=KeyError("x")),
    "failing callbacks": _failing_callbacks,
    "failing callbacks in a handler": _failing_callbacks_while_handling,
    "moved": _moved,
    "not a scope": _no_scope,
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_contextlib(name: str) -> None:
    theirs, ours = (outcome(CASES[name], module) for module in MODULES)
    assert ours == theirs
    assert ours  # or nothing was compared


def test_ours_are_not_theirs() -> None:
    assert scopes.ExitStack is not contextlib.ExitStack
    assert scopes.contextmanager is not contextlib.contextmanager
