"""The shared library: where it is found, and what its statuses mean in Python. Next: _plan.py."""

import ctypes as c
import os
import pathlib
import sys

from ._abi import Status, declare


class Unsupported(ValueError):
    """FB_UNSUPPORTED: the request is meaningful, but this device or route does not offer it."""


class NoDevice(RuntimeError):
    """FB_NO_DEVICE: the device, its driver or its compiler is not present."""


_ERRORS = {
    Status.INVALID: ValueError,
    Status.UNSUPPORTED: Unsupported,
    Status.NO_DEVICE: NoDevice,
    Status.COMPILE: RuntimeError,
    Status.DEVICE: RuntimeError,
    Status.MEMORY: MemoryError,
}

def _find():
    """The shared library: the one that FLASHBACK_LIB names, else the one that the wheel carries."""
    named = os.environ.get("FLASHBACK_LIB")
    if named:
        return pathlib.Path(named)
    name = "libflashback.dylib" if sys.platform == "darwin" else "libflashback.so"
    return pathlib.Path(__file__).with_name(name)


def _load():
    path = _find()
    if not path.is_file():
        raise ImportError(
            f"flashback's shared library is not at {path}; expected the one that `pip install .` builds, or a path in "
            "FLASHBACK_LIB, such as that of a CMake build"
        )
    try:
        return declare(c.CDLL(str(path.resolve())))
    except OSError as error:
        raise ImportError(
            f"flashback's shared library {path} cannot be loaded: {error}. It needs libc, libm and GCC's OpenMP "
            "runtime libgomp.so.1, which is in Debian's package libgomp1"
        ) from error
    except AttributeError as error:
        raise ImportError(
            f"flashback's shared library {path} is older than this package: {error}. Build both from one source"
        ) from error


lib = _load()
path = _find().resolve()


def check(status):
    """Raises what a status means, with the library's own sentence; FB_OK passes."""
    if status:
        raise _ERRORS.get(status, RuntimeError)(lib.fb_last_error().decode())


def text(function, *arguments):
    """The whole text of a function with snprintf's rules."""
    size = function(*arguments, None, 0) + 1
    buffer = c.create_string_buffer(size)
    function(*arguments, buffer, size)
    return buffer.value.decode()
