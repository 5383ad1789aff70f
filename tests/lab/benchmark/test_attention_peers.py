"""The judge of benchmarks/attention/peers.py: what it refuses to time."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import kvlab

torch = pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[3] / "benchmarks/attention/peers.py"


@pytest.fixture(scope="module")
def peers() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("tokens", [1, 40])
def test_gradients_are_judged_where_they_are_zero_too(peers: dict[str, Any], tokens: int) -> None:
    """A row that sees one key has dq and dk of 0, by which nothing can be divided."""
    case = peers["Case"](1, tokens, 4, 1, 64, causal=False)
    torch.manual_seed(tokens)
    dout, q, k, v = (torch.randn(1, tokens, heads, 64) for heads in (4, 4, 1, 1))
    out, lse = kvlab.attention(q, k, v, return_lse=True)
    want = peers["exact_gradients"](case, dout, q, k, v)
    assert all((float(x.norm()) == 0) == (tokens == 1) for x in want[:2])

    def judge(which: int, got: Any) -> None:
        peers["compare"]("gradient", got, want[which], 1e-2)

    right = kvlab.attention_backward(dout, q, k, v, out, lse)
    without_delta = kvlab.attention_backward(dout, q, k, v, 0 * out, lse)
    for which in range(3):
        judge(which, right[which][0])
        for wrong in (
            torch.full_like(right[which][0], torch.nan),
            right[which][0] + 0.1 * torch.randn(want[which].shape),
            *([without_delta[which][0]] if which < 2 else []),
        ):
            with pytest.raises(AssertionError, match="relative error"):
                judge(which, wrong)
