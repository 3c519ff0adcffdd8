"""What a score is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def auc(labels: npt.NDArray[Any], scores: npt.NDArray[Any]) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties counted half.

    `labels` are 0 or 1 `[n]`, `scores` `[n]`. By the rank-sum statistic (Mann & Whitney, 1947); NaN when one
    class is absent.
    """
    positive = labels > 0.5
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2.0)[inverse]  # tied scores share the mean of their ranks, from 1
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2.0) / (n_positive * n_negative))


def agreement(reference: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    """Share of rows whose first choice is the reference's. Both `[n]` or `[n, k]`, best first."""
    if not len(reference):
        return float("nan")
    first, other = (values.reshape(len(values), -1)[:, 0] for values in (reference, got))
    return float(np.mean(first == other))


def cosine(reference: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    """Mean over the rows of the cosine between a row's vector and the reference's. Both `[n, …]`; a row whose vector
    is zero counts as 0."""
    if not len(reference):
        return float("nan")
    a, b = (values.reshape(len(values), -1).astype(np.float64) for values in (reference, got))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.mean(np.sum(a * b, axis=1) / np.where(norms, norms, 1.0)))


def accuracy(labels: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    """Share of rows whose first choice is the label. `labels` `[n]`, `got` `[n]` or `[n, k]`, best first."""
    return agreement(labels, got)
