"""``torchrun --nproc_per_node=N -m kvlab.parallel.benchmark``: see `kvlab.lab.benchmark.context_parallel`."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module("kvlab.lab.benchmark.context_parallel").main())
