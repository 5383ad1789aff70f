// Attention: how tensors of a call lie in memory, and constants, for forward and backward.
// With the macro FLOAT32 = 1 elements are float32; else they are of the 16-bit type.
#pragma once
#include "common/pairs.cuh"

#define INFINITE __int_as_float(0x7f800000)

#if FLOAT32
using Element = float;
#else
using Element = u16;
#endif

struct Tensor {
    Element* data;
    i64 batch, position, head;  // strides in elements
};
