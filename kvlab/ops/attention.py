"""Attention over parts of the keys, put together again.

Softmax over all keys is a weighted mean of softmaxes over disjoint parts, with weights known from the parts'
log-sum-exps. So attention may be computed part by part (pages of different widths, splits of a long context,
the shards of a ring of devices) and merged with no error but rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arrays import Array, ArrayT, common_device, dtype_name, like_first, match_shapes, to_numpy_view
from kvlab.reference import attention as reference
from kvlab.registry import Row, choose, register

__all__ = ["merge_attention"]

_FLOATS = ("float16", "bfloat16", "float32")

# Pattern of an out and of its lse, by the number of dimensions of the out.
_LAYOUTS = {
    4: (("B", "Sq", "Hq", "D"), ("B", "Hq", "Sq")),
    3: (("total_q", "Hq", "D"), ("Hq", "total_q")),
}

register(
    Row("merge_attention", "cpu", "kvlab.ops.attention:_merge_cpu", {"dtype": _FLOATS}),
    Row("merge_attention", "reference", "kvlab.ops.attention:_merge_reference", {"dtype": _FLOATS}),
)


def merge_attention(
    outs: Sequence[ArrayT], lses: Sequence[Array], *, backend: str | None = None
) -> tuple[ArrayT, ArrayT]:
    """Merge attention over disjoint parts of the keys into attention over all of them.

    With lse = log sum_i exp lse_i, out = sum_i exp(lse_i - lse) out_i: the merge is exact up to rounding,
    whatever the parts, their order and their grouping [1]_. A part in which a row saw no key (lse_i = -inf)
    adds nothing to that row, whatever its out_i holds; a row that saw no key in any part gives out 0 and lse
    -inf.

    Parameters
    ----------
    outs : sequence of arrays
        Outputs of the parts, each (batch, seqlen_q, num_heads_q, head_dim) or (total_q, num_heads_q,
        head_dim); float16, bfloat16 or float32, all the same.
    lses : sequence of arrays
        Their log-sum-exps, each float32, (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q).
    backend : str, optional
        ``"cpu"`` computes in float32, ``"reference"`` in float64; by default the fastest on the arrays'
        device.

    Returns
    -------
    out : array
        Shape and dtype of one of the outs; kind and device of the first.
    lse : array
        float32, shape of one of the lses.

    Raises
    ------
    ValueError
        If there is no part, outs and lses differ in number, shapes do not fit, or arrays are on different
        devices.
    TypeError
        If an argument is no array, or dtypes are not as above.
    NotImplementedError
        If no backend on the arrays' device supports the call.

    References ---------- .. [1] Milakov and Gimelshein, "Online normalizer calculation for softmax",
    arXiv:1805.02867, 2018, section 3.1.

    Examples
    --------
    A part of one key and a part of three, all scores zero: the weights are 1/4 and 3/4.

    >>> import kvlab
    >>> outs = [np.full((1, 1, 1), value, np.float16) for value in (4, 8)]
    >>> lses = [np.log(np.full((1, 1), keys, np.float32)) for keys in (1, 3)]
    >>> out, lse = kvlab.merge_attention(outs, lses)
    >>> out.item(), round(np.exp(lse.item()))
    (7.0, 4)
    """
    _check_parts(outs, lses)
    device = common_device(_named("outs", outs) | _named("lses", lses))
    row = choose("merge_attention", device.kind, backend, dtype=dtype_name(outs[0]))
    merged: tuple[ArrayT, ArrayT] = row.launch(outs, lses)
    return merged


def _named(name: str, arrays: Sequence[Array]) -> dict[str, Any]:
    return {f"{name}[{i}]": array for i, array in enumerate(arrays)}


def _check_parts(outs: Sequence[Array], lses: Sequence[Array]) -> None:
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts, lses {len(lses)}: pass equally many, at least one")
    named_outs, named_lses = _named("outs", outs), _named("lses", lses)
    kind = dtype_name(outs[0], "outs[0]")
    for name, array in (named_outs | named_lses).items():
        wanted = kind if name in named_outs else "float32"
        if dtype_name(array, name) != wanted:
            raise TypeError(f"{name} has dtype {dtype_name(array)}; it must be {wanted}")
    shape = tuple(named_outs["outs[0]"].shape)
    if len(shape) not in _LAYOUTS:
        raise ValueError(
            f"outs[0] has shape {shape}; it must have dimensions (B, Sq, Hq, D) or (total_q, Hq, D)"
        )
    out_pattern, lse_pattern = _LAYOUTS[len(shape)]
    match_shapes(
        {name: (out.shape, out_pattern) for name, out in named_outs.items()}
        | {name: (lse.shape, lse_pattern) for name, lse in named_lses.items()}
    )


def _views(name: str, arrays: Sequence[Array]) -> list[NDArray[Any]]:
    return [to_numpy_view(array, name) for name, array in _named(name, arrays).items()]


def _merge_reference(outs: Sequence[ArrayT], lses: Sequence[Array]) -> tuple[ArrayT, ArrayT]:
    out_views = _views("outs", outs)
    out, lse = reference.merge_attention(out_views, _views("lses", lses))
    return like_first(out.astype(out_views[0].dtype), outs[0]), like_first(lse.astype(np.float32), outs[0])


@np.errstate(divide="ignore", invalid="ignore")
def _merge_cpu(outs: Sequence[ArrayT], lses: Sequence[Array]) -> tuple[ArrayT, ArrayT]:
    """Merge in float32, part by part, so that no more than two widened parts exist at once."""
    out_views, lse_views = _views("outs", outs), np.stack(_views("lses", lses))
    largest = lse_views.max(axis=0)
    largest = np.where(largest == -np.inf, np.float32(0), largest)  # rows without keys: exp(-inf - 0) is 0
    weights = np.exp(lse_views - largest)
    total = weights.sum(axis=0)
    weights /= np.where(total == 0, np.float32(1), total)
    merged = np.zeros(out_views[0].shape, dtype=np.float32)
    for weight, out in zip(np.swapaxes(weights, -1, -2)[..., None], out_views, strict=True):
        merged += np.where(weight == 0, np.float32(0), weight * out.astype(np.float32))
    lse = largest + np.log(total)
    return like_first(merged.astype(out_views[0].dtype), outs[0]), like_first(lse, outs[0])
