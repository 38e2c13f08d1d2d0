"""The kernels in Triton: the step of a whole tree in one launch, its row and column sums, and its norm.

No JAX here: the same source is compiled through jax-triton and interpreted on a CPU. A program finds its leaf from
its number, reads what `geometry` says about it from a table, and runs the body of the leaf's class.

Arrays come as columns: a tuple with the gradients of all leaves, one with the parameters, and so on. Which array of a
column a program needs is known only at run time. KERNEL names the compiled function: its pointers are then read from
its own parameter list with a computed index (pointers come first and are 8 bytes each; `aot` checks the layout in the
binary). An empty KERNEL selects among all pointers instead: slower, and portable.
"""

# ruff: noqa: SIM109
import triton
import triton.language as tl

TINY = tl.constexpr(1.1754944e-38)
META = tl.constexpr(16)

CELL, ROW, FULL, FACTORED, COLUMN = (tl.constexpr(i) for i in range(5))
ONCE, ROWS, CHUNKS, STRIPS = (tl.constexpr(i) for i in range(4))


@triton.jit
def _address(column, i, position: tl.constexpr, KERNEL: tl.constexpr):
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
def _f32(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32), bitcast=True), 16)


@triton.jit
def _load(address, offset, mask, DTYPE: tl.constexpr):
    """Elements of a gradient or a parameter as float32."""
    if DTYPE == 0:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float32), bitcast=True), 16)
    elif DTYPE == 1:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16), bitcast=True), 16)
    else:
        pointer = tl.multiple_of(address.to(tl.pointer_type(tl.float16), bitcast=True), 16)
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(address, offset, value, mask, DTYPE: tl.constexpr):
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
def _rounded(value, DTYPE: tl.constexpr):
    """``value`` rounded to a gradient's dtype."""
    if DTYPE == 1:
        value = value.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == 2:
        value = value.to(tl.float16).to(tl.float32)
    return value


@triton.jit
def _tables(words_ptr, WORDS: tl.constexpr, DEPTH: tl.constexpr):
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
def _look(table, index, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr):
    return tl.reshape(tl.gather(table, tl.reshape(index, [X * Y * Z]), 0), [X, Y, Z])


@triton.jit
def _encode(y, tree, WORDS: tl.constexpr, DEPTH: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr):
    """The number of thresholds below y: its code."""
    node = tl.zeros([X, Y, Z], tl.int32) + 1
    for _ in tl.static_range(DEPTH):
        node = 2 * node + (y > _look(tree, node, X, Y, Z)).to(tl.int32)
    return node - WORDS


@triton.jit
def _compand(y, words_ptr):
    """The code of y among words in closed form: `quantization.encode` for companding."""
    middle: tl.constexpr = 63 / 127
    c = (middle / tl.load(words_ptr + 191) - 1) / (1 - middle)
    size = tl.minimum(tl.abs(y), 1.0)
    level = (tl.div_rn(size * (1 + c), 1 + c * size) * 127 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(y > 0, 127 + level + (level > 0).to(tl.int32), 127 - level)


@triton.jit
def _load_codes(mu, start, z, mask_row, b, PACKED: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr):
    """Codes of a tile as int32; ``start`` holds the offset of each row."""
    pointer = tl.multiple_of(mu.to(tl.pointer_type(tl.uint8), bitcast=True), 16)
    if PACKED:
        half = tl.arange(0, Z // 2)[None, None, :]
        byte = tl.load(pointer + start // 2 + half, mask=mask_row & (half < b // 2), other=0).to(tl.int32)
        return tl.interleave(byte & 15, byte >> 4)
    else:
        return tl.load(pointer + start + z, mask=mask_row & (z < b), other=0).to(tl.int32)


@triton.jit
def _store_codes(mu, start, z, mask_row, b, code, PACKED: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
                 Z: tl.constexpr):
    pointer = tl.multiple_of(mu.to(tl.pointer_type(tl.uint8), bitcast=True), 16)
    if PACKED:
        half = tl.arange(0, Z // 2)[None, None, :]
        low, high = tl.split(tl.reshape(code, [X, Y, Z // 2, 2]))
        tl.store(pointer + start // 2 + half, (low | (high << 4)).to(tl.uint8), mask=mask_row & (half < b // 2))
    else:
        tl.store(pointer + start + z, code.to(tl.uint8), mask=mask_row & (z < b))


@triton.jit
def _inverse(scale):
    return tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def _finish(direction, gradient, parameter, offset, mask, decay, rate, GD: tl.constexpr, PD: tl.constexpr,
            READS: tl.constexpr, APPLY: tl.constexpr):
    """Write the update over the gradient, or the new parameter over the old one."""
    u = direction
    if READS:
        p = _load(parameter, offset, mask, PD)
        u = u + decay * p
    u = -rate * u
    if APPLY:
        _store(parameter, offset, p + _rounded(u, GD), mask, PD)
    else:
        _store(gradient, offset, u, mask, GD)


@triton.jit
def _exact(a, t, row, hyper, X: tl.constexpr, V: tl.constexpr, GD: tl.constexpr, PD: tl.constexpr,
           READS: tl.constexpr, APPLY: tl.constexpr):
    """Adam itself for X elements."""
    gradient, parameter, mu, _, nu, _ = a
    n = (tl.load(row + 4) // V) * V
    o = t * X + tl.arange(0, X)
    mask = o < n
    g = _load(gradient, o, mask, GD) * tl.load(hyper + 8)
    m = tl.load(hyper) * tl.load(_f32(mu) + o, mask=mask, other=0.0) + tl.load(hyper + 1) * g
    v = tl.load(hyper + 2) * tl.load(_f32(nu) + o, mask=mask, other=0.0) + tl.load(hyper + 3) * (g * g)
    tl.store(_f32(mu) + o, m, mask=mask)
    tl.store(_f32(nu) + o, v, mask=mask)
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
def _cells(a, t, row, hyper, mean, words_ptr, words, limits, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr,
           V: tl.constexpr, ROW_SCALE: tl.constexpr, SECOND: tl.constexpr, LOOP: tl.constexpr, PACKED: tl.constexpr,
           GD: tl.constexpr, PD: tl.constexpr, READS: tl.constexpr, APPLY: tl.constexpr, WORDS: tl.constexpr,
           DEPTH: tl.constexpr, COMPANDING: tl.constexpr):
    """The step of a program's cells."""
    gradient, parameter, mu, scale_, nu_, cross_ = a
    scale, nu, cross = _f32(scale_), _f32(nu_), _f32(cross_)
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
            g = _load(gradient, first + z, mask, GD) * factor
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
            g = _load(gradient, start + z, mask, GD) * factor
            code = _load_codes(mu, start, z, here & (yy < ny), b - shift, PACKED, X, Y, Z)
            m = _look(words, code, X, Y, Z) * (b1 * old) + w1 * g
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
        g = _load(gradient, offset, mask, GD) * factor
        code = _load_codes(mu, start, z, mask_row, b - shift, PACKED, X, Y, Z)
        if LOOP == ONCE or LOOP == STRIPS:
            if ROW_SCALE:
                which_scale, scale_mask = cell * ny + y, here & (y < ny)
            else:
                which_scale, scale_mask = cell, here
            old = tl.load(scale + which_scale, mask=scale_mask, other=0.0)
        m = tl.where(mask, _look(words, code, X, Y, Z) * (b1 * old) + w1 * g, 0.0)
        if LOOP == ONCE or LOOP == STRIPS:
            new = _max(tl.abs(m), ROW_SCALE)
            tl.store(scale + which_scale, new, mask=scale_mask)
        if COMPANDING:
            code = _compand(m * _inverse(new), words_ptr)
        else:
            code = _encode(m * _inverse(new), limits, WORDS, DEPTH, X, Y, Z)
        _store_codes(mu, start, z, mask_row, b - shift, code, PACKED, X, Y, Z)

        if SECOND == FULL:
            v = b2 * tl.load(nu + offset, mask=mask, other=0.0) + w2 * (g * g)
            tl.store(nu + offset, v, mask=mask)
            d = m / ((tl.sqrt(v / bc2) + eps) * bc1)
        elif SECOND == FACTORED:
            r = cell_row * ny + yy
            batch = r // batch_rows
            average = tl.load(mean + tl.load(row + 12) + batch, mask=mask_row, other=0.0)
            inverse = _inverse(average)
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
def _leaf_of(starts, pid, SLOTS: tl.constexpr):
    """Number of the leaf that program ``pid`` works on; ``starts`` ends in the largest int32."""
    return tl.sum((tl.load(starts + tl.arange(0, SLOTS)) <= pid).to(tl.int32), axis=0) - 1


@triton.jit
def gefen_step(gradients, parameters, mus, scales, nus, crosses, mean, words_ptr, hyper, meta, starts,
               LEAVES: tl.constexpr, SLOTS: tl.constexpr, CLASSES: tl.constexpr, WORDS: tl.constexpr,
               READS: tl.constexpr, APPLY: tl.constexpr, QUANTISED: tl.constexpr, COMPANDING: tl.constexpr,
               KERNEL: tl.constexpr):
    """The step of all leaves.

    ``hyper`` holds b1, 1 - b1, b2, 1 - b2, both bias corrections, eps, the learning rate, the gradient's factor, and
    then the weight decays. ``meta`` holds META numbers per leaf: first program, class, column factor, decay, and what
    `Cut` names. ``mean`` holds the means of the row factors.
    """
    pid = tl.program_id(0)
    leaf = _leaf_of(starts, pid, SLOTS)
    row = meta + leaf * META
    t = pid - tl.load(row)
    kind = tl.load(row + 1)
    COLUMNS: tl.constexpr = 1 if READS else 0
    gradient = _address(gradients, leaf, 0, KERNEL)
    if READS:
        parameter = _address(parameters, leaf, LEAVES, KERNEL)
    else:
        parameter = gradient
    mu = _address(mus, leaf, (COLUMNS + 1) * LEAVES, KERNEL)
    scale = _address(scales, leaf, (COLUMNS + 2) * LEAVES, KERNEL)
    nu = _address(nus, leaf, (COLUMNS + 3) * LEAVES, KERNEL)
    if len(crosses) > 0:
        cross = _address(crosses, tl.load(row + 2), (COLUMNS + 4) * LEAVES, KERNEL)
    else:
        cross = nu
    a = (gradient, parameter, mu, scale, nu, cross)
    if QUANTISED:
        words, limits = _tables(words_ptr, WORDS, 8 if WORDS == 256 else 4)
    for j in tl.static_range(len(CLASSES)):
        if kind == j:
            if CLASSES[j][0] == 1:
                _exact(a, t, row, hyper, CLASSES[j][1], CLASSES[j][4], CLASSES[j][9], CLASSES[j][10], READS, APPLY)
            else:
                _cells(a, t, row, hyper, mean, words_ptr, words, limits, CLASSES[j][1], CLASSES[j][2], CLASSES[j][3],
                       CLASSES[j][4], CLASSES[j][5], CLASSES[j][6], CLASSES[j][7], CLASSES[j][8], CLASSES[j][9],
                       CLASSES[j][10], READS, APPLY, WORDS, 8 if WORDS == 256 else 4, COMPANDING)


@triton.jit
def gefen_sums(gradients, nus, crosses, counters, hyper, meta, starts, row_sums, column_sums, stripe_sums, mean,
               LEAVES: tl.constexpr, SLOTS: tl.constexpr, CLASSES: tl.constexpr, T: tl.constexpr,
               KERNEL: tl.constexpr):
    """New row and column factors of all factored leaves, and the mean of each row factor.

    A program sums the squares of T x T elements over its rows and over its columns. Whoever finishes the last tile of
    a stripe adds the stripe's sums, in fixed order: nobody waits, and the result is the same in every run.
    ``meta``: first program, class, rows of a batch entry, width, stripes of rows, stripes of columns, and the leaf's
    first place in ``row_sums``, ``column_sums``, ``stripe_sums``, ``mean`` and ``counters``; batch entries.
    """
    pid = tl.program_id(0)
    leaf = _leaf_of(starts, pid, SLOTS)
    row = meta + leaf * META
    gradient = _address(gradients, leaf, 0, KERNEL)
    nu = _f32(_address(nus, leaf, LEAVES, KERNEL))
    cross = _f32(_address(crosses, leaf, 2 * LEAVES, KERNEL))
    t, kind = pid - tl.load(row), tl.load(row + 1)
    height, down, along = tl.load(row + 2), tl.load(row + 4), tl.load(row + 5)
    batches = tl.load(row + 11)
    batch, tile = t // (down * along), t % (down * along)
    i, j = tile // along, tile % along
    r, c = i * T + tl.arange(0, T), j * T + tl.arange(0, T)
    b2, w2, factor = tl.load(hyper + 2), tl.load(hyper + 3), tl.load(hyper + 8)
    for k in tl.static_range(len(CLASSES)):
        if kind == k:
            width = (tl.load(row + 3) // CLASSES[k][1]) * CLASSES[k][1]
            first = (batch.to(tl.int64) * height + r) * width
            mask = (r < height)[:, None] & (c < width)[None, :]
            g = _load(gradient, first[:, None] + c[None, :], mask, CLASSES[k][0]) * factor
            rows, columns = row_sums + tl.load(row + 6), column_sums + tl.load(row + 7)
            tl.store(rows + (batch * along + j) * height + r, tl.sum(g * g, 1), mask=r < height)
            tl.store(columns + (batch * down + i) * width + c, tl.sum(g * g, 0), mask=c < width)
    width = tl.load(row + 3)
    rows, columns = row_sums + tl.load(row + 6), column_sums + tl.load(row + 7)
    stripes, means = stripe_sums + tl.load(row + 8) + batch * down, mean + tl.load(row + 9) + batch
    counter = counters + tl.load(row + 10)
    tl.debug_barrier()  # all of this program's sums are written before it says so
    if tl.atomic_add(counter + batch * down + i, 1, sem="acq_rel", scope="gpu") == along - 1:
        tl.debug_barrier()
        total = tl.zeros([T], tl.float32)
        for s in range(along):
            total += tl.load(rows + (batch * along + s) * height + r, mask=r < height, other=0.0, cache_modifier=".cg")
        old = nu + batch.to(tl.int64) * height + r
        v = b2 * tl.load(old, mask=r < height, other=0.0) + w2 * (total / width.to(tl.float32))
        tl.store(old, v, mask=r < height)
        tl.store(stripes + i, tl.sum(tl.where(r < height, v, 0.0), 0))
        tl.debug_barrier()
        whole = counter + batches * (down + along) + batch
        if tl.atomic_add(whole, 1, sem="acq_rel", scope="gpu") == down - 1:
            tl.debug_barrier()
            sums = tl.zeros([T], tl.float32)
            for q in range(0, down, T):
                place = q + tl.arange(0, T)
                sums += tl.load(stripes + place, mask=place < down, other=0.0, cache_modifier=".cg")
            tl.store(means, tl.sum(sums, 0) / height.to(tl.float32))
    if tl.atomic_add(counter + batches * down + batch * along + j, 1, sem="acq_rel", scope="gpu") == down - 1:
        tl.debug_barrier()
        total = tl.zeros([T], tl.float32)
        for s in range(down):
            total += tl.load(columns + (batch * down + s) * width + c, mask=c < width, other=0.0, cache_modifier=".cg")
        place = cross + batch.to(tl.int64) * width + c
        v = b2 * tl.load(place, mask=c < width, other=0.0) + w2 * (total / height.to(tl.float32))
        tl.store(place, v, mask=c < width)


@triton.jit
def gefen_norm(gradients, counter, meta, starts, partial, norm, PROGRAMS: tl.constexpr, LEAVES: tl.constexpr,
               SLOTS: tl.constexpr, CLASSES: tl.constexpr, T: tl.constexpr, REPEAT: tl.constexpr,
               KERNEL: tl.constexpr):
    """The Euclidean norm of all gradients together. ``meta``: first program, class, elements."""
    pid = tl.program_id(0)
    leaf = _leaf_of(starts, pid, SLOTS)
    row = meta + leaf * META
    gradient = _address(gradients, leaf, 0, KERNEL)
    t, kind = pid - tl.load(row), tl.load(row + 1)
    for k in tl.static_range(len(CLASSES)):
        if kind == k:
            n = (tl.load(row + 2) // CLASSES[k][1]) * CLASSES[k][1]
            total = tl.zeros([T], tl.float32)
            for step in range(REPEAT):
                o = (t * REPEAT + step) * T + tl.arange(0, T)
                g = _load(gradient, o, o < n, CLASSES[k][0])
                total += g * g
            tl.store(partial + pid, tl.sum(total, 0))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        tl.debug_barrier()
        sums = tl.zeros([T], tl.float32)
        for first in range(0, PROGRAMS, T):
            o = first + tl.arange(0, T)
            sums += tl.load(partial + o, mask=o < PROGRAMS, other=0.0, cache_modifier=".cg")
        tl.store(norm, tl.sqrt(tl.sum(sums, 0)))
