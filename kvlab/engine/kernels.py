"""Launches of the decode engine: the token kernel, and what comes before and after it.

A block of the token kernel stays on every multiprocessor for the whole token and waits for the others between
phases, so all must be on the device at once: its launch is cooperative, and the driver refuses one that does
not fit. Addresses and sizes stand in structs (`CALL`, `EMBED`, `CHOOSE`) that stay where they are; a launch
takes them as they are then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlab.device import compute_capability
from kvlab.engine.token_kernel import TokenKernel
from kvlab.jit.build import arch_of, build
from kvlab.jit.launch import PreparedLaunch, load
from kvlab.jit.structs import ADDRESS, Struct
from kvlab.ops.device_arrays import memory_bandwidth

__all__ = [
    "CALL",
    "MATRIX",
    "OPERATION",
    "SETTINGS",
    "matrix_table",
    "prepare_choose",
    "prepare_draw",
    "prepare_embed",
    "prepare_operations",
    "prepare_token",
]

_STRIDES = ("kv_layer", "kv_batch", "kv_head")
_LOGITS_OF_BLOCK = 4 * 512  # that choose.cu reads

EMBED = Struct(
    **dict.fromkeys(("embedding", "ids", "positions", "angles", "hidden", "statistics", "rotation"), ADDRESS)
)
MATRIX = Struct(**dict.fromkeys(("weights", "bias", "norm_weight", "norm_bias"), ADDRESS))
CALL = Struct(
    matrices=ADDRESS,
    **dict.fromkeys(
        ("layers", "vocabulary", "split_ctas", "most_under_way", "first_phase", "end_phase"), "i"
    ),
    **dict.fromkeys(("hidden", "statistics", "partials", "barrier"), ADDRESS),
    **dict.fromkeys(("q", "k", "v", "newest"), ADDRESS),
    **dict.fromkeys(_STRIDES, "q"),
    **dict.fromkeys(("rotation", "positions", "attended", "activation", "logits"), ADDRESS),
    **dict.fromkeys(("head_norms", "raw_heads", "kv_parts"), ADDRESS),
    eps="f", chooses="i", tokens="i", best=ADDRESS, history=ADDRESS, embed=(EMBED, 1),
)  # fmt: skip
OPERATION = Struct(
    call=(CALL, 1), layer="i", product="i",
    **dict.fromkeys(("normed", "sums", "head_sums"), ADDRESS), first_column="i", takes_sums="i",
)  # fmt: skip
CHOOSE = Struct(
    logits=ADDRESS, vocabulary="i", pitch="i",
    **dict.fromkeys(("best", "arrivals", "ids", "positions", "history"), ADDRESS),
)  # fmt: skip
SETTINGS = Struct(inverse_temperature="f", top_k="u4", top_p="f8", seed="u8")
DRAW = Struct(
    logits=ADDRESS, vocabulary="i", pitch="i",
    **dict.fromkeys(("settings", "ids", "positions", "history"), ADDRESS),
)  # fmt: skip
_DRAWING_BLOCKS = 8  # of a row: a cluster


def matrix_table(rows: Sequence[tuple[int, int, int, int]]) -> NDArray[np.void]:
    """The kernel's table: of every product of every layer, then the head, what `MATRIX` names (0: none)."""
    return np.array([tuple(row) for row in rows], MATRIX.dtype)


def prepare_token(
    kernel: TokenKernel,
    pointers: Mapping[str, Any],
    kv_strides: Sequence[int],
    *,
    device: int,
    multiprocessors: int,
) -> tuple[PreparedLaunch, NDArray[np.void]]:
    """Compile the kernel and prepare its launch.

    Parameters
    ----------
    kernel : TokenKernel
    pointers : mapping
        Addresses on the device: of a `matrix_table` (``matrices``), whose weights are in the order of
        `kvlab.engine.packing.pack`, of the arrays of `TokenKernel.workspace`, of ``k`` and ``v``, and of
        ``head_norms`` (0 without). And what `prepare_embed` returns (``embed``).
    kv_strides : sequence of int
        Elements from a layer, a sequence and a KV head of k and v to the next; positions of a head lie one
        behind the other. With 0 from a sequence to the next the tokens are of one sequence, at positions one
        after the other.
    device, multiprocessors : int
        Ordinal and multiprocessors of the device, which must have compute capability 9.0.

    Returns
    -------
    PreparedLaunch, and the `CALL` that its launches read, (1,)
        With ``chooses`` a launch that makes logits chooses the next tokens, too, and embeds them; then
        ``best`` and ``history`` are needed, as of `CHOOSE`.

    Raises
    ------
    NotImplementedError
        If the device is none of compute capability 9.0.
    ValueError
        If a pointer or stride lacks, or the device has too few multiprocessors.
    """
    call = _call(kernel, pointers, kv_strides, multiprocessors)
    call["most_under_way"] = kernel.most_under_way(memory_bandwidth(device), multiprocessors)
    entry = _load("token", kernel.macros(), device, of_hopper=True)
    return PreparedLaunch(
        entry, (multiprocessors,), (kernel.threads,), call, kernel.shared_bytes, cooperative=True
    ), call


def prepare_operations(
    kernel: TokenKernel,
    pointers: Mapping[str, Any],
    kv_strides: Sequence[int],
    *,
    device: int,
    multiprocessors: int,
    cluster: int = 0,
) -> tuple[dict[str, PreparedLaunch], NDArray[np.void]]:
    """Compile ``engine/ops.cu`` and prepare its launches.

    Parameters
    ----------
    kernel, kv_strides, device, multiprocessors
        As of `prepare_token`; the device has compute capability 8.0 or more.
    pointers : mapping
        As of `prepare_token`, and ``normed`` and ``sums`` of `TokenKernel.between`.
    cluster : int
        Not 0: also that of ``engine/cluster.cu``, with so many blocks a cluster.

    Returns
    -------
    dict of PreparedLaunch, and the `OPERATION` that all of them read, (1,)

    Raises
    ------
    NotImplementedError, ValueError
        As `prepare_token`.
    """
    argument = np.zeros(1, OPERATION.dtype)
    others = dict(pointers)
    for name in ("normed", "sums"):
        argument[name] = others.pop(name)
    argument["call"][0] = _call(kernel, others, kv_strides, multiprocessors)
    macros, threads = kernel.macros(), 32 * kernel.warps
    threads_of = {"rotate_heads": 32, "add_rows": 64}
    launches = {}
    for name, grid in _grids(kernel).items():
        entry = _load("ops", macros, device, entry=name)
        block = (threads_of.get(name, threads),)
        launches[name] = PreparedLaunch(
            entry, grid, block, argument, early=name == "add_rows" and bool(cluster)
        )
    if cluster:
        entry = _load("cluster", {**macros, "CLUSTER": cluster}, device, entry="attend_block", clusters=True)
        launches["attend_block"] = PreparedLaunch(
            entry, (kernel.geometry.heads_kv * cluster,), (threads,), argument, early=True, cluster=cluster
        )
    return launches, argument


def _grids(kernel: TokenKernel) -> dict[str, tuple[int, ...]]:
    """Blocks of every launch of ``engine/ops.cu``."""
    geometry = kernel.geometry
    rows = {"up" if name == "gated" else name: size for name, (size, _) in geometry.products().items()}
    mlp = 2 * geometry.ffn if geometry.gated else geometry.ffn
    return {
        "norm_tokens": (1,),
        "rotate_heads": (rows["qkv"] // geometry.head_dim, kernel.batch),
        "attend_tokens": (kernel.readers, kernel.batch),
        "activate_rows": (-(-mlp // 2 // (32 * kernel.warps)), kernel.batch),
        "add_rows": (-(-geometry.hidden // 32), kernel.batch),
        **{f"multiply_{name}": (size // 16,) for name, size in rows.items()},
        "multiply_head": (kernel.vocabulary // 16,),
    }


def prepare_embed(
    kernel: TokenKernel, pointers: Mapping[str, int], device: int
) -> tuple[PreparedLaunch, NDArray[np.void]]:
    """Compile ``engine/embed.cu`` and prepare its launch; also the `EMBED` that it reads.

    `pointers` are its fields; ``hidden`` and ``statistics`` are of the embedding, not those of `CALL`.
    """
    argument = _filled(EMBED, pointers)
    names = ("BATCH", "BF16", "HIDDEN", "ROTARY_DIM")
    entry = _load("embed", {name: kernel.macros()[name] for name in names}, device)
    return PreparedLaunch(entry, (kernel.batch,), (256,), argument), argument


def prepare_choose(kernel: TokenKernel, pointers: Mapping[str, int], device: int) -> PreparedLaunch:
    """Compile ``engine/choose.cu`` and prepare its launch; `pointers` are the addresses of `CHOOSE`."""
    sizes = {"vocabulary": kernel.geometry.vocabulary, "pitch": kernel.vocabulary}
    argument = _filled(CHOOSE, {**pointers, **sizes})
    blocks = -(-kernel.vocabulary // _LOGITS_OF_BLOCK)
    return PreparedLaunch(_load("choose", {}, device), (blocks, kernel.batch), (512,), argument)


def prepare_draw(kernel: TokenKernel, pointers: Mapping[str, int], device: int) -> PreparedLaunch:
    """Compile ``engine/draw.cu`` and prepare its launch; `pointers` are the addresses of `DRAW`.

    ``settings`` is the address of `SETTINGS` on the device.
    """
    blocks = _DRAWING_BLOCKS if compute_capability(device) >= (9, 0) else 1
    sizes = {"vocabulary": kernel.geometry.vocabulary, "pitch": kernel.vocabulary}
    entry, argument = _load("draw", {"CTAS": blocks}, device), _filled(DRAW, {**pointers, **sizes})
    return PreparedLaunch(entry, (blocks, kernel.batch), (1024,), argument, cluster=blocks)


def _load(
    name: str, macros: Mapping[str, int], device: int, *, entry: str = "", of_hopper: bool = False,
    clusters: bool = False,
) -> Any:  # fmt: skip
    """An entry of a source, by default that of its name."""
    capability = compute_capability(device)
    needed = (
        "9.0 (H100, H200) for this"
        if of_hopper
        else "9.0 or more for clusters"
        if clusters
        else "8.0 or more"
    )
    if capability < ((9, 0) if clusters else (8, 0)) or (of_hopper and capability != (9, 0)):
        raise NotImplementedError(
            f"device={device} has compute capability {capability[0]}.{capability[1]}; the decode engine "
            f"needs {needed}, so take another plan, device='cpu', or use transformers"
        )
    return load(build(f"engine/{name}", macros, arch_of(*capability)), entry or name, device=device)


def _filled(struct: Struct, values: Mapping[str, Any]) -> NDArray[np.void]:
    """A struct that a `PreparedLaunch` reads; every field has to be named."""
    names = set(struct.dtype.names or ())
    if set(values) != names:
        raise ValueError(f"pointers={sorted(values)}: exactly {sorted(names)} are needed")
    result = np.zeros(1, struct.dtype)
    for name, value in values.items():
        result[name] = value
    return result


def _call(
    kernel: TokenKernel,
    pointers: Mapping[str, Any],
    kv_strides: Sequence[int],
    multiprocessors: int,
) -> NDArray[np.void]:
    geometry = kernel.geometry
    least = max(kernel.splits, 1 + geometry.parallel)  # parallel layers: one for QKV and one for UP
    if multiprocessors < least:
        raise ValueError(f"multiprocessors={multiprocessors}: at least {least} are needed")
    sizes = {
        "layers": geometry.layers,
        "vocabulary": kernel.vocabulary,
        "split_ctas": multiprocessors // kernel.splits * kernel.splits,
        "most_under_way": kernel.slots,
        "first_phase": 0,
        "end_phase": geometry.layers * kernel.phases + 1,
        "eps": geometry.eps,
        "chooses": 0,
        "tokens": geometry.vocabulary,
        "best": 0,
        "history": 0,
    }
    return _filled(CALL, {**pointers, **sizes, **dict(zip(_STRIDES, kv_strides, strict=True))})
