"""The evaluation against an independent computation, caches that are planted wrong, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from transformers import Cache, DynamicCache

from kvlab.cache.cache import MixedPrecisionCache
from kvlab.errors import BudgetError
from kvlab.integrations.transformers import KVLabCache
from kvlab.lab.quality.cases import controls, mixed, uniform
from kvlab.lab.quality.measure import Case, evaluate, held_bytes
from kvlab.lab.quality.model import Subject, tiny_llama
from kvlab.lab.quality.plan import CACHE_DTYPE, Protocol, num_chunks
from kvlab.lab.quality.scores import Score, join, mean_and_error
from kvlab.lab.quality.text import Windows, cut_windows

PROTOCOL = Protocol(length=192, scored_from=64, chunk=32, rows=2)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return tiny_llama()


@pytest.fixture(scope="module")
def windows(subject: Subject) -> Windows:
    return cut_windows(subject.text, subject.encode, 3, PROTOCOL.length + 1)


class Shifted(DynamicCache):
    """A cache whose tokens answer with the values of their neighbours."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states, value_states.roll(1, 2), *args, **kwargs)


def scores_of(
    subject: Subject, windows: Windows, make: Callable[[], Cache], kind: str = "other"
) -> tuple[Score, Score]:
    full, score = evaluate(subject.model, windows, [Case("case", kind, make)], PROTOCOL)
    return full, score


def logits_of(subject: Subject, windows: Windows, cache: Cache) -> np.ndarray:
    """Logits (windows, scored, vocabulary) in float64, fed in the chunks of the protocol."""
    tokens = torch.from_numpy(windows.tokens[:, :-1])
    parts = []
    with torch.no_grad():
        for chunk in tokens.split(PROTOCOL.chunk, dim=1):
            parts.append(subject.model(chunk, past_key_values=cache).logits.double().numpy())
    return np.concatenate(parts, 1)[:, PROTOCOL.scored_from :]


def test_scores_are_those_of_an_independent_computation(subject: Subject, windows: Windows) -> None:
    def make() -> KVLabCache:
        return KVLabCache(subject.model.config, bits=(3,), budget=None)

    full, score = scores_of(subject, windows, make)
    p = log_softmax(logits_of(subject, windows, DynamicCache()), axis=-1)
    q = log_softmax(logits_of(subject, windows, make()), axis=-1)
    blocks = (len(windows.starts), PROTOCOL.scored // PROTOCOL.chunk, PROTOCOL.chunk)
    target = windows.tokens[:, PROTOCOL.scored_from + 1 :, None]
    expected = {
        "kl": (np.exp(p) * (p - q)).sum(-1),
        "nll": -np.take_along_axis(q, target, -1)[..., 0],
        "agreement": (p.argmax(-1) == q.argmax(-1)).astype(float),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(
            getattr(score, name), values.reshape(blocks).mean(-1), rtol=1e-3, atol=1e-6
        )
    exact = -np.take_along_axis(p, target, -1)[..., 0].reshape(blocks).mean(-1)
    np.testing.assert_allclose(full.nll, exact, rtol=1e-4)


def test_a_cache_that_keeps_everything_has_no_divergence(subject: Subject, windows: Windows) -> None:
    full, score = scores_of(subject, windows, DynamicCache)
    assert full.kl == score.kl
    assert full.nll == score.nll
    assert mean_and_error(score.agreement) == (1.0, 0.0)
    assert abs(mean_and_error(score.kl)[0]) < 1e-7
    assert full.bits_per_element == score.bits_per_element == 32


def test_a_cache_that_is_wrong_is_seen(subject: Subject, windows: Windows) -> None:
    _, wrong = scores_of(subject, windows, Shifted)
    kl, error = mean_and_error(wrong.kl)
    assert kl > 0.01
    assert kl > 5 * error
    assert mean_and_error(wrong.agreement)[0] < 0.9


def test_fewer_bits_diverge_more_and_take_less(subject: Subject, windows: Windows) -> None:
    _, *scores = evaluate(subject.model, windows, uniform(subject.model.config), PROTOCOL)
    kl = [mean_and_error(score.kl)[0] for score in scores]
    assert sorted(kl) == kl
    sizes = [score.nbytes for score in scores]
    assert sorted(sizes, reverse=True) == sizes
    assert [score.widths for score in scores] == [{"8": 1.0}, {"4": 1.0}, {"3": 1.0}, {"2": 1.0}]


def test_bytes_are_those_of_the_caches_and_within_the_budget(subject: Subject, windows: Windows) -> None:
    made: list[KVLabCache] = []
    (case,) = mixed(subject.model.config, PROTOCOL.length, [0.25])

    def make() -> Cache:
        made.append(case.make())  # type: ignore[arg-type]
        return made[-1]

    _, score = scores_of(subject, windows, make)
    packed = [cache.packed for cache in made if cache.packed is not None]
    assert [cache.batch for cache in packed] == [2, 1]
    assert score.nbytes == round(sum(cache.nbytes for cache in packed) / 3)
    assert packed[0].dtype == CACHE_DTYPE
    config = subject.model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert score.nbytes <= 0.25 * 2 * per_token * PROTOCOL.length
    assert score.bits_per_element == pytest.approx(8 * score.nbytes / (per_token * PROTOCOL.length), rel=1e-4)
    assert sum(score.widths.values()) == pytest.approx(1)


def test_a_broken_budget_is_an_error(
    subject: Subject, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixedPrecisionCache, "budget_nbytes", property(lambda self: 1))
    with pytest.raises(RuntimeError, match=r"'mixed 0.5' takes \d+ bytes; its budget is 1"):
        evaluate(subject.model, windows, mixed(subject.model.config, PROTOCOL.length, [0.5]), PROTOCOL)


def test_a_cache_whose_budget_does_not_hold_is_given_up_alone(subject: Subject, windows: Windows) -> None:
    class Full(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any) -> Any:
            if self.get_seq_length() >= 96:
                raise BudgetError("no room for 128 tokens")
            return super().update(keys, values, layer, *args)

    cases = [Case("full", "other", Full), *uniform(subject.model.config, (8,))]
    failed: dict[str, BudgetError] = {}
    found = evaluate(subject.model, windows, cases, PROTOCOL, give_up=failed.__setitem__)
    alone = evaluate(subject.model, windows, cases[1:], PROTOCOL)
    assert [score.name for score in found] == ["full precision", "uniform 8"]
    assert [score.kl for score in found] == [score.kl for score in alone]
    assert list(map(str, failed.values())) == ["no room for 128 tokens"]
    with pytest.raises(BudgetError, match="no room"):
        evaluate(subject.model, windows, cases, PROTOCOL)


def test_controls_take_the_bytes_of_the_mixed_cache(subject: Subject, windows: Windows) -> None:
    config, length = subject.model.config, PROTOCOL.length
    cases = [*mixed(config, length, [0.25]), *controls(config, length, 0.25)]
    scores = evaluate(subject.model, windows, cases, PROTOCOL)[1:]
    assert len({score.name for score in scores}) == 5
    assert all(score.nbytes <= 0.25 * 16 / 32 * held_bytes_of_full(subject) for score in scores)


def held_bytes_of_full(subject: Subject) -> int:
    config = subject.model.config
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * PROTOCOL.length
    return 4 * elements


def test_progress_is_reported_as_often_as_announced(subject: Subject, windows: Windows) -> None:
    seen: list[str] = []
    cases = [Case("a", "other", DynamicCache), Case("b", "other", DynamicCache)]
    evaluate(subject.model, windows, cases, PROTOCOL, progress=seen.append)
    assert len(seen) == num_chunks(3, 2, PROTOCOL) == 2 * 6 * 3
    assert set(seen) == {"full precision", "a", "b"}


def test_wrong_calls_are_refused(subject: Subject, windows: Windows) -> None:
    twice = [Case("a", "other", DynamicCache)] * 2
    with pytest.raises(ValueError, match="different names"):
        evaluate(subject.model, windows, twice, PROTOCOL)
    with pytest.raises(ValueError, match="windows have 193 tokens; the protocol needs 257"):
        evaluate(subject.model, windows, [], Protocol(length=256, scored_from=128))
    for options in ({"chunk": 0}, {"scored_from": 2048}, {"chunk": 48}, {"rows": 0}):
        with pytest.raises(ValueError, match="must"):
            Protocol(**options)


def test_held_bytes_finds_every_tensor_once() -> None:
    class Wrapped(torch.Tensor):
        """As the tensors of quantisation libraries: data inside."""

        @staticmethod
        def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Wrapped:
            made = torch.Tensor._make_wrapper_subclass(cls, (100,), dtype=torch.float32)
            made.codes, made.scale = codes, scale
            return made

        def __init__(self, *args: Any) -> None:
            super().__init__()

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes", "scale"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    class Layer:
        def __init__(self) -> None:
            codes, scale = torch.zeros(25, dtype=torch.uint8), torch.zeros(2)
            self.keys = Wrapped(codes, scale)
            self.values = (codes, {"scale": scale, "zero": torch.zeros(3)}, "bits")

    cache = DynamicCache()
    cache.layers = [Layer(), Layer()]  # type: ignore[list-item]
    assert held_bytes(cache) == 2 * (25 + 8 + 12)


def test_mean_and_error_of_chunks() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.standard_normal((5, 7))
    mean, error = mean_and_error(blocks.tolist())
    assert mean == pytest.approx(blocks.mean())
    assert error == pytest.approx(blocks.std(ddof=1) / 35**0.5)
    assert np.isnan(mean_and_error([[1.0]])[1])


def test_parts_of_a_run_join_to_the_run(subject: Subject, windows: Windows) -> None:
    cases = [Case("dense", "other", DynamicCache), *uniform(subject.model.config, (3,))]
    whole = evaluate(subject.model, windows, cases, PROTOCOL)
    parts = [evaluate(subject.model, windows.part(part), cases, PROTOCOL) for part in ([0, 1], [2])]
    for joined, score in zip(join(parts), whole, strict=True):
        assert (joined.name, joined.kind, joined.starts) == (score.name, score.kind, score.starts)
        assert (joined.nbytes, joined.widths) == (score.nbytes, score.widths)
        assert joined.bits_per_element == pytest.approx(score.bits_per_element, rel=1e-6)
        np.testing.assert_allclose(joined.kl, score.kl, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(joined.nll, score.nll, rtol=1e-4)
    with pytest.raises(ValueError, match="do not join"):
        join([parts[0][:2], parts[1][1:3]])
