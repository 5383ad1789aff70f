// Sizes of a warpgroup's products that only attention needs, as common/hopper.cuh has them.
#pragma once
#include "common/hopper.cuh"

// clang-format off
#define KVLAB_NUMBERS40 KVLAB_NUMBERS0 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define KVLAB_NUMBERS48 KVLAB_NUMBERS40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define KVLAB_NUMBERS56 KVLAB_NUMBERS48 ",%48,%49,%50,%51,%52,%53,%54,%55"
KVLAB_SHARED(multiply_async, 80, 40, "0", "0", KVLAB_NUMBERS40, 40, 41, 42, KVLAB_SUMS32(c, 0), KVLAB_SUMS8(c, 32))
KVLAB_SHARED(multiply_async, 112, 56, "0", "0", KVLAB_NUMBERS56, 56, 57, 58, KVLAB_SUMS32(c, 0), KVLAB_SUMS8(c, 32), KVLAB_SUMS8(c, 40), KVLAB_SUMS8(c, 48))
KVLAB_REGISTERS(96, 48, KVLAB_NUMBERS48, 48, 49, 50, 51, 52, KVLAB_SUMS32(c, 0), KVLAB_SUMS8(c, 32), KVLAB_SUMS8(c, 40))
KVLAB_SHARED(multiply_mixed, 64, 32, "0", "1", KVLAB_NUMBERS0, 32, 33, 34, KVLAB_SUMS32(c, 0))
KVLAB_SHARED(multiply_turned, 80, 40, "1", "0", KVLAB_NUMBERS40, 40, 41, 42, KVLAB_SUMS32(c, 0), KVLAB_SUMS8(c, 32))
KVLAB_SHARED(multiply_mixed, 32, 16, "0", "1", KVLAB_NUMBERS16, 16, 17, 18, KVLAB_SUMS8(c, 0), KVLAB_SUMS8(c, 8))
// clang-format on
