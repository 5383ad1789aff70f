"""The next token from logits: greedy, or drawn at a temperature from the likeliest tokens.

A draw depends on the seed, the row and the number of its tokens, and on nothing else: neither on other
rows of the batch nor on what was drawn before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import number, whole_number

__all__ = ["Sampling"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes
    ----------
    temperature : float
        0: the likeliest token, of equals the first. Otherwise logits are divided by it.
    top_k : int
        Draw among the `top_k` likeliest tokens; 0: among all.
    top_p : float
        Then among the fewest of them whose probabilities reach `top_p` of theirs together.
    seed : int

    Raises
    ------
    ValueError, TypeError
        If a value is none of those.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        number(self.temperature, "temperature", 0)
        whole_number(self.top_k, "top_k", 0)
        number(self.top_p, "top_p", 0, 1)
        whole_number(self.seed, "seed", 0, (1 << 64) - 1)

    def choose(self, logits: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choose a token for each row.

        Parameters
        ----------
        logits : (batch, vocabulary)
        positions : int64, (batch,)
            Number of tokens of each row so far.

        Returns
        -------
        int64, (batch,)

        Examples
        --------
        >>> logits = np.log(np.array([[0.1, 0.6, 0.3]], np.float32))
        >>> Sampling().choose(logits, np.array([7])).tolist()
        [1]
        >>> two = Sampling(temperature=1.0, top_k=2)
        >>> drawn = [int(two.choose(logits, np.array([i]))[0]) for i in range(1000)]
        >>> drawn.count(0), 600 < drawn.count(1) < 733
        (0, True)
        """
        if self.temperature == 0:
            return np.asarray(np.argmax(logits, axis=-1), np.int64)
        return np.array([self._draw(row, i, int(positions[i])) for i, row in enumerate(logits)], np.int64)

    def _draw(self, logits: NDArray[Any], row: int, position: int) -> int:
        exact = logits.astype(np.float64)
        order = np.argsort(-exact, kind="stable")
        if self.top_k:
            order = order[: self.top_k]
        with np.errstate(over="ignore"):  # at the smallest temperatures
            mass = np.exp((exact[order] - exact[order[0]]) / self.temperature)
        total = np.cumsum(mass)
        kept = int(np.searchsorted(total, self.top_p * total[-1])) + 1
        total = total[: min(kept, len(total))]
        drawn = np.random.Generator(np.random.Philox(key=[self.seed, row], counter=position)).random()
        return int(order[min(int(np.searchsorted(total, drawn * total[-1], side="right")), len(total) - 1)])
