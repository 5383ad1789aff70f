"""How the kernel that decodes one token of a whole model is specialised: sizes, shared memory, workspace.

`kernels/cuda/engine/token.cu` says how it works, `kvlab/engine/kernels.py` launches it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from kvlab.arguments import whole_number
from kvlab.engine.geometry import Geometry

__all__ = ["SHARED_LIMIT", "TokenKernel"]

SHARED_LIMIT = 232_448 - 1_536  # bytes of a block on sm_90, less barriers, moments and chunks
_MAX_SLOTS = 48  # whose barriers fit what SHARED_LIMIT leaves
_LARGEST_SLOT = 12  # KiB: with 16 in place of 8 tokens take up to 3 % longer on an H200
_SMALL_SLOT = 8  # KiB, from which on a slot's barriers cost little beside its products
_SMALL_FACTOR = 0.75  # of a ring of smaller slots, which counts: 6 KiB took pythia-160m longer than 8 and 12
_MIN_SLOT = 4  # KiB: of smaller ones a block waits for barriers, .16 us each, and not for memory
_UNDER_WAY = 48  # KiB of copies under way, on an H100 and an H200; with the whole ring 7 % slower
_SHORT_SECONDS = 1.4e-6  # of memory's work, where phases are short, if that is less: 3 to 6 % of a token
_LONG_SECONDS = 1.9e-6  # where they are long, if that is more: 1 to 2 %
_SHORT_PHASE = 256  # KiB of a product for a block, up to which waits count and copies delay them
_LONG_PHASE = 1024  # from which on memory counts alone
_WHOLE_RING = 192  # KiB of slots, from which on more gain nothing
_OUTPUTS = ("out", "o", "down")  # products whose columns are split
_SPLIT = 16  # KiB that memory brings a block while sums of twice as many splits are added up
_SPLIT_ROW = 1  # KiB more for each row, where nothing else lies between a product and the next
_UNEVEN = 0.2  # of the KiB that a block has more than the mean; the others copy weights of the next phase
_FEW_ROWS = 4  # up to which that counts; for 8 rows and more it made no difference
_FEW_GROUPS = 2  # of adders, each of which tells the others that it is done: 1 % of pythia-160m
_TWO_SPLITS = 64  # KiB of outputs for a block, from which on parallel layers are faster with two splits
_FOUR_SPLITS = 1024  # and with four


@dataclasses.dataclass(frozen=True)
class TokenKernel:
    """How the kernel is specialised for a decoder and a batch.

    Attributes
    ----------
    geometry : Geometry
    batch : int
        Tokens, 1 to 16.
    bfloat16 : bool
        16-bit type of weights, keys and values; otherwise float16.
    splits : int
        Parts of the columns of ``out``, ``o`` and ``down``, each of another block.
    warps : int
        Warps that multiply, of a block.
    adder_groups : int
        Tiles whose sums are added up at a time.
    packed : bool
        Keys and values are in a packed cache, whose own launches attend: a launch has the phases from one
        layer's attention to the next.

    Raises
    ------
    ValueError
        If the kernel has no such specialisation; the message says what it has.
    """

    geometry: Geometry
    batch: int = 1
    bfloat16: bool = False
    splits: int = 4
    warps: int = 8
    adder_groups: int = 4
    packed: bool = False

    def __post_init__(self) -> None:
        for name, most in (
            ("batch", 16),
            ("splits", 64),
            ("warps", 31),
            ("adder_groups", 8),
        ):
            whole_number(getattr(self, name), name, 1, most)
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

    @classmethod
    def fitting(
        cls, geometry: Geometry, batch: int, bfloat16: bool, multiprocessors: int, *, packed: bool = False
    ) -> TokenKernel:
        """Choose how to specialise the kernel for a decoder.

        Eight warps and as many adders as leave a thread 96 registers or more, but fewer where phases are
        shortest; of splits those that lose least.

        Raises
        ------
        ValueError
            If no choice fits.
        """
        groups = _FEW_GROUPS if batch > 8 else 3 if batch > 4 else 4
        found = []
        for splits in _divisors(geometry):
            try:
                kernel = cls(geometry, batch, bfloat16, splits, adder_groups=groups, packed=packed)
            except ValueError:
                continue
            found.append((kernel._lost(multiprocessors), splits, kernel))
        if not found:
            raise ValueError(
                f"batch={batch}, hidden={geometry.hidden}, ffn={geometry.ffn}: a batch of these widths does "
                "not fit the shared memory of a block; take a smaller batch"
            )
        kernel = min(found, key=lambda one: one[:2])[2]
        is_short = batch <= _FEW_ROWS and geometry.parallel and kernel.splits == 1
        return dataclasses.replace(kernel, adder_groups=_FEW_GROUPS) if is_short else kernel

    def _lost(self, multiprocessors: int) -> float:
        """What splits cost a phase of outputs, in KiB that memory brings a block meanwhile.

        The part of a ring that is not there and covers nothing of a wait, which is all of it where slots are
        too small; sums on their way from block to block, where splits are more or fewer than what was
        fastest with a whole ring on an H100; and of few rows tiles that are dealt out unevenly.
        """
        geometry = self.geometry
        columns = sum(c for name, (_, c) in geometry.products().items() if name in _OUTPUTS)
        outputs = 2 * geometry.hidden * columns / multiprocessors / 1024
        best = geometry.parallel * ((outputs >= _TWO_SPLITS) + (outputs >= _FOUR_SPLITS))  # log2 of splits
        size = self.slot_blocks
        factor = 1.0 if size >= _SMALL_SLOT else _SMALL_FACTOR if size >= _MIN_SLOT else 0.0
        ring = factor * self.slots * size
        sums = _SPLIT if geometry.parallel else _SPLIT + _SPLIT_ROW * self.batch
        found = _WHOLE_RING - min(ring, _WHOLE_RING) + sums * abs(math.log2(self.splits) - best)
        if self.batch > _FEW_ROWS:
            return found
        of_block = geometry.hidden // 16 / max(multiprocessors // self.splits, 1)  # tiles
        return found + _UNEVEN * (math.ceil(of_block) - of_block) * columns / self.splits / 32

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + self._adders() * self.adder_groups + 1)

    @property
    def slot_blocks(self) -> int:
        """KiB of a slot: a number up to 16 that divides every product's columns in blocks of 32.

        The one whose ring is largest, of sizes from 8 on; if there is none, the largest size.
        """
        common = math.gcd(*(columns // 32 for columns in self._columns().values()))
        sizes = [size for size in range(1, _LARGEST_SLOT + 1) if common % size == 0]
        large = [size for size in sizes if size >= _SMALL_SLOT] or sizes[-1:]
        return max(large, key=lambda size: (size * self._slots_of(size), size))

    @property
    def slots(self) -> int:
        """Slots of the ring."""
        return self._slots_of(self.slot_blocks)

    def _slots_of(self, size: int) -> int:
        """A multiple of 4, so warps can have slots side by side, or fewer."""
        most = min(_MAX_SLOTS, (SHARED_LIMIT - self._fixed_bytes()) // (1024 * size))
        return most // 4 * 4 if most >= 4 else most

    def most_under_way(self, bandwidth: float, multiprocessors: int) -> int:
        """Slots of the ring whose copies are under way at a time.

        Fewer would leave memory idle, and behind more of them everything else waits. Where phases are short,
        and so mostly waits, no more than memory brings in a short time; where they are long, no less than it
        brings in a longer one.

        Parameters
        ----------
        bandwidth : float
            Bytes a second of the device's memory.
        multiprocessors : int
            Of the device.

        Examples
        --------
        >>> from kvlab.engine.geometry import published
        >>> kernel = TokenKernel.fitting(published("pythia-2.8b")[0], 1, False, 132)
        >>> kernel.slots, kernel.slot_blocks, kernel.most_under_way(3.35e12, 132)
        (20, 10, 4)
        """
        layer = 2 * sum(rows * columns for rows, columns in self.geometry.products().values())
        products = self.phases - 1  # all but attention
        phase, of_block = layer / products / multiprocessors / 1024, bandwidth / multiprocessors / 1024
        most: float = _UNDER_WAY
        if phase <= _SHORT_PHASE:
            most = min(most, _SHORT_SECONDS * of_block)
        elif phase >= _LONG_PHASE:
            most = max(most, _LONG_SECONDS * of_block)
        wanted = int(most / self.slot_blocks)
        return min(max(wanted, 2), self.slots)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._fixed_bytes() + 1024 * self.slot_blocks * self.slots

    @property
    def phases(self) -> int:
        """Phases of a layer, of which the second is attention; behind those of all layers comes the head."""
        return 3 if self.geometry.parallel else 5

    @property
    def vocabulary(self) -> int:
        """Rows of the head as they are packed."""
        return -(-self.geometry.vocabulary // 16) * 16

    def macros(self) -> dict[str, int]:
        """Macros of ``engine/token.cu``."""
        geometry = self.geometry
        return {
            "BATCH": self.batch,
            "BF16": int(self.bfloat16),
            "HIDDEN": geometry.hidden,
            "HEADS_Q": geometry.heads_q,
            "HEADS_KV": geometry.heads_kv,
            "HEAD_DIM": geometry.head_dim,
            "ROTARY_DIM": geometry.rotary_dim,
            "FFN": geometry.ffn,
            "PARALLEL": int(geometry.parallel),
            "LAYER_NORM": int(geometry.layer_norm),
            "GATED_MLP": int(geometry.gated),
            "HEAD_NORMS": int(geometry.head_norms),
            "PACKED": int(self.packed),
            "SPLITS": self.splits,
            "WARPS": self.warps,
            "ADDER_GROUPS": self.adder_groups,
            "SLOTS": self.slots,
            "SLOT_BLOCKS": self.slot_blocks,
            "SHARED_BYTES": self.shared_bytes,
        }

    def workspace(self, multiprocessors: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the arrays of a launch, but for weights, keys and values.

        ``partials``, ``kv_parts`` and ``barrier`` are 0 before the first launch; launches leave them at 0.
        """
        geometry, batch, half = self.geometry, self.batch, "bfloat16" if self.bfloat16 else "float16"
        heads = geometry.heads_q + geometry.heads_kv
        return {
            "hidden": ((batch, geometry.hidden), "float32"),
            "statistics": ((batch, geometry.hidden // 16, 2), "float32"),
            "partials": ((self.splits - 1, geometry.hidden // 16, batch, 32), "float32"),
            "barrier": ((3, 32), "int32"),
            "q": ((batch, geometry.heads_q, geometry.head_dim), half),
            "newest": ((2, batch, geometry.heads_kv, geometry.head_dim), half),
            "rotation": ((batch, geometry.rotary_dim // 2, 2), "float32"),
            "positions": ((batch,), "int32"),
            "attended": ((batch, geometry.attended), half),
            "activation": ((batch, geometry.ffn), half),
            "logits": ((batch, self.vocabulary), "float32"),
            "raw_heads": ((batch, heads if geometry.head_norms else 0, geometry.head_dim), "float32"),
            "kv_parts": ((multiprocessors, self._heads_of_pass(), geometry.head_dim, 4), "float32"),
        }

    def between(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of what lies between operations, in launches of their own: a norm, a product."""
        pitch = _up128(2 * self.geometry.hidden) + 64
        most = max(rows for rows, _ in self.geometry.products().values())
        return {"normed": ((self.batch, pitch // 4), "int32"), "sums": ((self.batch, most), "float32")}

    @property
    def readers(self) -> int:
        """Passes over the keys of a token: each KV head's, as often as its group needs."""
        return self.geometry.heads_q // self._heads_of_pass()

    def _adders(self) -> int:
        return -(-self.batch // 4)

    def _heads_of_warp(self) -> int:
        """Query heads that a warp has at attention, as in engine/model.cuh."""
        return 1 if self.geometry.heads_q // self.geometry.heads_kv % 2 or self.batch > 8 else 2

    def _heads_of_pass(self) -> int:
        """Query heads that read keys together: teams of warps, as many as divide the group."""
        own, group = self._heads_of_warp(), self.geometry.heads_q // self.geometry.heads_kv
        return own * max(n for n in range(1, self.warps + 1) if group // own % n == 0)

    def _columns(self) -> dict[str, int]:
        """Columns of each product that a block multiplies."""
        found = {}
        for name, (_, columns) in self.geometry.products().items():
            if name in _OUTPUTS and columns % self.splits:
                raise ValueError(f"splits={self.splits}: the {columns} columns of {name} are no multiple")
            found[name] = columns // self.splits if name in _OUTPUTS else columns
        return found

    def _fixed_bytes(self) -> int:
        """Bytes of x, or of a segment at attention, and of the sums of tiles, as in engine/model.cuh."""
        pitch, head_dim = _up128(2 * max(self._columns().values())) + 64, self.geometry.head_dim
        newest = (self._heads_of_pass() + 2) * head_dim * 2
        segment = newest + self.warps * self._heads_of_warp() * (head_dim + 2) * 4
        return _up128(max(self.batch * pitch, segment)) + _up128(
            self.adder_groups * self.warps * self.batch * 80
        )


def _divisors(geometry: Geometry) -> Iterator[int]:
    """Splits to try: small numbers that divide the columns of every product that is split."""
    split = [columns for name, (_, columns) in geometry.products().items() if name in _OUTPUTS]
    yield from (
        n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16) if not any(columns % (32 * n) for columns in split)
    )


def _up128(count: int) -> int:
    return -(-count // 128) * 128
