"""The compiled part of a reuse model."""

from conductor.reuse.kernels.requests import (
    enter_all,
    observe,
    retention_values,
    return_probabilities,
    reuse_probabilities,
)

__all__ = ["enter_all", "observe", "retention_values", "return_probabilities", "reuse_probabilities"]
