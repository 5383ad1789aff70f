// A kernel whose blocks may be on the device before the launch before it has ended.
//
// `PreparedLaunch(..., early=True)` of kvlab/jit/launch.py launches one; launched in any other way it runs as
// ever.
#pragma once

// Waits until all that was launched before has ended and what it wrote can be seen, and lets the next launch
// of the stream come. All threads call it before they touch global memory. In this order no more than one
// launch waits on the device: several would share its multiprocessors with blocks of the one that runs.
__device__ __forceinline__ void begin_early() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
