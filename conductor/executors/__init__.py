"""Executors: what carries tier actions out, by the store that it drives."""

from conductor.executors.dry_run import DryRunExecutor

__all__ = ["DryRunExecutor"]
