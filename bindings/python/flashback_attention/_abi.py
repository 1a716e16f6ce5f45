"""flashback.h for ctypes: constants, structs and functions.

Imports nothing of the package, so that tests/python and bench/peers can have it too. tests/test_abi.py holds every
constant and field against the table of the C header, so that none can be missed or moved. Next: _library.py.
"""

import ctypes as c
import enum

UNBOUNDED = 2**63 - 1
BROADCAST = -(2**63)


class Status(enum.IntEnum):
    """fb_status."""

    OK, INVALID, UNSUPPORTED, NO_DEVICE, COMPILE, DEVICE, MEMORY = range(7)


class Dtype(enum.IntEnum):
    """fb_dtype."""

    F32, F16, BF16, F64 = range(4)


class Device(enum.IntEnum):
    """fb_device."""

    CPU, CUDA, METAL = range(3)


class Route(enum.IntEnum):
    """fb_route."""

    AUTO, FUSED, VECTOR, UNFUSED, REFERENCE = range(5)


class Layout(enum.IntEnum):
    """fb_layout of flashback_dlpack.h."""

    BHLD, BLHD = range(2)


class Flag(enum.IntFlag):
    """FB_... of fb_desc.flags."""

    DETERMINISTIC = 1 << 0
    FORWARD_ONLY = 1 << 1
    TOP_LEFT = 1 << 2
    PACKED = 1 << 3
    LENGTHS = 1 << 4
    BIAS = 1 << 5
    DBIAS = 1 << 6
    MASK = 1 << 7
    BLOCK_MASK = 1 << 8
    SINKS = 1 << 9
    DSINKS = 1 << 10
    DLSE = 1 << 11
    ACCUMULATE = 1 << 12
    NO_DQ = 1 << 13
    NO_DK = 1 << 14
    NO_DV = 1 << 15


def _fields(kind, names):
    return [(name, kind) for name in names.split()]


class Window(c.Structure):
    """fb_window: distances in keys, both ends included."""

    _fields_ = _fields(c.c_int64, "left right")


class Strides(c.Structure):
    """fb_strides, in elements."""

    _fields_ = _fields(c.c_int64, "batch head row")


class Shape(c.Structure):
    """fb_shape of a bias or mask."""

    _fields_ = _fields(c.c_int64, "batch heads rows cols")


class Desc(c.Structure):
    """fb_desc: the problem."""

    _fields_ = (
        _fields(c.c_uint32, "size flags")
        + _fields(c.c_int32, "device index dtype route")
        + _fields(c.c_int64, "batch heads_q heads_kv len_q len_k head_dim head_dim_v total_q total_k")
        + [("window", Window), ("position_offset", c.c_int64), ("scale", c.c_double), ("softcap", c.c_double)]
        + _fields(Strides, "q k v out dout dq dk dv")
        + [("bias_shape", Shape), ("bias", Strides), ("dbias", Strides), ("mask_shape", Shape), ("mask", Strides)]
        + _fields(c.c_int64, "block_q block_k block_batch block_heads")
        + _fields(c.c_int32, "threads tasks")
        + _fields(c.c_int64, "fused_min_len score_bytes_max")
    )


class Ref(c.Structure):
    """fb_ref: a pointer, and an offset in bytes."""

    _fields_ = [("data", c.c_void_p), ("offset", c.c_uint64)]


class Io(c.Structure):
    """fb_io: the pointers of one call."""

    _fields_ = (
        _fields(c.c_uint32, "size reserved")
        + _fields(Ref, "q k v out lse dout dlse dq dk dv bias dbias mask block_mask sinks dsinks cu_q cu_k")
        + _fields(Ref, "lens_q lens_k workspace")
        + [("workspace_size", c.c_uint64), ("stream", c.c_void_p)]
    )


class DLDevice(c.Structure):
    """DLDevice of DLPack."""

    _fields_ = _fields(c.c_int32, "device_type device_id")


class DLDataType(c.Structure):
    """DLDataType of DLPack."""

    _fields_ = [("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16)]


class DLTensor(c.Structure):
    """fb_dltensor, which is DLTensor of DLPack."""

    _fields_ = [
        ("data", c.c_void_p),
        ("device", DLDevice),
        ("ndim", c.c_int32),
        ("dtype", DLDataType),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


# name: (result, arguments); pointers to structs are passed by ctypes' byref, plans as void pointers.
FUNCTIONS = {
    "fb_desc_init": (None, [c.POINTER(Desc), c.c_size_t]),
    "fb_io_init": (None, [c.POINTER(Io), c.c_size_t]),
    "fb_desc_from_dlpack": (c.c_int, [c.POINTER(Desc), c.c_int] + 3 * [c.POINTER(DLTensor)]),
    "fb_strides_from_dlpack": (c.c_int, [c.POINTER(Strides), c.c_int, c.POINTER(DLTensor), c.c_char_p]),
    "fb_plan_create": (c.c_int, [c.POINTER(c.c_void_p), c.POINTER(Desc)]),
    "fb_plan_workspace": (c.c_size_t, [c.c_void_p]),
    "fb_plan_explain": (c.c_size_t, [c.c_void_p, c.c_char_p, c.c_size_t]),
    "fb_plan_destroy": (None, [c.c_void_p]),
    "fb_supported": (c.c_int, [c.POINTER(Desc)]),
    "fb_forward": (c.c_int, [c.c_void_p, c.POINTER(Io)]),
    "fb_backward": (c.c_int, [c.c_void_p, c.POINTER(Io)]),
    "fb_alloc": (c.c_int, [c.POINTER(Ref), c.c_int, c.c_int32, c.c_size_t]),
    "fb_free": (c.c_int, [c.POINTER(Ref), c.c_int, c.c_int32]),
    "fb_last_error": (c.c_char_p, []),
    "fb_version": (c.c_char_p, []),
    "fb_info": (c.c_size_t, [c.c_char_p, c.c_size_t]),
}


def declare(library):
    """Gives the functions of a loaded library their types; returns it."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
