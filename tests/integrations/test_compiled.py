"""Compiled by torch, public functions give what they give alone: it calls them without a look inside."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kvlab  # noqa: E402
from kvlab.integrations.torch_autograd import attention, attention_varlen  # noqa: E402
from kvlab.parallel import functions as parallel  # noqa: E402
from kvlab.torch_compile import opaque  # noqa: E402
from tests.traced import CALLS, assert_traced_alike  # noqa: E402


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_are_the_plain_ones(name: str, dynamic: bool | None) -> None:
    assert_traced_alike(name, "cpu", torch.float32, backend="eager", dynamic=dynamic)


@pytest.mark.parametrize(("varlen", "dynamic"), [(False, True), (True, None)])
def test_one_graph_takes_other_lengths_and_numbers(varlen: bool, dynamic: bool | None) -> None:
    """Still without a break where lengths, scale, soft cap or window are other ones than before."""

    def loss(q: Any, k: Any, v: Any, bounds: Any, scale: float, softcap: float, left: int) -> Any:
        options: Any = {"scale": scale, "softcap": softcap, "window": (left, -1), "deterministic": True}
        if varlen:
            out = attention_varlen(q[0], k[0], v[0], bounds, bounds, q.shape[1], q.shape[1], **options)
        else:
            out = attention(q, k, v, **options)
        return (out * out).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length, *numbers in ((7, 0.1, 3.0, 4), (9, 0.2, 3.0, 4), (12, 0.3, 5.0, 4), (12, -0.3, 0.0, 6)):
        leaves = [torch.randn(1, length, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        bounds = torch.tensor([0, 3, length], dtype=torch.int32)
        plain, made = (torch.autograd.grad(f(*leaves, bounds, *numbers), leaves) for f in (loss, compiled))
        for x, y in zip(plain, made, strict=True):
            torch.testing.assert_close(y, x, atol=0, rtol=0)
    with pytest.raises(Exception, match="scale=nan must be finite"):
        compiled(*leaves, bounds, float("nan"), 0.0, 6)


def test_every_public_function_of_arrays_is_called_as_it_is() -> None:
    """Those of kvlab that torch can trace are operators; their module does not stand here."""
    functions = [getattr(kvlab, name) for name, home in kvlab._HOME.items() if home.startswith("kvlab.ops.")]
    functions += [getattr(parallel, name) for name in parallel.__all__]
    for function in functions:
        if inspect.isfunction(function):
            assert function._torchdynamo_disable, function.__name__


def test_a_traced_function_would_be_noticed() -> None:
    """What runs inside is seen by torch unless it is told not to look."""
    seen = []

    def inside(x: Any) -> Any:
        seen.append(torch._C._dynamo.eval_frame.get_eval_frame_callback() is None)
        return x

    torch._dynamo.reset()
    for _ in range(2):
        torch.compile(lambda x: opaque(inside)(x + 1) * 2, backend="eager")(torch.ones(2))
    assert seen == [True, True]
    seen.clear()
    torch.compile(lambda x: inside(x + 1) * 2, backend="eager")(torch.ones(2))
    assert seen != [True]


def test_where_nothing_is_compiled_a_function_is_called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's wrapper, which every call would pay in a process that has loaded transformers."""

    def disable(function: Any) -> Any:
        return lambda *arguments: pytest.fail("called through torch's wrapper")

    monkeypatch.setattr(torch._dynamo, "disable", disable)
    assert opaque(lambda x: x + 1)(1) == 2


def test_a_whole_graph_is_refused_by_the_name_of_the_function() -> None:
    q = torch.ones(1, 3, 2, 4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="function attention"):
        torch.compile(lambda x: kvlab.attention(x, x, x), backend="eager", fullgraph=True)(q)


def test_nothing_of_torch_is_loaded_for_it() -> None:
    code = """if True:
        import sys, kvlab, numpy as np
        x = np.ones((1, 2, 1, 4), np.float32)
        kvlab.attention(x, x, x)
        print([name for name in sys.modules if name.startswith("torch")])
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
