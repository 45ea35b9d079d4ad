"""What the launch path uses of contextlib, without importing it: 5 ms, with collections and functools.

For type checkers these *are* contextlib's, and they do the same: tests compare the two. Two things are left
out: a scope is not a decorator, and of several errors a traceback may show fewer.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager as AbstractContextManager
    from contextlib import ExitStack as ExitStack
    from contextlib import contextmanager as contextmanager
    from contextlib import suppress as suppress
else:

    class AbstractContextManager:
        __class_getitem__ = classmethod(type(list[int]))

    class _GeneratorScope:
        __slots__ = ("_generator",)

        def __init__(self, generator):
            self._generator = generator

        def __enter__(self):
            try:
                return next(self._generator)
            except StopIteration:
                raise RuntimeError("generator didn't yield") from None

        def __exit__(self, kind, error, trace):
            if kind is None:
                try:
                    next(self._generator)
                except StopIteration:
                    return False
                raise RuntimeError("generator didn't stop")
            try:
                self._generator.throw(error)
            except StopIteration as stopped:
                # Raised by a `return` in the generator, unless it is the very one that was thrown in.
                return stopped is not error
            except BaseException as raised:
                # Python turns a StopIteration that leaves a generator into a RuntimeError.
                turned = isinstance(error, StopIteration) and raised.__cause__ is error
                if raised is not error and not turned:
                    raise
                error.__traceback__ = trace
                return False
            raise RuntimeError("generator didn't stop after throw()")

    def contextmanager(function):
        def scope(*args, **kwargs):
            return _GeneratorScope(function(*args, **kwargs))

        scope.__wrapped__ = function
        scope.__name__ = function.__name__
        scope.__qualname__ = function.__qualname__
        scope.__doc__ = function.__doc__
        scope.__module__ = function.__module__
        return scope

    class suppress:  # noqa: N801 -- as in contextlib
        __slots__ = ("_kinds",)

        def __init__(self, *kinds):
            self._kinds = kinds

        def __enter__(self):
            return None

        def __exit__(self, kind, error, trace):
            return kind is not None and issubclass(kind, self._kinds)

    class ExitStack:
        def __init__(self):
            self._exits = []

        def __enter__(self):
            return self

        def enter_context(self, scope):
            kind = type(scope)
            enter, leave = kind.__enter__, kind.__exit__
            result = enter(scope)
            self._exits.append((leave, scope))
            return result

        def callback(self, function, /, *args, **kwargs):
            def leave(_, *error):
                function(*args, **kwargs)

            self._exits.append((leave, None))
            return function

        def pop_all(self):
            other = type(self)()
            other._exits, self._exits = self._exits, []
            return other

        def close(self):
            self.__exit__(None, None, None)

        def __exit__(self, kind, error, trace):
            pending = error
            while self._exits:
                leave, scope = self._exits.pop()
                try:
                    told = (None, None, None)
                    if pending is not None:
                        told = (type(pending), pending, pending.__traceback__)
                    if leave(scope, *told):
                        pending = None
                except BaseException as raised:  # noqa: BLE001 -- raised again below
                    # As if the scopes were nested: what was on its way is the context of what is raised now.
                    if raised is not pending and raised.__context__ in (None, error):
                        raised.__context__ = pending
                    pending = raised
            if pending is not None and pending is not error:
                # `raise` would put the error that is being handled outside in the place of the context.
                context = pending.__context__
                try:
                    raise pending
                except BaseException:
                    pending.__context__ = context
                    raise
            return error is not None and pending is None
