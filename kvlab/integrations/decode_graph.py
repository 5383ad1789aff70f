"""Decode steps of a model with a packed cache, replayed from CUDA graphs.

A decode step of transformers launches about twenty kernels a layer one by one, which takes the host several
times as long as the GPU takes to run them. Lengths and page tables of a packed cache lie on the GPU, so a
step of the whole model can be recorded once and replayed. Two recordings serve all steps: one of the steps
that collect attention mass for the importance of tokens, one of the others. The host reserves memory for
more tokens between replays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from typing import Any

from kvlab.errors import needs_extra
from kvlab.integrations.patching import by_name, replaced

with needs_extra("hf", "kvlab.integrations.decode_graph"):
    import torch
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from kvlab.integrations.transformers import KVLabCache

__all__ = ["DecodeGraph", "replayed_steps"]

_KNOWN = {"input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "return_dict"}
"""Arguments of a forward pass that a recorded step supports."""


class DecodeGraph:
    """Steps of one token a row.

    The first step of each kind runs as usual, the second is recorded; from then on steps are replayed. A
    longer sequence than the cache has room for moves its memory, and steps are recorded again: give the cache
    `max_seqlen`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        On a GPU, with the attention function "kvlab_packed". Its forward pass must not wait for the GPU in a
        step of one token.
    cache : KVLabCache
        That holds the prompt.

    Raises
    ------
    ValueError
        If the cache is empty, not on a GPU, or not all layers of the model are packed.

    Examples
    --------
    ::

        cache = KVLabCache(model.config, budget="2GiB", max_seqlen=32768)
        logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        step = DecodeGraph(model, cache)
        for _ in range(100):
            logits = step(logits.argmax(-1))
    """

    def __init__(self, model: Any, cache: KVLabCache) -> None:
        packed = cache.packed
        if packed is None or not packed.on_gpu or not packed.seqlen:
            raise ValueError("cache must hold a prompt on a GPU: call the model with it first")
        if len(cache.layers) != packed.num_layers:
            raise ValueError(
                f"{len(cache.layers) - packed.num_layers} layers are not packed (linear attention "
                f"or the like); their caches grow by copies, which a CUDA graph cannot record"
            )
        self._model, self._cache, self._packed = model, cache, packed
        self._recorded: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, torch.Tensor] | None] = {}
        self._ids = torch.zeros(packed.batch, 1, dtype=torch.long, device=model.device)
        self._positions = torch.zeros_like(self._ids)
        # Masks of four dimensions pass through transformers as they are; the cache looks at none here.
        self._mask = torch.ones(packed.batch, 1, 1, 1, dtype=torch.bool, device=model.device)

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Step with one token a row.

        Parameters
        ----------
        input_ids : (batch, 1) int64 tensor
        position_ids : (batch, 1) int64 tensor, optional
            Default: behind the tokens so far, padding included; with padding pass them.

        Returns
        -------
        (batch, 1, vocabulary) tensor
            Logits; the next call writes over them.

        Raises
        ------
        ValueError
            If the shapes are others.
        BudgetError
            If the token does not fit; the cache is as it was.
        """
        if not self.serves(self._cache):
            raise ValueError("the cache was reset or has other rows now: make a new DecodeGraph")
        for name, tensor in (("input_ids", input_ids), ("position_ids", position_ids)):
            if tensor is not None and tensor.shape != self._ids.shape:
                raise ValueError(f"{name} must be {tuple(self._ids.shape)}, got {tuple(tensor.shape)}")
        self._ids.copy_(input_ids)
        if position_ids is None:
            self._positions.fill_(self._packed.seqlen)
        else:
            self._positions.copy_(position_ids)
        with self._cache.unmasked():
            return self._step()

    def serves(self, cache: Any) -> bool:
        """Whether the next step of a cache can be one of these."""
        same = cache is self._cache and cache.packed is self._packed
        return same and self._packed.batch == len(self._ids)

    def _step(self) -> torch.Tensor:
        kind = self._packed.prepare()
        if kind not in self._recorded:
            # Graphs for memory that the cache has given back serve no step any more and hold some.
            self._recorded = {
                other: graph for other, graph in self._recorded.items() if other[:1] == kind[:1]
            }
            self._recorded[kind] = None
            return self._forward()
        recorded = self._recorded[kind]
        if recorded is None:
            recorded = self._recorded[kind] = self._record()
        graph, logits = recorded
        graph.replay()
        self._cache.replayed()
        return logits

    def _record(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with self._cache.recording(), torch.cuda.graph(graph):
            logits = self._forward()
        return graph, logits

    def _forward(self) -> torch.Tensor:
        out = self._model(
            input_ids=self._ids,
            position_ids=self._positions,
            attention_mask=self._mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        return out.logits  # type: ignore[no-any-return]


@contextmanager
def replayed_steps(model: Any) -> Iterator[None]:
    """Let a model replay its steps of one token a row inside a `with` block, in `generate`, too.

    Steps of several tokens, with other caches, with masks that are not (batch, tokens) or with more arguments
    run as usual.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As for `DecodeGraph`.
    """
    with replaced(model, "forward", partial(_replaying, model)):
        yield


def _replaying(model: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    latest: DecodeGraph | None = None
    inside = False

    parameters = signature(forward)

    @wraps(forward)
    def replaying(*args: Any, **kwargs: Any) -> Any:
        nonlocal latest, inside
        kwargs = by_name(parameters, args, kwargs)
        if inside or not _is_plain_step(kwargs):
            return forward(**kwargs)
        cache, ids, mask = kwargs["past_key_values"], kwargs["input_ids"], kwargs.get("attention_mask")
        cache.check_step(mask)
        if latest is None or not latest.serves(cache):
            latest = DecodeGraph(model, cache)
        inside = True
        try:
            logits = latest(ids, kwargs.get("position_ids"))
        finally:
            inside = False
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    return replaying


def _is_plain_step(kwargs: dict[str, Any]) -> bool:
    """Whether a forward pass is a step of one token a row of a packed cache that holds some."""
    cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids")
    if not isinstance(cache, KVLabCache) or ids is None or ids.shape[1:] != (1,) or torch.is_grad_enabled():
        return False
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        return False
    if positions is not None and positions.shape != ids.shape:
        return False
    more = {name for name, value in kwargs.items() if value is not None} - _KNOWN
    if not more <= {"logits_to_keep"} or kwargs.get("logits_to_keep", 1) not in (0, 1):
        return False
    packed = cache.packed
    return kwargs.get("use_cache") is not False and packed is not None and packed.on_gpu and packed.seqlen > 0
