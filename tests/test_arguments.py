"""Every public function, every argument, values of wrong kinds: the error names the argument and the value.

A table says of which kind each argument is; a name that is public and not in it fails the last test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import kvlab
from kvlab import MixedPrecisionCache
from kvlab.arguments import check_names, choice, flag, number, whole_number
from kvlab.sizes import parse_budget

NAN, HUGE = float("nan"), 10**30
WRONG: dict[str, list[Any]] = {
    "whole": ["a", 1.5, [1], True, NAN, 1j, {}, b"x", np.float32(2)],
    "count": ["a", 1.5, None, [1], True, NAN, 1j, {}, b"x", np.float32(2), -2, HUGE],
    "number": ["a", [1], True, NAN, 1j, {}, b"x", float("inf")],
    "flag": ["a", 1.5, None, [1], {}, NAN, 2],
    "word": ["nonsense", 1, [1], {}, b"x", True],
    "array": ["a", 1.5, None, [1.0], object(), {}],
    "arrays": ["a", 1.5, None, [], {}, [1.0]],
    "results": ["a", 1.5, [], {}, [1.0], [1.0, 2.0], (None, None)],
    "mask": ["a", 1.5, [True], object(), {}, np.ones((1, 8))],
    "rows": ["a", 1.5, None, [0.5], np.array([0.5]), np.array([[0]]), np.array([7]), np.array([-1])],
    "budget": ["a", [1], True, -1, 0, NAN, 1j, {}, b"x", "1GB?"],
    "bits": ["a", 1.5, None, [], [5], 7, [0], "k4", ["k0v4"], [2, "k4v0"]],
    "importance": ["nonsense", 1, [1], {}, None],
    "pair": ["a", 1.5, None, [1], (1, 2, 3), (-2, 0), (0.5, 1)],
    "window": ["a", 1.5, [1, 1], [0], True, NAN, 1j, {}, b"x", np.float32(2), -2, 0, HUGE],
    "path": [1.5, None, [1], {}],
    "frames": ["a", 1.5, [1], {}, np.zeros(3)],
    "angles": ["a", 1.5, {}, [-0.5], [NAN], ["a"]],
    "quantized": ["a", 1.5, None, [1], np.zeros(3)],
}

rng = np.random.default_rng(0)
Q = rng.standard_normal((1, 8, 4, 32), dtype=np.float32)
K, V = rng.standard_normal((2, 1, 8, 2, 32), dtype=np.float32)
ENDS, CODES = np.array([0, 8], np.int32), np.arange(8, dtype=np.uint8) % 4
OUT, LSE = np.zeros((1, 8, 4, 32), np.float32), np.zeros((1, 4, 8), np.float32)


def method(name: str) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        cache = MixedPrecisionCache(1, 4, 2, 32, budget=None)
        cache.append(0, K, V)
        return getattr(cache, name)(**arguments)

    return call


SCORES = {"scale": (None, "number"), "softcap": (0.0, "number")}
MASKS = {**SCORES, "causal": (False, "flag"), "window": ((-1, -1), "pair")}
WANTS_LSE = {"return_lse": (False, "flag")}
MARGIN = {"sm_margin": (0, "count")}
BACKEND = {"backend": (None, "word")}
QKV = {"q": (Q, "array"), "k": (K, "array"), "v": (V, "array")}
FLAT = {"q": (Q[0], "array"), "k": (K[0], "array"), "v": (V[0], "array")}
GRADIENT = {"dout": (OUT, "array"), "out": (OUT, "array"), "lse": (LSE, "array")}
FLAT_GRADIENT = {name: (array[0], kind) for name, (array, kind) in GRADIENT.items()}
FIXED_ORDER = {"deterministic": (False, "flag")}
FLOAT32_GRADIENTS = {"float32_dk_dv": (False, "flag")}
BOUNDS = {"cu_seqlens_q": (ENDS, "array"), "cu_seqlens_k": (ENDS, "array")}
LONGEST = {"max_seqlen_q": (8, "count"), "max_seqlen_k": (8, "count")}
GROUPS = {
    "cu_seqlens_q_groups": ([ENDS], "arrays"),
    "cu_seqlens_k": (ENDS, "array"),
    "prefix_lens": ([ENDS[1:]], "arrays"),
    "causal": (True, "flag"),
    "scale": (None, "number"),
    "return_lse": (False, "flag"),
    "implementation": (None, "word"),
    "max_seqlen_q": (8, "whole"),
    "max_seqlen_k": (8, "whole"),
    "segment_table": (np.zeros((1, 1), np.int32), "array"),
    "segment_len": (8, "whole"),
    "sm_margin": (0, "count"),
    "into": (([OUT[0]], [LSE[0]]), "results"),
}
ONLY_FORWARD = {"return_lse", "segment_table", "segment_len", "into"}
LAYER, MASK = {"layer": (0, "count")}, {"valid": (None, "mask")}
OPTIONS: dict[str, tuple[Any, str]] = {
    "batch": (1, "count"),
    "budget": (0.5, "budget"),
    "bits": ((4, 8), "bits"),
    "importance": ("attention", "importance"),
    "allocator": ("greedy", "word"),
    "residual": (0, "count"),
    "sink": (4, "count"),
    "sliding_window": (None, "window"),
    "rewind": (0, "count"),
    "recent": (9, "count"),
    "plan_length": (64, "count"),
    "max_seqlen": (None, "whole"),
    "realloc_every": (16, "count"),
    "floor": (1.0, "number"),
    "ema_decay": (0.9, "number"),
    "device": (None, "word"),
    "dtype": ("float16", "word"),
    "frames": (None, "frames"),
    "rotary": (None, "angles"),
}
FRAMES = kvlab.KeyFrames.measured([(Q, K, V)])
GEOMETRY = {name: (value, "count") for name, value in zip(
    ("num_layers", "num_heads_q", "num_heads_kv", "head_dim"), (1, 4, 2, 32), strict=True
)}  # fmt: skip
CALLS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, str]]]] = {
    "MixedPrecisionCache": (MixedPrecisionCache, GEOMETRY | OPTIONS),
    "KeyFrames": (
        kvlab.KeyFrames,
        {field.name: (getattr(FRAMES, field.name), "array") for field in fields(FRAMES)},
    ),
    "step": (method("step"), LAYER | QKV | SCORES | MASK),
    "append": (method("append"), LAYER | {"k": (K, "array"), "v": (V, "array")} | MASK),
    "attend": (method("attend"), LAYER | {"q": (Q, "array")} | SCORES),
    "crop": (method("crop"), {"n": (1, "count")}),
    "smallest_nbytes": (method("smallest_nbytes"), {"seqlen": (1, "count")}),
    "repeat": (method("repeat"), {"n": (1, "count")}),
    "reorder": (method("reorder"), {"rows": (np.array([0]), "rows")}),
    "select": (method("select"), {"rows": (np.array([0]), "rows")}),
    "save": (method("save"), {"path": ("", "path")}),
    "load": (MixedPrecisionCache.load, {"path": ("", "path")}),
    "pack": (kvlab.pack, {"codes": (CODES, "array"), "bits": (2, "count"), "check": (True, "flag")}),
    "unpack": (
        kvlab.unpack,
        {"packed": (kvlab.pack(CODES, 2), "array"), "bits": (2, "count"), "count": (8, "count")},
    ),
    "pack_ternary": (
        kvlab.pack_ternary,
        {"values": (np.zeros(8, np.int8), "array"), "check": (True, "flag")},
    ),
    "unpack_ternary": (
        kvlab.unpack_ternary,
        {"packed": (np.zeros(2, np.uint8), "array"), "count": (8, "count"), "check": (True, "flag")},
    ),
    "quantize": (
        kvlab.quantize,
        {
            "x": (K, "array"),
            "bits": (4, "number"),
            "axis": (-1, "whole"),
            "group_size": (None, "whole"),
            "codec": ("affine", "word"),
            "nan": ("raise", "word"),
        },
    ),
    "dequantize": (
        kvlab.dequantize,
        {"quantized": (kvlab.quantize(K, 4), "quantized"), "dtype": (None, "word"), "check": (True, "flag")},
    ),
    "attention": (kvlab.attention, QKV | MASKS | WANTS_LSE | MARGIN),
    "attention_varlen": (
        kvlab.attention_varlen,
        FLAT | BOUNDS | LONGEST | MASKS | WANTS_LSE | MARGIN | {"into": ((OUT[0], LSE[0]), "results")},
    ),
    "attention_backward": (
        kvlab.attention_backward,
        GRADIENT | QKV | MASKS | FIXED_ORDER | FLOAT32_GRADIENTS | MARGIN,
    ),
    "grouped_attention_varlen": (
        kvlab.grouped_attention_varlen,
        {"q_groups": ([Q[0]], "arrays"), "k": (K[0], "array"), "v": (V[0], "array")} | GROUPS,
    ),
    "grouped_attention_varlen_backward": (
        kvlab.grouped_attention_varlen_backward,
        {"q_groups": ([Q[0]], "arrays"), "k": (K[0], "array"), "v": (V[0], "array")}
        | {"douts": ([OUT[0]], "arrays"), "outs": ([OUT[0]], "arrays"), "lses": ([LSE[0]], "arrays")}
        | {name: value for name, value in GROUPS.items() if name not in ONLY_FORWARD}
        | FIXED_ORDER
        | FLOAT32_GRADIENTS,
    ),
    "attention_varlen_backward": (
        kvlab.attention_varlen_backward,
        FLAT_GRADIENT | FLAT | BOUNDS | LONGEST | MASKS | FIXED_ORDER | FLOAT32_GRADIENTS | MARGIN,
    ),
    "merge_attention": (kvlab.merge_attention, {"outs": ([OUT], "arrays"), "lses": ([LSE], "arrays")}),
}
HAVE_NO_PLAIN_ARGUMENTS = {"BudgetError", "FormatError", "OutOfMemory", "Quantized", "last_backend"}
ELSEWHERE = {
    "accelerate": "tests/integrations/test_accelerate.py",
    "measure_frames": "tests/integrations/test_frames.py",
    "perplexity": "tests/integrations/test_reading.py",
    "quantized": "tests/integrations/test_quantized.py",
    "read": "tests/integrations/test_reading.py",
}
CASES = [
    (name, argument)
    for name, (function, arguments) in CALLS.items()
    for argument in (
        arguments | BACKEND if "backend" in inspect.signature(function).parameters else arguments
    )
]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_the_error_names_the_argument_and_the_value(name: str, argument: str) -> None:
    function, arguments = CALLS[name]
    kind = {**arguments, **BACKEND}[argument][1]
    good = {key: value for key, (value, _) in arguments.items()}
    for wrong in WRONG[kind]:
        with pytest.raises((TypeError, ValueError)) as caught:
            function(**{**good, argument: wrong})
        text = str(caught.value)
        assert argument in text, f"{argument}={wrong!r}: {text}"
        named = [
            repr(wrong),
            str(wrong),
            type(wrong).__name__,
            "shape",
            "dtype",
            " 0 parts",
            "lses 0",
            " 0 groups",
        ]
        if isinstance(wrong, list | tuple | np.ndarray):
            named += [str(element) for element in wrong]
        assert any(word in text for word in named), f"{argument}={wrong!r}: {text}"


def test_good_values_pass() -> None:
    """Else every argument above might be refused whatever it is."""
    for name, (function, arguments) in CALLS.items():
        if name not in ("save", "load"):
            function(**{key: value for key, (value, _) in arguments.items()})


def test_scalars_of_numpy_are_welcome() -> None:
    cache = MixedPrecisionCache(np.int64(1), np.int32(4), 2, 32, sink=np.uint8(3), ema_decay=np.float32(0.5))
    assert (cache.num_layers, cache.sink, cache.ema_decay) == (1, 3, 0.5)
    assert kvlab.attention(Q, K, V, causal=np.True_, scale=np.float64(0.1)).shape == Q.shape
    assert (whole_number(np.int8(3), "n"), number(np.float16(2), "x"), flag(np.False_, "f")) == (
        3,
        2.0,
        False,
    )
    assert choice("b", "word", ("a", "b")) == "b"


def test_errors_say_of_an_array_what_it_is_and_not_what_is_in_it() -> None:
    """Arguments in the wrong order are often arrays where a number stands."""
    cache = MixedPrecisionCache(1, 4, 2, 32)
    with pytest.raises(TypeError, match=r"^layer=<float32 array of shape \(1, 8, 4, 32\)> must be a whole"):
        cache.step(Q, K, V, 0)  # type: ignore[arg-type, type-var]
    for check in (number, flag, lambda x, name: choice(x, name, ("a", "b")), parse_budget):
        with pytest.raises(TypeError) as caught:
            check(Q, "x") if check is not parse_budget else check(Q)
        assert "float32 array of shape (1, 8, 4, 32)" in str(caught.value)
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("is_causal", "causal is meant"), ("softmax_scale", "scale is meant"), ("casual", "causal is meant"),
        ("dropout_p", "there is no dropout: leave it out"), ("mask", "options are q, k, v, causal, scale"),
    ],
)  # fmt: skip
def test_an_option_of_another_library_is_refused_with_a_hint(option: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"{option}=1 is no option of attention.*{hint}"):
        kvlab.attention(Q, K, V, **{option: 1})  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        kvlab.attention(Q, K)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "known"), [("foo", ["floor", "bits"]), ("windw", ["rewind"]), ("nbits", ["budget"])]
)
def test_an_option_that_none_resembles_gets_no_hint(option: str, known: list[str]) -> None:
    with pytest.raises(TypeError, match=f"^{option}=1 is no option of the cache; options are {known[0]}"):
        check_names({option: 1}, known, "the cache")


def test_every_public_name_is_in_the_table() -> None:
    public = set(kvlab._HOME)
    assert public - HAVE_NO_PLAIN_ARGUMENTS - set(ELSEWHERE) <= set(CALLS)
    for name, (function, arguments) in CALLS.items():
        if name in public:
            known = set(inspect.signature(function).parameters) - {"backend"}
            assert known == set(arguments), f"{name}: {known ^ set(arguments)}"
