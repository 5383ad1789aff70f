"""The cubin reader against what ptxas itself says, and against damaged images."""

from __future__ import annotations

import functools
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import FormatError
from kvlab.jit.compile_gate import GATED_ARCHS
from kvlab.jit.cubin import Resources, read_resources
from tests.spilling_kernel import SPILLS

SOURCE = (
    SPILLS
    + r"""
struct Map { unsigned long long opaque[16]; };
__constant__ float table[100];

// A call that is not inlined, with a stack of its own.
__noinline__ __device__ float callee(float x, int n) {
  float a[30];
  for (int i = 0; i < 30; i++) a[i] = x * i;
  for (int i = 0; i < n; i++) a[(i * 7) % 30] += a[(i * i) % 30];
  return a[n % 30];
}
extern "C" __global__ void nothing() {}
extern "C" __global__ void parameters(float* y, const __grid_constant__ Map map, char c, short s, double d) {
  y[threadIdx.x] = map.opaque[3] + c + s + d + table[threadIdx.x];
}
struct Maps { Map of_group[40]; };
extern "C" __global__ void many_parameters(float* y, const __grid_constant__ Maps maps, short s) {
  y[threadIdx.x] = maps.of_group[39].opaque[3] + s;
}
extern "C" __global__ void shared_static(float* y, int n) {
  __shared__ float s[300];
  s[threadIdx.x] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[n - threadIdx.x];
}
extern "C" __global__ void shared_both(float* y, int n) {
  extern __shared__ float s[];
  __shared__ double z[33];
  s[threadIdx.x] = y[threadIdx.x];
  z[threadIdx.x % 33] = n;
  __syncthreads();
  y[threadIdx.x] = s[n - threadIdx.x] + z[n];
}
extern "C" __global__ void calls(float* y, int n) { y[threadIdx.x] = callee(y[threadIdx.x], n); }
"""
)
PARAMETERS = {
    "nothing": (),
    "parameters": (8, 128, 1, 2, 8),
    "many_parameters": (8, 40 * 128, 2),
    "shared_static": (8, 4),
    "shared_both": (8, 4),
    "calls": (8, 4),
    "spills": (8, 4),
}


@functools.cache
def _compiled(arch: str) -> tuple[bytes, str]:
    """The cubin of SOURCE and ptxas's verbose log of it."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(std="c++17", arch=arch, ptxas_options=["-v"])
    return bytes(Program(SOURCE, "c++", options).compile("cubin", logs=log).code), log.getvalue()


def _said_by_ptxas(log: str) -> dict[str, Resources]:
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        found[name] = Resources(
            registers=number(r"Used (\d+) registers"),
            shared_bytes=number(r"(\d+) bytes smem"),
            local_bytes=number(r"(\d+) bytes cumulative stack size"),
            parameter_bytes=PARAMETERS[name],
        )
    return found


@pytest.mark.parametrize("arch", [*GATED_ARCHS, "sm_86", "sm_89", "sm_103a"])
def test_resources_are_those_ptxas_reports(arch: str) -> None:
    cubin, log = _compiled(arch)
    said = _said_by_ptxas(log)
    assert set(said) == set(PARAMETERS)
    assert read_resources(cubin) == said
    # The source does what it is for, so that none of the figures above is 0 throughout.
    assert said["shared_static"].shared_bytes == 1200
    assert said["spills"].local_bytes > 0
    assert said["calls"].local_bytes >= 120
    assert said["parameters"].local_bytes == 0


@given(st.data())
def test_a_damaged_cubin_is_a_format_error_or_read(data: st.DataObject) -> None:
    cubin, _ = _compiled("sm_90a")
    if data.draw(st.booleans(), label="truncate"):
        damaged = cubin[: data.draw(st.integers(0, len(cubin) - 1))]
    else:
        spots = st.one_of(st.integers(0, 63), st.integers(0, len(cubin) - 1))
        at = data.draw(spots)
        damaged = cubin[:at] + data.draw(st.binary(min_size=1, max_size=8)) + cubin[at:][1:]
    try:
        kernels = read_resources(damaged)
    except FormatError:
        return
    assert all(isinstance(takes, Resources) for takes in kernels.values())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_cubin_is_refused(share: float) -> None:
    cubin, _ = _compiled("sm_90a")
    with pytest.raises(FormatError, match="cubin"):
        read_resources(cubin[: int(share * len(cubin))])
