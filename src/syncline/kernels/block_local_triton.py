"""Triton kernels of `block_local`: dense products per block, with the fetches of pixels redirected inside them (C1).

Every weight is read once per product. A program owns one block (or a part of its fields), keeps what belongs to the
block's neurons at hand, and streams the weights past it; pixels come from the second-level cache. Tiles must be
powers of two, so 288 rows are 256 + 32 and 96 images 64 + 32, two tiles each way ("A" and "B") in one program.
Not responsible for launching (`block_local_launch`) or checking (`block_local`). Legend in `geometry`.
"""

from __future__ import annotations

import triton
import triton.language as tl

MIX: tl.constexpr = tl.constexpr(0x9E3779B1)


@triton.jit
def _pixels(
    k: tl.tensor, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FIELD: tl.constexpr, COUNT: tl.constexpr
) -> tl.tensor:
    """Offsets of the field's pixels k = (c · field + y) · field + x from the block's first pixel."""
    c = k // (FIELD * FIELD)
    rest = k % (FIELD * FIELD)
    return ((c * HEIGHT + rest // FIELD) * WIDTH + rest % FIELD) * COUNT


@triton.jit
def _neurons(
    r: tl.tensor,
    BLOCK_W: tl.constexpr,
    DEPTH: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """Offsets of the rows r = (i · bw + j) · depth + k from the block's first neuron."""
    place = r // DEPTH
    return (((r % DEPTH) * OUT_H + place // BLOCK_W) * OUT_W + place % BLOCK_W) * COUNT


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, total: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """total + a b. 'widen' multiplies in float32, for Triton's interpreter, which cannot multiply bfloat16."""
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _add_or_store(at: tl.tensor, value: tl.tensor, mask: tl.tensor, ADD: tl.constexpr) -> None:
    if ADD:
        tl.atomic_add(at, value, mask=mask, sem="relaxed")
    else:
        tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _weights(
    w: tl.tensor,
    tiles: tl.tensor,
    block: tl.tensor,
    r: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    start: tl.tensor,
    ROWS: tl.constexpr,
    FAN_IN: tl.constexpr,
    COPIED: tl.constexpr,
) -> tl.tensor:
    """(rows, columns): a tile of the block's weights, by the copy engine (`tiles` is a descriptor) or by pointers.

    The copy engine may bring rows of the next block where the tile is larger than the block; they are not used.
    """
    if COPIED:
        return tiles.load([block * ROWS + first, start])
    else:
        at = w + block.to(tl.int64) * ROWS * FAN_IN + r[:, None] * FAN_IN + k[None, :]
        mask = (r < ROWS)[:, None] & (k < FAN_IN)[None, :]
        return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def forward_kernel(
    x: tl.tensor,
    w: tl.tensor,
    tiles_a: tl.tensor,
    tiles_b: tl.tensor,
    scale: tl.tensor,
    y: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    FIELD: tl.constexpr,
    STEP: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEPTH: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    ROWS: tl.constexpr,
    FAN_IN: tl.constexpr,
    SCALED: tl.constexpr,
    COPIED: tl.constexpr,
    RA: tl.constexpr,
    RB: tl.constexpr,
    NA: tl.constexpr,
    NB: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """y = scale · W x. Grid: (blocks · split, row groups, image groups)."""
    block = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    first_row = tl.program_id(1) * (RA + RB)
    first_image = tl.program_id(2) * (NA + NB)
    p = block // ACROSS
    q = block % ACROSS
    x += (p * STEP * WIDTH + q * STEP) * COUNT

    ra = first_row + tl.arange(0, RA)
    na = first_image + tl.arange(0, NA)
    sum_aa = tl.zeros((RA, NA), tl.float32)
    if NB > 0:
        nb = first_image + NA + tl.arange(0, NB)
        sum_ab = tl.zeros((RA, NB), tl.float32)
    if RB > 0:
        rb = first_row + RA + tl.arange(0, RB)
        sum_ba = tl.zeros((RB, NA), tl.float32)
        if NB > 0:
            sum_bb = tl.zeros((RB, NB), tl.float32)

    EACH: tl.constexpr = (FAN_IN + SPLIT * BK - 1) // (SPLIT * BK) * BK
    last = tl.minimum((part + 1) * EACH, FAN_IN)
    for start in range(part * EACH, last, BK):
        k = start + tl.arange(0, BK)
        inside = k < FAN_IN
        pixel = _pixels(k, HEIGHT, WIDTH, FIELD, COUNT)
        wa = _weights(w, tiles_a, block, ra, first_row, k, start, ROWS, FAN_IN, COPIED)
        xa = tl.load(
            x + pixel[:, None] + na[None, :], mask=inside[:, None] & (na < COUNT)[None, :], other=0.0
        )
        sum_aa = _dot(wa, xa, sum_aa, PRECISION)
        if NB > 0:
            xb = tl.load(
                x + pixel[:, None] + nb[None, :], mask=inside[:, None] & (nb < COUNT)[None, :], other=0.0
            )
            sum_ab = _dot(wa, xb, sum_ab, PRECISION)
        if RB > 0:
            wb = _weights(w, tiles_b, block, rb, first_row + RA, k, start, ROWS, FAN_IN, COPIED)
            sum_ba = _dot(wb, xa, sum_ba, PRECISION)
            if NB > 0:
                sum_bb = _dot(wb, xb, sum_bb, PRECISION)

    y += (p * BLOCK_H * OUT_W + q * BLOCK_W) * COUNT
    at_a = y + _neurons(ra, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT)
    fits_a = ra < ROWS
    if SCALED:
        sa = tl.load(scale + block * ROWS + ra, mask=fits_a, other=0.0)
        sum_aa *= sa[:, None]
        if NB > 0:
            sum_ab *= sa[:, None]
    _add_or_store(at_a[:, None] + na[None, :], sum_aa, fits_a[:, None] & (na < COUNT)[None, :], SPLIT > 1)
    if NB > 0:
        _add_or_store(at_a[:, None] + nb[None, :], sum_ab, fits_a[:, None] & (nb < COUNT)[None, :], SPLIT > 1)
    if RB > 0:
        at_b = y + _neurons(rb, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT)
        fits_b = rb < ROWS
        if SCALED:
            sb = tl.load(scale + block * ROWS + rb, mask=fits_b, other=0.0)
            sum_ba *= sb[:, None]
            if NB > 0:
                sum_bb *= sb[:, None]
        _add_or_store(at_b[:, None] + na[None, :], sum_ba, fits_b[:, None] & (na < COUNT)[None, :], SPLIT > 1)
        if NB > 0:
            mask = fits_b[:, None] & (nb < COUNT)[None, :]
            _add_or_store(at_b[:, None] + nb[None, :], sum_bb, mask, SPLIT > 1)


@triton.jit
def _delta(
    delta: tl.tensor,
    scale: tl.tensor,
    r: tl.tensor,
    n: tl.tensor,
    BLOCK_W: tl.constexpr,
    DEPTH: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """(rows, images): a tile of the block's deltas, scaled."""
    at = delta + _neurons(r, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT)[:, None] + n[None, :]
    value = tl.load(at, mask=(r < ROWS)[:, None] & (n < COUNT)[None, :], other=0.0)
    if SCALED:
        value = value.to(tl.float32) * tl.load(scale + r, mask=r < ROWS, other=0.0)[:, None]
    return value.to(DTYPE)


@triton.jit
def input_gradient_kernel(
    delta: tl.tensor,
    w: tl.tensor,
    tiles_a: tl.tensor,
    tiles_b: tl.tensor,
    scale: tl.tensor,
    dx: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    FIELD: tl.constexpr,
    STEP: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEPTH: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    ROWS: tl.constexpr,
    FAN_IN: tl.constexpr,
    SCALED: tl.constexpr,
    COPIED: tl.constexpr,
    RA: tl.constexpr,
    RB: tl.constexpr,
    NA: tl.constexpr,
    NB: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """dx += (scale · W)ᵀ δ. Grid as in `forward_kernel`; the block's deltas stay, tiles of columns stream by."""
    block = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    first_row = tl.program_id(1) * (RA + RB)
    first_image = tl.program_id(2) * (NA + NB)
    p = block // ACROSS
    q = block % ACROSS
    dx += (p * STEP * WIDTH + q * STEP) * COUNT
    delta += (p * BLOCK_H * OUT_W + q * BLOCK_W) * COUNT
    scale += block * ROWS
    DTYPE: tl.constexpr = w.dtype.element_ty

    ra = first_row + tl.arange(0, RA)
    na = first_image + tl.arange(0, NA)
    d_aa = _delta(delta, scale, ra, na, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, SCALED, DTYPE)
    if NB > 0:
        nb = first_image + NA + tl.arange(0, NB)
        d_ab = _delta(delta, scale, ra, nb, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, SCALED, DTYPE)
    if RB > 0:
        rb = first_row + RA + tl.arange(0, RB)
        d_ba = _delta(delta, scale, rb, na, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, SCALED, DTYPE)
        if NB > 0:
            d_bb = _delta(delta, scale, rb, nb, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, SCALED, DTYPE)

    EACH: tl.constexpr = (FAN_IN + SPLIT * BK - 1) // (SPLIT * BK) * BK
    last = tl.minimum((part + 1) * EACH, FAN_IN)
    for start in range(part * EACH, last, BK):
        k = start + tl.arange(0, BK)
        inside = k < FAN_IN
        pixel = _pixels(k, HEIGHT, WIDTH, FIELD, COUNT)
        wa = _weights(w, tiles_a, block, ra, first_row, k, start, ROWS, FAN_IN, COPIED)
        g_a = _dot(tl.trans(wa), d_aa, None, PRECISION)  # (columns, images)
        if NB > 0:
            g_b = _dot(tl.trans(wa), d_ab, None, PRECISION)
        if RB > 0:
            wb = _weights(w, tiles_b, block, rb, first_row + RA, k, start, ROWS, FAN_IN, COPIED)
            g_a = _dot(tl.trans(wb), d_ba, g_a, PRECISION)
            if NB > 0:
                g_b = _dot(tl.trans(wb), d_bb, g_b, PRECISION)
        _add_or_store(dx + pixel[:, None] + na[None, :], g_a, inside[:, None] & (na < COUNT)[None, :], True)
        if NB > 0:
            _add_or_store(
                dx + pixel[:, None] + nb[None, :], g_b, inside[:, None] & (nb < COUNT)[None, :], True
            )


@triton.jit
def _hash(value: tl.tensor) -> tl.tensor:
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _round(value: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """float32 to the float32 of a bfloat16, stochastically; `bits` are uniform in 0…65535."""
    cut = (value.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return cut.to(tl.float32, bitcast=True)


@triton.jit
def _times(
    g: tl.tensor,
    d: tl.tensor,
    x: tl.tensor,
    n: tl.tensor,
    pixel: tl.tensor,
    inside: tl.tensor,
    COUNT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """g + δ xᵀ over the images n, whose deltas d are here already."""
    seen = tl.load(x + pixel[:, None] + n[None, :], mask=inside[:, None] & (n < COUNT)[None, :], other=0.0)
    return _dot(d, tl.trans(seen), g, PRECISION)


@triton.jit(do_not_specialize=["rate", "decay", "row_seed", "column_seed"])
def weight_gradient_kernel(
    delta: tl.tensor,
    x: tl.tensor,
    delta2: tl.tensor,
    x2: tl.tensor,
    w: tl.tensor,
    m: tl.tensor,
    tiles_w: tl.tensor,
    tiles_m: tl.tensor,
    scale: tl.tensor,
    radial: tl.tensor,
    squares: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    row_seed: tl.tensor,
    column_seed: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    FIELD: tl.constexpr,
    STEP: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEPTH: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_W: tl.constexpr,
    ROWS: tl.constexpr,
    FAN_IN: tl.constexpr,
    SCALED: tl.constexpr,
    TWO: tl.constexpr,
    UPDATE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COPIED: tl.constexpr,
    RT: tl.constexpr,
    NA: tl.constexpr,
    NB: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """δ xᵀ, written to `w` or turned into a step of momentum on `w` and `m`.

    Grid: (row tiles · blocks · split). `squares` is (split, B, R): the sums of the new weights' squares.
    """
    TILES: tl.constexpr = (ROWS + RT - 1) // RT
    tile = tl.program_id(0) % TILES
    block = tl.program_id(0) // TILES // SPLIT
    part = tl.program_id(0) // TILES % SPLIT
    p = block // ACROSS
    q = block % ACROSS
    w += block.to(tl.int64) * ROWS * FAN_IN
    m += block.to(tl.int64) * ROWS * FAN_IN
    first_pixel = (p * STEP * WIDTH + q * STEP) * COUNT
    first_neuron = (p * BLOCK_H * OUT_W + q * BLOCK_W) * COUNT
    x += first_pixel
    x2 += first_pixel
    delta += first_neuron
    delta2 += first_neuron
    r = tile * RT + tl.arange(0, RT)
    fits = r < ROWS
    if SCALED:
        s = tl.load(scale + block * ROWS + r, mask=fits, other=0.0)
        pull = s * s * tl.load(radial + block * ROWS + r, mask=fits, other=0.0)
    if STOCHASTIC:
        row_bits = _hash((block * ROWS + r).to(tl.uint32) ^ row_seed.to(tl.uint32))
    norm = tl.zeros((RT,), tl.float32)
    DTYPE: tl.constexpr = x.dtype.element_ty
    KEEP: tl.constexpr = COUNT <= NA + NB  # deltas of all images fit: they are read once per program
    na = tl.arange(0, NA)
    if KEEP:
        d_a = _delta(delta, delta, r, na, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, False, DTYPE)
        if NB > 0:
            nb = NA + tl.arange(0, NB)
            d_b = _delta(delta, delta, r, nb, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, False, DTYPE)
        if TWO:
            e_a = _delta(delta2, delta2, r, na, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, False, DTYPE)
            if NB > 0:
                e_b = _delta(delta2, delta2, r, nb, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, False, DTYPE)

    EACH: tl.constexpr = (FAN_IN + SPLIT * BK - 1) // (SPLIT * BK) * BK
    last = tl.minimum((part + 1) * EACH, FAN_IN)
    for start in tl.range(part * EACH, last, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        inside = k < FAN_IN
        pixel = _pixels(k, HEIGHT, WIDTH, FIELD, COUNT)
        at = r[:, None] * FAN_IN + k[None, :]
        mask = fits[:, None] & inside[None, :]
        if UPDATE:
            if COPIED:
                old = tiles_w.load([block * ROWS + tile * RT, start]).to(tl.float32)
                speed = tiles_m.load([block * ROWS + tile * RT, start]).to(tl.float32)
            else:
                old = tl.load(w + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                speed = tl.load(m + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        g = tl.zeros((RT, BK), tl.float32)
        if KEEP:
            g = _times(g, d_a, x, na, pixel, inside, COUNT, PRECISION)
            if NB > 0:
                g = _times(g, d_b, x, nb, pixel, inside, COUNT, PRECISION)
            if TWO:
                g = _times(g, e_a, x2, na, pixel, inside, COUNT, PRECISION)
                if NB > 0:
                    g = _times(g, e_b, x2, nb, pixel, inside, COUNT, PRECISION)
        else:
            for first in tl.static_range(0, COUNT, NA):
                n = first + na
                d = _delta(delta, delta, r, n, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, False, DTYPE)
                g = _times(g, d, x, n, pixel, inside, COUNT, PRECISION)
                if TWO:
                    d = _delta(delta2, delta2, r, n, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT, ROWS, False, DTYPE)
                    g = _times(g, d, x2, n, pixel, inside, COUNT, PRECISION)
        if UPDATE:
            if SCALED:
                g = g * s[:, None] - pull[:, None] * old
            speed = decay * speed + g
            new = old - rate * speed
            if STOCHASTIC:
                column_bits = _hash(k.to(tl.uint32) ^ column_seed.to(tl.uint32))
                bits = (row_bits[:, None] ^ column_bits[None, :]) * MIX
                bits = bits ^ (bits >> 15)
                new = _round(new, bits >> 16)
                speed = _round(speed, bits & 0xFFFF)
            norm += tl.sum(tl.where(mask, new * new, 0.0), axis=1)
            if COPIED:
                tiles_m.store([block * ROWS + tile * RT, start], speed.to(m.dtype.element_ty))
            else:
                tl.store(m + at, speed.to(m.dtype.element_ty), mask=mask)
        else:
            new = g
        if COPIED:
            tiles_w.store([block * ROWS + tile * RT, start], new.to(w.dtype.element_ty))
        else:
            tl.store(w + at, new.to(w.dtype.element_ty), mask=mask)
    if UPDATE:
        BLOCKS: tl.constexpr = OUT_H // BLOCK_H * ACROSS
        tl.store(squares + (part * BLOCKS + block) * ROWS + r, norm, mask=fits)
