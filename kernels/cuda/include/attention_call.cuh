// Attention: how tensors of a call lie in memory, and constants, for forward and backward. Needs pairs.cuh.
#pragma once

constexpr float LN2 = 0.69314718056f, LOG2E = 1.44269504089f;
#define INFINITE __int_as_float(0x7f800000)

using i64 = long long;

struct Tensor {
    u16* data;
    i64 batch, position, head;  // strides in elements
};
