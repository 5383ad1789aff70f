"""The decode benchmark of the GPU, as far as a machine without one can tell: pages, judge, figure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvlab.lab.benchmark import run as benchmark
from kvlab.lab.benchmark.baseline import Options
from kvlab.lab.benchmark.decode_cuda import LADDERS
from kvlab.lab.benchmark.device_pages import Shape, draw_pages, relative_error
from kvlab.lab.benchmark.figures import draw_decode
from kvlab.ops.frame import FRAME
from kvlab.reference.packed import packed_attention

SHAPE = Shape(2, 640, num_heads_q=4, num_heads_kv=2, head_dim=64)


def test_pages_are_full_and_each_is_in_one_table_once() -> None:
    pages = draw_pages(SHAPE, LADDERS["8/4/2"], device="cpu")
    rung = pages.rung.view(SHAPE.num_sequences, -1)
    assert [layout.bits_k for layout in pages.layouts] == [2, 4, 8]
    assert rung[0].tolist() == [0] * 16 + [1] * 16 + [2] * 8
    for r, pool in enumerate(pages.pools):
        assert sorted(pages.index[pages.rung == r].tolist()) == list(range(len(pool)))
    assert int(pages.count.min()) == 16
    assert int(pages.num_pages.min()) == 40


def attended(pages: SimpleNamespace, q: torch.Tensor) -> torch.Tensor:
    arrays = {name: getattr(pages, name).numpy() for name in ("rung", "index", "count", "num_pages", *FRAME)}
    arrays["pools"] = [pool.numpy() for pool in pages.pools]
    own = SimpleNamespace(layouts=pages.layouts, dtype=pages.dtype, **arrays)
    return torch.from_numpy(packed_attention(q.float().numpy(), own)[0]).to(torch.bfloat16)


@pytest.mark.parametrize("name", ["16", "3", "8/4/2", "default", "profiles"])
def test_the_judge_accepts_the_right_answer_alone(name: str) -> None:
    pages = draw_pages(SHAPE, LADDERS[name], device="cpu")
    q = torch.randn(2, 1, 4, 64, dtype=torch.bfloat16)
    out = attended(pages, q)
    for pair in range(SHAPE.num_sequences):
        assert relative_error(pages, q, out, pair) < 4e-3
        for wrong in (torch.zeros_like(out), out.flip(2), out.flip(0), attended(pages, q.flip(2))):
            assert relative_error(pages, q, wrong, pair) > 0.1


def rows() -> list[dict[str, Any]]:
    times = {4096: (12.0, 9.0, 1.0), 32768: (40.0, 17.0, 8.0)}
    return [
        {"context": context, "widths": name, "dense_us": dense, "packed_us": packed, "floor_us": floor}
        for context, (dense, packed, floor) in times.items()
        for name in ("4", "2")
    ]


def test_figure_has_a_curve_and_a_floor_for_each_width() -> None:
    pytest.importorskip("matplotlib")
    axes = draw_decode(rows()[::-1]).axes[0]
    lines = axes.get_lines()
    assert [line.get_label() for line in lines if not str(line.get_label()).startswith("_")] == [
        "dense bfloat16", "2 bits", "4 bits",
    ]  # fmt: skip
    assert len([line for line in lines if line.get_linestyle() == "--"]) == 2
    for line in lines:
        assert np.array_equal(line.get_xdata(), [4096, 32768])
    assert np.array_equal(lines[1].get_ydata(), [9, 17])


def test_the_command_draws_decode_on_cuda_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from kvlab.cli.benchmark import command

    with pytest.raises(ValueError, match="decode on cuda have one, not decode on cpu"):
        command("decode", figure=tmp_path / "out.png")
    monkeypatch.setattr("kvlab.lab.benchmark.decode_cuda.benchmark_decode", lambda _: rows())
    monkeypatch.setattr(benchmark.targets, "machine", lambda _: None)
    command("decode", device="cuda", figure=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.png", "out.svg"]


@pytest.mark.parametrize("case", ["packing", "codec", "decode"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(case: str) -> None:
    with pytest.raises(NotImplementedError, match=r"device='cuda': .*; --device cpu runs what needs no GPU"):
        benchmark.run(case, Options(device="cuda"))
