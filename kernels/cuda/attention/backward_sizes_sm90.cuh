// Attention backward on Hopper: how large its tiles are. Needs HEAD_DIM and CLUSTER_SPLIT; BLOCK_M where a
// step does not have the rows that it has here.
//
// Up to 128 channels a CTA has a tile by itself; above, two CTAs have one: attention/backward_sm90_wide.cu.
#pragma once

constexpr bool WIDE = HEAD_DIM > 128;
#ifndef BLOCK_M
constexpr int BLOCK_M = HEAD_DIM == 64 ? 128 : 64;
#endif
constexpr int BLOCK_N = WIDE ? 64 : 128;
constexpr int Q_STAGES = 2, DOUT_STAGES = WIDE ? 1 : 2, SCORE_STAGES = WIDE ? 4 : 2;
constexpr int CLUSTER = WIDE ? 2 * CLUSTER_SPLIT : CLUSTER_SPLIT;
constexpr int SCORES = WIDE ? 32 : BLOCK_M / 2, SUMS = WIDE ? 64 : HEAD_DIM / 2;  // a thread's
