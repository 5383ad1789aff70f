"""The candidate page formats of the study: what is compiled, and under which name.

A variant is a dict of the macros of candidates.cu. The defaults are the format that was expected to win
(mid-rise grid, one byte a step, 16-byte vectors per lane); the others differ in one respect each.
"""

from typing import Final

CODECS: Final = {"step16": 0, "step8": 1, "asym": 2, "prmt": 3, "lut": 4, "channel": 5}
# Lloyd-Max magnitudes of the 16-level codebook for the unit Gaussian (Max 1960).
GAUSSIAN_16: Final = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)


def variant(bits: int, head_dim: int, **changes: int | str) -> dict[str, int | str]:
    base: dict[str, int | str] = {
        "bits": bits, "head_dim": head_dim, "codec": "step8", "bf16": 1, "group": 4, "warps": 8, "stages": 3,
        "vector": 4, "read_all": 0, "compute": 1, "interleaved": 1, "k_fold": 1,
    }  # fmt: skip
    v = base | changes
    foldable = v["codec"] in ("step8", "step16") and v["bf16"] and bits < 8
    return v | {"k_fold": int(bool(v["k_fold"] and foldable))}


def page_bytes(v: dict[str, int | str]) -> tuple[int, int]:
    """Bytes of a page that the kernel needs, and of the whole page with positions and importance."""
    head_dim = int(v["head_dim"])
    step = 64 if v["codec"] == "step8" else 128
    k_meta = 4 * head_dim if v["codec"] == "channel" else 256 if v["codec"] == "asym" else step
    v_meta = 256 if v["codec"] == "asym" else step
    needed = 2 * (8 * head_dim * int(v["bits"])) + k_meta + v_meta
    return needed, needed + 192


def shared_bytes(v: dict[str, int | str]) -> int:
    needed, whole = page_bytes(v)
    copied = whole if v["read_all"] else needed
    return int(v["warps"]) * (int(v["stages"]) * copied + int(v["group"]) * (int(v["head_dim"]) + 2) * 4)


def bf16_bits(x: float) -> int:
    import struct

    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def macros(v: dict[str, int | str]) -> dict[str, int | str]:
    high = [bf16_bits(x) >> 8 for x in GAUSSIAN_16]
    low = [bf16_bits(x) & 255 for x in GAUSSIAN_16]
    word = lambda b: hex(b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24) + "u"  # noqa: E731
    names = (
        "bits",
        "head_dim",
        "bf16",
        "group",
        "warps",
        "stages",
        "read_all",
        "compute",
        "interleaved",
        "k_fold",
    )
    return {
        **{name.upper(): v[name] for name in names},
        "CODEC": CODECS[str(v["codec"])],
        "WORDS_PER_VECTOR": v["vector"],
        "TABLE_HIGH0": word(high[:4]),
        "TABLE_HIGH1": word(high[4:]),
        "TABLE_LOW0": word(low[:4]),
        "TABLE_LOW1": word(low[4:]),
    }


def name(v: dict[str, int | str]) -> str:
    return "_".join(f"{key}{value}" for key, value in v.items())


def _variants() -> list[dict[str, int | str]]:
    found = []
    for head_dim in (128, 64):
        for bits in (2, 3, 4, 8):
            ring = {"warps": 12 if 2 * bits * head_dim * 8 * 24 < 150_000 else 8, "stages": 2}
            for warps, stages in [(8, 2), (8, 3), (8, 4), (12, 2), (12, 3), (16, 2), (16, 3), (4, 4)]:
                found.append(variant(bits, head_dim, warps=warps, stages=stages))
            changes: list[dict[str, int | str]] = [
                {"codec": "step16"},
                {"codec": "asym"},
                {"codec": "channel"},
                {"bf16": 0},
                {"vector": 1},
                {"read_all": 1},
                {"compute": 0},
                {"group": 1},
                {"interleaved": 0},
                {"k_fold": 0},
                {"interleaved": 0, "k_fold": 0},
            ]
            if bits in (2, 4):
                changes.append({"codec": "lut"})
            if bits == 4:
                changes.append({"codec": "prmt"})
            found += [variant(bits, head_dim, **ring, **change) for change in changes]
    unique = {name(v): v for v in found if shared_bytes(v) <= 224 * 1024}
    return list(unique.values())


VARIANTS: Final = _variants()
