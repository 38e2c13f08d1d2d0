"""What `_cpu_kernel` needs beyond Numba: bits, prefetching, and the arguments that XLA hands over.

XLA calls with a frame of its C interface for foreign functions (`xla/ffi/api/c_api.h` in jaxlib, stable across
versions), of which this reads only the addresses and the dimensions of the buffers.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Only fused multiply-adds. NaNs and infinities mean what they mean in IEEE arithmetic.
inner = {"error_model": "numpy", "boundscheck": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
compiled = numba.njit(fastmath={"contract"}, **inner)


def _reader(dtype):
    """A compiled function that turns an address into a pointer to ``dtype``."""
    pointer = types.CPointer(dtype)

    @intrinsic
    def read(typing, address):
        def build(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), build

    return read


def _cast(source, target):
    """A compiled function that takes the bits of one number for those of another type."""

    @intrinsic
    def cast(typing, value):
        def build(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), build

    return cast


@intrinsic
def _word(typing, address, index):
    """The int64 at place ``index`` of what begins at ``address``."""

    def build(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        return builder.load(builder.gep(pointer, [arguments[1]]))

    return types.int64(types.int64, types.int64), build


@intrinsic
def _prefetch(typing, address):
    """Ask for the cache line at an address; any address will do."""

    def build(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, i32(0), i32(2), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), build


@compiled
def bring(address, size):
    """Begin to read ``size`` bytes into the cache."""
    for offset in range(0, size, 64):
        _prefetch(address + offset)


_int64s, _float32s, _uint32s, _uint8s = map(_reader, (types.int64, types.float32, types.uint32, types.uint8))
bits, as_float = _cast(types.float32, types.uint32), _cast(types.uint32, types.float32)


@compiled
def buffer(frame, index):
    """(address, rows, columns) of argument ``index``; a vector is one row."""
    arguments = _word(frame, 9)
    buffer = _word(arguments, index)
    rank, dims = _word(buffer, 4), _word(buffer, 5)
    return _word(buffer, 3), _word(dims, 0) if rank > 1 else 1, _word(dims, rank - 1)


@compiled
def matrix(frame, index):
    """Argument ``index`` as float32 (rows, columns)."""
    address, rows, columns = buffer(frame, index)
    return numba.carray(_float32s(address), (rows, columns))


@compiled
def vector(frame, index):
    """The same, flat."""
    address, rows, columns = buffer(frame, index)
    return numba.carray(_float32s(address), rows * columns)


@compiled
def bytes_of(frame, index):
    """Argument ``index`` as flat uint8."""
    address, rows, columns = buffer(frame, index)
    return numba.carray(_uint8s(address), rows * columns)


@compiled
def words_of(frame, index):
    """Argument ``index`` as flat uint32."""
    address, rows, columns = buffer(frame, index)
    return numba.carray(_uint32s(address), rows * columns)


@compiled
def answered(frame):
    """Whether XLA only asked for which version of its interface this was written; the answer is XLA's own version.

    What is read of a frame has been the same in all of them.
    """
    extension = _word(frame, 1)
    if extension == 0 or np.int32(_word(extension, 1)) != 1:
        return False
    numba.carray(_int64s(_word(extension, 3)), 4)[3] = _word(_word(frame, 2), 4)
    return True
