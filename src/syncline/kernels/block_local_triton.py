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
NO_POLICY: tl.constexpr = tl.constexpr("")  # as a default of `_load`; Triton 3.6 refuses a plain string there


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
def _load(
    at: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ALL_ROWS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    POLICY: tl.constexpr = NO_POLICY,
) -> tl.tensor:
    """A tile of which `rows` and `columns` exist, the rest zero; without a mask where all of them do."""
    if ALL_ROWS and ALL_COLUMNS:
        return tl.load(at, eviction_policy=POLICY)
    elif ALL_ROWS:
        return tl.load(at, mask=columns[None, :], other=0.0, eviction_policy=POLICY)
    elif ALL_COLUMNS:
        return tl.load(at, mask=rows[:, None], other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(at, mask=rows[:, None] & columns[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def _add_or_store(at: tl.tensor, value: tl.tensor, mask: tl.tensor, ADD: tl.constexpr) -> None:
    if ADD:
        tl.atomic_add(at, value, mask=mask, sem="relaxed")
    else:
        tl.store(at, value.to(at.dtype.element_ty), mask=mask)


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
    """y = scale · W x. Grid: (blocks · split, row groups, image groups).

    Weights come by the copy engine (COPIED: `tiles_a` and `tiles_b` are descriptors) or by pointers. The copy engine may
    bring rows of the next block where the tile is larger than the block; they are not used.
    """
    block = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    first_row = tl.program_id(1) * (RA + RB)
    first_image = tl.program_id(2) * (NA + NB)
    p = block // ACROSS
    q = block % ACROSS
    x += (p * STEP * WIDTH + q * STEP) * COUNT

    ALL_ROWS: tl.constexpr = ROWS % (RA + RB) == 0
    ALL_COLUMNS: tl.constexpr = FAN_IN % BK == 0
    ALL_IMAGES: tl.constexpr = COUNT % (NA + NB) == 0
    w += block.to(tl.int64) * ROWS * FAN_IN
    ra = first_row + tl.arange(0, RA)
    rows_a = w + ra[:, None] * FAN_IN
    na = first_image + tl.arange(0, NA)
    sum_aa = tl.zeros((RA, NA), tl.float32)
    if NB > 0:
        nb = first_image + NA + tl.arange(0, NB)
        sum_ab = tl.zeros((RA, NB), tl.float32)
    if RB > 0:
        rb = first_row + RA + tl.arange(0, RB)
        rows_b = w + rb[:, None] * FAN_IN
        sum_ba = tl.zeros((RB, NA), tl.float32)
        if NB > 0:
            sum_bb = tl.zeros((RB, NB), tl.float32)

    EACH: tl.constexpr = (FAN_IN + SPLIT * BK - 1) // (SPLIT * BK) * BK
    last = tl.minimum((part + 1) * EACH, FAN_IN)
    for start in range(part * EACH, last, BK):
        k = start + tl.arange(0, BK)
        inside = k < FAN_IN
        pixel = _pixels(k, HEIGHT, WIDTH, FIELD, COUNT)
        if COPIED:
            wa = tiles_a.load([block * ROWS + first_row, start])
        else:
            wa = _load(rows_a + k[None, :], ra < ROWS, inside, ALL_ROWS, ALL_COLUMNS, "evict_first")
        xa = _load(x + pixel[:, None] + na[None, :], inside, na < COUNT, ALL_COLUMNS, ALL_IMAGES)
        sum_aa = _dot(wa, xa, sum_aa, PRECISION)
        if NB > 0:
            xb = _load(x + pixel[:, None] + nb[None, :], inside, nb < COUNT, ALL_COLUMNS, ALL_IMAGES)
            sum_ab = _dot(wa, xb, sum_ab, PRECISION)
        if RB > 0:
            if COPIED:
                wb = tiles_b.load([block * ROWS + first_row + RA, start])
            else:
                wb = _load(rows_b + k[None, :], rb < ROWS, inside, ALL_ROWS, ALL_COLUMNS, "evict_first")
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
def input_gradient_kernel(
    delta: tl.tensor,
    w: tl.tensor,
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
    RT: tl.constexpr,
    NA: tl.constexpr,
    NB: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """dx += Wᵀ δ. Grid: (columns of blocks · bands · chunks, image groups).

    A band is `step` rows of pixels. The blocks above one another that see it, and the part of their fields that
    lies in it, are summed in one program; only fields side by side meet in atomic additions.
    """
    # pixels of a field in one band and channel
    BAND: tl.constexpr = STEP * FIELD if STEP < FIELD else FIELD * FIELD
    REACH: tl.constexpr = (FIELD + STEP - 1) // STEP  # bands of a field
    DOWN: tl.constexpr = OUT_H // BLOCK_H
    SPAN: tl.constexpr = FAN_IN // (FIELD * FIELD) * BAND  # pixels of a field in one band, all channels
    CHUNKS: tl.constexpr = (SPAN + BK - 1) // BK
    TILES: tl.constexpr = (ROWS + RT - 1) // RT
    ALL_ROWS: tl.constexpr = ROWS % RT == 0
    ALL_IMAGES: tl.constexpr = COUNT % (NA + NB) == 0
    ALL_PIXELS: tl.constexpr = SPAN % BK == 0 and FIELD % STEP == 0
    chunk = tl.program_id(0) % CHUNKS
    band = tl.program_id(0) // CHUNKS % (DOWN + REACH - 1)
    q = tl.program_id(0) // CHUNKS // (DOWN + REACH - 1)
    first_image = tl.program_id(1) * (NA + NB)

    u = chunk * BK + tl.arange(0, BK)
    c = u // BAND
    v = u % BAND
    na = first_image + tl.arange(0, NA)
    g_a = tl.zeros((BK, NA), tl.float32)
    if NB > 0:
        nb = first_image + NA + tl.arange(0, NB)
        g_b = tl.zeros((BK, NB), tl.float32)

    low = tl.maximum(band - REACH + 1, 0)
    high = tl.minimum(band, DOWN - 1)
    for i in range((high - low + 1) * TILES):
        p = low + i // TILES
        r = i % TILES * RT + tl.arange(0, RT)
        above = (band - p) * STEP * FIELD  # pixels of the field in the bands above, per channel
        block = p * ACROSS + q
        k = c * FIELD * FIELD + above + v
        inside = (u < SPAN) & (above + v < FIELD * FIELD)
        at = w + block.to(tl.int64) * ROWS * FAN_IN + r[:, None] * FAN_IN + k[None, :]
        wt = tl.trans(_load(at, r < ROWS, inside, ALL_ROWS, ALL_PIXELS, "evict_first"))  # (columns, rows)
        here = delta + (p * BLOCK_H * OUT_W + q * BLOCK_W) * COUNT
        rows = here + _neurons(r, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT)
        d_a = _load(rows[:, None] + na[None, :], r < ROWS, na < COUNT, ALL_ROWS, ALL_IMAGES)
        g_a = _dot(wt, d_a, g_a, PRECISION)
        if NB > 0:
            d_b = _load(rows[:, None] + nb[None, :], r < ROWS, nb < COUNT, ALL_ROWS, ALL_IMAGES)
            g_b = _dot(wt, d_b, g_b, PRECISION)

    y = band * STEP + v // FIELD
    pixel = dx + ((c * HEIGHT + y) * WIDTH + q * STEP + v % FIELD) * COUNT
    inside = (u < SPAN) & (y < HEIGHT)
    tl.atomic_add(
        pixel[:, None] + na[None, :], g_a, mask=inside[:, None] & (na < COUNT)[None, :], sem="relaxed"
    )
    if NB > 0:
        mask = inside[:, None] & (nb < COUNT)[None, :]
        tl.atomic_add(pixel[:, None] + nb[None, :], g_b, mask=mask, sem="relaxed")


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
def _finish(
    g: tl.tensor,
    w: tl.tensor,
    m: tl.tensor,
    tiles_w: tl.tensor,
    tiles_m: tl.tensor,
    scale: tl.tensor,
    radial: tl.tensor,
    rate: tl.tensor,
    decay: tl.tensor,
    row_seed: tl.tensor,
    column_seed: tl.tensor,
    block: tl.tensor,
    first: tl.tensor,
    start: tl.tensor,
    ROWS: tl.constexpr,
    FAN_IN: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    UPDATE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COPIED: tl.constexpr,
) -> tl.tensor:
    """What becomes of a tile g of the gradient: written out, or a step of momentum. Returns the rows' new squares."""
    RT: tl.constexpr = g.shape[0]
    BK: tl.constexpr = g.shape[1]
    r = first + tl.arange(0, RT)
    k = start + tl.arange(0, BK)
    fits = r < ROWS
    row = block * ROWS + first
    at = block.to(tl.int64) * ROWS * FAN_IN + r[:, None] * FAN_IN + k[None, :]
    mask = fits[:, None] & (k < FAN_IN)[None, :]
    new = g
    if UPDATE:
        if COPIED >= 1:
            old = tiles_w.load([row, start]).to(tl.float32)
            speed = tiles_m.load([row, start]).to(tl.float32)
        else:
            old = _load(w + at, fits, k < FAN_IN, ALL_ROWS, ALL_COLUMNS, "evict_first").to(tl.float32)
            speed = _load(m + at, fits, k < FAN_IN, ALL_ROWS, ALL_COLUMNS, "evict_first").to(tl.float32)
        if SCALED:
            s = tl.load(scale + block * ROWS + r, mask=fits, other=0.0)
            pull = s * s * tl.load(radial + block * ROWS + r, mask=fits, other=0.0)
            g = g * s[:, None] - pull[:, None] * old
        speed = decay * speed + g
        new = old - rate * speed
        if STOCHASTIC:
            row_bits = _hash((block * ROWS + r).to(tl.uint32) ^ row_seed.to(tl.uint32))
            column_bits = _hash(k.to(tl.uint32) ^ column_seed.to(tl.uint32))
            bits = (row_bits[:, None] ^ column_bits[None, :]) * MIX
            new = _round(new, bits >> 16)
            speed = _round(speed, bits & 0xFFFF)
        if COPIED >= 2:
            tiles_m.store([row, start], speed.to(m.dtype.element_ty))
        else:
            tl.store(m + at, speed.to(m.dtype.element_ty), mask=mask)
    if COPIED >= 2:
        tiles_w.store([row, start], new.to(w.dtype.element_ty))
    else:
        tl.store(w + at, new.to(w.dtype.element_ty), mask=mask)
    return tl.sum(new * new, axis=1)


@triton.jit(do_not_specialize=["rate", "decay", "row_seed", "column_seed"])
def weight_gradient_kernel(
    delta: tl.tensor,
    x: tl.tensor,
    delta2: tl.tensor,
    x2: tl.tensor,
    w: tl.tensor,
    m: tl.tensor,
    w_a: tl.tensor,
    w_b: tl.tensor,
    m_a: tl.tensor,
    m_b: tl.tensor,
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
    RA: tl.constexpr,
    RB: tl.constexpr,
    NA: tl.constexpr,
    NB: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """δ xᵀ, written to `w` or turned into a step of momentum on `w` and `m`.

    Grid: (row groups · blocks · split). `squares` is (split, B, R): the sums of the new weights' squares.
    The deltas stay in the program where NA + NB images are all there are; else they are read again and again.
    """
    GROUPS: tl.constexpr = (ROWS + RA + RB - 1) // (RA + RB)
    first = tl.program_id(0) % GROUPS * (RA + RB)
    block = tl.program_id(0) // GROUPS // SPLIT
    part = tl.program_id(0) // GROUPS % SPLIT
    p = block // ACROSS
    q = block % ACROSS
    first_pixel = (p * STEP * WIDTH + q * STEP) * COUNT
    first_neuron = (p * BLOCK_H * OUT_W + q * BLOCK_W) * COUNT
    x += first_pixel
    x2 += first_pixel
    delta += first_neuron
    delta2 += first_neuron
    KEEP: tl.constexpr = COUNT <= NA + NB
    ALL_ROWS: tl.constexpr = ROWS % (RA + RB) == 0
    ALL_IMAGES: tl.constexpr = COUNT == NA + NB or (COUNT > NA + NB and COUNT % NA == 0)
    ALL_COLUMNS: tl.constexpr = FAN_IN % BK == 0
    ra = first + tl.arange(0, RA)
    fits_a = ra < ROWS
    at_a = _neurons(ra, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT)[:, None]
    na = tl.arange(0, NA)
    real_a = na < COUNT
    norm_a = tl.zeros((RA,), tl.float32)
    if RB > 0:
        rb = first + RA + tl.arange(0, RB)
        fits_b = rb < ROWS
        at_b = _neurons(rb, BLOCK_W, DEPTH, OUT_H, OUT_W, COUNT)[:, None]
        norm_b = tl.zeros((RB,), tl.float32)
    if NB > 0:
        nb = NA + tl.arange(0, NB)
        real_b = nb < COUNT
    if KEEP:
        d_aa = _load(delta + at_a + na[None, :], fits_a, real_a, ALL_ROWS, ALL_IMAGES)
        if NB > 0:
            d_ab = _load(delta + at_a + nb[None, :], fits_a, real_b, ALL_ROWS, ALL_IMAGES)
        if TWO:
            e_aa = _load(delta2 + at_a + na[None, :], fits_a, real_a, ALL_ROWS, ALL_IMAGES)
            if NB > 0:
                e_ab = _load(delta2 + at_a + nb[None, :], fits_a, real_b, ALL_ROWS, ALL_IMAGES)
        if RB > 0:
            d_ba = _load(delta + at_b + na[None, :], fits_b, real_a, ALL_ROWS, ALL_IMAGES)
            if NB > 0:
                d_bb = _load(delta + at_b + nb[None, :], fits_b, real_b, ALL_ROWS, ALL_IMAGES)
            if TWO:
                e_ba = _load(delta2 + at_b + na[None, :], fits_b, real_a, ALL_ROWS, ALL_IMAGES)
                if NB > 0:
                    e_bb = _load(delta2 + at_b + nb[None, :], fits_b, real_b, ALL_ROWS, ALL_IMAGES)

    EACH: tl.constexpr = (FAN_IN + SPLIT * BK - 1) // (SPLIT * BK) * BK
    last = tl.minimum((part + 1) * EACH, FAN_IN)
    for start in tl.range(part * EACH, last, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        inside = k < FAN_IN
        pixel = _pixels(k, HEIGHT, WIDTH, FIELD, COUNT)[:, None]
        g_a = tl.zeros((RA, BK), tl.float32)
        if RB > 0:
            g_b = tl.zeros((RB, BK), tl.float32)
        if KEEP:
            seen = tl.trans(_load(x + pixel + na[None, :], inside, real_a, ALL_COLUMNS, ALL_IMAGES))
            g_a = _dot(d_aa, seen, g_a, PRECISION)
            if RB > 0:
                g_b = _dot(d_ba, seen, g_b, PRECISION)
            if NB > 0:
                seen = tl.trans(_load(x + pixel + nb[None, :], inside, real_b, ALL_COLUMNS, ALL_IMAGES))
                g_a = _dot(d_ab, seen, g_a, PRECISION)
                if RB > 0:
                    g_b = _dot(d_bb, seen, g_b, PRECISION)
            if TWO:
                seen = tl.trans(_load(x2 + pixel + na[None, :], inside, real_a, ALL_COLUMNS, ALL_IMAGES))
                g_a = _dot(e_aa, seen, g_a, PRECISION)
                if RB > 0:
                    g_b = _dot(e_ba, seen, g_b, PRECISION)
                if NB > 0:
                    seen = tl.trans(_load(x2 + pixel + nb[None, :], inside, real_b, ALL_COLUMNS, ALL_IMAGES))
                    g_a = _dot(e_ab, seen, g_a, PRECISION)
                    if RB > 0:
                        g_b = _dot(e_bb, seen, g_b, PRECISION)
        else:
            for image in tl.static_range(0, COUNT, NA):
                n = image + na
                real = n < COUNT
                seen = tl.trans(_load(x + pixel + n[None, :], inside, real, ALL_COLUMNS, ALL_IMAGES))
                d = _load(delta + at_a + n[None, :], fits_a, real, ALL_ROWS, ALL_IMAGES)
                g_a = _dot(d, seen, g_a, PRECISION)
                if RB > 0:
                    d = _load(delta + at_b + n[None, :], fits_b, real, ALL_ROWS, ALL_IMAGES)
                    g_b = _dot(d, seen, g_b, PRECISION)
                if TWO:
                    seen = tl.trans(_load(x2 + pixel + n[None, :], inside, real, ALL_COLUMNS, ALL_IMAGES))
                    d = _load(delta2 + at_a + n[None, :], fits_a, real, ALL_ROWS, ALL_IMAGES)
                    g_a = _dot(d, seen, g_a, PRECISION)
                    if RB > 0:
                        d = _load(delta2 + at_b + n[None, :], fits_b, real, ALL_ROWS, ALL_IMAGES)
                        g_b = _dot(d, seen, g_b, PRECISION)
        norm_a += _finish(
            g_a, w, m, w_a, m_a, scale, radial, rate, decay, row_seed, column_seed, block, first, start,
            ROWS, FAN_IN, ALL_ROWS, ALL_COLUMNS, SCALED, UPDATE, STOCHASTIC, COPIED,
        )  # fmt: skip
        if RB > 0:
            norm_b += _finish(
                g_b, w, m, w_b, m_b, scale, radial, rate, decay, row_seed, column_seed, block, first + RA, start,
                ROWS, FAN_IN, ALL_ROWS, ALL_COLUMNS, SCALED, UPDATE, STOCHASTIC, COPIED,
            )  # fmt: skip
    if UPDATE:
        to = squares + (part * (OUT_H // BLOCK_H * ACROSS) + block) * ROWS
        tl.store(to + ra, norm_a, mask=fits_a)
        if RB > 0:
            tl.store(to + rb, norm_b, mask=fits_b)
