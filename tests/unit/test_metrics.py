"""Metrics, against their definitions counted out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gpu_runtime.quality.metrics import accuracy, agreement, auc, cosine


def pairs_won(labels: Any, scores: Any) -> float:
    """The definition of AUC: of all (positive, negative) pairs, how many are ranked right; a tie is half."""
    won = 0.0
    positives, negatives = scores[labels == 1], scores[labels == 0]
    for positive in positives:
        for negative in negatives:
            won += 1.0 if positive > negative else 0.5 if positive == negative else 0.0
    return won / (len(positives) * len(negatives))


@pytest.mark.parametrize("levels", [2, 5, 1000], ids=lambda n: f"{n} different scores")
@pytest.mark.parametrize("seed", range(5))
def test_auc_is_the_share_of_pairs_ranked_right(seed: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    labels = np.concatenate([[0, 1], rng.integers(0, 2, 60)])
    scores = (rng.integers(0, levels, 62) / levels).astype(np.float32)
    assert auc(labels, scores) == pytest.approx(pairs_won(labels, scores), abs=1e-12)


def test_auc_of_perfect_reversed_and_constant_scores() -> None:
    labels = np.asarray([0, 0, 1, 1])
    scores = np.asarray([0.1, 0.2, 0.3, 0.4])
    assert [auc(labels, scores), auc(labels, -scores), auc(labels, np.ones(4))] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("label", [0, 1])
def test_auc_of_one_class_says_nothing(label: int) -> None:
    assert math.isnan(auc(np.full(3, label), np.asarray([0.1, 0.2, 0.3])))


def test_agreement_looks_at_first_choices_only() -> None:
    reference = np.asarray([[1, 2], [3, 4], [5, 6], [7, 8]])
    got = np.asarray([[1, 9], [4, 3], [5, 6], [8, 7]])
    assert agreement(reference, got) == 0.5
    assert agreement(reference[:, 0], got[:, 0]) == 0.5


def test_agreement_of_nothing_says_nothing() -> None:
    assert math.isnan(agreement(np.zeros((0, 2)), np.zeros((0, 2))))


def test_cosine_is_the_mean_over_rows_whatever_their_scale() -> None:
    reference = np.asarray([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]])
    got = np.asarray([[5.0, 0.0], [2.0, 0.0], [-3.0, -4.0]])
    assert cosine(reference, got) == pytest.approx((1 + 0 - 1) / 3)
    assert cosine(np.ones((2, 3)), np.asarray([[0.0] * 3, [2.0] * 3])) == pytest.approx(0.5)
    assert math.isnan(cosine(np.zeros((0, 2)), np.zeros((0, 2))))


def test_accuracy_compares_first_choices_with_labels() -> None:
    assert accuracy(np.asarray([1.0, 2.0, 3.0, 4.0]), np.asarray([[1, 0], [2, 0], [3, 0], [0, 4]])) == 0.75
