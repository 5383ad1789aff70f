"""The two matrix products of attention over one packed page, as vector code: scores = K q and out += V^T p.

A page keeps its codes in the order in which the lanes of a tensor core hold them
(docs/performance/page_format.md): 32-bit words of 32 neighbouring lanes, each with two 16-bit halves full
of codes. On a CPU eight neighbouring lanes are one vector. Such a vector holds 2 tile rows (g) x 4 pairs of
tile columns (u), so every field of it meets the same eight numbers: q at 4 channels, or p at 4 tokens,
written twice. These are laid out beforehand as *patterns*

    pattern[channel tile of K, token block of V][column half][half of the word][query row][4 lanes]

and one vector of codes is expanded once (shift, mask, convert, centre) for all query rows:

    accumulator[row half][query row] += codes * pattern                        2 * rows registers, rows <= 4

The upper half of a word is left where it is: its numbers are 2^16 times too large, and its patterns 2^-16
times as large. A group of four neighbouring lanes holds parts of one sum: for K they are added at the end
of a token block, for V at the end of all pages (`packed`). Codes are centred before they are
multiplied, so that float32 loses nothing.

Functions are made for a kind of codes ("2", "3", "4", "8", "float16", "bfloat16", "float32") and a number
of query rows, compiled at first use and called by address, so a call compiles what it needs. Addresses are
not checked.
"""

from functools import cache

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import float32x8

LANES = 8
VECTOR_BYTES, PATTERN_BYTES = 4 * LANES, 16
_I16, _I32, _I64, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
_I16X8, _I32X8 = ir.VectorType(_I16, LANES), ir.VectorType(_I32, LANES)
_F16X8, _F32X8, _F32X4 = ir.VectorType(_F16, LANES), ir.VectorType(_F32, LANES), ir.VectorType(_F32, 4)

WORDS_PER_GROUP = {
    "2": (1, 2),
    "3": (3, 4),
    "4": (1, 1),
    "8": (2, 1),
    "float16": (4, 1),
    "bfloat16": (4, 1),
    "float32": (8, 1),
}
"""Words that a group of tiles shares, and tiles of that group."""


def _every_lane(value):
    return ir.Constant(_I32X8, [value] * LANES)


def address_of(builder, base, *terms):
    """base + the sum of (index, bytes) terms."""
    for index, size in terms:
        base = builder.add(base, builder.mul(index, _I64(size)))
    return base


def load_at(builder, address, vector_type):
    value = builder.load(builder.inttoptr(address, vector_type.as_pointer()))
    value.align = 4
    return value


def load_twice(builder, address):
    four = load_at(builder, address, _F32X4)
    return builder.shuffle_vector(four, four, ir.Constant(_I32X8, [0, 1, 2, 3, 0, 1, 2, 3]))


def store_at(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def multiply_add(builder, a, b, c):
    """a * b + c of vectors of eight floats, in one instruction where there is one."""
    signature = ir.FunctionType(_F32X8, [_F32X8] * 3)
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fmuladd.v{LANES}f32")
    return builder.call(function, [a, b, c])


class Tile:
    """Eight lanes of a 16 x 16 tile, the `place`-th of its group, as float vectors."""

    def __init__(self, builder, kind, words, group, place):
        self.builder, self.kind = builder, kind
        self.coded = kind in ("2", "3", "4", "8")
        count, _ = WORDS_PER_GROUP[kind]
        base = address_of(builder, words, (group, count * 32 * 4))
        load = lambda word: load_at(builder, builder.add(base, _I64(word * 32 * 4)), _I32X8)  # noqa: E731
        if kind == "float32":
            self.pairs = [(load(2 * r), load(2 * r + 1)) for r in range(4)]
        elif kind in ("float16", "bfloat16"):
            self.pairs = [load(r) for r in range(4)]
        elif kind == "8":
            self.pairs = [self._shifted(load(r // 2), 8 * (r % 2)) for r in range(4)]
        elif kind == "3":
            self.pairs = [self._three_bits(load, 4 * place + r) for r in range(4)]
        else:
            self.pairs = [self._shifted(load(0), int(kind) * (4 * place + r)) for r in range(4)]

    def _shifted(self, word, bits):
        return self.builder.lshr(word, _every_lane(bits)) if bits else word

    def _three_bits(self, load, pair):
        if pair < 15:
            return self._shifted(load(pair // 5), 1 + 3 * (pair % 5))
        low, mid, high = (self.builder.and_(load(j), _every_lane(0x00010001)) for j in range(3))
        upper = self.builder.or_(
            self.builder.shl(mid, _every_lane(1)), self.builder.shl(high, _every_lane(2))
        )
        return self.builder.or_(low, upper)

    def field(self, register, half):
        """Eight elements as floats: centred codes, times 2^16 in the upper half, or raw numbers."""
        builder, pair = self.builder, self.pairs[register]
        if self.kind == "float32":
            return builder.bitcast(pair[half], _F32X8)
        if self.kind == "bfloat16":
            bits = builder.and_(pair, _every_lane(0xFFFF0000)) if half else builder.shl(pair, _every_lane(16))
            return builder.bitcast(bits, _F32X8)
        if self.kind == "float16":
            bits = builder.trunc(builder.lshr(pair, _every_lane(16)) if half else pair, _I16X8)
            return builder.fpext(builder.bitcast(bits, _F16X8), _F32X8)
        top = 2 ** int(self.kind) - 1
        code = builder.sitofp(builder.and_(pair, _every_lane(top << 16 * half)), _F32X8)
        return builder.fsub(code, ir.Constant(_F32X8, [top / 2 * 2.0 ** (16 * half)] * LANES))


def _accumulate(builder, tile, patterns, rows, sums):
    """sums[row half][query row] += the tile's elements times the patterns of its columns."""
    for column_half in range(2):
        for half in range(2):
            fields = [tile.field(2 * column_half + row_half, half) for row_half in range(2)]
            for row in range(rows):
                place = ((column_half * 2 + half) * rows + row) * PATTERN_BYTES
                pattern = load_twice(builder, builder.add(patterns, _I64(place)))
                for row_half in range(2):
                    target = sums[row_half][row]
                    builder.store(
                        multiply_add(builder, fields[row_half], pattern, builder.load(target)), target
                    )


def _add_quads(builder, quads):
    """Sums of four neighbouring lanes of four vectors: [a, b, c, d of lanes 0-3, a, b, c, d of lanes 4-7]."""

    def add_pairs(x, y):
        even, odd = (
            builder.shuffle_vector(x, y, ir.Constant(_I32X8, [k + i for k in (0, 2, 8, 10, 4, 6, 12, 14)]))
            for i in range(2)
        )
        return builder.fadd(even, odd)

    a, b, c, d = quads
    return add_pairs(add_pairs(a, b), add_pairs(c, d))


def _store_scores(builder, sums, rows, scores, lane_vector, block):
    """Store the scores of 2 g x 2 row halves: slots 8 g + 2 block + row half of scores[row]."""
    zero = ir.Constant(_F32X8, [0.0] * LANES)
    for row in range(0, rows, 2):
        quads = [
            builder.load(sums[half][r]) if r < rows else zero for r in (row, row + 1) for half in range(2)
        ]
        total = _add_quads(builder, quads)
        for i in range(4):
            if row + i % 2 < rows:
                pair = builder.shuffle_vector(
                    total, total, ir.Constant(ir.VectorType(_I32, 2), [2 * i, 2 * i + 1])
                )
                start = builder.add(scores, _I64(4 * (64 * (row + i % 2) + 8 * (i // 2))))
                store_at(builder, pair, address_of(builder, start, (lane_vector, 64), (block, 8)))


def _sums(builder, rows):
    return [[cgutils.alloca_once(builder, _F32X8) for _ in range(rows)] for _ in range(2)]


@intrinsic(prefer_literal=True)
def _key_product(typing_context, words, patterns, scores, tiles, kind, rows):
    """scores[row][slot] = sum over channels of element * q, for all 64 slots; tiles = head_dim / 16."""
    kind_name, row_count = kind.literal_value, rows.literal_value

    def generate(context, builder, signature, arguments):
        words, patterns, scores, tiles = arguments[:4]
        group_tiles = WORDS_PER_GROUP[kind_name][1]
        sums = _sums(builder, row_count)
        with cgutils.for_range(builder, _I64(4)) as block, cgutils.for_range(builder, _I64(4)) as lane_vector:
            lane_words = address_of(builder, words, (lane_vector.index, VECTOR_BYTES))
            for target in (*sums[0], *sums[1]):
                builder.store(ir.Constant(_F32X8, [0.0] * LANES), target)
            with cgutils.for_range(builder, tiles) as channel:
                tile = builder.add(builder.mul(block.index, tiles), channel.index)
                group, place = builder.udiv(tile, _I64(group_tiles)), builder.urem(tile, _I64(group_tiles))
                columns = address_of(builder, patterns, (channel.index, 4 * row_count * PATTERN_BYTES))
                done = builder.append_basic_block("tile.done")
                choose = builder.switch(place, done)
                for i in range(group_tiles):
                    case = builder.append_basic_block(f"tile.{i}")
                    choose.add_case(_I64(i), case)
                    builder.position_at_end(case)
                    _accumulate(
                        builder, Tile(builder, kind_name, lane_words, group, i), columns, row_count, sums
                    )
                    builder.branch(done)
                builder.position_at_end(done)
            _store_scores(builder, sums, row_count, scores, lane_vector.index, block.index)
        return context.get_dummy_value()

    return types.void(words, patterns, scores, tiles, kind, rows), generate


@intrinsic(prefer_literal=True)
def _value_product(typing_context, words, patterns, out, tiles, kind, rows):
    """out[channel tile][lane vector][row half][query row][8 lanes] += elements * p, over all 64 slots."""
    kind_name, row_count = kind.literal_value, rows.literal_value

    def generate(context, builder, signature, arguments):
        words, patterns, out, tiles = arguments[:4]
        group_tiles = WORDS_PER_GROUP[kind_name][1]
        sums = _sums(builder, row_count)
        with cgutils.for_range(builder, tiles) as channel, cgutils.for_range(builder, _I64(4)) as lane_vector:
            lane_words = address_of(builder, words, (lane_vector.index, VECTOR_BYTES))
            first_group = builder.mul(channel.index, _I64(4 // group_tiles))
            vectors = builder.add(builder.mul(channel.index, _I64(4)), lane_vector.index)
            totals = address_of(builder, out, (vectors, 2 * row_count * VECTOR_BYTES))
            places = [builder.add(totals, _I64(i * VECTOR_BYTES)) for i in range(2 * row_count)]
            for place, target in zip(places, sums[0] + sums[1], strict=True):
                builder.store(load_at(builder, place, _F32X8), target)
            for block in range(4):
                group = builder.add(first_group, _I64(block // group_tiles))
                tile = Tile(builder, kind_name, lane_words, group, block % group_tiles)
                columns = builder.add(patterns, _I64(block * 4 * row_count * PATTERN_BYTES))
                _accumulate(builder, tile, columns, row_count, sums)
            for place, target in zip(places, sums[0] + sums[1], strict=True):
                store_at(builder, builder.load(target), place)
        return context.get_dummy_value()

    return types.void(words, patterns, out, tiles, kind, rows), generate


@intrinsic
def add_lanes(typing_context, totals, start, stride):
    """Eight channels (a row half of a channel tile) from the 4 lane vectors at totals[start + i * stride]."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        quads = []
        for i in range(4):
            place = builder.add(arguments[1], builder.mul(arguments[2], _I64(i)))
            pointer = builder.gep(data, [place])
            quads.append(load_at(builder, builder.ptrtoint(pointer, _I64), _F32X8))
        total = _add_quads(builder, quads)
        return builder.shuffle_vector(total, total, ir.Constant(_I32X8, [0, 4, 1, 5, 2, 6, 3, 7]))

    return float32x8(totals, types.intp, types.intp), generate


_PRODUCT = types.void(types.int64, types.int64, types.int64, types.int64)


@cache
def key_product(kind, rows):
    """Return the compiled C function (words, patterns, scores, tiles) of a kind and 1 to 4 query rows."""

    @cfunc(_PRODUCT, cache=True)
    def packed_key_product(words, patterns, scores, tiles):
        _key_product(words, patterns, scores, tiles, kind, rows)

    return packed_key_product


@cache
def value_product(kind, rows):
    """Return the compiled C function (words, patterns, out, tiles) of a kind and 1 to 4 query rows."""

    @cfunc(_PRODUCT, cache=True)
    def packed_value_product(words, patterns, out, tiles):
        _value_product(words, patterns, out, tiles, kind, rows)

    return packed_value_product


@intrinsic
def call_product(typing_context, function, words, patterns, result, tiles):
    """Call a product of a page by the address of its compiled function."""

    def generate(context, builder, signature, arguments):
        pointer = ir.FunctionType(ir.VoidType(), [_I64] * 4).as_pointer()
        builder.call(builder.inttoptr(arguments[0], pointer), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), generate
