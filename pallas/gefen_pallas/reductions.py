"""Kernels that reduce a whole tree: row and column sums of squared gradients, and the norm of all gradients.

As in `source`, a program finds its leaf from its number, and arrays come as columns.
"""

import triton
import triton.language as tl

from gefen_pallas.pieces import META, address_of, float_pointer, leaf_of, load_float


@triton.jit
def gefen_sums(
    gradients,
    nus,
    crosses,
    counters,
    hyper,
    meta,
    starts,
    row_sums,
    column_sums,
    stripe_sums,
    mean,
    LEAVES: tl.constexpr,
    SLOTS: tl.constexpr,
    CLASSES: tl.constexpr,
    T: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """New row and column factors of all factored leaves, and the mean of each row factor.

    A program sums the squares of T x T elements over its rows and over its columns. Whoever finishes the last tile of
    a stripe adds the stripe's sums, in fixed order: nobody waits, and the result is the same in every run.
    ``meta``: first program, class, rows of a batch entry, width, stripes of rows, stripes of columns, and the leaf's
    first place in ``row_sums``, ``column_sums``, ``stripe_sums``, ``mean`` and ``counters``; batch entries.
    """
    pid = tl.program_id(0)
    leaf = leaf_of(starts, pid, SLOTS)
    row = meta + leaf * META
    gradient = address_of(gradients, leaf, 0, KERNEL)
    nu = float_pointer(address_of(nus, leaf, LEAVES, KERNEL))
    cross = float_pointer(address_of(crosses, leaf, 2 * LEAVES, KERNEL))
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
            g = load_float(gradient, first[:, None] + c[None, :], mask, CLASSES[k][0]) * factor
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
            average = tl.sum(sums, 0) / height.to(tl.float32)
            tl.store(means, average + (average - average))  # NaN where it is not finite: the step is then NaN too
    if tl.atomic_add(counter + batches * down + batch * along + j, 1, sem="acq_rel", scope="gpu") == down - 1:
        tl.debug_barrier()
        total = tl.zeros([T], tl.float32)
        for s in range(down):
            total += tl.load(columns + (batch * down + s) * width + c, mask=c < width, other=0.0, cache_modifier=".cg")
        place = cross + batch.to(tl.int64) * width + c
        v = b2 * tl.load(place, mask=c < width, other=0.0) + w2 * (total / height.to(tl.float32))
        tl.store(place, v, mask=c < width)


@triton.jit
def gefen_norm(
    gradients,
    counter,
    meta,
    starts,
    partial,
    norm,
    PROGRAMS: tl.constexpr,
    LEAVES: tl.constexpr,
    SLOTS: tl.constexpr,
    CLASSES: tl.constexpr,
    T: tl.constexpr,
    REPEAT: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """The Euclidean norm of all gradients together. ``meta``: first program, class, elements."""
    pid = tl.program_id(0)
    leaf = leaf_of(starts, pid, SLOTS)
    row = meta + leaf * META
    gradient = address_of(gradients, leaf, 0, KERNEL)
    t, kind = pid - tl.load(row), tl.load(row + 1)
    for k in tl.static_range(len(CLASSES)):
        if kind == k:
            n = (tl.load(row + 2) // CLASSES[k][1]) * CLASSES[k][1]
            total = tl.zeros([T], tl.float32)
            for step in range(REPEAT):
                o = (t * REPEAT + step) * T + tl.arange(0, T)
                g = load_float(gradient, o, o < n, CLASSES[k][0])
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
