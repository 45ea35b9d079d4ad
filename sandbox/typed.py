"""The names of `typing` that the launch path uses, without importing typing: 10 ms, with re and enum.

For type checkers they *are* typing's. At run time nothing looks at an annotation, so what is left of each is
what makes a class statement or an alias work. `typing.get_args` works on the Literal of this module too.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any as Any
    from typing import Final as Final
    from typing import Literal as Literal
    from typing import NoReturn as NoReturn
    from typing import Protocol as Protocol
else:
    _Alias = type(list[int])

    class Literal:
        __class_getitem__ = classmethod(_Alias)

    class Final:
        __class_getitem__ = classmethod(_Alias)

    class Protocol:
        __slots__ = ()

    Any = NoReturn = object
