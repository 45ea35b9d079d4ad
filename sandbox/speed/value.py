"""typing.NamedTuple, made in a tenth of the time.

Every value of ours is a named tuple, and a launch imports sixty of them. The standard one compiles source
text for each class and resolves each annotation: 11 ms of a launch, twice what bubblewrap takes. This one
builds the same class from the class statement's namespace. For type checkers it *is* typing.NamedTuple.
"""

from __future__ import annotations

from _collections import _tuplegetter  # type: ignore[import-not-found]  # the accessor namedtuple() itself uses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _NamedTupleType(type):
        def __new__(mcs, name, bases, namespace):
            if not bases:
                return super().__new__(mcs, name, (tuple,), namespace)
            fields = tuple(namespace.get("__annotations__", ()))
            defaults = {field: namespace.pop(field) for field in fields if field in namespace}
            for number, field in enumerate(fields):
                namespace[field] = _tuplegetter(number, None)
            namespace.update(_fields=fields, _field_defaults=defaults, __match_args__=fields, __slots__=())
            namespace["_last_values"] = tuple(defaults.values())  # fields with defaults are the last ones
            return super().__new__(mcs, name, bases, namespace)

    class NamedTuple(metaclass=_NamedTupleType):
        __slots__ = ()
        _fields = _last_values = ()
        _field_defaults = {}  # noqa: RUF012 -- never changed, each class gets its own

        def __new__(cls, *args, **kwargs):
            missing = len(cls._fields) - len(args)
            if missing or kwargs:
                if kwargs or not 0 < missing <= len(cls._last_values):
                    args = cls._completed(args, kwargs)
                else:
                    args += cls._last_values[-missing:]
            return tuple.__new__(cls, args)

        _make = classmethod(tuple.__new__)  # of all values, in order, which are not counted: for hot paths

        @classmethod
        def _completed(cls, args, kwargs):
            rest = cls._fields[len(args) :]
            values = {**cls._field_defaults, **kwargs}
            missing = [field for field in rest if field not in values]
            unknown = [name for name in kwargs if name not in rest]
            if missing or unknown or len(args) > len(cls._fields):
                wrong = ", ".join((*missing, *unknown)) or f"{len(args)} of them"
                raise TypeError(f"{cls.__name__}() takes {', '.join(cls._fields)}; not right: {wrong}")
            return (*args, *(values[field] for field in rest))

        def __repr__(self):
            shown = (f"{field}={value!r}" for field, value in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({', '.join(shown)})"

        def __getnewargs__(self):
            return tuple(self)

        def _replace(self, **changes):
            result = type(self)(*map(changes.pop, self._fields, self))
            if changes:
                raise TypeError(f"{type(self).__name__} has no field {', '.join(changes)}")
            return result

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))
