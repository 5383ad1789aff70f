"""Attention of a sequence over several ranks (context parallelism), on GPUs or CPUs.

`enable` divides the sequences of a transformers model; it is loaded at its first use, with transformers.
"""

from importlib import import_module
from typing import Any

from kvlab.parallel.functions import (
    extract_local,
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    position_ids,
    scatter_local,
    zigzag_llama3_flash_attn_varlen_func,
)
from kvlab.parallel.ring_functions import (
    ring_flash_attn_func,
    ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_varlen_func,
)

__all__ = [
    "enable",
    "extract_local",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "position_ids",
    "ring_flash_attn_func",
    "ring_flash_attn_varlen_func",
    "scatter_local",
    "zigzag_llama3_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_varlen_func",
]


def __getattr__(name: str) -> Any:
    if name == "enable":
        return import_module("kvlab.integrations.context_parallel").enable
    raise AttributeError(f"module 'kvlab.parallel' has no attribute {name!r}")
