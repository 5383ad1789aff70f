"""Estimate the memory of a call before it runs: `kvlab.device.estimate`.

Attention keeps no scores. At its peak a call holds its arguments, its results and a workspace that does not
depend on the product of the lengths. The numbers are bytes of arrays. They leave out the scratch memory of
CPU threads (0.3 to 1 MiB each), the list of tiles on Hopper (48 bytes for 128 query rows or more) and memory
that libraries keep for themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Estimate", "estimate"]

_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_OPERATIONS = ("attention", "attention_backward")

# The backward on a GPU keeps sums of dq in float32, head_dim filled up to one of these (on GPUs other than
# Hopper sometimes to less), and two numbers a row.
_HEAD_DIMS = (64, 128, 256)
_ROWS = 128


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of a call: its arguments, its results, and what exists only while it runs."""

    arguments: int
    results: int
    workspace: int

    @property
    def peak(self) -> int:
        """Most that exists at once."""
        return self.arguments + self.results + self.workspace

    @property
    def minimum(self) -> int:
        """What no implementation can do without: arguments and results."""
        return self.arguments + self.results


def estimate(
    operation: str,
    *,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    dtype: str = "float16",
    backend: str = "cuda",
) -> Estimate:
    """Return the memory that a call of fixed-length attention takes.

    Parameters
    ----------
    operation : str
        ``"attention"`` or ``"attention_backward"``.
    batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim : int
        Its shape.
    dtype : str
    backend : str
        ``"cuda"`` or ``"cpu"``; the reference keeps every score and is for small calls.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        If the operation or the dtype is unknown, or a size is negative.
    NotImplementedError
        If there is no estimate for the backend.

    Examples
    --------
    >>> shape = {"batch": 1, "seqlen_q": 16384, "seqlen_k": 16384, "num_heads_q": 16, "num_heads_kv": 16}
    >>> estimate("attention", **shape, head_dim=128).peak / 2**20
    257.0
    >>> estimate("attention_backward", **shape, head_dim=128, backend="cpu").workspace / 2**20
    1.0
    """
    sizes = {
        "batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv, "head_dim": head_dim,
    }  # fmt: skip
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}={size} must be at least 0")
    if operation not in _OPERATIONS:
        raise ValueError(f"operation={operation!r} is unknown; known are {', '.join(_OPERATIONS)}")
    if dtype not in _ITEMSIZE:
        raise ValueError(f"dtype={dtype!r} is unknown; known are {', '.join(_ITEMSIZE)}")
    if backend not in ("cuda", "cpu"):
        raise NotImplementedError(f"backend={backend!r}: there are estimates for 'cuda' and 'cpu'")
    rows = batch * num_heads_q * seqlen_q
    of_q = rows * head_dim * _ITEMSIZE[dtype]
    of_kv = 2 * batch * num_heads_kv * seqlen_k * head_dim * _ITEMSIZE[dtype]
    lse = 4 * rows
    if operation == "attention":
        return Estimate(of_q + of_kv, of_q + lse, 0)
    # dout, q, out and lse, k and v; dq, dk and dv.
    workspace = 4 * rows if backend == "cpu" else _backward_workspace(batch * num_heads_q, seqlen_q, head_dim)
    return Estimate(3 * of_q + of_kv + lse, of_q + of_kv, workspace)


def _backward_workspace(heads: int, seqlen_q: int, head_dim: int) -> int:
    stored = -(-seqlen_q // _ROWS) * _ROWS
    width = min((size for size in _HEAD_DIMS if size >= head_dim), default=head_dim)
    return 4 * heads * stored * (width + 2)
