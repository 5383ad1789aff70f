"""The laboratory: quality, timing, benchmarks, ablations and sweeps, with results in plain files."""
