"""The two matrix products of attention over four packed pages, as vector code: scores = K q, out += V^T p.

A page keeps its codes in the order in which the lanes of a tensor core hold them
(docs/performance/page_format.md): 32-bit words of 32 neighbouring lanes, each with two 16-bit halves full
of codes. On a CPU eight neighbouring lanes are one vector. Such a vector holds 2 tile rows (g) x 4 pairs of
tile columns (u), so every field of it meets the same eight numbers: q at 4 channels, or p at 4 tokens,
written twice. These are laid out beforehand as *patterns*

    pattern[channel tile of K, page of V][column half][half of the word][query row][4 lanes]

and one vector of codes is expanded once (shift, mask, convert, centre) for all query rows:

    accumulator[row half][query row] += codes * pattern                        2 * rows registers, rows <= 4

The upper half of a word is left where it is: its numbers are 2^16 times too large, and its patterns 2^-16
times as large. A group of four neighbouring lanes holds parts of one sum: for K they are added at the end
of a page, for V at the end of all pages (`packed`). Codes are centred before they are multiplied, so that
float32 loses nothing.

Functions are made for a kind of codes ("2", "3", "4", "8", "float16", "bfloat16", "float32", and of keys in
blocks a profile such as "8420", where codes are multiplied by the factor of their width) and a number of
query rows, compiled at first use and called by address, so a call compiles what it needs. They take the
addresses of the codes of four pages; 0 stands for a page without a token to attend. Addresses are not
checked.
"""

from functools import cache
from itertools import groupby

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import float32x8

LANES = 8
VECTOR_BYTES, PATTERN_BYTES, WORD_BYTES = 4 * LANES, 16, 128
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

FACTORS = {"2": 32, "4": 12, "8": 1}
"""What codes of keys in blocks are multiplied by: half a cell of each width, in scales."""

QUAD = 4
"""Pages that a product takes at once."""


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
    """Eight lanes of a 16 x 16 tile as float vectors.

    It is the `in_group`-th of a group of tiles, whose words begin at `words`. At 3 bits a tile of no whole
    group has a word of its own, laid out as at 4 bits: in_group is None. Codes are multiplied by `factor`,
    a constant.
    """

    def __init__(self, builder, kind, words, in_group, factor=1):
        self.builder, self.kind, self.factor = builder, kind, factor
        self.coded = kind in ("2", "3", "4", "8")
        load = lambda word: load_at(builder, builder.add(words, _I64(word * WORD_BYTES)), _I32X8)  # noqa: E731
        if kind == "float32":
            self.registers = [(load(2 * r), load(2 * r + 1)) for r in range(4)]
        elif kind in ("float16", "bfloat16"):
            self.registers = [load(r) for r in range(4)]
        elif kind == "8":
            self.registers = [self._shifted(load(r // 2), 8 * (r % 2)) for r in range(4)]
        elif kind == "4" or in_group is None:
            self.registers = [self._shifted(load(0), 4 * r) for r in range(4)]
        elif kind == "3":
            self.registers = [self._three_bits(load, 4 * in_group + r) for r in range(4)]
        else:
            self.registers = [
                self._shifted(load(0), 8 * (r // 2) + 4 * in_group + 2 * (r % 2)) for r in range(4)
            ]

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
        builder, pair = self.builder, self.registers[register]
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
        centred = builder.fsub(code, ir.Constant(_F32X8, [top / 2 * 2.0 ** (16 * half)] * LANES))
        if self.factor == 1:
            return centred
        return builder.fmul(centred, ir.Constant(_F32X8, [float(self.factor)] * LANES))


def is_profile(kind):
    """Whether keys are kept in four blocks: a kind such as "8420", their widths."""
    return kind.isdigit() and len(kind) == 4


def for_each_tile(builder, kind, tiles, emit, emit_empty=None):
    """Loop over the tiles of a side: emit(number, word, tile), the index of its first word and a maker of it.

    The maker takes the address of the tile's words and returns a `Tile`. Of a profile, emit_empty(number) is
    called for tiles without codes, if it is given.
    """
    if not is_profile(kind):
        _for_each_of_run(builder, kind, tiles, _I64(0), _I64(0), 1, emit)
        return
    each, first, first_word = builder.udiv(tiles, _I64(4)), _I64(0), _I64(0)
    for width, blocks in groupby(kind):
        run = builder.mul(each, _I64(len(list(blocks))))
        if width != "0":
            _for_each_of_run(builder, width, run, first, first_word, FACTORS[width], emit)
            words, together = WORDS_PER_GROUP[width]
            whole = builder.udiv(builder.add(run, _I64(together - 1)), _I64(together))
            first_word = builder.add(first_word, builder.mul(whole, _I64(words)))
        elif emit_empty:
            with cgutils.for_range(builder, run) as tile:
                emit_empty(builder.add(first, tile.index))
        first = builder.add(first, run)


def _for_each_of_run(builder, kind, tiles, first, first_word, factor, emit):
    """Loop over tiles of one kind, from a first one and its word on."""

    def emit_tile(number, word, in_group):
        def tile(words):
            return Tile(builder, kind, words, in_group, factor)

        emit(builder.add(first, number), builder.add(first_word, word), tile)

    words, together = WORDS_PER_GROUP[kind]
    groups = builder.udiv(tiles, _I64(together))
    with cgutils.for_range(builder, groups) as group:
        for in_group in range(together):
            number = builder.add(builder.mul(group.index, _I64(together)), _I64(in_group))
            emit_tile(number, builder.mul(group.index, _I64(words)), in_group)
    if together > 1:
        in_groups = builder.mul(groups, _I64(together))
        behind_groups = builder.mul(groups, _I64(words))
        with cgutils.for_range(builder, builder.sub(tiles, in_groups)) as rest:
            number, word = (builder.add(begin, rest.index) for begin in (in_groups, behind_groups))
            emit_tile(number, word, None if kind == "3" else 0)


def _accumulate(builder, tile, patterns, rows, sums):
    """sums[row half][query row] += the tile's elements times the patterns of its columns."""
    for column_half in range(2):
        for half in range(2):
            fields = [tile.field(2 * column_half + row_half, half) for row_half in range(2)]
            for row in range(rows):
                offset = ((column_half * 2 + half) * rows + row) * PATTERN_BYTES
                pattern = load_twice(builder, builder.add(patterns, _I64(offset)))
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


def _store_scores(builder, sums, rows, scores):
    """Store the scores of 2 tile rows x 2 row halves: four slots, one after the other, of each query row."""
    zero = ir.Constant(_F32X8, [0.0] * LANES)
    for row in range(0, rows, 2):
        quads = [
            builder.load(sums[half][r]) if r < rows else zero for r in (row, row + 1) for half in range(2)
        ]
        total = _add_quads(builder, quads)
        for i in range(min(2, rows - row)):
            order = ir.Constant(ir.VectorType(_I32, 4), [2 * i, 2 * i + 1, 2 * i + 4, 2 * i + 5])
            four = builder.shuffle_vector(total, total, order)
            store_at(builder, four, builder.add(scores, _I64(4 * 16 * QUAD * (row + i))))


def _sums(builder, rows):
    return [[cgutils.alloca_once(builder, _F32X8) for _ in range(rows)] for _ in range(2)]


def _page_at(builder, pages, page):
    """Return the address of the codes of a page of the quad, and whether there is one."""
    pointer = builder.inttoptr(address_of(builder, pages, (page, 8)), _I64.as_pointer())
    address = builder.load(pointer)
    return address, builder.icmp_unsigned("!=", address, _I64(0))


@intrinsic(prefer_literal=True)
def _key_product(typing_context, pages, patterns, scores, tiles, kind, rows):
    """scores[row][16 page + slot] = sum over channels of element * q; tiles = head_dim / 16."""
    kind_name, row_count = kind.literal_value, rows.literal_value

    def generate(context, builder, signature, arguments):
        pages, patterns, scores, tiles = arguments[:4]
        sums = _sums(builder, row_count)
        with cgutils.for_range(builder, _I64(QUAD)) as page:
            codes, there = _page_at(builder, pages, page.index)
            with builder.if_then(there), cgutils.for_range(builder, _I64(4)) as lane_vector:
                for target in (*sums[0], *sums[1]):
                    builder.store(ir.Constant(_F32X8, [0.0] * LANES), target)

                def add_tile(number, word, tile):
                    words = address_of(builder, codes, (word, WORD_BYTES), (lane_vector.index, VECTOR_BYTES))
                    columns = address_of(builder, patterns, (number, 4 * row_count * PATTERN_BYTES))
                    _accumulate(builder, tile(words), columns, row_count, sums)

                for_each_tile(builder, kind_name, tiles, add_tile)
                slots = address_of(builder, scores, (page.index, 64), (lane_vector.index, 16))
                _store_scores(builder, sums, row_count, slots)
        return context.get_dummy_value()

    return types.void(pages, patterns, scores, tiles, kind, rows), generate


@intrinsic(prefer_literal=True)
def _value_product(typing_context, pages, patterns, out, tiles, kind, rows):
    """out[channel tile][lane vector][row half][query row][8 lanes] += elements * p, over all slots."""
    kind_name, row_count = kind.literal_value, rows.literal_value

    def generate(context, builder, signature, arguments):
        pages, patterns, out, tiles = arguments[:4]
        sums = _sums(builder, row_count)

        def add_tile(number, word, tile):
            with cgutils.for_range(builder, _I64(4)) as lane_vector:
                vectors = builder.add(builder.mul(number, _I64(4)), lane_vector.index)
                totals = address_of(builder, out, (vectors, 2 * row_count * VECTOR_BYTES))
                targets = [builder.add(totals, _I64(i * VECTOR_BYTES)) for i in range(2 * row_count)]
                for at, target in zip(targets, sums[0] + sums[1], strict=True):
                    builder.store(load_at(builder, at, _F32X8), target)
                with cgutils.for_range(builder, _I64(QUAD)) as page:
                    codes, there = _page_at(builder, pages, page.index)
                    with builder.if_then(there):
                        words = address_of(
                            builder, codes, (word, WORD_BYTES), (lane_vector.index, VECTOR_BYTES)
                        )
                        columns = address_of(builder, patterns, (page.index, 4 * row_count * PATTERN_BYTES))
                        _accumulate(builder, tile(words), columns, row_count, sums)
                for at, target in zip(targets, sums[0] + sums[1], strict=True):
                    store_at(builder, builder.load(target), at)

        for_each_tile(builder, kind_name, tiles, add_tile)
        return context.get_dummy_value()

    return types.void(pages, patterns, out, tiles, kind, rows), generate


@intrinsic
def add_lanes(typing_context, totals, start, stride):
    """Eight channels (a row half of a channel tile) from the 4 lane vectors at totals[start + i * stride]."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        quads = []
        for i in range(4):
            offset = builder.add(arguments[1], builder.mul(arguments[2], _I64(i)))
            pointer = builder.gep(data, [offset])
            quads.append(load_at(builder, builder.ptrtoint(pointer, _I64), _F32X8))
        total = _add_quads(builder, quads)
        return builder.shuffle_vector(total, total, ir.Constant(_I32X8, [0, 4, 1, 5, 2, 6, 3, 7]))

    return float32x8(totals, types.intp, types.intp), generate


_PRODUCT = types.void(types.int64, types.int64, types.int64, types.int64)


@cache
def key_product(kind, rows):
    """Return the compiled C function (pages, patterns, scores, tiles) of a kind and 1 to 4 query rows."""

    @cfunc(_PRODUCT, cache=True)
    def packed_key_product(pages, patterns, scores, tiles):
        _key_product(pages, patterns, scores, tiles, kind, rows)

    return packed_key_product


@cache
def value_product(kind, rows):
    """Return the compiled C function (pages, patterns, out, tiles) of a kind and 1 to 4 query rows."""

    @cfunc(_PRODUCT, cache=True)
    def packed_value_product(pages, patterns, out, tiles):
        _value_product(pages, patterns, out, tiles, kind, rows)

    return packed_value_product


@intrinsic
def call_product(typing_context, function, pages, patterns, result, tiles):
    """Call a product by the address of its compiled function."""

    def generate(context, builder, signature, arguments):
        pointer = ir.FunctionType(ir.VoidType(), [_I64] * 4).as_pointer()
        builder.call(builder.inttoptr(arguments[0], pointer), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), generate
