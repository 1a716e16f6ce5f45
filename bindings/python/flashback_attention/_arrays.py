"""Arrays that are not PyTorch's: NumPy's by their array interface, all others by DLPack. Nothing is copied.

Results are NumPy arrays for NumPy, arrays of the caller's own library where that has `from_dlpack`, and otherwise
`Tensor`s, which any library with DLPack takes. Only memory of the CPU; on a GPU `torch.from_dlpack` makes tensors of
any library's arrays, without a copy.
"""

import ctypes as c
import functools
import math
import sys

from . import _engine
from ._abi import DLDataType, DLDevice, DLTensor
from ._plan import CODES, DTYPES, Place, View, contiguous, device_word

_NUMPY_TYPES = {
    "float32": CODES["f32"], "float16": CODES["f16"], "bfloat16": CODES["bf16"], "float64": CODES["f64"],
    "bool": CODES["bool"], "int32": CODES["i32"],
}  # fmt: skip
_CPU = (1, 0)


class _Version(c.Structure):
    _fields_ = [("major", c.c_uint32), ("minor", c.c_uint32)]


class _Managed(c.Structure):
    """DLManagedTensor, which a capsule named "dltensor" holds."""


_Deleter = c.CFUNCTYPE(None, c.POINTER(_Managed))
_Managed._fields_ = [("tensor", DLTensor), ("context", c.c_void_p), ("deleter", _Deleter)]


class _Versioned(c.Structure):
    """DLManagedTensorVersioned, in "dltensor_versioned"; everything behind `version` is that of major version 1."""

    _fields_ = [
        ("version", _Version),
        ("context", c.c_void_p),
        ("deleter", c.c_void_p),
        ("flags", c.c_uint64),
        ("tensor", DLTensor),
    ]


def _python(name, result, *arguments):
    return c.PYFUNCTYPE(result, *arguments)((name, c.pythonapi))


_capsule_name = _python("PyCapsule_GetName", c.c_char_p, c.py_object)
_capsule_pointer = _python("PyCapsule_GetPointer", c.c_void_p, c.py_object, c.c_char_p)
_capsule_new = _python("PyCapsule_New", c.py_object, c.c_void_p, c.c_char_p, c.c_void_p)


# ---- In ----


def _is_numpy(array):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.ndarray)


def view(array, name):
    """The View of an array. `name` is used in errors."""
    if isinstance(array, View):
        return array
    if _is_numpy(array):
        return _numpy_view(array, name)
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{name} is of type {type(array).__name__}, expected a NumPy array, a PyTorch tensor, or an array with "
            "__dlpack__"
        )
    return _dlpack_view(array, name)


@functools.lru_cache(maxsize=64)
def _numpy_code(dtype):
    """(code, bits) of a dtype of NumPy's, or None."""
    return _NUMPY_TYPES.get(dtype.name) if dtype.isnative else None


@functools.lru_cache(maxsize=64)
def _numpy_type(code):
    """The dtype of NumPy's for (code, bits)."""
    import numpy

    word = next(name for name, known in _NUMPY_TYPES.items() if known == code)
    if word == "bfloat16":
        import ml_dtypes

        return numpy.dtype(ml_dtypes.bfloat16)
    return numpy.dtype(word)


def _numpy_view(array, name):
    kind, size = _numpy_code(array.dtype), array.itemsize
    if kind is None:
        raise TypeError(f"{name} is {array.dtype.str}, expected the machine's {', '.join(_NUMPY_TYPES)}")
    steps = [step // size for step in array.strides]
    if [step * size for step in steps] != list(array.strides):
        raise ValueError(
            f"{name} has strides of {array.strides} bytes, expected multiples of its element's {size}; copy it"
        )
    return View(array.__array_interface__["data"][0], array.shape, tuple(steps), kind, _CPU, array)


def _capsule(array):
    """What array.__dlpack__ gives; older producers know no versions."""
    try:
        return array.__dlpack__(max_version=(1, 0))
    except TypeError:
        return array.__dlpack__()


def _dlpack_view(array, name):
    device = tuple(int(x) for x in array.__dlpack_device__())
    if device_word(View(0, (), (), (), device)) != "cpu":
        raise TypeError(
            f"{name} lies on DLPack device {device}; other arrays than PyTorch's are taken from the CPU only. "
            "torch.from_dlpack makes a tensor of it without a copy"
        )
    capsule = _capsule(array)
    word = _capsule_name(capsule)
    pointer = _capsule_pointer(capsule, word)
    if word == b"dltensor_versioned":
        managed = c.cast(pointer, c.POINTER(_Versioned)).contents
        if managed.version.major != 1:
            raise TypeError(f"{name} has DLPack version {managed.version.major}.{managed.version.minor}, expected 1.x")
    else:
        managed = c.cast(pointer, c.POINTER(_Managed)).contents
    t = managed.tensor
    shape = tuple(t.shape[: t.ndim])
    strides = tuple(t.strides[: t.ndim]) if t.strides else contiguous(shape)
    kind = (t.dtype.code, t.dtype.bits) if t.dtype.lanes == 1 else (t.dtype.code, t.dtype.bits * t.dtype.lanes)
    return View((t.data or 0) + t.byte_offset, shape, strides, kind, device, (array, capsule))


# ---- Out ----


class Tensor:
    """A result in memory of the library, for any consumer of DLPack: numpy.from_dlpack(t), torch.from_dlpack(t)."""

    def __init__(self, memory, place):
        self._memory, self._place = memory, place
        self.shape, self.dtype = place.shape, DTYPES[place.type]

    def __dlpack_device__(self):
        return _CPU

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if stream is not None or copy or (dl_device is not None and tuple(dl_device) != _CPU):
            raise BufferError("the tensor lies on the CPU; it is given there, without a copy and without a stream")
        n = len(self.shape)
        arrays = (c.c_int64 * max(n, 1))(*self.shape), (c.c_int64 * max(n, 1))(*self._place.strides)
        kind, device = DLDataType(*self._place.type, 1), DLDevice(*_CPU)
        managed = _Managed(DLTensor(self._memory.ref.data, device, n, kind, *arrays, 0), None, _release)
        _exported[c.addressof(managed)] = (managed, arrays, self._memory)
        return _capsule_new(c.addressof(managed), b"dltensor", _drop_unused)

    def __repr__(self):
        return f"flashback_attention.Tensor({self.dtype}, {list(self.shape)})"


_exported = {}  # address of a DLManagedTensor that someone holds: what has to live with it


@_Deleter
def _release(managed):
    _exported.pop(c.addressof(managed.contents), None)


@c.CFUNCTYPE(None, c.c_void_p)
def _capsule_dies(capsule):
    """A capsule that nobody consumed still has its name, and its tensor."""
    name = c.PYFUNCTYPE(c.c_char_p, c.c_void_p)(("PyCapsule_GetName", c.pythonapi))(capsule)
    if name == b"dltensor":
        pointer = c.PYFUNCTYPE(c.c_void_p, c.c_void_p, c.c_char_p)(("PyCapsule_GetPointer", c.pythonapi))
        _exported.pop(pointer(capsule, name), None)


_drop_unused = c.cast(_capsule_dies, c.c_void_p)


def _importer(array):
    """from_dlpack of the library that an array is from, or None."""
    if hasattr(array, "__array_namespace__"):
        found = getattr(array.__array_namespace__(), "from_dlpack", None)
        if found:
            return found
    return getattr(sys.modules.get(type(array).__module__.partition(".")[0]), "from_dlpack", None)


class Arrays:
    """The kind of _engine.py for views; `like` is the array whose library results go to."""

    @staticmethod
    def signature(view):
        return view.shape, view.strides, view.type, view.device

    @staticmethod
    def view(view, name):
        return view

    @staticmethod
    def pointer(tensor):
        return tensor.data

    @staticmethod
    def empty(place, like):
        if _is_numpy(like.owner):
            array = _numpy_empty(place)
            if place.fill is not None:
                array.fill(place.fill)
            return View(array.__array_interface__["data"][0], *place[:3], _CPU, array)
        count = math.prod(place.shape)
        memory = _engine.Memory(place.type[1] // 8 * count)
        if place.fill == 0:
            c.memset(memory.ref.data, 0, memory.size)
        elif place.fill is not None:  # of lse, which is f32 or f64
            kind = c.c_double if place.type == CODES["f64"] else c.c_float
            (kind * count).from_address(memory.ref.data)[:] = [place.fill] * count
        return View(memory.ref.data, *place[:3], _CPU, Tensor(memory, place))

    @staticmethod
    def workspace(size, like):
        return _engine.cpu_workspace(size)

    @staticmethod
    def stream(like):
        return 0


def _numpy_empty(place):
    import numpy

    if len(place.shape) == 4 and place.strides != contiguous(place.shape):
        batch, heads, rows, cols = place.shape
        return numpy.empty((batch, rows, heads, cols), _numpy_type(place.type)).transpose(0, 2, 1, 3)
    return numpy.empty(place.shape, _numpy_type(place.type))


def swapped(view):
    """A result [B,H,L,D] as [B,L,H,D], in the same memory."""
    (b, h, l, d), (sb, sh, sl, sd) = view.shape, view.strides
    if _is_numpy(view.owner):
        return _numpy_view(view.owner.transpose(0, 2, 1, 3), "result")
    place = Place((b, l, h, d), (sb, sl, sh, sd), view.type)
    return View(view.data, *place[:3], _CPU, Tensor(view.owner._memory, place))


def result(view, like):
    """The array that the caller gets for a view that `empty` made; `like` is an operand as the caller gave it."""
    if view is None:
        return None
    importer = None if _is_numpy(view.owner) else _importer(like)
    return importer(view.owner) if importer else view.owner


arrays = Arrays()
