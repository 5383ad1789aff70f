"""Convert float16, bfloat16 and float32 elements to and from float32 buffers of whole vectors.

float16 and bfloat16 arrive as arrays of their bits; a kernel takes one array of 16-bit and one of 32-bit
elements. The one that does not apply is empty, so the kernel is compiled once for all types.
"""

import numpy as np

from .simd import (
    LANES,
    float_of_bits,
    float_of_half,
    helper,
    load,
    load_bfloat,
    load_half,
    maximum,
    minimum,
    splat,
    store,
    store_bfloat,
    store_half,
)

FLOAT16, BFLOAT16, FLOAT32 = range(3)

_ZERO = np.float32(0)
_LARGEST_HALF = np.float32(65504)


@helper
def load_values(x16, x32, dtype, first, count, values, start):
    """Read count elements at `first` of x16 or x32 to values[start:]; the rest of the last vector is 0."""
    whole = count // LANES * LANES
    if dtype == FLOAT16:
        for i in range(0, whole, LANES):
            store(values, start + i, load_half(x16, first + i))
    elif dtype == BFLOAT16:
        for i in range(0, whole, LANES):
            store(values, start + i, load_bfloat(x16, first + i))
    else:
        for i in range(0, whole, LANES):
            store(values, start + i, load(x32, first + i))
    if whole < count:
        store(values, start + whole, splat(_ZERO))
        for i in range(whole, count):
            if dtype == FLOAT16:
                values[start + i] = float_of_half(x16[first + i])
            elif dtype == BFLOAT16:
                values[start + i] = float_of_bits(np.uint32(x16[first + i]) << np.uint32(16))
            else:
                values[start + i] = x32[first + i]


@helper
def store_values(values, dtype, out16, out32, first, count, rest):
    """Write values[0:count] to out16 or out32 at `first`, rounded to nearest; float16 saturates at 65504."""
    whole = count // LANES * LANES
    top, bottom = splat(_LARGEST_HALF), splat(-_LARGEST_HALF)
    if dtype == FLOAT16:
        for i in range(0, whole, LANES):
            store_half(out16, first + i, maximum(bottom, minimum(top, load(values, i))))
    elif dtype == BFLOAT16:
        for i in range(0, whole, LANES):
            store_bfloat(out16, first + i, load(values, i))
    else:
        for i in range(0, whole, LANES):
            store(out32, first + i, load(values, i))
    if whole < count:
        if dtype == FLOAT16:
            store_half(rest, 0, maximum(bottom, minimum(top, load(values, whole))))
        else:
            store_bfloat(rest, 0, load(values, whole))
        for i in range(whole, count):
            if dtype == FLOAT32:
                out32[first + i] = values[i]
            else:
                out16[first + i] = rest[i - whole]
