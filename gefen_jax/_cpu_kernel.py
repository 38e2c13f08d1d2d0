"""The step of one leaf as a compiled loop for a CPU, called by XLA; see `cpu`.

Two passes over a matrix (rows, columns) in which every statistic is a tiling: the second moment, then codes, scales
and the result, strip by strip, so that what lies between them stays in a core's first-level cache. The equations are
those of `update`; everything is written in place.

Inner loops are small functions over whole arrays: Numba then knows that no index is negative, and LLVM uses vectors.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types

from gefen_jax._xla_frame import (
    answered,
    as_float,
    bits,
    bring,
    buffer,
    bytes_of,
    compiled,
    inner,
    matrix,
    vector,
    words_of,
)
from gefen_jax.update import TINY

# For sums alone. All else is only contracted: NaNs and infinities mean what they mean in IEEE arithmetic.
reordered = numba.njit(fastmath={"contract", "reassoc", "nsz"}, **inner)

STRIP = 4096
"""Elements of a strip, unless one block of momentum has more."""
_SEGMENT = 512  # elements that are added in float32 before float64 takes over, and looked up in memory ahead
_ONE, _TINY, _PER_LEVEL, _UNITS = np.float32(1), np.float32(TINY), np.float32(1 / 127), np.float32(1 << 30)
_MAGNITUDE, _LAST_BIN, _PLACE = np.uint32(0x7FFFFFFF), np.uint32(4096), np.int32((1 << 19) - 1)
_CODE, _JUMP, _LIMIT = np.uint32(0xFF), np.uint32(8), np.uint32(0xFFFFFE00)


@compiled
def _fill(values, value):
    for j in range(values.size):
        values[j] = value


@compiled
def _copy(values, copies):
    for j in range(copies.size):
        copies[j] = values[j]


@reordered
def _sum_of_squares(g, factor):
    total = np.float32(0)
    for j in range(g.size):
        x = g[j] * factor
        total += x * x
    return total


@compiled
def _add_squares(g, factor, sums):
    for j in range(g.size):
        x = g[j] * factor
        sums[j] += x * x


@compiled
def _take_in(part, sums):
    for j in range(part.size):
        sums[j] += part[j]
        part[j] = 0


@compiled
def _column_factors(sums, rows, mean, h, cross, roots):
    """New column factors of one matrix, and the square roots of their ratios to the mean of the row factors."""
    b2, w2 = h[2], h[3]
    scale = (_ONE / mean if mean > 0 else np.float32(0)) + (mean - mean)  # NaN where the mean is not finite
    for j in range(cross.size):
        column = b2 * cross[j] + w2 * np.float32(sums[j] / rows)
        cross[j] = column
        roots[j] = np.sqrt(column * scale)
        sums[j] = 0


@compiled
def _block_means(sums, count, h, nu):
    """New second moments from sums of squares of ``count`` elements, which start anew."""
    b2, w2 = h[2], h[3]
    for j in range(nu.size):
        nu[j] = b2 * nu[j] + w2 * np.float32(sums[j] / count)
        sums[j] = 0


@compiled
def _factored_denominators(row, roots, h, found):
    """(root of the second moment + eps) times the first moment's bias correction, along a strip of one row."""
    bc1, bc2, eps = h[4], h[5], h[6]
    row = np.sqrt(row / bc2)
    for j in range(found.size):
        found[j] = (row * roots[j] + eps) * bc1


@compiled
def _column_denominators(nu, h, found):
    bc1, bc2, eps = h[4], h[5], h[6]
    for j in range(found.size):
        found[j] = (np.sqrt(nu[j] / bc2) + eps) * bc1


@compiled
def _tiled_denominators(nu, wide, start, h, found):
    bc1, bc2, eps = h[4], h[5], h[6]
    j = 0
    while j < found.size:
        block = (start + j) // wide
        end = min((block + 1) * wide - start, found.size)
        _fill(found[j:end], (np.sqrt(nu[block] / bc2) + eps) * bc1)
        j = end


@compiled
def _unpack(packed, codes):
    for j in range(packed.size):
        codes[2 * j] = packed[j] & np.uint8(15)
        codes[2 * j + 1] = packed[j] >> np.uint8(4)


@compiled
def _pack(codes, packed):
    for j in range(packed.size):
        packed[j] = codes[2 * j] | (codes[2 * j + 1] << np.uint8(4))


@compiled
def _momentum(codes, g, scale, words, h, m):
    """m = b1 * word * scale + (1 - b1) * g for one run."""
    s, w1, factor = h[0] * scale, h[1], h[8]
    for j in range(m.size):
        m[j] = words[codes[j]] * s + w1 * (g[j] * factor)


@compiled
def _companding_momentum(codes, g, scale, c, h, m):
    """The same with words in closed form (`quantization.Companding`), which no table needs to be read for."""
    s, w1, factor = h[0] * scale, h[1], h[8]
    for j in range(m.size):
        place = np.int32(codes[j]) - np.int32(127)
        y = np.float32(place - np.int32(place > 0)) * _PER_LEVEL
        m[j] = y / (_ONE + c * (_ONE - abs(y))) * s + w1 * (g[j] * factor)


@compiled
def _largest(m):
    """The largest magnitude, found among the bits: their order is that of the magnitudes, with NaN above all."""
    top = np.uint32(0)
    for j in range(m.size):
        top = max(top, bits(m[j]) & _MAGNITUDE)
    return top


@compiled
def _find_bins(m, inverse, bins, places):
    """The bin of each element, and its place in the bin in units of 2^-30, moved up by 9 bits; see `cpu.table`.

    As a fixed-point number, of which NaN becomes the least; what is beyond the ends goes to the last bin.
    """
    for j in range(m.size):
        fixed = np.int32(m[j] * inverse * _UNITS)  # in this order: the inverse of a tiny scale would overflow
        bins[j] = min(np.uint32((fixed >> np.int32(19)) + np.int32(2048)), _LAST_BIN)
        places[j] = np.uint32(fixed & _PLACE) << np.uint32(9)


@compiled
def _choose(table, bins, places, codes):
    """Codes from the entries of their bins."""
    for j in range(bins.size):
        bins[j] = table[bins[j]]
    for j in range(codes.size):
        above = np.uint32(1) + ((bins[j] >> _JUMP) & np.uint32(1))
        step = above if places[j] > (bins[j] & _LIMIT) else np.uint32(0)
        codes[j] = np.uint8((bins[j] & _CODE) + step)


@compiled
def _compand(m, inverse, c, codes):
    """Codes of a companding codebook, as `quantization.encode` makes them."""
    side, shift = np.float32(127), np.float32(1.5 * 2**23)
    for j in range(m.size):
        y = m[j] * inverse
        size = min(abs(y), _ONE)
        level = np.int32((size * (_ONE + c) / (_ONE + c * size) * side + shift) - shift)
        codes[j] = np.uint8(127 + level + np.int32(level > 0)) if y > 0 else np.uint8(127 - level)


@compiled
def _directions(m, h, found):
    """Learning rate times direction, over the denominators."""
    rate = h[7]
    for j in range(m.size):
        found[j] = rate * (m[j] / found[j])


@compiled
def _subtract(found, decay, p):
    if decay == 0:
        for j in range(p.size):
            p[j] -= found[j]
    else:
        for j in range(p.size):
            p[j] -= found[j] + decay * p[j]


@compiled
def _update(found, decay, p, out):
    if decay == 0:
        for j in range(out.size):
            out[j] = -found[j]
    else:
        for j in range(out.size):
            out[j] = -(found[j] + decay * p[j])


@compiled
def _second_moment(at_g, g, nu, cross, h, roots):
    """New second moment of a leaf, and for factored ones the square roots of the columns' shares (`update`)."""
    b2, w2, factor = h[2], h[3], h[8]
    height, width = g.shape
    factored = cross.shape[1] > 1
    period = height // cross.shape[0] if factored else height // nu.shape[0]
    wide = width // nu.shape[1]
    by_column = factored or wide == 1
    part, sums = np.empty(width, np.float32), np.empty(width, np.float64)
    _fill(part, np.float32(0))
    _fill(sums, 0.0)
    total = 0.0
    for i in range(height):
        squares = 0.0
        for start in range(0, width, _SEGMENT):
            end = min(start + _SEGMENT, width)
            bring(at_g + (i * width + end + _SEGMENT) * 4, _SEGMENT * 4)
            if factored:
                squares += _sum_of_squares(g[i, start:end], factor)
            if by_column:
                _add_squares(g[i, start:end], factor, part[start:end])
        last = i % period == period - 1
        if by_column and (last or i % 64 == 63):
            _take_in(part, sums)
        if factored:
            row = b2 * nu[i, 0] + w2 * np.float32(squares / width)
            nu[i, 0] = row
            total += row
            if last:
                matrix_of_stack = i // period
                mean = np.float32(total / period)
                _column_factors(sums, period, mean, h, cross[matrix_of_stack], roots[matrix_of_stack])
                total = 0.0
        elif by_column:
            if last:
                _block_means(sums, period, h, nu[i // period])
        else:
            for k in range(nu.shape[1]):
                sums[k] += _sum_of_squares(g[i, k * wide : (k + 1) * wide], factor)
            if last:
                _block_means(sums, period * wide, h, nu[i // period])


def handler():
    """Compile the entry point: XLA_FFI_Error* (XLA_FFI_CallFrame*), a null pointer for success.

    Arguments of a call: g, codes, scale, nu, cross and p as matrices, then words, table and h (`cpu`). Long, because
    each level of calls is optimised anew, which takes seconds.
    """

    @numba.cfunc(types.int64(types.int64), error_model="numpy", boundscheck=False)
    def step(frame):
        if answered(frame):
            return 0
        g, nu, cross = matrix(frame, 0), matrix(frame, 3), matrix(frame, 4)
        gs, codes, scales, ps = vector(frame, 0), bytes_of(frame, 1), vector(frame, 2), vector(frame, 5)
        words, table, h = vector(frame, 6), words_of(frame, 7), vector(frame, 8)
        at_g, at_codes, at_p = buffer(frame, 0)[0], buffer(frame, 1)[0], buffer(frame, 5)[0]
        applies, companding, c = h[10] != 0, table.size == 1, as_float(table[0])
        decay = h[7] * h[9] if h[9] != 0 else np.float32(0)  # also where the rate is not finite: ps may be one number
        height, width = g.shape
        factored, tall, wide = cross.shape[1] > 1, height // nu.shape[0], width // nu.shape[1]
        by_column = factored or wide == 1
        roots = np.empty((cross.shape[0], width if by_column else 0), np.float32)
        _second_moment(at_g, g, nu, cross, h, roots)

        tall_block, run, per_row = height // buffer(frame, 2)[1], width // buffer(frame, 2)[2], buffer(frame, 2)[2]
        # A strip is several whole rows where rows are short, else part of the rows that a block has.
        rows_at_once = max(1, STRIP // width) if tall_block == 1 else 1
        span = width if rows_at_once > 1 else run * max(1, min(STRIP // (tall_block * run), per_row))
        most = rows_at_once * span
        m, maxima = np.empty((tall_block, most), np.float32), np.empty(most // run, np.uint32)
        line, found = np.empty(most, np.uint8), np.empty(most, np.float32)
        bins, places = np.empty(most, np.uint32), np.empty(most, np.uint32)
        bytes_per_row = codes.size // height
        packed = bytes_per_row != width
        tile = -1
        for top_row in range(0, height, max(tall_block, rows_at_once)):
            rows = min(rows_at_once, height - top_row)
            for start in range(0, width, span):
                columns = min(span, width - start)
                n = rows * columns
                first = top_row // tall_block * per_row + start // run
                kept = scales[first : first + n // run]
                _fill(maxima, np.uint32(0))
                for t in range(tall_block):
                    at = (top_row + t) * width + start
                    at_byte = (top_row + t) * bytes_per_row + (start // 2 if packed else start)
                    if packed:
                        _unpack(codes[at_byte : at_byte + n // 2], line[:n])
                    old = line[:n] if packed else codes[at_byte : at_byte + n]
                    for k in range(kept.size):
                        a, b = k * run, (k + 1) * run
                        bring(at_g + (at + n + a) * 4, run * 4)
                        if companding:
                            _companding_momentum(old[a:b], gs[at + a : at + b], kept[k], c, h, m[t, a:b])
                        else:
                            _momentum(old[a:b], gs[at + a : at + b], kept[k], words, h, m[t, a:b])
                        maxima[k] = max(maxima[k], _largest(m[t, a:b]))
                for k in range(kept.size):
                    top = as_float(maxima[k])
                    kept[k] = np.float32(0) if top < _TINY else top
                for t in range(tall_block):
                    at = (top_row + t) * width + start
                    at_byte = (top_row + t) * bytes_per_row + (start // 2 if packed else start)
                    for r in range(rows):
                        i, row = top_row + t + r, found[r * columns : (r + 1) * columns]
                        if factored:
                            among = roots[i // (height // cross.shape[0]), start : start + columns]
                            _factored_denominators(nu[i, 0], among, h, row)
                        elif by_column:
                            if i // tall != tile:
                                tile = i // tall
                                _column_denominators(nu[tile], h, roots[0])
                            _copy(roots[0, start : start + columns], row)
                        else:
                            _tiled_denominators(nu[i // tall], wide, start, h, row)
                    _directions(m[t, :n], h, found[:n])
                    if applies:
                        _subtract(found[:n], decay, ps[at : at + n])
                    else:
                        _update(found[:n], decay, ps[at : at + n], gs[at : at + n])  # without decay ps is not read
                    new = line[:n] if packed else codes[at_byte : at_byte + n]
                    for k in range(kept.size):
                        a, b = k * run, (k + 1) * run
                        bring(at_p + (at + n + a) * 4, run * 4)
                        bring(at_codes + at_byte + n + a, run)
                        inverse = _ONE / kept[k] if kept[k] > 0 else np.float32(0)
                        if companding:
                            _compand(m[t, a:b], inverse, c, new[a:b])
                        else:
                            _find_bins(m[t, a:b], inverse, bins[a:b], places[a:b])
                    if not companding:
                        _choose(table, bins[:n], places[:n], new)
                    if packed:
                        _pack(new, codes[at_byte : at_byte + n // 2])
        return 0

    return step
