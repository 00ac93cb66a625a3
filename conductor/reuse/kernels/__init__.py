"""The compiled part of a reuse model."""

from conductor.reuse.kernels.requests import (
    observe,
    retention_values,
    return_probabilities,
    reuse_probabilities,
)

__all__ = ["observe", "retention_values", "return_probabilities", "reuse_probabilities"]
