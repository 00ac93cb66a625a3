"""What came out of a run: figures under the names of AIPerf, from simulated and from measured runs alike."""

from simulator.report.bounds import Bounds
from simulator.report.measured import Measured, measured
from simulator.report.summary import SCHEMA_VERSION, request_rows, summary

__all__ = ["SCHEMA_VERSION", "Bounds", "Measured", "measured", "request_rows", "summary"]
