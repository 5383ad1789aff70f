"""The second kernel of packed attention: adds up the parts of each query row and writes it.

    grid (query rows, KV heads, batch), block 128 threads: thread t has the channels t and t + 128
        largest maximum   of all parts: each thread looks through every 128th, then by halves in shared memory
        weights           exp(maximum of the part - largest), 128 parts at a time, one a thread
        channels          sums over the parts in their order, those of rotated and of raw values (each second
                          one, where both occur) apart
        rotation          of the first sum: the butterflies of `make_hadamard` in shared memory

The order of all sums is fixed, so equal input gives equal bits.
"""

import math

import numpy as np
from numba import cuda, types

from .packed import LOWEST, rounds_of
from .packed_query import block_of, make_hadamard, max_number
from .packed_softmax import MERGE_THREADS
from .page import narrowed, power_of_two

int32, uint32, float32, int64 = np.int32, np.uint32, np.float32, np.int64

AT_ONCE = 16  # parts that are asked for together


def merge_parts(head_dim, dtype, widths_v, rows):
    """Make the kernel that merges what `attend_pages` of the same options has written."""
    narrow, hadamard = narrowed(dtype), make_hadamard(head_dim, MERGE_THREADS, block_of(head_dim))
    kinds = rounds_of(widths_v)
    rounds, coded, raw = len(kinds), False in kinds, True in kinds
    part_floats = head_dim + 2
    threads = MERGE_THREADS
    each = -(-head_dim // threads)
    norm = float32(1 / math.sqrt(block_of(head_dim)))

    def kernel(partial, out, lse, parts, query_rows, group, exponent):
        weight = cuda.shared.array(threads, float32)
        weighted = cuda.shared.array(threads, float32)  # sums of p
        rotated = cuda.shared.array(head_dim, float32)
        thread = cuda.threadIdx.x
        at, head_kv, batch = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        sequence = (int64(batch) * cuda.gridDim.y + head_kv) * ((query_rows + rows - 1) // rows) + at // rows
        row = at % rows
        results = parts * rounds  # of this row, `rows` rows apart
        first = (sequence * results * rows + row) * part_floats
        stride = int64(rows) * part_floats

        row_max = LOWEST
        i = thread
        while i < results:
            row_max = max_number(row_max, partial[first + i * stride + head_dim])
            i += threads
        weight[thread] = row_max
        cuda.syncthreads()  # the maxima of all threads are in shared memory
        half = threads // 2
        while half > 0:
            if thread < half:
                weight[thread] = max_number(weight[thread], weight[thread + half])
            cuda.syncthreads()  # this stage is done
            half //= 2
        row_max = weight[0]

        total = float32(0)
        coded_sum = cuda.local.array(each, float32)
        raw_sum = cuda.local.array(each, float32)
        x = cuda.local.array(AT_ONCE, float32)
        for c in range(each):
            coded_sum[c] = float32(0)
            raw_sum[c] = float32(0)
        for base in range(0, results, threads):
            cuda.syncthreads()  # the weights before are used
            weight[thread] = weighted[thread] = float32(0)
            if base + thread < results:
                result = first + (base + thread) * stride
                weight[thread] = math.exp(partial[result + head_dim] - row_max)
                weighted[thread] = weight[thread] * partial[result + head_dim + 1]
            cuda.syncthreads()  # the next weights are there
            for i in range(0, min(threads, results - base), AT_ONCE):
                for c in range(each):
                    channel = min(thread + c * threads, head_dim - 1)
                    for j in range(AT_ONCE):
                        value = partial[first + min(base + i + j, results - 1) * stride + channel]
                        x[j] = value if base + i + j < results else float32(0)
                    for j in range(AT_ONCE):
                        if coded and (not raw or j % 2 == 0):
                            coded_sum[c] += weight[uint32(i + j)] * x[j]
                        else:
                            raw_sum[c] += weight[uint32(i + j)] * x[j]
                for j in range(AT_ONCE):
                    total += weighted[uint32(i + j)]

        if coded:
            for c in range(each):
                channel = thread + c * threads
                if channel < head_dim:
                    rotated[channel] = coded_sum[c]
            cuda.syncthreads()  # the sum of rotated values is in shared memory
            hadamard(rotated, 0, thread)
        factor = norm
        if coded:
            factor *= power_of_two(int32(exponent[2 * (int64(batch) * cuda.gridDim.y + head_kv) + 1]))
        heads, seqlen_q = cuda.gridDim.y * group, query_rows // group
        position = at // group
        head = head_kv * group + at - position * group
        for c in range(each):
            channel = thread + c * threads
            if channel < head_dim:
                x = raw_sum[c]
                if coded:
                    adjacent_ones = cuda.popc(uint32(channel & channel >> 1 & 0x55))
                    turned = (adjacent_ones & 1 == 1) != (channel & 0x7C == 0x7C)
                    x += -rotated[channel] * factor if turned else rotated[channel] * factor
                if total != 0:
                    x /= total
                to = ((int64(batch) * seqlen_q + position) * heads + head) * head_dim + channel
                out[to] = narrow(float32(x))
        if thread == 0:
            to = (int64(batch) * heads + head) * seqlen_q + position
            lse[to] = float32(-math.inf) if total == 0 else row_max + float32(math.log(total))

    pointer, whole = types.CPointer, types.int32
    element = pointer(types.uint32 if dtype == "float32" else types.uint16)
    arguments = (
        pointer(types.float32), element, pointer(types.float32), whole, whole, whole, pointer(types.int8),
    )  # fmt: skip
    return kernel, arguments, (MERGE_THREADS, 1)


# gate: merge_parts head_dim=128 dtype=bfloat16 widths_v=31 rows=4 registers<=128
# gate: merge_parts head_dim=64 dtype=float16 widths_v=15 rows=4 registers<=128 arch=sm_90a
# gate: merge_parts head_dim=80,256 dtype=float16,float32 widths_v=31 rows=2 registers<=128 arch=sm_90a
