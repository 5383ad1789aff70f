"""Training of transformers models with a sequence divided among ranks: ``kvlab.parallel.enable(model)``.

All ranks call the model with the same whole batch. Each takes its early and late chunks of every sequence,
with their positions and with labels that were shifted before they were cut. Attention gathers keys
(kvlab/parallel); the rest of a transformer works token by token. The loss that a rank returns is that of all
tokens. Its gradient is summed over the ranks, parameter by parameter, before it is accumulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.errors import needs_extra

with needs_extra("hf", "kvlab.parallel.enable"):
    import torch
    import torch.distributed as dist
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvlab.arguments import whole_number
from kvlab.parallel.collectives import group_of, rank_and_size
from kvlab.parallel.functions import extract_local, position_ids, zigzag_llama3_flash_attn_varlen_func

__all__ = ["ATTENTION", "Enabled", "enable"]

ATTENTION = "kvlab_context_parallel"
IGNORED = -100
"""Label of a token that does not count, as transformers has it."""

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sharded:
    """How the batch of a call is divided; the attention function gets it among the keyword arguments."""

    group: Any
    batch: int
    seqlen: int
    stride: int

    @property
    def bounds(self) -> list[int]:
        """Prefix sums of the lengths of whole sequences."""
        return [n * self.seqlen for n in range(self.batch + 1)]

    def local(self, x: Tensor) -> Tensor:
        """This rank's columns of (batch, seqlen, ...)."""
        rows: Tensor = extract_local(x.flatten(0, 1), self.bounds, group=self.group)
        return rows.view(self.batch, -1, *x.shape[2:])


class Enabled:
    """What `enable` did to a model; `remove` undoes it."""

    def __init__(self, model: PreTrainedModel, group: Any, stride: int | None) -> None:
        self._model, self._group, self._stride = model, group_of(group), stride
        self._before = model.config._attn_implementation
        self._forward = model.forward
        self._ranks = rank_and_size(group)[1]
        model.set_attn_implementation(ATTENTION)  # warns and does nothing where a model cannot
        if model.config.get_text_config()._attn_implementation != ATTENTION:
            raise NotImplementedError(
                f"{type(model).__name__} does not take its attention function from "
                "transformers.AttentionInterface"
            )
        model.forward = self._forward_divided
        parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        self._hooks = [p.register_hook(self._sum) for p in parameters]

    def remove(self) -> None:
        """Give the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        self._model.forward = self._forward
        self._model.set_attn_implementation(self._before)

    def _sum(self, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def _forward_divided(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The model's forward on this rank's tokens of a batch (batch, seqlen) that all ranks have."""
        if attention_mask is not None and not bool((attention_mask == 1).all()):
            raise NotImplementedError(
                "attention_mask has padding: with context parallelism sequences of a batch have one length"
            )
        for name in ("past_key_values", "inputs_embeds", "position_ids"):
            if options.get(name) is not None:
                raise NotImplementedError(
                    f"{name}: with context parallelism pass input_ids of whole sequences"
                )
        batch, seqlen = input_ids.shape
        if seqlen % (2 * self._ranks):
            raise ValueError(
                f"input_ids has {seqlen} tokens a sequence: on {self._ranks} ranks it must be a multiple of "
                f"{2 * self._ranks}; pad it, with labels {IGNORED} there"
            )
        config = self._model.config.get_text_config()
        stride = self._stride or getattr(config, "num_key_value_heads", config.num_attention_heads)
        shard = Sharded(self._group, batch, seqlen, stride)
        positions = position_ids(shard.bounds, input_ids, group=self._group).view(batch, -1)
        options |= {"position_ids": positions, "use_cache": False, "context_parallel": shard}
        if labels is None:
            return self._forward(input_ids=shard.local(input_ids), **options)
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        options |= {"shift_labels": shard.local(shifted), "num_items_in_batch": (shifted != IGNORED).sum()}
        result = self._forward(input_ids=shard.local(input_ids), labels=shard.local(labels), **options)
        total = result.loss.detach().clone()
        dist.all_reduce(total, group=self._group)
        result.loss = result.loss + (total - result.loss.detach())
        return result


def enable(model: PreTrainedModel, group: Any = None, *, heads_k_stride: int | None = None) -> Enabled:
    """Divide every sequence that a transformers model is called with among the ranks of a process group.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only model that takes its attention function from `transformers.AttentionInterface`, with
        the same weights on all ranks. All ranks call it with the same ``input_ids`` (batch, seqlen) and
        ``labels``; seqlen is a multiple of 2 * ranks. What it returns: the loss of all tokens, and the logits
        of this rank's (`kvlab.parallel.extract_local` says which they are).
    group : process group or DeviceMesh of one axis, optional
        All ranks if not given. With data parallelism beside it, the ranks that share a batch.
    heads_k_stride : int, optional
        KV heads that are gathered at once; all if not given.

    Returns
    -------
    Enabled
        Its ``remove()`` gives the model back as it was.

    Raises
    ------
    TypeError
        If model is no transformers model.
    RuntimeError
        If torch.distributed has not been initialised.
    NotImplementedError
        If the model has an attention function of its own.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; it must be a transformers.PreTrainedModel")
    stride = None if heads_k_stride is None else whole_number(heads_k_stride, "heads_k_stride", 1)
    return Enabled(model, group, stride)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    context_parallel: Sharded | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (batch, heads, tokens of this rank, head_dim)."""
    if context_parallel is None:
        raise RuntimeError(f"{ATTENTION!r} works in models that kvlab.parallel.enable was called with")
    for name in ("softcap", "s_aux", "sinks"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: not computed with context parallelism")
    shard = context_parallel
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    local = [bound // rank_and_size(shard.group)[1] for bound in shard.bounds]
    out = zigzag_llama3_flash_attn_varlen_func(
        q, k, v, local, shard.bounds, shard.seqlen, shard.seqlen, min(shard.stride, key.shape[1]),
        dropout_p=dropout, softmax_scale=scaling, causal=True, group=shard.group,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
    )  # fmt: skip
    return out.unflatten(0, (shard.batch, -1)), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, lambda *arguments, **options: None)
