"""How the weights of a decoder lie in memory: rows in the order of the kernels, in fragments of the MMA.

A kernel computes y = W x for up to 16 tokens and is limited by reading W, so each thread must find what it
multiplies in 16 contiguous bytes and a warp in 512. `pack` stores W as the A operand of mma.m16n8k16.
The unit is a block of 16 rows by 32 columns, 1 KiB: two fragments of 512 bytes, 16 bytes a lane. Blocks lie
column after column within 16 rows, and 16 rows after 16 rows.

    lane 4 g + t of fragment h holds columns 8 t + 4 h + {0, 1, 2, 3} of the block:
        halves 0, 1   row g,     columns + {0, 1}       (register a0)
        halves 2, 3   row g + 8, columns + {0, 1}       (a1)
        halves 4, 5   row g,     columns + {2, 3}       (a2)
        halves 6, 7   row g + 8, columns + {2, 3}       (a3)

The sum over columns may run in any order, and this order gives a lane 8 contiguous columns of x, one 16-byte
read for both fragments. No size of a head occurs in it, so no thread idles at 80 channels.

What follows a product needs rows in twos: channels that rotate together, a gate and its partner. `qkv_rows`
and `gated_rows` order rows so that the two are neighbours, 2 j and 2 j + 1; one thread then has both. Orders
are arrays of row numbers and apply to weights and biases alike: ``pack(weight[order])``, ``bias[order]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK_COLUMNS",
    "TILE_ROWS",
    "gated_rows",
    "pack",
    "packed_shape",
    "qkv_rows",
    "rotary_pairs",
    "unpack",
    "unpaired",
]

TILE_ROWS, BLOCK_COLUMNS = 16, 32

Rows = NDArray[np.int64]


def packed_shape(rows: int, columns: int) -> tuple[int, ...]:
    """Shape of a packed matrix: tile of rows, block of columns, fragment, lane, element.

    Examples
    --------
    >>> packed_shape(40, 64)
    (3, 2, 2, 32, 8)
    """
    return -(-rows // TILE_ROWS), columns // BLOCK_COLUMNS, 2, 32, 8


def pack(weight: NDArray[Any]) -> NDArray[Any]:
    """Bring a matrix into fragment order; rows are filled up to a multiple of 16 with zeros.

    Parameters
    ----------
    weight : (rows, columns)
        16 bits an element; columns a multiple of 32.

    Returns
    -------
    (ceil(rows / 16), columns / 32, 2, 32, 8), same dtype
        Tile of rows, block of columns, fragment, lane, element.

    Raises
    ------
    ValueError
        If `weight` is no matrix, or its columns are no multiple of 32.
    TypeError
        If its elements have not 16 bits.

    Examples
    --------
    >>> packed = pack(np.arange(16 * 32, dtype=np.uint16).reshape(16, 32))
    >>> packed.shape, packed[0, 0, 1, 4].tolist()  # lane 4: row 1 and row 9, columns 4 to 7
    ((1, 1, 2, 32, 8), [36, 37, 292, 293, 38, 39, 294, 295])
    """
    if weight.ndim != 2 or weight.shape[1] % BLOCK_COLUMNS or not weight.shape[1]:
        raise ValueError(
            f"weight has shape {weight.shape}; (rows, columns) with columns = 32, 64, ... is packed"
        )
    if weight.dtype.itemsize != 2:
        raise TypeError(f"weight is {weight.dtype}; float16 or bfloat16 is packed, so convert it first")
    rows, columns = weight.shape
    tiles = -(-rows // TILE_ROWS)
    if rows % TILE_ROWS:
        weight = np.concatenate([weight, np.zeros((tiles * TILE_ROWS - rows, columns), weight.dtype)])
    # tile, half of its rows, g, block, t, fragment, half of the four columns, element
    apart = weight.reshape(tiles, 2, 8, columns // BLOCK_COLUMNS, 4, 2, 2, 2)
    packed = apart.transpose(0, 3, 5, 2, 4, 6, 1, 7)
    return np.ascontiguousarray(packed).reshape(tiles, -1, 2, 32, 8)


def unpack(packed: NDArray[Any], rows: int) -> NDArray[Any]:
    """Undo `pack`.

    Parameters
    ----------
    packed : (tiles, blocks, 2, 32, 8)
    rows : int
        Rows the matrix had.

    Returns
    -------
    (rows, 32 * blocks), same dtype

    Raises
    ------
    ValueError
        If `packed` has another shape, or not as many tiles as `rows` need.

    Examples
    --------
    >>> weight = np.arange(5 * 64, dtype=np.uint16).reshape(5, 64)
    >>> np.array_equal(unpack(pack(weight), 5), weight)
    True
    """
    tiles = -(-rows // TILE_ROWS)
    if packed.ndim != 5 or packed.shape[0] != tiles or packed.shape[2:] != (2, 32, 8):
        raise ValueError(
            f"packed has shape {packed.shape}; {rows} rows are packed as ({tiles}, blocks, 2, 32, 8)"
        )
    apart = packed.reshape(tiles, packed.shape[1], 2, 8, 4, 2, 2, 2)
    weight = apart.transpose(0, 6, 3, 1, 4, 2, 5, 7).reshape(tiles * TILE_ROWS, -1)
    return np.ascontiguousarray(weight[:rows])


def rotary_pairs(head_dim: int, rotary_dim: int) -> Rows:
    """Order the channels of a head so that channels that rotate together are neighbours.

    Parameters
    ----------
    head_dim : int
        Even.
    rotary_dim : int
        How many channels rotate: channel i with channel i + rotary_dim / 2. The others keep their places.

    Returns
    -------
    int64, (head_dim,)

    Raises
    ------
    ValueError
        If one of them is odd, or rotary_dim is not within the head.

    Examples
    --------
    >>> rotary_pairs(8, 6).tolist()
    [0, 3, 1, 4, 2, 5, 6, 7]
    """
    if head_dim % 2 or rotary_dim % 2 or not 0 <= rotary_dim <= head_dim:
        raise ValueError(
            f"head_dim={head_dim}, rotary_dim={rotary_dim}: both must be even and rotary_dim at most head_dim"
        )
    rotated = np.arange(rotary_dim).reshape(2, -1).T.reshape(-1)
    return np.concatenate([rotated, np.arange(rotary_dim, head_dim)])


def unpaired(x: NDArray[Any], rotary_dim: int) -> NDArray[Any]:
    """Bring channels, the last axis, from the order of `rotary_pairs` back to their own.

    Examples
    --------
    >>> unpaired(np.array([[0, 3, 1, 4, 2, 5, 6, 7]]), 6).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    rotated = x[..., :rotary_dim]
    return np.concatenate([rotated[..., ::2], rotated[..., 1::2], x[..., rotary_dim:]], axis=-1)


def qkv_rows(
    num_heads_q: int, num_heads_kv: int, head_dim: int, rotary_dim: int, *, interleaved: bool
) -> Rows:
    """Order the rows of the joint projection: all query heads, all key heads, all value heads.

    Channels of query and key heads are in the order of `rotary_pairs`, those of value heads as they come.

    Parameters
    ----------
    num_heads_q, num_heads_kv, head_dim, rotary_dim : int
    interleaved : bool
        Whether the rows come as in GPT-NeoX, where each head's query, key and value rows follow each other;
        otherwise they come as query, key and value weights put together.

    Returns
    -------
    int64, ((num_heads_q + 2 * num_heads_kv) * head_dim,)
        Row number, in the weight as it comes, of each row as it is packed.

    Raises
    ------
    ValueError
        As `rotary_pairs`, or if interleaved rows have other numbers of query and KV heads.

    Examples
    --------
    >>> qkv_rows(2, 2, 2, 2, interleaved=True).tolist()
    [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    """
    if interleaved and num_heads_q != num_heads_kv:
        raise ValueError(
            f"num_heads_q={num_heads_q}, num_heads_kv={num_heads_kv}: interleaved rows have equal numbers"
        )
    order = rotary_pairs(head_dim, rotary_dim)
    num_heads = num_heads_q + 2 * num_heads_kv
    first = np.arange(num_heads) * head_dim
    if interleaved:
        first = first.reshape(num_heads_q, 3).T.reshape(-1)
    channels = np.tile(order, (num_heads, 1))
    channels[num_heads_q + num_heads_kv :] = np.arange(head_dim)
    return (first[:, None] + channels).reshape(-1)


def gated_rows(intermediate: int) -> Rows:
    """Order the rows of gate and up weights, put together, so that row i of gate is followed by row i of up.

    Returns
    -------
    int64, (2 * intermediate,)

    Examples
    --------
    >>> gated_rows(3).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    return np.arange(2 * intermediate).reshape(2, -1).T.reshape(-1)
