"""CUDA C++ sources, compiled at run time by `kvlab.jit.build`, in a folder for each feature.

A folder has its ``.cu`` and the ``.cuh`` of its own; ``common/`` has what several of them share. Entry points
are ``extern "C"`` and specialised by macros alone. Sources include nothing but ``cuda_fp16.h``,
``cuda_bf16.h``, ``cuda_fp8.h`` and the ``.cuh`` files here, named from this folder
(``"common/hopper.cuh"``), so the headers of the nvidia-cuda-runtime package are all a machine needs to
compile them. The last lines of a source, ``// gate:``, say which specialisations of it exist and how many
registers they may take (`kvlab.jit.compile_gate`); ``resources.json`` holds what they do take. The file is
here so that the folder installs as the package ``kvlab.cuda_kernels``.
"""
