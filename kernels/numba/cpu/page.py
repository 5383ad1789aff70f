"""How the CPU kernels of packed attention read a page: offsets of its parts, scales, positions.

`layouts` (rungs, LAYOUT_FIELDS) holds the offsets of the parts of a page, for each rung. A page table has
rung, count, index and base, (num_bh, entries), and num_pages, (num_bh,); num_bh = batch * num_heads_kv.
Kernels take its entries in quads, four of one rung.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .fragments import QUAD
from .simd import float32x8, helper
from .softmax import floats, integers, serial

PAGE = 16
SLOTS = QUAD * PAGE
LAYOUT_FIELDS = 8
POOL, RECORD, V_CODES, K_SCALES, V_SCALES, POSITIONS, K_FUNCTION, V_FUNCTION = range(LAYOUT_FIELDS)
"""Columns of `layouts`: an address, bytes of a record, byte offsets in it (codes of K begin it; K_SCALES
and V_SCALES are -1 at width 16, which has none), and the addresses of two functions: of `fragments`, or
for `packed_rows` of `expand`."""

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_I8X8, _I32X8, _F32X8 = ir.VectorType(_I8, 8), ir.VectorType(_I32, 8), ir.VectorType(ir.FloatType(), 8)


@intrinsic
def double_scales(typing_context, address):
    """Twice the scales of eight tokens: a byte is a float16 without sign and low 7 mantissa bits."""

    def generate(context, builder, signature, arguments):
        codes = builder.load(builder.inttoptr(arguments[0], _I8X8.as_pointer()))
        codes.align = 1
        bits = builder.shl(builder.zext(codes, _I32X8), integers(20))
        finite = builder.fmul(builder.bitcast(bits, _F32X8), floats(2.0**113))
        special = builder.bitcast(builder.or_(bits, integers(0x7F800000)), _F32X8)
        return builder.select(builder.icmp_unsigned("<", bits, integers(0xF8 << 20)), finite, special)

    return float32x8(types.int64), generate


@intrinsic
def load_word(typing_context, address):
    """Return the 32 bits at an address."""

    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], _I32.as_pointer()))

    return types.uint32(types.int64), generate


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at an address; it need not be readable."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _I8.as_pointer())
        signature = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
        builder.call(function, [pointer, _I32(0), _I32(2), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@serial
def check_table(rung, count, index, num_pages, layouts, last):
    """Return whether quads are of one rung and every used entry with tokens names a page that exists.

    last (rungs,): the byte of a pool at which its last page may begin; below 0 if it has none.
    """
    for bh in range(rung.shape[0]):
        if num_pages[bh] < 0 or num_pages[bh] > rung.shape[1] or num_pages[bh] % QUAD:
            return False
        for quad in range(0, num_pages[bh], QUAD):
            own = rung[bh, quad]
            if own >= last.size:
                return False
            for p in range(quad, quad + QUAD):
                if rung[bh, p] != own or count[bh, p] > PAGE:
                    return False
                if count[bh, p] and np.int64(index[bh, p]) * layouts[own, RECORD] > last[own]:
                    return False
    return True


@helper
def position_of(positions, base, slot):
    """Return the position of a slot of a page: `positions` is the address of its offsets."""
    word = load_word(positions + 4 * (slot // 2))
    return (np.int64(base) << 16) + (np.int64(word) >> (16 * (slot % 2)) & 0xFFFF)


@helper
def newest_of(positions, base, count):
    """Return the last position in a page; -1 if it holds no token."""
    newest = np.int64(-1)
    for slot in range(count):
        newest = max(newest, position_of(positions, base, slot))
    return newest


@helper
def find_records(table, layout, quad, records, values, used):
    """Return how many tokens a quad holds; `used` says how many each page.

    records, values: the addresses of its pages, where the codes of K begin, and of their codes of V; 0 for a
    page without a token.
    """
    _, count, index, _ = table
    tokens = 0
    for page in range(QUAD):
        p = QUAD * quad + page
        used[page] = count[p]
        records[page] = layout[POOL] + np.int64(index[p]) * layout[RECORD] if used[page] else 0
        values[page] = records[page] + layout[V_CODES] if used[page] else 0
        tokens += used[page]
    return tokens


@helper
def leave_out_before(oldest, layout, base, records, values, used):
    """Leave out the pages of a quad that have no token at `oldest` or later; how many tokens are left."""
    tokens = 0
    for page in range(QUAD):
        if newest_of(records[page] + layout[POSITIONS], base[page], used[page]) < oldest:
            records[page] = values[page] = used[page] = 0
        tokens += used[page]
    return tokens
