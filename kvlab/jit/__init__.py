"""From source to cubin to launch: NVRTC and Numba compile, one cache keeps cubins by content."""
