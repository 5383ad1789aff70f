"""A CUDA kernel whose values do not fit into registers, so that every check of spills has one to find."""

SPILLS = """extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* y, int n) {
  float a[96];
#pragma unroll
  for (int i = 0; i < 96; i++) a[i] = y[i * 1024 + threadIdx.x];
  for (int j = 0; j < n; j++) {
#pragma unroll
    for (int i = 0; i < 96; i++) a[i] = a[i] * a[(i * 17 + 3) % 96] + y[i + j];
  }
#pragma unroll
  for (int i = 0; i < 96; i++) y[i * 1024 + threadIdx.x] = a[i];
}
"""
