"""The kernel that decodes one token of a whole model in one launch: sizes, its struct, the launch.

`kernels/cuda/engine/token.cu` says how it works. One block on every multiprocessor stays for the whole token
and waits for the others between phases, so all must be on the device at once: the launch is cooperative, and
the driver refuses one that does not fit. Private so far: there is no decoder around it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvlab.arguments import whole_number
from kvlab.device import compute_capability
from kvlab.jit.build import arch_of, build
from kvlab.jit.launch import PreparedLaunch, load

__all__ = ["CALL", "MATRIX", "Layout", "TokenKernel", "matrix_table", "prepare_token"]

SHARED_LIMIT = 232_448 - 1_024  # bytes of a block on sm_90, less barriers and moments
_MOST_SLOTS = 48  # whose barriers fit what SHARED_LIMIT leaves
_LARGEST_SLOT = 16  # KiB: 10 were faster than 20 on an H200, 16 is what Llama's widths give
_POINTERS = ("hidden", "statistics", "partials", "arrivals", "barrier", "q", "k", "v")
_MORE_POINTERS = ("rotation", "positions", "activation", "logits")
_STRIDES = ("kv_layer", "kv_batch", "kv_head", "kv_position")

MATRIX = np.dtype([(name, "u8") for name in ("weights", "bias", "norm_weight", "norm_bias")])
CALL = np.dtype(
    [
        ("matrices", "u8"),
        *((name, "i4") for name in ("layers", "vocabulary", "qkv_ctas", "split_ctas")),
        *((name, "u8") for name in _POINTERS),
        *((name, "i8") for name in _STRIDES),
        *((name, "u8") for name in _MORE_POINTERS),
        ("eps", "f4"),
        ("padding", "i4"),
    ]
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of a decoder, 16-bit weights.

    Attributes
    ----------
    hidden, heads_q, heads_kv, head_dim, rotary_dim, ffn : int
    layers, vocabulary : int
    parallel : bool
        Layers of GPT-NeoX: attention and MLP read the same x. Otherwise Llama's: RMS norms, SwiGLU.
    """

    hidden: int
    heads_q: int
    heads_kv: int
    head_dim: int
    rotary_dim: int
    ffn: int
    layers: int
    vocabulary: int
    parallel: bool

    def products(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the products of a layer, in the order of the kernel's table."""
        attended = self.heads_q * self.head_dim
        qkv = (attended + 2 * self.heads_kv * self.head_dim, self.hidden)
        if self.parallel:
            return {
                "qkv": qkv,
                "up": (self.ffn, self.hidden),
                "out": (self.hidden, attended + self.ffn),
            }
        return {
            "qkv": qkv,
            "o": (self.hidden, attended),
            "gated": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }


@dataclasses.dataclass(frozen=True)
class TokenKernel:
    """How the kernel is specialised for a decoder and a batch.

    Attributes
    ----------
    layout : Layout
    batch : int
        Tokens, 1 to 16, each of a sequence of its own.
    bfloat16 : bool
        16-bit type of weights, keys and values; otherwise float16.
    splits : int
        Parts of the columns of ``out``, ``o`` and ``down``, each of another block.
    warps : int
        Warps that multiply, of a block.
    adder_groups : int
        Tiles whose sums are added up at a time.

    Raises
    ------
    ValueError
        If the kernel has no such specialisation; the message says what it has.
    """

    layout: Layout
    batch: int = 1
    bfloat16: bool = False
    splits: int = 4
    warps: int = 16
    adder_groups: int = 4

    def __post_init__(self) -> None:
        layout = self.layout
        for part in (layout, self):
            for field in dataclasses.fields(part):
                if field.type == "int":
                    whole_number(getattr(part, field.name), field.name, 1)
        if self.batch > 16:
            raise ValueError(f"batch={self.batch}: 1 to 16 tokens are decoded at a time; split the batch")
        if layout.heads_q % layout.heads_kv or (layout.parallel and layout.heads_q != layout.heads_kv):
            raise ValueError(
                f"heads_q={layout.heads_q}, heads_kv={layout.heads_kv}: query heads are a multiple of KV "
                "heads, and as many in parallel layers"
            )
        if layout.head_dim % 16 or layout.rotary_dim % 2 or layout.rotary_dim > layout.head_dim:
            raise ValueError(
                f"head_dim={layout.head_dim}, rotary_dim={layout.rotary_dim}: a multiple of 16 and an even "
                "number up to it are supported"
            )
        if layout.vocabulary % 16 or layout.ffn % 16:
            raise ValueError(
                f"vocabulary={layout.vocabulary}, ffn={layout.ffn}: multiples of 16 are supported; add rows "
                "of zeros to the weights"
            )
        for name, columns in self._columns().items():
            if columns % 32:
                raise ValueError(
                    f"{name} has {columns} columns a block with splits={self.splits}; multiples of 32 are "
                    "supported, so choose other splits"
                )
        if self.threads > 1024:
            raise ValueError(
                f"warps={self.warps}, adder_groups={self.adder_groups}: {self.threads} threads; a block has "
                "up to 1,024"
            )
        if self.slots < 2:
            raise ValueError(
                f"batch={self.batch}, splits={self.splits}, warps={self.warps}: {self._fixed_bytes()} bytes "
                f"beside the weights leave no two slots of {self.slot_blocks} KiB; take more splits or fewer "
                "warps"
            )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + self._adders() * self.adder_groups + 1)

    @property
    def slot_blocks(self) -> int:
        """KiB of a slot: the largest number up to 16 that divides every product's columns in blocks of 32."""
        common = math.gcd(*(columns // 32 for columns in self._columns().values()))
        return max(size for size in range(1, _LARGEST_SLOT + 1) if common % size == 0)

    @property
    def slots(self) -> int:
        """Slots of the ring."""
        return min(_MOST_SLOTS, (SHARED_LIMIT - self._fixed_bytes()) // (1024 * self.slot_blocks))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._fixed_bytes() + 1024 * self.slot_blocks * self.slots

    def macros(self) -> dict[str, int]:
        """Macros of ``engine/token.cu``."""
        layout = self.layout
        return {
            "BATCH": self.batch,
            "BF16": int(self.bfloat16),
            "HIDDEN": layout.hidden,
            "HEADS_Q": layout.heads_q,
            "HEADS_KV": layout.heads_kv,
            "HEAD_DIM": layout.head_dim,
            "ROTARY_DIM": layout.rotary_dim,
            "FFN": layout.ffn,
            "NEOX": int(layout.parallel),
            "SPLITS": self.splits,
            "WARPS": self.warps,
            "ADDER_GROUPS": self.adder_groups,
            "SLOTS": self.slots,
            "SLOT_BLOCKS": self.slot_blocks,
            "SHARED_BYTES": self.shared_bytes,
        }

    def workspace(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the arrays of `prepare_token`, but for keys and values.

        ``arrivals`` and ``barrier`` are 0 before the first launch; launches leave them at 0.
        """
        layout, batch, half = self.layout, self.batch, "bfloat16" if self.bfloat16 else "float16"
        attended = layout.heads_q * layout.head_dim
        return {
            "hidden": ((batch, layout.hidden), "float32"),
            "statistics": ((batch, layout.hidden // 16, 2), "float32"),
            "partials": ((self.splits, layout.hidden // 16, batch, 16), "float32"),
            "arrivals": ((layout.hidden // 16, self._adders()), "int32"),
            "barrier": ((3, 32), "int32"),
            "q": ((batch, layout.heads_q, layout.head_dim), half),
            "rotation": ((batch, layout.rotary_dim // 2, 2), "float32"),
            "positions": ((batch,), "int32"),
            "activation": ((batch, attended + layout.ffn), half),
            "logits": ((batch, layout.vocabulary), "float32"),
        }

    def _adders(self) -> int:
        return -(-self.batch // 4)

    def _columns(self) -> dict[str, int]:
        """Columns of each product that a block multiplies."""
        split = ("out", "o", "down")
        found = {}
        for name, (_, columns) in self.layout.products().items():
            if name in split and columns % self.splits:
                raise ValueError(f"splits={self.splits}: the {columns} columns of {name} are no multiple")
            found[name] = columns // self.splits if name in split else columns
        return found

    def _fixed_bytes(self) -> int:
        """Bytes of x, or of attention's merged sums, and of the sums of tiles, as in engine/model.cuh."""
        layout = self.layout
        pitch = _up128(2 * max(self._columns().values())) + 64
        merged = self.warps * (layout.heads_q // layout.heads_kv) * (layout.head_dim + 2) * 4
        return _up128(max(self.batch * pitch, merged)) + _up128(
            self.adder_groups * self.warps * self.batch * 80
        )


def _up128(count: int) -> int:
    return -(-count // 128) * 128


def matrix_table(rows: Sequence[tuple[int, int, int, int]]) -> NDArray[np.void]:
    """The kernel's table: of every product of every layer, then the head, what `MATRIX` names (0: none)."""
    return np.array([tuple(row) for row in rows], MATRIX)


def prepare_token(
    kernel: TokenKernel,
    matrices: int,
    pointers: Mapping[str, int],
    kv_strides: Sequence[int],
    *,
    eps: float,
    device: int,
    multiprocessors: int,
    qkv_ctas: int | None = None,
) -> PreparedLaunch:
    """Compile the kernel and prepare its launch.

    Parameters
    ----------
    kernel : TokenKernel
    matrices : int
        Address, on the device, of a `matrix_table`; weights in the order of `kvlab.engine.packing.pack`.
    pointers : mapping of str to int
        Addresses of the arrays of `TokenKernel.workspace`, of ``k`` and of ``v``.
    kv_strides : sequence of int
        Elements from a layer, a sequence, a KV head and a position of k and v to the next.
    eps : float
        Of the norms.
    device, multiprocessors : int
        Ordinal and multiprocessors of the device, which must have compute capability 9.0.
    qkv_ctas : int, optional
        Parallel layers: multiprocessors that multiply QKV, beside those of UP; by default as many as QKV has
        of the rows.

    Raises
    ------
    NotImplementedError
        If the device is none of compute capability 9.0.
    ValueError
        If a pointer or stride lacks, or QKV and UP cannot both have multiprocessors.
    """
    capability = compute_capability(device)
    if capability != (9, 0):
        raise NotImplementedError(
            f"device={device} has compute capability {capability[0]}.{capability[1]}; the token kernel "
            "runs on 9.0 (H100, H200), so use transformers there"
        )
    call = _call(kernel, matrices, pointers, kv_strides, eps, multiprocessors, qkv_ctas)
    loaded = load(build("engine/token", kernel.macros(), arch_of(*capability)), "token", device=device)
    return PreparedLaunch(
        loaded, (multiprocessors,), (kernel.threads,), call, kernel.shared_bytes, cooperative=True
    )


def _call(
    kernel: TokenKernel,
    matrices: int,
    pointers: Mapping[str, int],
    kv_strides: Sequence[int],
    eps: float,
    multiprocessors: int,
    qkv_ctas: int | None,
) -> NDArray[np.void]:
    layout, names = kernel.layout, (*_POINTERS, *_MORE_POINTERS)
    if set(pointers) != set(names) or len(kv_strides) != len(_STRIDES):
        raise ValueError(
            f"pointers={sorted(pointers)}, kv_strides={tuple(kv_strides)}: exactly {sorted(names)} and "
            f"{_STRIDES} are needed"
        )
    if multiprocessors < kernel.splits:
        raise ValueError(f"multiprocessors={multiprocessors}: at least splits={kernel.splits} are needed")
    if layout.parallel:
        qkv = layout.products()["qkv"][0]
        if qkv_ctas is None:
            qkv_ctas = round(multiprocessors * qkv / (qkv + layout.ffn))
        if not 0 < qkv_ctas < multiprocessors:
            raise ValueError(f"qkv_ctas={qkv_ctas}: 1 to {multiprocessors - 1} leave some to UP")
    else:
        qkv_ctas = multiprocessors
    call = np.zeros(1, CALL)
    values = {
        "matrices": matrices,
        "layers": layout.layers,
        "vocabulary": layout.vocabulary,
        "qkv_ctas": qkv_ctas,
        "split_ctas": multiprocessors // kernel.splits * kernel.splits,
        "eps": eps,
        **pointers,
        **dict(zip(_STRIDES, kv_strides, strict=True)),
    }
    for name, value in values.items():
        call[name] = value
    return call
