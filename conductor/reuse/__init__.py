"""Reuse of cached blocks: when it will be, learned online, and what is worth keeping for it."""

from conductor.reuse.model import HORIZON_S, ReturnForecast, ReuseModel, Visit
from conductor.reuse.retention import RetainedBlocks

__all__ = ["HORIZON_S", "RetainedBlocks", "ReturnForecast", "ReuseModel", "Visit"]
