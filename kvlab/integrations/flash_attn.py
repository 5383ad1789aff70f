"""The functions of flash-attn 2, computed by kvlab: the same names, arguments and order, on CPUs and GPUs.

Code written for flash-attn runs unchanged after

    kvlab.integrations.flash_attn.install()

which makes ``import flash_attn`` find this module, and ``flash_attn.flash_attn_interface`` and
``flash_attn.bert_padding`` too (flash_attn_padding.py). Beside the public functions stand the four that other
libraries import although they are private, ``_flash_attn_forward`` and its kin (flash_attn_private.py).

Gradients are those of `kvlab.integrations.torch_autograd`. What differs from flash-attn: float32 is accepted,
on the CPU float64; every head dimension that kvlab supports; scratch results that only flash-attn's own
backward reads are empty. Not offered: dropout, ALiBi.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from kvlab.arguments import flag, refuse_unsupported, whole_number
from kvlab.integrations import flash_attn_padding
from kvlab.integrations.flash_attn_arguments import score_options
from kvlab.integrations.flash_attn_cache import attend_cache, attend_paged, rotate_new, write_new
from kvlab.integrations.flash_attn_cache_checks import check_cache
from kvlab.integrations.flash_attn_private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from kvlab.integrations.torch_autograd import attention, attention_varlen
from kvlab.torch_compile import opaque

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]

VERSION = "2.8.3"
"""The version of flash-attn whose functions these are; ``flash_attn.__version__`` after `install`."""

Tensor = torch.Tensor
Window = tuple[int, int]


def install() -> None:
    """Make ``import flash_attn`` give this module, for the rest of the process.

    Raises
    ------
    RuntimeError
        If another flash_attn has been imported already; call this first.

    Examples
    --------
    >>> install()
    >>> from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_func
    >>> flash_attn_func is sys.modules[flash_attn_func.__module__].flash_attn_func
    True
    """
    present = sys.modules.get("flash_attn")
    if present is not None and getattr(present, "flash_attn_func", None) is not flash_attn_func:
        raise RuntimeError(
            "another flash_attn is imported already: call install() before anything imports it"
        )
    own = globals()
    package = _module("flash_attn", {name: own[name] for name in __all__ if name != "install"})
    package.__path__ = []
    package.__version__ = VERSION  # type: ignore[attr-defined]
    private = (
        _flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward,
    )  # fmt: skip
    interface = vars(package) | {function.__name__: function for function in private}
    package.flash_attn_interface = _module("flash_attn.flash_attn_interface", interface)  # type: ignore[attr-defined]
    padding = {name: getattr(flash_attn_padding, name) for name in flash_attn_padding.__all__}
    package.bert_padding = _module("flash_attn.bert_padding", padding)  # type: ignore[attr-defined]


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None, is_package="." not in name)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


def _answer(result: Any, q: Tensor, return_attn_probs: bool) -> Any:
    """Out, or out, lse and the probabilities after dropout, of which there are none."""
    return (*result, q.new_empty(0)) if flag(return_attn_probs, "return_attn_probs") else result[0]


# ---- fixed length


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over sequences of one length; see `kvlab.attention`.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, nheads, headdim)
    k, v : tensor, (batch, seqlen_k, nheads_k, headdim)
    dropout_p, alibi_slopes
        Must be 0 and None.
    softmax_scale, causal, window_size, softcap
        `scale`, `causal`, `window` and `softcap` of `kvlab.attention`.
    deterministic : bool
        Of the backward.
    return_attn_probs : bool
        Also return the log-sum-exp, and an empty tensor in the place of probabilities.

    Returns
    -------
    out : tensor, shape and dtype of q
    softmax_lse : float32 tensor, (batch, nheads, seqlen_q), only if return_attn_probs
    S_dmask : empty tensor, only if return_attn_probs

    Raises
    ------
    NotImplementedError
        If dropout or ALiBi is asked for.
    ValueError, TypeError
        As `kvlab.attention`.

    Examples
    --------
    >>> q = torch.ones(1, 3, 2, 4)
    >>> flash_attn_func(q, q, q, causal=True).shape
    torch.Size([1, 3, 2, 4])
    """
    refuse_unsupported(dropout_p, alibi_slopes)
    options = score_options(causal, softmax_scale, window_size, softcap)
    result = attention(q, k, v, deterministic=deterministic, return_lse=True, **options)
    return _answer(result, q, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor qkv (batch, seqlen, 3, nheads, headdim)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


# ---- variable length


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention over sequences of different lengths; see `kvlab.attention_varlen`.

    Parameters
    ----------
    q : tensor, (total_q, nheads, headdim)
    k, v : tensor, (total_k, nheads_k, headdim)
        With a block_table (num_blocks, page_block_size, nheads_k, headdim). When pages are read in place,
        and when copied first, `flash_attn_with_kvcache` says.
    cu_seqlens_q, cu_seqlens_k : int32 tensor, (batch + 1,)
        Prefix sums; as in `kvlab.attention_varlen` a GPU does not check their values.
    max_seqlen_q, max_seqlen_k : int
    block_table : int32 tensor, (batch, max_num_blocks_per_seq), optional
        Pages of each sequence; then there are no gradients. Checked as in `flash_attn_with_kvcache`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As in `flash_attn_func`.

    Returns
    -------
    As `flash_attn_func`; softmax_lse is (nheads, total_q).

    Raises
    ------
    NotImplementedError, ValueError, TypeError
        As `flash_attn_func`.

    Examples
    --------
    >>> q, bounds = torch.ones(3, 2, 4), torch.tensor([0, 1, 3], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, bounds, bounds, 2, 2, causal=True).shape
    torch.Size([3, 2, 4])
    """
    refuse_unsupported(dropout_p, alibi_slopes)
    options = score_options(causal, softmax_scale, window_size, softcap)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if block_table is not None:
        result: Any = attend_paged(q, k, v, *sequences, block_table, options)
    else:
        result = attention_varlen(
            q, k, v, *sequences, deterministic=deterministic, return_lse=True, **options
        )
    return _answer(result, q, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, nheads_k, headdim)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, nheads, headdim)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


# ---- with a cache


@opaque
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write new keys and values into a cache, and attend to all of it; without gradients.

    The one function here that changes an argument, as in flash-attn: with k and v, k_cache and v_cache.

    Parameters
    ----------
    q : tensor, (batch, seqlen_q, nheads, headdim)
    k_cache, v_cache : tensor, (batch_cache, seqlen_cache, nheads_k, headdim)
        With a block_table (num_blocks, page_block_size, nheads_k, headdim).
    k, v : tensor, (batch, seqlen_new, nheads_k, headdim), optional
        Written behind the first cache_seqlens tokens.
    rotary_cos, rotary_sin : tensor, (positions, rotary_dim / 2), optional
        Rotate k and q to their positions in the cache; all rows of q to one position if neither causal nor
        windowed.
    cache_seqlens : int or int32 tensor, (batch,), optional
        Tokens in the cache before the call, left padding included; the whole cache if not given.
    cache_batch_idx : int32 tensor, (batch,), optional
        Which row of the cache belongs to which row of q; the first rows if not given. Not with a block_table.
    cache_leftpad : int32 tensor, (batch,), optional
        First token of each row, at most cache_seqlens.
    block_table : int32 tensor, (batch, max_num_blocks_per_seq), optional
        Pages of each row; entries that hold none of its tokens may be anything.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    rotary_interleaved : bool
        Whether neighbouring channels turn together, or channel i and i + rotary_dim / 2.
    num_splits : int
        Has no effect: kvlab chooses.
    return_softmax_lse : bool

    Returns
    -------
    out : tensor, shape and dtype of q
    softmax_lse : float32 tensor, (batch, nheads, seqlen_q), only if return_softmax_lse

    Raises
    ------
    NotImplementedError
        If ALiBi is asked for.
    ValueError, TypeError
        As `kvlab.attention`; if one of k and v, or of rotary_cos and rotary_sin, is missing; if a length, a
        padding, an index or the rotary table does not fit. Then nothing has been written.

    Notes
    -----
    Reads a contiguous cache in place. Pages and chosen rows (cache_batch_idx) are read in place on compute
    capability 9.0 in 16 bits if page_block_size or, without pages, seqlen_cache is a multiple of 16, best of
    128, and there is no cache_leftpad, window or softcap; else they are copied first.

    On a GPU the values of cache_seqlens, cache_leftpad, cache_batch_idx and block_table are not checked,
    since the host would have to wait for them. Values out of range are moved to the nearest one in range: so
    nothing outside the arguments is read or written, but the result of that row, and where its new tokens are
    written, have no meaning. A cache_seqlens that is an int is checked on every device.

    Examples
    --------
    >>> cache = torch.zeros(2, 1, 8, 1, 4)
    >>> new = torch.ones(1, 1, 1, 4)
    >>> flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=0).ravel(), cache[0, 0, :2, 0, 0]
    (tensor([1., 1., 1., 1.]), tensor([1., 0.]))
    """
    refuse_unsupported(alibi_slopes=alibi_slopes)
    options = score_options(causal, softmax_scale, window_size, softcap)
    one_position = not options["causal"] and options["window"] == (-1, -1)
    interleaved = flag(rotary_interleaved, "rotary_interleaved")
    return_lse = flag(return_softmax_lse, "return_softmax_lse")
    whole_number(num_splits, "num_splits", 0)
    with torch.no_grad():
        rows = check_cache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table, one_position=one_position,
        )  # fmt: skip
        if k is not None and v is not None:
            if rotary_cos is not None and rotary_sin is not None:
                q, k = rotate_new(q, k, rows, rotary_cos, rotary_sin, one_position, interleaved)
            write_new(k_cache, v_cache, k, v, rows)
        out, lse = attend_cache(q, k_cache, v_cache, rows, options)
    return (out, lse) if return_lse else out
