"""Batches of rows that differ in length: each row once, within the budget, with few shapes and little padding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gpu_runtime.datasets.batching import Batching, BatchShape, choose_lengths, longest_first


def lengths_like_text(rows: int, seed: int = 0) -> Any:
    """Skewed, as sentences are: half below 20 tokens, a few of 256."""
    drawn = np.random.default_rng(seed).lognormal(3.0, 0.7, rows)
    return np.clip(drawn, 3, 256).astype(np.int64)


def padded(lengths: Any, chosen: tuple[int, ...]) -> int:
    return int(np.asarray(chosen)[np.searchsorted(chosen, lengths)].sum())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_no_other_lengths_need_less_padding(count: int) -> None:
    for seed in range(20):
        observed = np.random.default_rng(seed).integers(1, 9, 12)
        chosen = choose_lengths(observed, 10, count)
        every = [
            (*some, 10) for n in range(count) for some in itertools.combinations(sorted(set(observed.tolist())), n)
        ]
        assert len(chosen) <= count and chosen[-1] == 10 and list(chosen) == sorted(set(chosen))
        assert padded(observed, chosen) == min(padded(observed, one) for one in every)


def test_rows_above_the_longest_count_as_the_longest() -> None:
    assert choose_lengths(np.asarray([3, 99]), 8, 4) == (3, 8)
    assert choose_lengths(np.asarray([], np.int64), 8, 4) == (8,)


@pytest.mark.parametrize("budget", [1, 64, 1_000, 100_000])
def test_every_row_is_in_one_batch_that_holds_it_and_keeps_the_budget(budget: int) -> None:
    found = lengths_like_text(500)
    lengths = found[longest_first(found)]
    batching = Batching(budget, 32, choose_lengths(lengths, 256, 8))
    cuts = list(batching.cut(len(lengths), lengths))
    assert [start for start, _, _ in cuts] == [0, *(stop for _, stop, _ in cuts[:-1])] and cuts[-1][1] == 500
    for start, stop, length in cuts:
        shape = batching.shape(length)
        assert stop - start <= shape.rows <= 32 and lengths[start:stop].max() <= length == shape.length
        assert shape.elements <= budget or shape.rows == 1
        assert shape in batching.shapes
    assert len({length for _, _, length in cuts}) <= 8 == len(batching.shapes)


@pytest.mark.parametrize(
    ("budget", "largest"),
    [(24, [(2, 12)]), (20, [(4, 5), (1, 12)]), (6, [(1, 12)])],
    ids=["the longest have the most elements", "others have more", "one row is more than the budget"],
)
def test_the_largest_batches_have_the_most_elements_or_the_longest_rows(
    budget: int, largest: list[tuple[int, int]]
) -> None:
    assert Batching(budget, 8, (2, 5, 12)).largest == tuple(BatchShape(*shape) for shape in largest)


def test_rows_as_long_as_sentences_need_at_most_a_tenth_more() -> None:
    found = lengths_like_text(5_000)
    lengths = found[longest_first(found)]
    batching = Batching(2_048, 512, choose_lengths(lengths, 256, 32))
    spent = sum(batching.shape(length).elements for _, _, length in batching.cut(len(lengths), lengths))
    assert lengths.sum() <= spent <= 1.10 * lengths.sum()


def test_one_long_row_does_not_pad_the_short_ones() -> None:
    """Padded to the longest of their batch in the order they came, these would cost 16 times their tokens."""
    lengths = np.asarray([512] + [16] * 31)
    batching = Batching(512, 32, choose_lengths(lengths, 512, 32))
    spent = sum(batching.shape(length).elements for _, _, length in batching.cut(32, lengths))
    assert spent < 1.05 * lengths.sum()


def test_rows_that_are_alike_are_cut_by_count() -> None:
    assert list(Batching(4, 8).cut(10, None)) == [(0, 4, None), (4, 8, None), (8, 10, None)]
    assert Batching(4, 8).shapes == (BatchShape(4),)


def test_the_longest_come_first_and_equals_keep_their_order() -> None:
    assert longest_first(np.asarray([2, 5, 2, 7, 5])).tolist() == [3, 1, 4, 0, 2]


@pytest.mark.parametrize("lengths", [(4, 2), (2, 2), (0, 4)])
def test_lengths_ascend(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Batching(4, 8, lengths)


def test_a_row_longer_than_any_length_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"length 9 is longer than any of \(4, 8\)"):
        Batching(64, 8, (4, 8)).shape(9)
