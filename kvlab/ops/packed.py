"""Attention over packed pages: queries attend the stored tokens of a compressed cache without unpacking them.

The pages come as a page table and pools (`kvlab.pages.LayerPages`).
Stored tokens are older than the queries, so nothing hides them but a window, and their order does not matter:
pages are attended in any order and partial results merged by their log-sum-exp. The caller does the same with
the tokens that are not in pages.

Importance is attention mass, and its denominator is known only after that merge. So a call may save the
scores of the last query rows, and `mass_from_scores` turns them into probabilities without reading keys
again.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Generic, NamedTuple

from kvlab.arguments import sides_of_window
from kvlab.arrays import Array, ArrayT, common_device, device_of, dtype_name
from kvlab.pages import DevicePages, LayerPages, PageLayout
from kvlab.registry import ON_CUDA, ON_NUMBA, AtLeast, Implementation, choose, register, requirements_of
from kvlab.shapes import match_shapes
from kvlab.torch_compile import opaque

__all__ = ["PackedAttention", "Pages", "Window", "mass_from_scores", "packed_attention"]

_FLOATS = ("float16", "bfloat16", "float32")
_REQUIREMENTS: dict[str, Any] = {"dtype": _FLOATS, "head_dim": range(16, 257, 16)}
_CUDA_REQUIREMENTS: dict[str, Any] = {
    "dtype": ("float16", "bfloat16"),
    "head_dim": (64, 80, 96, 128, 192, 256),
    "compute_capability": AtLeast((9, 0)),
}
_NUMBA_REQUIREMENTS = _REQUIREMENTS | ON_NUMBA

register(
    Implementation("packed_attention", "cpu", "kvlab.ops.cpu.packed:attend", _REQUIREMENTS),
    Implementation("packed_attention", "reference", "kvlab.ops.reference.packed:attend", _REQUIREMENTS),
    Implementation("packed_attention", "cuda", "kvlab.ops.cuda.packed:launch", _CUDA_REQUIREMENTS),
    Implementation("packed_attention", "numba", "kvlab.ops.numba.packed:launch", _NUMBA_REQUIREMENTS),
    Implementation("mass_from_scores", "cpu", "kvlab.ops.cpu.packed:mass", {}),
    Implementation("mass_from_scores", "reference", "kvlab.ops.reference.packed:mass", {}),
    Implementation("mass_from_scores", "cuda", "kvlab.ops.cuda.packed_mass:launch", ON_CUDA),
)


Pages = LayerPages | DevicePages
"""What an attention call reads of one layer."""


class Window(NamedTuple):
    """How far query tokens see back: token s of row b to position first[b] + s - left."""

    left: int
    first: Any
    """int32 (batch,): the position of the first query token of each row."""


class PackedAttention(NamedTuple, Generic[ArrayT]):
    """What `packed_attention` returns."""

    out: ArrayT
    lse: ArrayT
    scores: ArrayT | None


@opaque
def packed_attention(
    q: ArrayT,
    pages: Pages,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    first_position: Array | None = None,
    keep_scores: int = 0,
    backend: str | None = None,
) -> PackedAttention[ArrayT]:
    """Attend all tokens that the pages of a layer hold.

    Every query sees every stored token of its row, or those that its window reaches back to. The queries are
    brought into the frame of the coded keys once, and what coded values add up to is rotated back once, so a
    page is expanded in registers and no dense key or value is ever written.

    Parameters
    ----------
    q : array, (batch, seqlen_q, num_heads_q, head_dim)
        float16, bfloat16 or float32. Query head h reads KV head h // (num_heads_q // num_heads_kv).
    pages : Pages
        A `kvlab.pages.LayerPages`, or a `kvlab.pages.DevicePages` on the GPU of `q`: a cache's own pages.
    scale : float, optional
        Factor on the scores; 1 / sqrt(head_dim) if not given.
    softcap : float
        If positive, scores are softcap * tanh(score / softcap).
    window : (int, int)
        (left, right) as for `kvlab.attention`: query token s of row b sees the stored tokens at positions
        from first_position[b] + s - left on; -1 means no limit. The right side must be -1 or a number, but
        hides nothing, since stored tokens are older than the queries. A page without a token that some
        query sees is not read but for its positions.
    first_position : int32 array, (batch,)
        With a window: the position of the first query token of each row, on the device of `q`.
    keep_scores : int
        Keep the scores of that many last query rows, for `mass_from_scores`. They take 4 * keep_scores *
        group bytes for each slot of the page table: 16 bytes a token and KV head for one row and a group of
        4.
    backend : str, optional
        ``"cpu"`` and ``"numba"`` compute in float32, ``"cuda"`` in the dtype of the cache with float32 sums,
        ``"reference"`` in float64.

    Returns
    -------
    out : array, (batch, seqlen_q, num_heads_q, head_dim)
        Kind and dtype of `q`; 0 where a row holds no token.
    lse : float32 array, (batch, num_heads_q, seqlen_q)
        Log-sum-exp of the scores, natural; -inf where a row holds no token. `kvlab.merge_attention` joins
        out and lse with those of other tokens.
    scores : float32 array, (batch, num_heads_kv, quads, keep_scores * group, 64), or None
        None unless `keep_scores`. Slot s of entry 4 n + q of the page table is at 16 q + s of quad n. Entries
        beyond `num_pages` hold anything, unused slots and tokens before the window -inf.

    Raises
    ------
    ValueError
        If shapes do not fit, packed keys of some layouts only are in profiles, softcap, window or keep_scores
        is out of range, a window comes without first_position or the other way round, or, on the CPU, the
        page table names a page that does not exist.
    TypeError
        If q is no array of a supported dtype or first_position none of int32.
    NotImplementedError
        If no backend on the device of q supports the call.

    Examples
    --------
    A page at 16 bits that holds two keys of zeros and their values.

    >>> import numpy as np
    >>> from kvlab.ops.cpu.page_tokens import encode_tokens
    >>> from kvlab.pages import LayerPages, PageLayout
    >>> layout = PageLayout(head_dim=16, bits_k=16, bits_v=16, itemsize=4)
    >>> pool = np.zeros((1, layout.nbytes), np.uint8)
    >>> k, v = np.zeros((2, 16), np.float32), np.eye(2, 16, dtype=np.float32)
    >>> encode_tokens(pool, layout, "float32", np.array([0, 0]), np.array([0, 1]), k, v)
    >>> count = np.array([[[2, 0, 0, 0]]], np.uint8)
    >>> rung, index, base = (np.zeros((1, 1, 4), kind) for kind in ("u1", "u4", "u2"))
    >>> mean = np.zeros((1, 1, 16), np.float16)
    >>> num_pages = np.full((1, 1), 4, np.int32)
    >>> pages = LayerPages((layout,), (pool,), rung, count, index, base, num_pages, mean, "float32")
    >>> out, lse, _ = packed_attention(np.ones((1, 1, 1, 16), np.float32), pages)
    >>> out[0, 0, 0, :3], bool(np.isclose(lse.item(), np.log(2)))
    (array([0.5, 0.5, 0. ], dtype=float32), True)
    """
    group = _check(q, pages, softcap, keep_scores)
    hidden = _window_of(window, first_position, q.shape[0])  # type: ignore[attr-defined]
    device = common_device(
        {"q": q, "pages.rung": pages.rung} | ({"first_position": hidden.first} if hidden else {})
    )
    requirements = {"dtype": dtype_name(q, "q"), "head_dim": q.shape[3], **requirements_of(device)}  # type: ignore[attr-defined]
    row = choose("packed_attention", device.kind, backend, **requirements)
    scale = 1 / math.sqrt(requirements["head_dim"]) if scale is None else scale
    result: PackedAttention[ArrayT] = row.launch(q, pages, group, scale, softcap, keep_scores, hidden)
    return result


@opaque
def mass_from_scores(scores: ArrayT, lse: Array, pages: Pages, *, backend: str | None = None) -> ArrayT:
    """Turn kept scores into attention mass: the mean probability of each stored token.

    Parameters
    ----------
    scores : array
        From `packed_attention` with keep_scores.
    lse : float32 array, (batch, num_heads_q, seqlen_q)
        Log-sum-exp of each query row over all its keys, stored or not; the last keep_scores rows are read.
        A row with +inf gets no probability at all, one way to leave a padding row out.
    pages : Pages
        The pages of that call, unchanged.

    Returns
    -------
    float32 array, (batch, num_heads_kv, entries, 16)
        Mean over the kept rows and the heads of a group of exp(score - lse); 0 in unused slots and entries.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If an argument is no float32 array.
    """
    for name, array in (("scores", scores), ("lse", lse)):
        if dtype_name(array, name) != "float32":
            raise TypeError(f"{name} must be float32, got {dtype_name(array, name)}")
    device = common_device({"scores": scores, "lse": lse, "pages.rung": pages.rung})
    table = tuple(pages.rung.shape)
    sizes = match_shapes(
        {
            "quads of pages.rung": ((*table[:2], table[2] // 4), ("B", "Hkv", "quads")),
            "scores": (scores.shape, ("B", "Hkv", "quads", "rows", 64)),  # type: ignore[attr-defined]
            "lse": (lse.shape, ("B", "Hq", "Sq")),  # type: ignore[attr-defined]
        }
    )
    group = _group_size(sizes["Hq"], sizes["Hkv"])
    if sizes["rows"] == 0 or sizes["rows"] % group or sizes["rows"] // group > sizes["Sq"]:
        raise ValueError(
            f"scores keeps {sizes['rows']} rows of heads: it must be a multiple of the group size {group}, "
            f"for at least 1 and at most the {sizes['Sq']} query rows of lse"
        )
    row = choose("mass_from_scores", device.kind, backend, **requirements_of(device))
    result: ArrayT = row.launch(scores, lse, pages, group)
    return result


def _group_size(num_heads_q: int, num_heads_kv: int) -> int:
    if num_heads_kv == 0 or num_heads_q % num_heads_kv:
        raise ValueError(
            f"q has {num_heads_q} heads: it must be a multiple of the {num_heads_kv} KV heads of the pages"
        )
    return num_heads_q // num_heads_kv


def _check(q: Any, pages: Pages, softcap: float, keep_scores: int) -> int:
    """Return the group size of a call that makes sense."""
    device_of(q, "q")
    shapes = (tuple(x.shape) for x in (q, pages.rung, pages.k_mean, pages.k_shift, pages.exponent))
    return _checked_group(*shapes, tuple(pages.layouts), float(softcap), keep_scores)


@lru_cache(maxsize=256)
def _checked_group(
    q: tuple[int, ...],
    rung: tuple[int, ...],
    k_mean: tuple[int, ...],
    k_shift: tuple[int, ...],
    exponent: tuple[int, ...],
    layouts: tuple[PageLayout, ...],
    softcap: float,
    keep_scores: int,
) -> int:
    head_dim = layouts[0].head_dim
    sizes = match_shapes(
        {
            "q": (q, ("B", "Sq", "Hq", "D")),
            "pages.rung": (rung, ("B", "Hkv", "entries")),
            "pages.k_mean": (k_mean, ("B", "Hkv", head_dim)),
            "pages.k_shift": (k_shift, ("B", "Hkv", head_dim // 2)),
            "pages.exponent": (exponent, ("B", "Hkv", 2)),
        }
    )
    packed = [layout for layout in layouts if layout.bits_k != 16]
    if len({layout.in_blocks for layout in packed}) > 1:
        raise ValueError(
            f"pages.layouts keep packed keys in profiles and in widths, {[x.bits_k for x in packed]}: all "
            "must be one or the other, so write width 8 as the profile (8, 8, 8, 8)"
        )
    if sizes["D"] != head_dim:
        raise ValueError(f"q has head_dim {sizes['D']}, but the pages hold tokens of head_dim {head_dim}")
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")
    if not 0 <= keep_scores <= sizes["Sq"]:
        raise ValueError(f"keep_scores must be from 0 to the {sizes['Sq']} query rows, got {keep_scores}")
    return _group_size(sizes["Hq"], sizes["Hkv"])


def _window_of(window: tuple[int, int], first_position: Any, batch: int) -> Window | None:
    """Return what a window means for the launchers; None if nothing is hidden."""
    left, _ = sides_of_window(window)
    if (left == -1) != (first_position is None):
        raise ValueError(
            f"window={tuple(window)} {'comes with' if left == -1 else 'needs'} first_position: give both, or "
            "neither"
        )
    if left == -1:
        return None
    if dtype_name(first_position, "first_position") != "int32" or tuple(first_position.shape) != (batch,):
        raise TypeError(
            f"first_position must be int32 of shape ({batch},), one position for each row of the batch, got "
            f"{dtype_name(first_position, 'first_position')} {tuple(first_position.shape)}"
        )
    return Window(left, first_position)
