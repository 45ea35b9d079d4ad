"""The C library, called directly. `ctypes` does the same, and importing it takes 3 ms of a launch, because it
makes a class for each C type; this needs `_ctypes`, on which it is built.
"""

from __future__ import annotations

from _ctypes import (
    FUNCFLAG_CDECL,
    FUNCFLAG_PYTHONAPI,
    FUNCFLAG_USE_ERRNO,
    CFuncPtr,
    _SimpleCData,
    addressof,
    dlopen,
    get_errno,
)

from sandbox.speed.typed import Any

__all__ = ["Library", "MachineWord", "addressof", "get_errno", "memory_at", "open_libc", "writable"]

_RTLD_NOW = 2


class _Int(_SimpleCData):  # type: ignore[type-arg]  # not generic at run time
    _type_ = "i"


class _Char(_SimpleCData):  # type: ignore[type-arg]
    _type_ = "c"


class MachineWord(_SimpleCData):  # type: ignore[type-arg]
    """An argument of the size of a pointer. An int is passed as a C int."""

    _type_ = "P"


class _Function(CFuncPtr):
    # PYTHONAPI: the interpreter lock stays held. A clone must not happen while another thread runs Python.
    _flags_ = FUNCFLAG_CDECL | FUNCFLAG_PYTHONAPI | FUNCFLAG_USE_ERRNO
    _restype_ = _Int


class _PointerFunction(CFuncPtr):
    _flags_ = FUNCFLAG_CDECL | FUNCFLAG_PYTHONAPI | FUNCFLAG_USE_ERRNO
    _restype_ = MachineWord


class Library:
    """Each attribute is the function of that name, which returns an int. Arguments are ints, bytes or None,
    a MachineWord, or what `writable` made. AttributeError if there is none."""

    def __init__(self, path: str | None = None) -> None:
        """`path`: of a shared object; its functions are those of its libraries too. None: this process."""
        self._handle = dlopen(path, _RTLD_NOW)  # type: ignore[arg-type]  # None is allowed

    def __getattr__(self, name: str) -> Any:
        function = _Function((name, self))  # type: ignore[arg-type]  # it needs `_handle` alone
        setattr(self, name, function)
        return function

    def pointer(self, name: str) -> Any:
        """The function of that name, which returns an address, or None."""
        return _PointerFunction((name, self))  # type: ignore[arg-type]


# One for all: it and its functions refer to each other, and would be left to the garbage collector.
_LIBC = Library()


def open_libc() -> Library:
    return _LIBC


def writable(size: int) -> Any:
    """Memory for the kernel to write to; `raw` has it as bytes."""
    return (_Char * size)()


def memory_at(address: int, size: int) -> Any:
    """Memory of this process, wherever it is. Assigning to `raw` changes it."""
    return (_Char * size).from_address(address)
