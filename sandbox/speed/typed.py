"""The names of `typing` and `collections.abc` that the launch path uses, without importing either.

`typing` takes 10 ms, with re and enum; `collections` takes as long as six modules of ours. For type checkers
the names *are* theirs. At run time nothing looks at an annotation, so what is left of typing's names is what
makes a class statement or an alias work. `typing.get_args` works on the Literal of this module too. The names
of collections.abc are its own classes, from the module where it has them itself: `os` imports that anyway.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable as Callable
    from collections.abc import Collection as Collection
    from collections.abc import Container as Container
    from collections.abc import Generator as Generator
    from collections.abc import Iterable as Iterable
    from collections.abc import Iterator as Iterator
    from collections.abc import Mapping as Mapping
    from collections.abc import Sequence as Sequence
    from collections.abc import Set as Set
    from typing import Any as Any
    from typing import Final as Final
    from typing import Literal as Literal
    from typing import NoReturn as NoReturn
    from typing import Protocol as Protocol
else:
    import _collections_abc as _abc

    Callable, Iterable, Iterator, Generator = _abc.Callable, _abc.Iterable, _abc.Iterator, _abc.Generator
    Collection, Container, Mapping, Sequence = _abc.Collection, _abc.Container, _abc.Mapping, _abc.Sequence
    Set = _abc.Set

    _Alias = type(list[int])

    class Literal:
        __class_getitem__ = classmethod(_Alias)

    class Final:
        __class_getitem__ = classmethod(_Alias)

    class Protocol:
        __slots__ = ()

    Any = NoReturn = object
