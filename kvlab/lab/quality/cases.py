"""The caches that the demo compares: mixed and uniform widths, controls at equal bytes, transformers' own.

A control has the bytes of a mixed cache and lacks one part of it: random scores, positions alone, equal
widths, or no protection of the first and the newest tokens. The quantised caches of transformers have no
budget; they run with the options that serve them best and with their defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import MissingExtraError, needs_extra
from kvlab.lab.quality.measure import Case
from kvlab.lab.quality.plan import CACHE_DTYPE
from kvlab.ladder import BITS, Bits

with needs_extra("hf", "kvlab.lab.quality.cases"):
    from transformers import PreTrainedConfig, QuantizedCache
    from transformers.utils.import_utils import is_hqq_available, is_optimum_quanto_available

    from kvlab.integrations.transformers import KVLabCache

__all__ = ["BUDGETS", "controls", "held", "hqq", "mixed", "opponents", "quanto", "require", "uniform"]

BUDGETS = (0.17, 0.2, 0.3, 0.5)
"""Budgets of the mixed caches, as fractions of the float16 bytes."""
Floats = NDArray[np.float32]


def uniform(config: PreTrainedConfig, widths: Sequence[int] = (8, 4, 3, 2)) -> list[Case]:
    """All tokens at one width, without a budget."""
    return [_case(config, f"uniform {width}", "uniform", bits=(width,)) for width in widths]


def mixed(config: PreTrainedConfig, length: int, budgets: Sequence[float] = BUDGETS) -> list[Case]:
    """Mixed widths under budgets that are fractions of the float16 bytes of `length` tokens."""
    return [_case(config, f"mixed {budget:g}", "mixed", budget, plan_length=length) for budget in budgets]


def held(
    config: PreTrainedConfig,
    budgets: Sequence[float] = BUDGETS,
    *,
    bits: Bits = BITS,
    importance: str = "attention",
    plan_length: int = 1,
) -> list[Case]:
    """Mixed widths whose budget holds at every length from `plan_length` on, not only at the last one."""
    options: dict[str, Any] = {"bits": bits, "importance": importance, "plan_length": plan_length}
    return [_case(config, f"held {budget:g}", "held", budget, **options) for budget in budgets]


def opponents(config: PreTrainedConfig, budget: float) -> list[Case]:
    """What a budget is compared with: one width for all tokens, without and with a residual window.

    Of widths and of splits between K and V those are taken whose codes have at most 16 times `budget` bits an
    element, the largest of each kind. Their bytes are not quite equal: scales, positions and the window come
    on top, so say them.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> [case.name for case in opponents(LlamaConfig(num_hidden_layers=1), 0.27)]
    ['one width 4', 'one width 3, residual 64', 'keys 4, values 3']
    """
    most = 16 * budget
    ladders = {
        "one width {}": [(width, width) for width in (2, 3, 4, 8)],
        "one width {}, residual 64": [(width, width) for width in (2, 3, 4, 8)],
        "keys {}, values {}": [(3, 2), (4, 2), (4, 3), (8, 4)],
    }
    found = []
    for name, rungs in ladders.items():
        window = 64 if "residual" in name else 0
        fitting = [rung for rung in rungs if sum(rung) / 2 <= most - (0.6 if window else 0)]
        keys, values = fitting[-1] if fitting else rungs[0]
        bits = (f"k{keys}v{values}",)
        found.append(_case(config, name.format(keys, values), "opponent", bits=bits, residual=window))
    return found


def controls(config: PreTrainedConfig, length: int, budget: float) -> list[Case]:
    """Caches with the bytes of a mixed one and something missing; each should come out worse."""
    missing: dict[str, dict[str, Any]] = {
        "random scores": {"importance": RandomScores()},
        "recency only": {"importance": "recency"},
        "equal widths": {"allocator": "uniform"},
        "heavy hitters only": {"importance": summed_attention, "sink": 0},
    }
    return [
        _case(config, f"{name} {budget:g}", "control", budget, plan_length=length, **options)
        for name, options in missing.items()
    ]


def hqq(config: PreTrainedConfig) -> list[Case]:
    """The quantised cache of transformers with hqq; its 3 bits do not run."""
    return [
        _quantized(config, f"hqq {bits}", backend="hqq", nbits=bits, axis_key=1, axis_value=1)
        for bits in (8, 4, 2)
    ]


def quanto(config: PreTrainedConfig) -> list[Case]:
    """The quantised cache of transformers with quanto: keys per channel, which is best, and defaults."""
    return [
        _quantized(config, f"quanto {bits}{name}", backend="quanto", nbits=bits, **options)
        for bits in (4, 2)
        for name, options in ((" channel", {"axis_key": -1}), ("", {}))
    ]


def _quantized(config: PreTrainedConfig, name: str, **options: Any) -> Case:
    return Case(name, "transformers", lambda: QuantizedCache(config=config, **options))


def require(library: str) -> None:
    """Check that "hqq" or "quanto" is there; the error says what to install."""
    found, name, requirement = {
        "hqq": (is_hqq_available, "hqq", "hqq==0.2.8.post1"),
        "quanto": (is_optimum_quanto_available, "optimum-quanto", "optimum-quanto==0.2.7 ninja"),
    }[library]
    if not found():
        raise MissingExtraError(f"{name} is not installed: pip install {requirement}", name=name)


def _case(
    config: PreTrainedConfig, name: str, kind: str, budget: float | None = None, **options: Any
) -> Case:
    """A packed cache with or without a budget."""
    return Case(name, kind, lambda: KVLabCache(config, dtype=CACHE_DTYPE, budget=budget, **options), budget)


class RandomScores:
    """Scores of the usual sizes on the wrong tokens: each keeps what another token of its step got first."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(
        self, previous: Floats | None, observed: Floats, positions: NDArray[np.int64], seqlen: int
    ) -> Floats:
        return self._rng.permuted(observed, axis=-1) if previous is None else previous


def summed_attention(
    previous: Floats | None, observed: Floats, positions: NDArray[np.int64], seqlen: int
) -> Floats:
    """Attention summed over all collections, as in H2O (Zhang et al. 2023): old heavy hitters never fall."""
    return observed if previous is None else previous + observed
