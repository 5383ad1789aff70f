// A kernel whose blocks may be on the device before the launch before it has ended.
//
// `PreparedLaunch(..., early=True)` of kvlab/build.py launches one; launched in any other way it runs as
// ever.
#pragma once

// Lets the next launch of the stream come, and waits until all that was launched before has ended and what it
// wrote can be seen. All threads call it before they touch global memory: a launch that ends has then waited
// for the one before, so whoever waits for it waits for all.
__device__ __forceinline__ void begin_early() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}
