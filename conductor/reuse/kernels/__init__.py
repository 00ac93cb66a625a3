"""The compiled part of a reuse model."""

from conductor.reuse.kernels.requests import (
    enter_all,
    observe,
    observe_all,
    retention_values,
    return_probabilities,
    reuse_probabilities,
)

__all__ = [
    "enter_all",
    "observe",
    "observe_all",
    "retention_values",
    "return_probabilities",
    "reuse_probabilities",
]
