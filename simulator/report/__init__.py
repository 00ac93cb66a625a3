"""What came out of a run: figures under the names of AIPerf, documents of runs, HTML pages and traces of them."""

from simulator.report.bounds import Bounds
from simulator.report.chrome_trace import chrome_trace, write_chrome_trace
from simulator.report.comparison import compare, distinct_names
from simulator.report.html_page import html_report
from simulator.report.measured import Measured, measured
from simulator.report.run_document import Run, RunFileError, read_run_file, run_document, write_run_file
from simulator.report.summary import SCHEMA_VERSION, request_rows, summary

__all__ = [
    "SCHEMA_VERSION",
    "Bounds",
    "Measured",
    "Run",
    "RunFileError",
    "chrome_trace",
    "compare",
    "distinct_names",
    "html_report",
    "measured",
    "read_run_file",
    "request_rows",
    "run_document",
    "summary",
    "write_chrome_trace",
    "write_run_file",
]
