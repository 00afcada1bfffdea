"""Element types, ``constexpr`` and the two functions whose signature torch inspects."""

import enum

from .._host import device_module


class dtype:
    """An element type; equality and hash by name, as in Triton."""

    def __init__(self, name, bits=0):
        self.name = name
        self.primitive_bitwidth = bits
        self.itemsize = bits // 8

    def __eq__(self, other):
        return type(other) is type(self) and other.name == self.name

    def __hash__(self):
        return hash(self.name)

    def __str__(self):
        return self.name

    def __repr__(self):
        return f"triton.language.{self.name}"

    @property
    def scalar(self):
        return self

    def is_floating(self):
        return self.name.startswith(("fp", "bf"))

    def is_fp8(self):
        return self.name.startswith("fp8")

    def is_int(self):
        return self.name.startswith(("int", "uint"))

    def is_ptr(self):
        return False

    def is_block(self):
        return False


class pointer_type(dtype):
    def __init__(self, element_ty, address_space=1, const=False):
        super().__init__(f"pointer<{element_ty}>", 64)
        self.element_ty, self.address_space, self.const = element_ty, address_space, const

    def is_ptr(self):
        return True


class block_type(dtype):
    def __init__(self, element_ty, shape):
        super().__init__(f"<{shape}, {element_ty}>")
        self.element_ty, self.shape = element_ty, shape

    def is_block(self):
        return True


_TYPES = {
    "void": ("void", 0),
    "int1": ("int1", 1),
    "int8": ("int8", 8),
    "int16": ("int16", 16),
    "int32": ("int32", 32),
    "int64": ("int64", 64),
    "uint8": ("uint8", 8),
    "uint16": ("uint16", 16),
    "uint32": ("uint32", 32),
    "uint64": ("uint64", 64),
    "float8e5": ("fp8e5", 8),
    "float8e5b16": ("fp8e5b16", 8),
    "float8e4nv": ("fp8e4nv", 8),
    "float8e4b8": ("fp8e4b8", 8),
    "float8e4b15": ("fp8e4b15", 8),
    "float16": ("fp16", 16),
    "bfloat16": ("bf16", 16),
    "float32": ("fp32", 32),
    "float64": ("fp64", 64),
}
globals().update({name: dtype(*fields) for name, fields in _TYPES.items()})
pi32_t = pointer_type(globals()["int32"])


class constexpr:
    """A value known when a kernel is compiled; on the host it is the value in a box."""

    def __init__(self, value=None):
        self.value = value.value if isinstance(value, constexpr) else value

    def __repr__(self):
        return f"constexpr[{self.value}]"

    def __bool__(self):
        return bool(self.value)

    def __index__(self):
        return self.value

    def __eq__(self, other):
        return self.value == (other.value if isinstance(other, constexpr) else other)

    def __hash__(self):
        return hash(self.value)

    def __call__(self, *args, **kwargs):
        return self.value(*args, **kwargs)


class tensor:
    """A block of values inside a kernel; named in annotations."""


class PropagateNan(enum.Enum):
    NONE = 0
    ALL = 0xFFFF


def view(input, *shape, _builder=None):
    raise RuntimeError("triton.language.view was called outside a kernel")


def builtin(fn):
    return fn


__all__ = [
    "PropagateNan",
    "block_type",
    "constexpr",
    "dtype",
    "pi32_t",
    "pointer_type",
    "tensor",
    "view",
    *_TYPES,
]
__getattr__ = device_module("triton.language.core", absent=("make_tensor_descriptor",))
