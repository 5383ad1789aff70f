// Products that common/hopper.cuh lacks: 96 columns from registers, 32 columns of column operands.
#pragma once
// clang-format off
#define KVLAB_NUMBERS_HALF ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
KVLAB_REGISTERS(96, 48, KVLAB_NUMBERS0 KVLAB_NUMBERS_HALF, 48, 49, 50, 51, 52, KVLAB_SUMS32(c, 0), KVLAB_SUMS8(c, 32), KVLAB_SUMS8(c, 40))
KVLAB_SHARED(multiply_columns, 32, 16, "1", "1", KVLAB_NUMBERS16, 16, 17, 18, KVLAB_SUMS8(c, 0), KVLAB_SUMS8(c, 8))
// clang-format on
