"""The kernel in Triton that takes the step of a whole tree in one launch.

The same source is compiled through jax-triton and interpreted on a CPU. A program finds its leaf from its number, reads
what `geometry` says about it from a table, and runs the body of the leaf's class.
"""

# ruff: noqa: SIM109
import triton
import triton.language as tl

from gefen_pallas.pieces import (
    META,
    TINY,
    address_of,
    compand,
    encode,
    float_pointer,
    leaf_of,
    load_codes,
    load_float,
    look,
    reciprocal,
    rounded,
    search_tree,
    store_codes,
    store_float,
)

CELL, ROW, FULL, FACTORED, COLUMN = (tl.constexpr(i) for i in range(5))
ONCE, ROWS, CHUNKS, STRIPS = (tl.constexpr(i) for i in range(4))


@triton.jit
def _finish(
    direction,
    gradient,
    parameter,
    offset,
    mask,
    decay,
    rate,
    GD: tl.constexpr,
    PD: tl.constexpr,
    READS: tl.constexpr,
    APPLY: tl.constexpr,
):
    """Write the update over the gradient, or the new parameter over the old one."""
    u = direction
    if READS:
        p = load_float(parameter, offset, mask, PD)
        u = u + decay * p
    u = -rate * u
    if APPLY:
        store_float(parameter, offset, p + rounded(u, GD), mask, PD)
    else:
        store_float(gradient, offset, u, mask, GD)


@triton.jit
def _exact(
    a,
    t,
    row,
    hyper,
    X: tl.constexpr,
    V: tl.constexpr,
    GD: tl.constexpr,
    PD: tl.constexpr,
    READS: tl.constexpr,
    APPLY: tl.constexpr,
):
    """Adam itself for X elements."""
    gradient, parameter, mu, _, nu, _ = a
    n = (tl.load(row + 4) // V) * V
    o = t * X + tl.arange(0, X)
    mask = o < n
    g = load_float(gradient, o, mask, GD) * tl.load(hyper + 8)
    m = tl.load(hyper) * tl.load(float_pointer(mu) + o, mask=mask, other=0.0) + tl.load(hyper + 1) * g
    v = tl.load(hyper + 2) * tl.load(float_pointer(nu) + o, mask=mask, other=0.0) + tl.load(hyper + 3) * (g * g)
    tl.store(float_pointer(mu) + o, m, mask=mask)
    tl.store(float_pointer(nu) + o, v, mask=mask)
    d = m / ((tl.sqrt(v / tl.load(hyper + 5)) + tl.load(hyper + 6)) * tl.load(hyper + 4))
    decay = tl.load(hyper + tl.load(row + 3))
    _finish(d, gradient, parameter, o, mask, decay, tl.load(hyper + 7), GD, PD, READS, APPLY)


@triton.jit
def _sum(x, AXES: tl.constexpr):
    """Sum over the trailing axes of a tile (2: columns; 12: rows and columns; 1: rows), kept as 1."""
    if AXES == 2:
        return tl.sum(x, 2, keep_dims=True)
    elif AXES == 1:
        return tl.sum(x, 1, keep_dims=True)
    else:
        return tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _max(x, ROW_SCALE: tl.constexpr):
    x = tl.max(x, 2, keep_dims=True)
    if not ROW_SCALE:
        x = tl.max(x, 1, keep_dims=True)
    return tl.where(x < TINY, 0.0, x)


@triton.jit
def _cells(
    a,
    t,
    row,
    hyper,
    mean,
    words_ptr,
    words,
    limits,
    X: tl.constexpr,
    Y: tl.constexpr,
    Z: tl.constexpr,
    V: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    SECOND: tl.constexpr,
    LOOP: tl.constexpr,
    PACKED: tl.constexpr,
    GD: tl.constexpr,
    PD: tl.constexpr,
    READS: tl.constexpr,
    APPLY: tl.constexpr,
    WORDS: tl.constexpr,
    DEPTH: tl.constexpr,
    COMPANDING: tl.constexpr,
):
    """The step of a program's cells."""
    gradient, parameter, mu, scale_, nu_, cross_ = a
    scale, nu, cross = float_pointer(scale_), float_pointer(nu_), float_pointer(cross_)
    b1, w1, b2, w2 = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2), tl.load(hyper + 3)
    bc1, bc2, eps = tl.load(hyper + 4), tl.load(hyper + 5), tl.load(hyper + 6)
    rate, factor, decay = tl.load(hyper + 7), tl.load(hyper + 8), tl.load(hyper + tl.load(row + 3))
    cells, across, ny = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    b = (tl.load(row + 7) // V) * V  # provably a multiple of V: wide loads and stores
    width = (tl.load(row + 8) // V) * V
    tall, wide, batch_rows = tl.load(row + 9), tl.load(row + 10), tl.load(row + 11)

    x = tl.arange(0, X)[:, None, None]
    y = tl.arange(0, Y)[None, :, None]
    z = tl.arange(0, Z)[None, None, :]
    size = (ny * b).to(tl.float32)
    if LOOP == STRIPS:
        strips = across // wide
        top, left = (t // strips) * tall, (t % strips) * wide
        trips = tl.cdiv(tall * wide, X)
        size = size * (tall * wide).to(tl.float32)
        if SECOND == COLUMN:
            column_sum = tl.zeros([1, 1, Z], tl.float32)
            size = (ny * tall).to(tl.float32)
            which = (t // strips) * width + left * b + z
            which_mask = z < b
        else:
            column_sum = tl.zeros([1, 1, 1], tl.float32)
            which = t + tl.zeros([1, 1, 1], tl.int32)
            which_mask = which >= 0
        for j in range(trips):
            q = j * X + x
            first = ((top + q // wide).to(tl.int64) * ny + y) * width + (left + q % wide).to(tl.int64) * b
            mask = (q < tall * wide) & (y < ny) & (z < b)
            g = load_float(gradient, first + z, mask, GD) * factor
            if SECOND == COLUMN:
                column_sum += tl.sum(_sum(g * g, 1), 0, keep_dims=True)
            else:
                column_sum += tl.sum(_sum(g * g, 12), 0, keep_dims=True)
        v = b2 * tl.load(nu + which, mask=which_mask, other=0.0) + w2 * (column_sum / size)
        tl.store(nu + which, v, mask=which_mask)
        strip_weight = 1.0 / ((tl.sqrt(v / bc2) + eps) * bc1)
    elif LOOP == ROWS:
        trips = tl.cdiv(ny, Y)
    elif LOOP == CHUNKS:
        trips = tl.cdiv(b, Z)
    else:
        repeat = tl.load(row + 13)
        trips = tl.minimum(repeat, tl.cdiv(cells - t * (repeat * X), X))

    if LOOP == ROWS or LOOP == CHUNKS:  # first the statistics of the whole cell
        cell = t * X + x
        here = cell < cells
        old = tl.load(scale + cell, mask=here, other=0.0)
        largest = tl.zeros([X, 1, 1], tl.float32)
        squares = tl.zeros([X, 1, Z if SECOND == COLUMN else 1], tl.float32)
        for j in range(trips):
            yy, shift = y, 0
            if LOOP == ROWS:
                yy = j * Y + y
            else:
                shift = j * Z
            start = ((cell // across).to(tl.int64) * ny + yy) * width + (cell % across).to(tl.int64) * b + shift
            mask = here & (yy < ny) & (shift + z < b)
            g = load_float(gradient, start + z, mask, GD) * factor
            code = load_codes(mu, start, z, here & (yy < ny), b - shift, PACKED, X, Y, Z)
            m = look(words, code, X, Y, Z) * (b1 * old) + w1 * g
            largest = tl.maximum(largest, _max(tl.where(mask, tl.abs(m), 0.0), False))
            if SECOND == CELL:
                squares += _sum(g * g, 12)
            elif SECOND == COLUMN:
                squares += _sum(g * g, 1)
        new = largest
        tl.store(scale + cell, new, mask=here)
        if SECOND == CELL:
            v = b2 * tl.load(nu + cell, mask=here, other=0.0) + w2 * (squares / size)
            tl.store(nu + cell, v, mask=here)
            weight = 1.0 / ((tl.sqrt(v / bc2) + eps) * bc1)
        elif SECOND == COLUMN:
            seen = here & (z < b)
            v = b2 * tl.load(nu + cell * b + z, mask=seen, other=0.0) + w2 * (squares / ny.to(tl.float32))
            tl.store(nu + cell * b + z, v, mask=seen)
            weight = 1.0 / ((tl.sqrt(v / bc2) + eps) * bc1)

    for j in range(trips):
        yy, shift = y, 0
        if LOOP == STRIPS:
            q = j * X + x
            cell_row, cell_column = top + q // wide, left + q % wide
            cell = cell_row * across + cell_column
            here = q < tall * wide
        else:
            cell = t * X + x
            if LOOP == ONCE:
                cell = (t * repeat + j) * X + x
            cell_row, cell_column = cell // across, cell % across
            here = cell < cells
            if LOOP == ROWS:
                yy = j * Y + y
            elif LOOP == CHUNKS:
                shift = j * Z
        start = (cell_row.to(tl.int64) * ny + yy) * width + cell_column.to(tl.int64) * b + shift
        mask_row = here & (yy < ny)
        mask = mask_row & (shift + z < b)
        offset = start + z
        g = load_float(gradient, offset, mask, GD) * factor
        code = load_codes(mu, start, z, mask_row, b - shift, PACKED, X, Y, Z)
        if LOOP == ONCE or LOOP == STRIPS:
            if ROW_SCALE:
                which_scale, scale_mask = cell * ny + y, here & (y < ny)
            else:
                which_scale, scale_mask = cell, here
            old = tl.load(scale + which_scale, mask=scale_mask, other=0.0)
        m = tl.where(mask, look(words, code, X, Y, Z) * (b1 * old) + w1 * g, 0.0)
        if LOOP == ONCE or LOOP == STRIPS:
            new = _max(tl.abs(m), ROW_SCALE)
            tl.store(scale + which_scale, new, mask=scale_mask)
        if COMPANDING:
            code = compand(m * reciprocal(new), words_ptr)
        else:
            code = encode(m * reciprocal(new), limits, WORDS, DEPTH, X, Y, Z)
        store_codes(mu, start, z, mask_row, b - shift, code, PACKED, X, Y, Z)

        if SECOND == FULL:
            v = b2 * tl.load(nu + offset, mask=mask, other=0.0) + w2 * (g * g)
            tl.store(nu + offset, v, mask=mask)
            d = m / ((tl.sqrt(v / bc2) + eps) * bc1)
        elif SECOND == FACTORED:
            r = cell_row * ny + yy
            batch = r // batch_rows
            average = tl.load(mean + tl.load(row + 12) + batch, mask=mask_row, other=0.0)
            some = average != 0  # also where it is NaN
            inverse = tl.where(some, tl.div_rn(1.0, tl.where(some, average, 1.0)), 0.0)
            root = tl.sqrt(tl.load(nu + r, mask=mask_row, other=0.0) / bc2)
            c = tl.load(cross + (batch.to(tl.int64) * width + cell_column * b) + shift + z, mask=mask, other=0.0)
            d = m / ((root * tl.sqrt(c * inverse) + eps) * bc1)
        elif LOOP == STRIPS:
            d = m * strip_weight
        elif LOOP == ONCE:
            if SECOND == CELL:
                which_nu, nu_mask = cell, here
                squares = _sum(g * g, 12) / size
            elif SECOND == ROW:
                which_nu, nu_mask = cell * ny + y, mask_row
                squares = _sum(g * g, 2) / b.to(tl.float32)
            else:
                which_nu, nu_mask = cell * b + z, here & (z < b)
                squares = _sum(g * g, 1) / ny.to(tl.float32)
            v = b2 * tl.load(nu + which_nu, mask=nu_mask, other=0.0) + w2 * squares
            tl.store(nu + which_nu, v, mask=nu_mask)
            d = m * (1.0 / ((tl.sqrt(v / bc2) + eps) * bc1))
        else:
            d = m * weight
        _finish(d, gradient, parameter, offset, mask, decay, rate, GD, PD, READS, APPLY)


@triton.jit
def gefen_step(
    gradients,
    parameters,
    mus,
    scales,
    nus,
    crosses,
    mean,
    words_ptr,
    hyper,
    meta,
    starts,
    LEAVES: tl.constexpr,
    SLOTS: tl.constexpr,
    CLASSES: tl.constexpr,
    WORDS: tl.constexpr,
    READS: tl.constexpr,
    APPLY: tl.constexpr,
    QUANTISED: tl.constexpr,
    COMPANDING: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """The step of all leaves.

    ``hyper`` holds b1, 1 - b1, b2, 1 - b2, both bias corrections, eps, the learning rate, the gradient's factor, and
    then the weight decays. ``meta`` holds META numbers per leaf: first program, class, column factor, decay, and what
    `Cut` names. ``mean`` holds the means of the row factors.
    """
    pid = tl.program_id(0)
    leaf = leaf_of(starts, pid, SLOTS)
    row = meta + leaf * META
    t = pid - tl.load(row)
    kind = tl.load(row + 1)
    COLUMNS: tl.constexpr = 1 if READS else 0
    gradient = address_of(gradients, leaf, 0, KERNEL)
    if READS:
        parameter = address_of(parameters, leaf, LEAVES, KERNEL)
    else:
        parameter = gradient
    mu = address_of(mus, leaf, (COLUMNS + 1) * LEAVES, KERNEL)
    scale = address_of(scales, leaf, (COLUMNS + 2) * LEAVES, KERNEL)
    nu = address_of(nus, leaf, (COLUMNS + 3) * LEAVES, KERNEL)
    if len(crosses) > 0:
        cross = address_of(crosses, tl.load(row + 2), (COLUMNS + 4) * LEAVES, KERNEL)
    else:
        cross = nu
    a = (gradient, parameter, mu, scale, nu, cross)
    if QUANTISED:
        words, limits = search_tree(words_ptr, WORDS, 8 if WORDS == 256 else 4)
    for j in tl.static_range(len(CLASSES)):
        if kind == j:
            if CLASSES[j][0] == 1:
                _exact(a, t, row, hyper, CLASSES[j][1], CLASSES[j][4], CLASSES[j][9], CLASSES[j][10], READS, APPLY)
            else:
                _cells(
                    a,
                    t,
                    row,
                    hyper,
                    mean,
                    words_ptr,
                    words,
                    limits,
                    CLASSES[j][1],
                    CLASSES[j][2],
                    CLASSES[j][3],
                    CLASSES[j][4],
                    CLASSES[j][5],
                    CLASSES[j][6],
                    CLASSES[j][7],
                    CLASSES[j][8],
                    CLASSES[j][9],
                    CLASSES[j][10],
                    READS,
                    APPLY,
                    WORDS,
                    8 if WORDS == 256 else 4,
                    COMPANDING,
                )
