"""The launcher of gradients on a GPU, as far as it goes without one: what it passes and may ask for."""

import pytest

from kvlab.jit.build import build
from kvlab.jit.compile_gate import specialisations
from kvlab.jit.cubin import read_resources
from kvlab.ops.cuda import attention_backward as launcher
from kvlab.ops.cuda.attention_backward_split import CLUSTER

HOPPER_SHARED_BYTES = 227 * 1024


def declared(source: str) -> list[dict[str, str]]:
    """Return the macros of every gated specialisation of a source."""
    return [dict(item.macros) for item in specialisations() if item.name == source]


def test_every_tiling_is_gated() -> None:
    gated = declared("attention/backward.cu")
    for head_dim, shapes in launcher.SHAPES.items():
        for shape in shapes:
            tiling = {name.upper(): str(value) for name, value in shape._asdict().items()}
            assert tiling | {"HEAD_DIM": str(head_dim), "BF16": "1", "SOFTCAP": "0", "ALIGNED": "1"} in gated
    for head_dim, tiles in launcher.HOPPER_SHAPES.items():
        splits = [n for n in (1, 2, 4, 8) if n * tiles.cluster <= CLUSTER]
        wanted = {"HEAD_DIM": str(head_dim), "BF16": "1", "SOFTCAP": "0"}
        gated = declared(f"{tiles.source}.cu")
        stores = {"FIRST_STORES": "1"}  # ordinary calls where they are short, and all deterministic ones
        for split in ({"CLUSTER_SPLIT": str(n)} for n in splits):
            assert wanted | split in gated
            assert wanted | split | stores in gated
            assert wanted | split | stores | {"DETERMINISTIC": "1"} in gated
    for head_dim, tiles in launcher.LONG_STEPS.items():
        wanted = {"HEAD_DIM": str(head_dim), "BF16": "1", "SOFTCAP": "0", "CLUSTER_SPLIT": "1"}
        wanted |= {"BLOCK_M": str(tiles.block_m)}
        assert wanted in declared(f"{tiles.source}.cu")


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_bits_every_time_take_a_kernel_of_their_own(
    monkeypatch: pytest.MonkeyPatch, dim: int, deterministic: bool
) -> None:
    built: list[dict[str, int]] = []
    monkeypatch.setattr(launcher, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(launcher, "build", lambda name, macros, arch: built.append(dict(macros)))
    monkeypatch.setattr(launcher, "load", lambda *_, **__: None)
    launcher.plan_of.__wrapped__(dim, "bfloat16", False, True, True, 1, deterministic, 0)
    before_and_after, main = built
    assert "DETERMINISTIC" not in before_and_after
    assert "BLOCK_M" not in main
    assert main.get("DETERMINISTIC", 0) == deterministic


def test_long_steps_are_the_same_for_all_kernels_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, int]] = []
    monkeypatch.setattr(launcher, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(launcher, "build", lambda name, macros, arch: built.append(dict(macros)))
    monkeypatch.setattr(launcher, "load", lambda *_, **__: None)
    plan = launcher.plan_of.__wrapped__(120, "bfloat16", False, True, True, 1, False, 0, 1, True)
    assert [x["BLOCK_M"] for x in built] == [plan.box] * 2 == [80] * 2
    assert plan.aligned_rows % plan.box == plan.aligned_rows % launcher.PREPOST_ROWS == 0


@pytest.mark.parametrize(
    ("dim", "capped", "deterministic", "rows", "window", "expected"),
    [
        (128, False, False, 16384, (1 << 30, 1 << 30), True),
        (104, False, False, 8192, (1 << 30, 0), True),
        (128, False, False, 8191, (1 << 30, 0), False),
        (128, True, False, 16384, (1 << 30, 0), False),
        (128, False, True, 16384, (1 << 30, 0), False),
        (128, False, False, 16384, (500, 0), False),
        (96, False, False, 16384, (1 << 30, 1 << 30), False),
        (256, False, False, 16384, (1 << 30, 1 << 30), False),
    ],
)
def test_which_calls_have_long_steps(
    dim: int, capped: bool, deterministic: bool, rows: int, window: tuple[int, int], expected: bool
) -> None:
    call = dict(zip(("left", "right"), window, strict=True))
    assert launcher.has_long_steps(dim, capped, deterministic, (1, rows, rows), call) == expected


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_there_is_a_tiling_for_every_gpu(capability: tuple[int, int]) -> None:
    for head_dim in launcher.SHAPES:
        shape = launcher.shape_for(head_dim, capability)
        assert 128 % shape.block_m == 0  # the workspace has multiples of 128 rows
    small = capability in ((8, 6), (8, 9), (12, 0))
    assert (launcher.shape_for(128, capability).block_m == 32) == small


@pytest.mark.parametrize("head_dim", launcher.FLOAT32_BLOCKS)
def test_float32_tiles_are_gated_and_fit_every_gpu(head_dim: int) -> None:
    block = launcher.FLOAT32_BLOCKS[head_dim]
    assert {"HEAD_DIM": str(head_dim), "BLOCK": str(block)} in declared("attention/backward_float32.cu")
    assert launcher.float32_shared_bytes(head_dim) <= 99 * 1024


def test_hopper_tiles_fit() -> None:
    long = {dim: hopper(dim) | {"BLOCK_M": x.block_m} for dim, x in launcher.LONG_STEPS.items()}
    kernels = [(x, dim, hopper(dim)) for dim, x in launcher.HOPPER_SHAPES.items()]
    kernels += [(x, dim, long[dim]) for dim, x in launcher.LONG_STEPS.items()]
    for tiles, head_dim, chosen in kernels:
        resources = read_resources(build(tiles.source, chosen, "sm_90a").cubin)
        static = resources["attend_backward"].shared_bytes
        assert tiles.shared_bytes(head_dim) + static <= HOPPER_SHARED_BYTES


def hopper(head_dim: int) -> dict[str, int]:
    return {"HEAD_DIM": head_dim, "BF16": 1, "SOFTCAP": 0, "CLUSTER_SPLIT": 1}


def test_the_call_has_the_layout_of_the_kernels() -> None:
    size = launcher._CALL.size
    prepost = read_resources(build("attention/backward_pre_post", macros(64, prepost=True), "sm_90a").cubin)
    assert prepost["preprocess"].parameter_bytes == prepost["postprocess"].parameter_bytes == (size,)
    portable = read_resources(build("attention/backward", macros(64), "sm_90a").cubin)
    assert portable["attend_backward"].parameter_bytes == (size,)
    built = build("attention/backward_float32", {"HEAD_DIM": 64, "BLOCK": 32}, "sm_90a")
    assert read_resources(built.cubin)["attend_backward"].parameter_bytes == (size,)
    hoppers = read_resources(build("attention/backward_sm90", hopper(64), "sm_90a").cubin)
    assert hoppers["attend_backward"].parameter_bytes == (*(128,) * 4, size)


def macros(head_dim: int, prepost: bool = False) -> dict[str, int]:
    chosen = {"HEAD_DIM": head_dim, "BF16": 1, "ALIGNED": 1}
    if prepost:
        return chosen | {"FLOAT32": 0}
    shape = launcher.shape_for(head_dim, (9, 0))
    return chosen | {"SOFTCAP": 0} | {name.upper(): value for name, value in shape._asdict().items()}
