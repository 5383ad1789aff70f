"""Decode steps that repeat: the short way of the host to the two launches of a layer.

Checks and Python's other work take longer than the launches, a layer and token. So of arrays that lie as
those of the last step of a layer nothing is asked again: three addresses, one allocation, two launches.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from kvlab.arrays import CudaView
from kvlab.cache.cuda.calls import Repeated

if TYPE_CHECKING:
    from kvlab.cache.cuda.layers import DeviceCache

__all__ = ["remember", "repeat"]


def remember(
    cache: DeviceCache, layer: int, layout: Hashable, arrays: list[Any], scale: float, softcap: float
) -> None:
    """Let `repeat` serve arrays that lie as these (B, S, H, D), and that it is given the `layout` of."""
    last = cache.repeated[layer]
    if last is not None and last.layout == layout:
        return
    steps, views = arrays[0].shape[1], [cache.executor.view(x, "x") for x in arrays]
    calls = cache.calls.step(layer, arrays[0], steps, scale, softcap, cache.observed_as(layer), False)
    cache.repeated[layer] = Repeated(layout, steps, views[0].shape, [view[1:] for view in views], calls)


def repeat(cache: DeviceCache, layer: int, layout: Hashable, q: Any, k: Any, v: Any) -> Any:
    """A step like one before, on tensors of torch without padding; None: it is none, so call `step`.

    Steps that lack room or that collect attention mass are none.
    """
    last = cache.repeated[layer]
    if last is None or last.layout != layout or cache.unsettled:
        return None
    steps = last.steps
    if cache.room[layer] < steps or cache.collects(layer, steps) or not cache.lengths[layer]:
        return None
    (attend, append, lse), (of_q, of_k, of_v) = last.calls, last.views
    query = CudaView(q.data_ptr(), *of_q)
    key, value = CudaView(k.data_ptr(), *of_k), CudaView(v.data_ptr(), *of_v)
    if (query.pointer | key.pointer | value.pointer) & 3:
        return None
    out, stream = q.new_empty(last.shape), cache.executor.stream(q)
    address = out.data_ptr()
    attend(query, address, lse.pointer, stream)
    append(query, key, value, 0, address, lse.pointer, True, stream)
    cache.lengths[layer] += steps
    cache.since[layer] += steps
    cache.room[layer] -= steps
    return out
