"""Measure the quality of a compressed cache: a model reads real text through it, prediction by prediction.

Protocol: windows of 2,048 tokens are fed in chunks of 64 with the cache kept, so that every token is read
from the cache as in a real decoder and only the running chunk is exact. Predictions at positions from 1,024
on are scored against those of the same model with a dense float32 cache: Kullback-Leibler divergence
KL(full precision || cache) of the next-token distributions, perplexity, and how often the most probable
token is the same. Changes of perplexity below half a percent are noise on a few thousand tokens; the
divergence is what ranks caches.

All caches of a comparison advance together, chunk by chunk, so the full-precision predictions are made once
and never stored. Tokens of one chunk are not independent, so a standard error comes from the means of
chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import BudgetError, needs_extra
from kvlab.lab.quality.plan import Protocol
from kvlab.lab.quality.scores import FULL_PRECISION, Blocks, Score
from kvlab.lab.quality.text import Windows

with needs_extra("hf", "kvlab.lab.quality.measure"):
    import torch
    from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

    from kvlab.integrations.cache_bytes import layer_nbytes, tensors
    from kvlab.integrations.reading import read_chunks
    from kvlab.integrations.transformers import KVLabCache

__all__ = ["Case", "Observe", "evaluate", "full_precision", "held_bytes"]

Observe = Callable[[int, str, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A cache to evaluate."""

    name: str  # unlike that of any other case of the run
    kind: str  # what it is compared as, for example "uniform" or "mixed"
    make: Callable[[], Cache]  # returns a new, empty one
    budget: float | None = None  # fraction of the float16 bytes that it may take


def full_precision(config: PreTrainedConfig) -> Case:
    """The dense cache of the model's own dtype that all others are compared with."""
    return Case(FULL_PRECISION, FULL_PRECISION, lambda: DynamicCache(config=config))


def evaluate(
    model: PreTrainedModel,
    windows: Windows,
    cases: Sequence[Case],
    protocol: Protocol,
    *,
    progress: Callable[[str], None] = lambda name: None,
    observe: Observe = lambda first, name, begin, logits: None,
    give_up: Callable[[str, BudgetError], None] | None = None,
) -> list[Score]:
    """Read windows through every cache and through a dense one; score all against the dense one.

    The model has an attention function that reads the caches of all cases ("kvlab_packed"). Windows have
    `protocol.length + 1` tokens: the last one is only predicted. Full precision stands first in the result,
    then the cases in their order.

    `progress` is told the name of the case after each of its chunks, `plan.num_chunks(...)` times in all.
    `observe` is shown every scored chunk: number of the first of the windows that are read at once, name of
    the case, where in the windows the chunk begins, and logits (windows, chunk, vocabulary). `give_up` is
    told the name of a case that its budget does not hold, and the error; the case is read no further and gets
    no score. Without it such a BudgetError ends the comparison. A cache of more bytes than its budget is a
    RuntimeError.
    """
    everything = [full_precision(model.config), *cases]
    if len({case.name for case in everything}) < len(everything):
        raise ValueError(f"cases must have different names, not {[case.name for case in everything]}")
    if windows.tokens.shape[1] != protocol.length + 1:
        raise ValueError(
            f"windows have {windows.tokens.shape[1]} tokens; the protocol needs {protocol.length + 1}"
        )
    runs = [_Run(case) for case in everything]
    with torch.inference_mode():
        for first in range(0, len(windows.tokens), protocol.rows):
            batch = windows.tokens[first : first + protocol.rows]
            _read_batch(model, batch, runs, protocol, progress, partial(observe, first), give_up)
    return [run.score(list(windows.starts)) for run in runs]


def _read_batch(
    model: PreTrainedModel,
    windows: NDArray[np.int64],
    runs: list[_Run],
    protocol: Protocol,
    progress: Callable[[str], None],
    observe: Callable[[str, int, torch.Tensor], None],
    give_up: Callable[[str, BudgetError], None] | None,
) -> None:
    """Read the next windows through all runs; those that are given up leave the list."""
    tokens = torch.from_numpy(windows).to(model.device)
    for run in runs:
        run.begin(model, tokens[:, :-1], protocol)
    for begin in range(0, protocol.length, protocol.chunk):
        end = begin + protocol.chunk
        scored = begin >= protocol.scored_from
        truth = None
        for run in list(runs):
            start = time.perf_counter()
            try:
                logits = next(run.logits)
            except BudgetError as error:
                if give_up is None:
                    raise
                runs.remove(run)
                give_up(run.case.name, error)
                continue
            if logits.is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            run.check_budget()
            if scored:
                truth = truth or _Truth(logits, tokens[:, begin + 1 : end + 1])
                run.add(truth, logits, seconds)
                observe(run.case.name, begin, logits)
            progress(run.case.name)
    dense = runs[0].cache
    elements = sum(tensor.numel() for layer in dense.layers for tensor in tensors(vars(layer)))
    for run in runs:
        run.end(len(windows), elements)


class _Truth:
    """What full precision says of a chunk, and the tokens that follow in the text."""

    def __init__(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        self.log_p = logits.float().log_softmax(-1)
        self.p, self.best, self.targets = self.log_p.exp(), self.log_p.argmax(-1), targets[..., None]


class _Run:
    """One case on its way through all windows."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.cache = case.make()
        self.nbytes, self.elements, self.rows, self.scored, self.seconds = 0, 0, 0, 0, 0.0
        self.pages: dict[str, int] = {}
        self.kl: Blocks = []
        self.nll: Blocks = []
        self.agreement: Blocks = []

    def begin(self, model: PreTrainedModel, tokens: torch.Tensor, protocol: Protocol) -> None:
        self.cache = self.case.make()
        parts = read_chunks(model, tokens, self.cache, chunk=protocol.chunk, logits_from=protocol.scored_from)
        self.logits = (logits for _, logits in parts)
        self.chunks: list[torch.Tensor] = []  # (rows, 3) each

    def check_budget(self) -> None:
        packed = self.cache.packed if isinstance(self.cache, KVLabCache) else None
        if packed is not None and packed.budget_nbytes is not None and packed.nbytes > packed.budget_nbytes:
            raise RuntimeError(
                f"{self.case.name!r} takes {packed.nbytes} bytes; its budget is {packed.budget_nbytes}"
            )

    def add(self, truth: _Truth, logits: torch.Tensor, seconds: float) -> None:
        means = []
        for row, row_logits in enumerate(logits):  # row by row, so that what is between stays in the caches
            log_q = row_logits.float().log_softmax(-1)
            nll = -log_q.gather(-1, truth.targets[row])
            same = (log_q.argmax(-1) == truth.best[row]).float()
            kl = log_q.neg_().add_(truth.log_p[row]).mul_(truth.p[row]).sum(-1)
            means.append(torch.stack([kl.mean(), nll.mean(), same.mean()]))
        self.chunks.append(torch.stack(means))
        self.scored += logits.shape[0] * logits.shape[1]
        self.seconds += seconds

    def end(self, rows: int, elements: int) -> None:
        self.nbytes += held_bytes(self.cache)
        self.elements += elements
        self.rows += rows
        means = torch.stack(self.chunks, 2)
        for number, blocks in enumerate((self.kl, self.nll, self.agreement)):
            blocks += [[float(f"{x:.6g}") for x in row] for row in means[:, number].tolist()]
        if isinstance(self.cache, KVLabCache) and self.cache.packed is not None:
            for width, counts in self.cache.packed.allocation().items():
                self.pages[width] = self.pages.get(width, 0) + int(counts.sum())

    def score(self, starts: list[int]) -> Score:
        total = sum(self.pages.values())
        return Score(
            name=self.case.name,
            kind=self.case.kind,
            budget=self.case.budget,
            starts=starts,
            nbytes=round(self.nbytes / self.rows),
            bits_per_element=8 * self.nbytes / self.elements,
            tokens_per_second=self.scored / self.seconds,
            widths={width: count / total for width, count in self.pages.items() if count},
            kl=self.kl,
            nll=self.nll,
            agreement=self.agreement,
        )


def held_bytes(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds: codes, scales, tables, exact tokens.

    Examples
    --------
    >>> cache = DynamicCache()
    >>> k, v = cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    >>> held_bytes(cache)
    192
    """
    return cache.nbytes if isinstance(cache, KVLabCache) else layer_nbytes(cache.layers)
