"""What the Triton kernels are made of: finding arrays, reading and writing them, codes and their search.

No JAX here. Arrays come as columns: a tuple with the gradients of all leaves, one with the parameters, and so on. Which
array of a column a program needs is known only at run time. KERNEL names the compiled function: its pointers are then
read from its own parameter list with a computed index (pointers come first and are 8 bytes each; `aot` reads the layout
from the binary). An empty KERNEL selects among all pointers instead: slower, and portable.
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1.1754944e-38)
META = tl.constexpr(16)


@triton.jit
def address_of(column, i, position: tl.constexpr, KERNEL: tl.constexpr):
    """Address of array i of a column whose first pointer is the kernel's parameter ``position``."""
    if KERNEL == "":
        found = column[0].to(tl.int64)
        for k in tl.static_range(1, len(column)):
            found = tl.where(i == k, column[k].to(tl.int64), found)
    else:
        asm: tl.constexpr = (
            "{ .reg .u64 b; mov.u64 b, " + KERNEL + "_param_0; add.u64 b, b, $1; ld.param.u64 $0, [b]; }"
        )
        offset = (i + position).to(tl.int64) * 8
        found = tl.inline_asm_elementwise(asm, "=l,l", [offset], dtype=tl.int64, is_pure=True, pack=1)
    return found


@triton.jit
def float_pointer(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32), bitcast=True), 16)


@triton.jit
def load_float(address, offset, mask, DTYPE: tl.constexpr):
    """Elements of a gradient or a parameter as float32."""
    if DTYPE == 0:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float32), bitcast=True), 16)
    elif DTYPE == 1:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16), bitcast=True), 16)
    else:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float16), bitcast=True), 16)
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_float(address, offset, value, mask, DTYPE: tl.constexpr):
    if DTYPE == 0:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float32), bitcast=True), 16)
        tl.store(pointer + offset, value, mask=mask)
    elif DTYPE == 1:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16), bitcast=True), 16)
        tl.store(pointer + offset, value.to(tl.bfloat16), mask=mask)
    else:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float16), bitcast=True), 16)
        tl.store(pointer + offset, value.to(tl.float16), mask=mask)


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """``value`` rounded to a gradient's dtype."""
    if DTYPE == 1:
        value = value.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == 2:
        value = value.to(tl.float16).to(tl.float32)
    return value


@triton.jit
def search_tree(words_ptr, WORDS: tl.constexpr, DEPTH: tl.constexpr):
    """The words, and their decision thresholds as a binary search tree: node i has the children 2 i and 2 i + 1.

    The thresholds are those of `quantization.thresholds`: the largest float32 that the lower of two words still gets,
    found among the neighbours of the midpoint; the second of two equal words (256 have two zeros) gets nothing. Every
    program makes the tree anew: a few operations per word, and no launch or state of its own. Nodes of one level lie
    side by side, so that threads that look at different ones seldom meet in a bank of shared memory.
    """
    node = tl.arange(0, WORDS)
    first = tl.zeros([WORDS], tl.int32) + 1  # first node of the node's level
    half = tl.zeros([WORDS], tl.int32) + WORDS // 2
    for level in tl.static_range(1, DEPTH):
        deeper = node >= 2**level
        first = tl.where(deeper, 2**level, first)
        half = tl.where(deeper, WORDS // 2 // 2**level, half)
    rank = tl.minimum(tl.maximum((2 * (node - first) + 1) * half - 1, 0), WORDS - 2)
    rank += (tl.load(words_ptr + rank) == tl.load(words_ptr + rank + 1)).to(tl.int32)
    lower = tl.load(words_ptr + rank)
    upper = tl.load(words_ptr + tl.minimum(rank + 1, WORDS - 1))
    bits = (lower + (upper - lower) * 0.5).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    limit = lower
    for step in tl.static_range(5):
        near = order + (step - 2)
        y = (near ^ ((near >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        kept = (tl.abs(y - lower) <= tl.abs(y - upper)) & (y < upper)
        limit = tl.where(kept, tl.maximum(limit, y), limit)
    return tl.load(words_ptr + node), limit


@triton.jit
def look(table, index, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr):
    return tl.reshape(tl.gather(table, tl.reshape(index, [X * Y * Z]), 0), [X, Y, Z])


@triton.jit
def encode(y, tree, WORDS: tl.constexpr, DEPTH: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr):
    """The number of thresholds below y: its code."""
    node = tl.zeros([X, Y, Z], tl.int32) + 1
    for _ in tl.static_range(DEPTH):
        node = 2 * node + (y > look(tree, node, X, Y, Z)).to(tl.int32)
    return node - WORDS


@triton.jit
def compand(y, words_ptr):
    """The code of y among words in closed form: `quantization.encode` for companding."""
    middle: tl.constexpr = 63 / 127
    c = (middle / tl.load(words_ptr + 191) - 1) / (1 - middle)
    size = tl.minimum(tl.abs(y), 1.0)
    level = (tl.div_rn(size * (1 + c), 1 + c * size) * 127 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(y > 0, 127 + level + (level > 0).to(tl.int32), 127 - level)


@triton.jit
def load_codes(mu, start, z, mask_row, b, PACKED: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr):
    """Codes of a tile as int32; ``start`` holds the offset of each row."""
    pointer = tl.multiple_of(mu.to(tl.pointer_type(tl.uint8), bitcast=True), 16)
    if PACKED:
        half = tl.arange(0, Z // 2)[None, None, :]
        byte = tl.load(pointer + start // 2 + half, mask=mask_row & (half < b // 2), other=0).to(tl.int32)
        return tl.interleave(byte & 15, byte >> 4)
    else:
        return tl.load(pointer + start + z, mask=mask_row & (z < b), other=0).to(tl.int32)


@triton.jit
def store_codes(
    mu, start, z, mask_row, b, code, PACKED: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr
):
    pointer = tl.multiple_of(mu.to(tl.pointer_type(tl.uint8), bitcast=True), 16)
    if PACKED:
        half = tl.arange(0, Z // 2)[None, None, :]
        low, high = tl.split(tl.reshape(code, [X, Y, Z // 2, 2]))
        tl.store(pointer + start // 2 + half, (low | (high << 4)).to(tl.uint8), mask=mask_row & (half < b // 2))
    else:
        tl.store(pointer + start + z, code.to(tl.uint8), mask=mask_row & (z < b))


@triton.jit
def reciprocal(scale):
    return tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def leaf_of(starts, pid, SLOTS: tl.constexpr):
    """Number of the leaf that program ``pid`` works on; ``starts`` ends in the largest int32."""
    return tl.sum((tl.load(starts + tl.arange(0, SLOTS)) <= pid).to(tl.int32), axis=0) - 1
