"""Attention of a sequence over several ranks (context parallelism), on GPUs or CPUs."""

from kvlab.parallel.functions import (
    extract_local,
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    position_ids,
    ring_flash_attn_func,
    ring_flash_attn_varlen_func,
    scatter_local,
    zigzag_llama3_flash_attn_varlen_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_varlen_func,
)

__all__ = [
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
