"""A `MixedPrecisionCache` on a GPU: steps are launched without waiting, pages are planned and moved there.

What lies where: road.py (checks, sizes) goes to layers.py (steps; long.py those
of many tokens), whose state is in state.py. These use changes.py with plan.py and tight.py (plans and
moves), `kvlab.cache.score` (importance), `kvlab.cache.launches`, store.py (memory), and
host.py with exchange.py, window.py and function.py (what the CPU does for it: rare operations, files, other
plans, functions as importance). Memory and launches
come from an executor: executor.py on a GPU, with kernels.py, plan.py and score.py, `kvlab.cache.cpu` for
arrays of NumPy.
"""
