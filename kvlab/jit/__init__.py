"""Sources to cubins to launches: NVRTC and Numba as compilers, one cache by content, the compile gate."""
