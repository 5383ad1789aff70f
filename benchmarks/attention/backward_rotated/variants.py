"""Builds of the experimental backward (macros by name), and shapes with the builds that are timed on them."""

VARIANTS = {}


def add(name, d, **k):
    VARIANTS[name] = {"HEAD_DIM": d, **k}


add("128 o0", 128)
add("128 debug", 128, DEBUG=1)
add("64 debug", 64, ORDER=1, DEBUG=1)
add("96 debug", 96, DEBUG=1)
add("128 o1", 128, ORDER=1)
add("128 red", 128, RED=1)
add("128 plain", 128, ROTATE=0, Q_STAGES=2)
add("128 plain red", 128, ROTATE=0, Q_STAGES=2, RED=1)
add("128 static", 128, DYNAMIC=0)
add("128 nodq", 128, ABLATE=1)
add("128 noadd", 128, ABLATE=3)
add("128 noexp", 128, ABLATE=2)
add("128 plain nodq", 128, ROTATE=0, Q_STAGES=2, ABLATE=1)
add("64 o1", 64, ORDER=1)
add("64 plain", 64, ROTATE=0, Q_STAGES=2)
add("64 red", 64, ORDER=1, RED=1)
add("64 nodq", 64, ORDER=1, ABLATE=1)
add("64 noexp", 64, ORDER=1, ABLATE=2)
add("96 o0", 96)
add("96 o1", 96, ORDER=1)
add("96 red", 96, RED=1)


def D(d):
    return [n for n in VARIANTS if n.startswith(f"{d} ") and "debug" not in n]


M = [n for n in D(128) if "no" not in n]


def det(n, **k):
    return [n, {"ordered": 1, **k}]


PLAN = [
    {
        "name": "d128 16K 16/16 causal",
        "shape": [1, 16384, 16, 16, 128, True],
        "variants": [
            *D(128),
            ["128 o0", {"section": 34 << 20}],
            ["128 o0", {"section": 17 << 20}],
            det("128 o0"),
            det("128 plain"),
        ],
        "today": [0, 1],
    },
    {
        "name": "d128 16K 16/16 full",
        "shape": [1, 16384, 16, 16, 128, False],
        "variants": [*D(128), det("128 o0")],
        "today": [0],
    },
    {
        "name": "d64 16K 32/32 causal",
        "shape": [1, 16384, 32, 32, 64, True],
        "variants": [*D(64), det("64 o1")],
        "today": [0],
    },
    {
        "name": "d96 2x8K 16/16 causal",
        "shape": [2, 8192, 16, 16, 96, True],
        "variants": [*D(96), det("96 o0")],
        "today": [0],
    },
    {
        "name": "d128 2x2K 64/8 causal",
        "shape": [2, 2048, 64, 8, 128, True],
        "variants": [*M, ["128 o0", {"section": 34 << 20}], det("128 o0")],
        "today": [0, 1],
    },
    {
        "name": "d128 2x8K 64/8 causal",
        "shape": [2, 8192, 64, 8, 128, True],
        "variants": [*M, ["128 o0", {"section": 34 << 20}], det("128 o0")],
        "today": [0, 1],
    },
    {
        "name": "d64 4x4K 32/8 causal",
        "shape": [4, 4096, 32, 8, 64, True],
        "variants": [*D(64), det("64 o1")],
        "today": [0],
    },
    {
        "name": "d128 8x1K 32/8 causal",
        "shape": [8, 1024, 32, 8, 128, True],
        "variants": [*M, det("128 o0")],
        "today": [0],
    },
    {
        "name": "d128 2x4K 64/8 causal",
        "shape": [2, 4096, 64, 8, 128, True],
        "variants": ["128 o0", "128 red", "128 o1", det("128 o0")],
        "today": [0],
    },
    {
        "name": "d128 1x32K 32/8 causal",
        "shape": [1, 32768, 32, 8, 128, True],
        "variants": ["128 o0", "128 red", "128 o1", det("128 o0")],
        "today": [0],
    },
]
