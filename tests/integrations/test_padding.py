"""Padding as masks of transformers tell it, with windows and without, and masks that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.integrations.padding import Padding


def causal(new: int, total: int, window: int = 0) -> torch.Tensor:
    mask = torch.ones(2, 1, new, total, dtype=torch.bool).tril(total - new)
    return mask.triu(total - new - window + 1) if window else mask


def test_padding_is_read_from_masks() -> None:
    padding, mask = Padding(), causal(4, 4)
    mask[0, :, :, :2] = False
    valid = padding.extend(mask, batch=2, length=0, new=4)
    assert valid is not None
    assert valid.tolist() == [[False, False, True, True], [True] * 4]
    longer = causal(1, 5)
    longer[0, :, :, :2] = False
    for _ in range(3):  # every layer asks
        assert padding.extend(longer, batch=2, length=4, new=1) is None  # no new token is padding
    assert Padding().extend(causal(3, 9), batch=2, length=6, new=3) is None


def test_the_mask_of_a_step_that_was_refused_is_forgotten() -> None:
    padding, mask = Padding(), causal(4, 4)
    mask[0, :, :, :2] = False
    padding.extend(mask, batch=2, length=0, new=4)
    refused = causal(3, 7)
    refused[0, :, :, :2], refused[0, :, :, 5] = False, False
    padding.extend(refused, batch=2, length=4, new=3)  # and the cache stays as it was
    padding.add_token(4)
    wanted = [[False, False, True, True, True], [True] * 5]
    assert padding.seen(5).tolist() == wanted  # type: ignore[union-attr]


@pytest.mark.parametrize("window", [2, 5])
def test_masks_of_windows_and_of_full_attention_tell_the_same_padding(window: int) -> None:
    """The padding that a window has passed is not in its mask."""
    padding, rng = Padding(), np.random.default_rng(window)
    length, valid = 0, torch.zeros(2, 0, dtype=torch.bool)
    for new in (4, 1, 7, 3, 1, 1):
        valid = torch.cat([valid, torch.from_numpy(rng.random((2, new)) < 0.7)], 1)
        first = max(length - window + 1, 0)
        masks = causal(new, length + new) & valid[:, None, None]
        windowed = causal(new, length - first + new, window) & valid[:, None, None, first:]
        for _ in range(2):  # layers ask in turns
            for mask, own in ((windowed, window), (masks, 0)):
                found = padding.extend(mask, 2, length, new, own)
                new_ones = valid[:, length:]
                assert new_ones.all() if found is None else torch.equal(found, new_ones)
        length += new
        assert padding.valid is None or torch.equal(padding.valid, valid)
    wrong = ~valid[:, None, None, -window:]
    with pytest.raises((NotImplementedError, ValueError), match="mask"):
        padding.extend(wrong, 2, length - 1, 1, window)


@given(st.integers(0, 5), st.integers(1, 6), st.sampled_from([0, 3]), st.data())
def test_any_other_mask_is_refused(length: int, new: int, window: int, data: st.DataObject) -> None:
    length = min(length, window - 1) if window else length
    mask = causal(new, length + new, window)
    cell = data.draw(st.tuples(st.integers(0, 1), st.integers(0, new - 1), st.integers(0, length + new - 1)))
    row, query, key = cell
    # What no query sees any more is padding, if it is new.
    padding = key >= length and mask[row, 0, :, key].sum() == mask[row, 0, query, key] == 1
    mask[row, 0, query, key] ^= True
    if padding:
        assert Padding().extend(mask, 2, length, new, window) is not None
    else:
        with pytest.raises((NotImplementedError, ValueError), match="mask"):
            Padding().extend(mask, 2, length, new, window)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.zeros(2, 1, 2, 9), NotImplementedError),
        (torch.ones(2, 1, 2, 12, dtype=torch.bool), NotImplementedError),
        (None, ValueError),
        (causal(2, 9), ValueError),
    ],
    ids=["floats", "another length", "forgotten", "old padding shown"],
)
def test_masks_that_do_not_fit_are_refused(mask: torch.Tensor | None, error: type[Exception]) -> None:
    padding, first = Padding(), causal(7, 7)
    first[1, :, :, :3] = False
    padding.extend(first, batch=2, length=0, new=7)
    with pytest.raises(error, match="mask"):
        padding.extend(mask, batch=2, length=7, new=2)
