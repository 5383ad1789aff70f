"""kvlab: attention over compressed KV caches.

This module holds the public names and nothing else. Each is loaded at its first use, so that importing kvlab
costs little and needs neither torch nor transformers nor CuPy nor a GPU. A public name stands in two places
here, in the imports that type checkers read and in the table that Python reads; a test holds them together.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.cache.cache import MixedPrecisionCache as MixedPrecisionCache
    from kvlab.errors import BudgetError as BudgetError
    from kvlab.errors import FormatError as FormatError
    from kvlab.errors import OutOfMemory as OutOfMemory
    from kvlab.integrations.accelerate import accelerate as accelerate
    from kvlab.integrations.frames import measure_frames as measure_frames
    from kvlab.integrations.quantized import quantized as quantized
    from kvlab.integrations.reading import perplexity as perplexity
    from kvlab.integrations.reading import read as read
    from kvlab.ops.attention import attention as attention
    from kvlab.ops.attention import attention_varlen as attention_varlen
    from kvlab.ops.attention import merge_attention as merge_attention
    from kvlab.ops.attention_backward import attention_backward as attention_backward
    from kvlab.ops.attention_backward import attention_varlen_backward as attention_varlen_backward
    from kvlab.ops.bits import pack as pack
    from kvlab.ops.bits import pack_ternary as pack_ternary
    from kvlab.ops.bits import unpack as unpack
    from kvlab.ops.bits import unpack_ternary as unpack_ternary
    from kvlab.ops.codec import Quantized as Quantized
    from kvlab.ops.codec import dequantize as dequantize
    from kvlab.ops.codec import quantize as quantize
    from kvlab.ops.grouped import grouped_attention_varlen as grouped_attention_varlen
    from kvlab.ops.grouped_backward import (
        grouped_attention_varlen_backward as grouped_attention_varlen_backward,
    )
    from kvlab.ops.key_frames import KeyFrames as KeyFrames
    from kvlab.registry import last_backend as last_backend

__version__ = "0.1.0.dev0"

_HOME = {
    "BudgetError": "kvlab.errors",
    "FormatError": "kvlab.errors",
    "KeyFrames": "kvlab.ops.key_frames",
    "MixedPrecisionCache": "kvlab.cache.cache",
    "OutOfMemory": "kvlab.errors",
    "Quantized": "kvlab.ops.codec",
    "accelerate": "kvlab.integrations.accelerate",
    "attention": "kvlab.ops.attention",
    "attention_backward": "kvlab.ops.attention_backward",
    "attention_varlen": "kvlab.ops.attention",
    "attention_varlen_backward": "kvlab.ops.attention_backward",
    "dequantize": "kvlab.ops.codec",
    "grouped_attention_varlen": "kvlab.ops.grouped",
    "grouped_attention_varlen_backward": "kvlab.ops.grouped_backward",
    "last_backend": "kvlab.registry",
    "measure_frames": "kvlab.integrations.frames",
    "merge_attention": "kvlab.ops.attention",
    "pack": "kvlab.ops.bits",
    "pack_ternary": "kvlab.ops.bits",
    "perplexity": "kvlab.integrations.reading",
    "quantize": "kvlab.ops.codec",
    "quantized": "kvlab.integrations.quantized",
    "read": "kvlab.integrations.reading",
    "unpack": "kvlab.ops.bits",
    "unpack_ternary": "kvlab.ops.bits",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
