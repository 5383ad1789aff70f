"""kvlab.registry: the first row that supports a call is chosen, and what is refused is said."""

from __future__ import annotations

import contextvars
import importlib
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import registry
from kvlab.registry import ANY, AtLeast, Implementation, choose, last_backend, register

HERE = __name__


def double(x: int) -> int:
    return 2 * x


def fail(x: int) -> int:
    raise RuntimeError("kernel failed")


def double_by_reference(x: int) -> int:
    return registry.choose("double", "cpu", "reference", bits=2, features=set()).launch(x)


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An operation "double" in a table of its own, with one row a backend."""
    monkeypatch.setattr(registry, "_rows", {})
    on_gpu = {"bits": (2, 4), "features": {"causal", "window"}, "compute_capability": AtLeast((9, 0))}
    register(
        Implementation("double", "cuda", f"{HERE}:double", on_gpu),
        Implementation(
            "double", "numba", f"{HERE}:double", {**on_gpu, "compute_capability": AtLeast((8, 0))}
        ),
        Implementation("double", "cpu", f"{HERE}:double", {"bits": (2, 4), "features": {"causal"}}),
        Implementation("double", "reference", f"{HERE}:double", {"bits": range(1, 9), "features": ANY}),
    )
    return


@pytest.mark.parametrize(
    ("device", "backend", "requirements", "expected"),
    [
        ("cpu", None, {"bits": 2, "features": {"causal"}}, "cpu"),
        ("cpu", None, {"bits": 2, "features": set()}, "cpu"),
        ("cpu", None, {"bits": 3, "features": {"causal"}}, "reference"),
        ("cpu", None, {"bits": 2, "features": {"causal", "softcap"}}, "reference"),
        ("cpu", "reference", {"bits": 2, "features": set()}, "reference"),
        ("cuda", None, {"bits": 2, "features": set(), "compute_capability": (9, 0)}, "cuda"),
        ("cuda", None, {"bits": 2, "features": set(), "compute_capability": (8, 6)}, "numba"),
    ],
)
def test_first_row_that_supports_the_call_is_chosen(
    device: str, backend: str | None, requirements: dict[str, object], expected: str
) -> None:
    assert choose("double", device, backend, **requirements).backend == expected


@given(bits=st.integers(0, 10), features=st.sets(st.sampled_from(["causal", "window", "softcap"])))
def test_chosen_row_supports_every_fact_and_no_better_row_does(bits: int, features: set[str]) -> None:
    better = [row for row in registry.rows("double") if row.device_kind == "cpu"]
    try:
        chosen = choose("double", "cpu", bits=bits, features=features)
    except NotImplementedError:
        assert all(row.unsupported({"bits": bits, "features": features}) for row in better)
        return
    assert bits in chosen.supports["bits"]
    assert all(feature in chosen.supports["features"] for feature in features)
    for row in better[: better.index(chosen)]:
        assert row.unsupported({"bits": bits, "features": features})


def test_refusal_says_what_is_missing_and_who_has_it() -> None:
    with pytest.raises(NotImplementedError) as caught:
        choose("double", "cpu", "cpu", bits=3, features={"window", "causal"})
    assert str(caught.value) == (
        "double: backend 'cpu' does not support bits=3 (supported: 2, 4); features=window (supported: causal)"
        ". Supported by: backend 'reference' on cpu arrays"
    )


def test_refusal_names_a_backend_on_the_other_device() -> None:
    requirements = {"bits": 4, "features": {"window"}}
    register(Implementation("window", "cpu", f"{HERE}:double", {"bits": (2,), "features": ANY}))
    register(Implementation("window", "cuda", f"{HERE}:double", {"bits": (4,), "features": ANY}))
    with pytest.raises(NotImplementedError, match=r"Supported by: backend 'cuda' on cuda arrays$"):
        choose("window", "cpu", **requirements)


def test_backend_of_another_device_is_never_taken() -> None:
    with pytest.raises(
        NotImplementedError, match=r"'cuda' works on cuda arrays, the arguments are on cpu; move"
    ):
        choose("double", "cpu", "cuda", bits=2, features=set())


def test_operation_without_rows_here() -> None:
    register(Implementation("gpu_only", "cuda", f"{HERE}:double", {}))
    with pytest.raises(
        NotImplementedError, match=r"gpu_only: there is no implementation for cpu arrays\. Supported"
    ):
        choose("gpu_only", "cpu")


def test_unknown_backend_is_a_value_error_with_the_list() -> None:
    for attempt in (
        lambda: choose("double", "cpu", "triton", bits=2, features=set()),
        lambda: register(Implementation("double", "triton", f"{HERE}:double", {})),
    ):
        with pytest.raises(
            ValueError, match="'triton' is unknown; known are 'reference', 'cpu', 'numba', 'cuda'"
        ):
            attempt()


def test_rows_of_one_device_must_state_the_same_facts() -> None:
    with pytest.raises(
        ValueError, match=r"rows of 'double' on cpu must state the same requirements.*use ANY"
    ):
        register(Implementation("double", "cpu", f"{HERE}:double", {"bits": (2,)}))


def test_a_fact_cannot_be_forgotten_or_misspelt() -> None:
    with pytest.raises(
        TypeError, match=r"needs the requirements \['bits', 'features'\], got \['bit', 'features'\]"
    ):
        choose("double", "cpu", bit=2, features=set())


def test_last_backend_tells_what_ran() -> None:
    def story() -> list[str | None]:
        told = [last_backend()]
        choose("double", "cpu", bits=2, features=set()).launch(3)
        told.append(last_backend())
        choose("double", "cpu", "reference", bits=2, features=set()).launch(3)
        return [*told, last_backend()]

    assert contextvars.Context().run(story) == [None, "cpu", "reference"]


def test_last_backend_is_the_outer_one_and_unchanged_by_a_failure() -> None:
    register(
        Implementation("outer", "cpu", f"{HERE}:double_by_reference", {}),
        Implementation("broken", "reference", f"{HERE}:fail", {}),
    )
    assert choose("outer", "cpu").launch(4) == 8
    assert last_backend() == "cpu"
    with pytest.raises(RuntimeError, match="kernel failed"):
        choose("broken", "cpu").launch(4)
    assert last_backend() == "cpu"


def test_last_backend_of_another_thread_is_not_seen() -> None:
    choose("double", "cpu", bits=2, features=set()).launch(3)
    seen: list[str | None] = []
    thread = threading.Thread(target=lambda: seen.append(last_backend()))
    thread.start()
    thread.join()
    assert seen == [None]


def test_older_gpus_get_the_kernels_in_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    operations = {row.operation for row in registry.all_rows() if row.backend == "numba"}
    assert len(operations) == 11
    for operation in operations:
        supports = next(row.supports for row in registry.rows(operation) if row.backend == "numba")
        listed = {"bits", "codec", "dtype", "implementation"} & set(supports)
        requirements = {name: next(iter(supports[name])) for name in listed}
        requirements |= {"head_dim": 64} if "head_dim" in supports else {}
        for capability, backend in (((7, 5), "numba"), ((9, 0), "cuda")):
            assert choose(operation, "cuda", **requirements, compute_capability=capability).backend == backend
        with pytest.raises(NotImplementedError, match=r"compute_capability=.*at least"):
            choose(operation, "cuda", "cuda", **requirements, compute_capability=(7, 5))


def test_every_row_of_the_library_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    table = registry.all_rows()
    assert table
    for row in table:
        module, _, function = row.launcher.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), row
        assert all(registry.describe(allowed) for allowed in row.supports.values())
