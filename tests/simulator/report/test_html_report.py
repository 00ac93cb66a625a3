"""The HTML page: complete in itself, valid figures, and drawn by a real browser without a complaint."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import plotly.graph_objects
import pytest
from simulated_runs import busy_pairs, lost, simulated

from conductor.placement import Objectives
from simulator.report import Run, html_report, run_document

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OBJECTIVES = Objectives(ttft_s=1.0, tbt_s=0.05)
NASTY = "</script><b>&\"'"


@dataclass(frozen=True, slots=True)
class KnownBounds:
    mean_ttft_s: float = 0.1
    good_requests: float = 90.0
    reuse_ratio_capacity: float = 0.6
    reuse_ratio_unlimited: float = 0.7


def runs() -> list[Run]:
    return [
        Run("slo", {"policy": "slo", "speed": 1.0}, busy_pairs(100), OBJECTIVES, KnownBounds()),
        Run("slo", {"policy": "slo", "speed": 2.0}, busy_pairs(150, seed=1), OBJECTIVES, KnownBounds()),
        Run(NASTY, {"policy": "lmetric", NASTY: NASTY}, busy_pairs(100, seed=2), OBJECTIVES),
    ]


def embedded(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)
    assert found
    charts: list[dict[str, Any]] = json.loads(found[1])
    return charts


class Outline(HTMLParser):
    """Elements that are open at the end, addresses, and the texts of headings and header cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "line", "br"):
            self.open.append(tag)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "action")]

    def handle_endtag(self, tag: str) -> None:
        if tag != "line":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "th"):
            self.texts.append(data)


def test_the_page_needs_nothing_else() -> None:
    page = html_report("Two rates & more", runs())
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert outline.addresses == []
    assert "Two rates & more" in outline.texts
    assert {"slo", "slo (2)", NASTY} <= set(outline.texts)
    assert page.count("plotly.js v") == 1
    assert "@import" not in page


def test_equal_runs_give_equal_pages_also_by_way_of_documents() -> None:
    page = html_report("a", runs())
    documents = [json.loads(json.dumps(run_document(run))) for run in runs()]
    assert html_report("a", documents) == page


def test_every_figure_is_valid() -> None:
    charts = embedded(html_report("a", runs()))
    keys = [chart["key"] for chart in charts]
    assert keys == [
        *("outcomes", "reuse", "cdf-ttft", "cdf-tbt", "goodput", "ttft-over-time", "ttft-parts"),
        *("load-variation", "gauges-0", "gauges-1", "gauges-2"),
    ]
    for chart in charts:
        figure = json.loads(re.sub(r"var\(--[\w-]+\)", "#123456", json.dumps(chart["figure"])))
        plotly.graph_objects.Figure(figure)  # raises for what plotly.js does not know
        for trace in figure["data"]:
            assert len(trace["x"]) <= 2_000
        axes = [axis for key, axis in figure["layout"].items() if re.match("[xy]axis", key)]
        assert any(axis.get("title", {}).get("text") for axis in axes), chart["key"]


def test_colours_are_those_of_the_style_sheet() -> None:
    page = html_report("a", runs())
    named = set(re.findall(r"var\((--[\w-]+)\)", json.dumps(embedded(page))))
    light, dark = page.split("@media (prefers-color-scheme: dark)")[:2]
    for name in named:
        assert f"{name}:" in light and f"{name}:" in dark, name


def test_outcomes_add_up() -> None:
    (chart,) = (c for c in embedded(html_report("a", runs())) if c["key"] == "outcomes")
    for run, total in enumerate((100, 150, 100)):
        assert sum(trace["customdata"][run] for trace in chart["figure"]["data"]) == total


def test_a_page_of_one_run_and_of_nothing_served() -> None:
    assert "data-run=" not in html_report("a", runs()[:1])
    nothing = Run("nothing", {}, simulated([lost(0, 0.0)]), OBJECTIVES)
    assert {"outcomes", "reuse"} <= {chart["key"] for chart in embedded(html_report("a", [nothing]))}
    with pytest.raises(ValueError, match="at least one run"):
        html_report("a", [])


def browsed(page: str, folder: Path) -> tuple[str, str]:
    """The document after its scripts have run, and what the browser logged."""
    assert CHROMIUM is not None
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1400,3000"),
            *("--virtual-time-budget=30000", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=80,
    )
    return done.stdout, done.stderr


CLICKS = "".join(
    f'document.querySelector("button[data-{what}]").click();' for what in ("run='1'", "choice='p99'")
)
FRAMES = """<body>{frames}<script>
addEventListener("load", () => setTimeout(() => {{
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument;
    for (const script of page.querySelectorAll("script")) script.remove();
    const found = document.createElement("pre");
    found.textContent = encodeURIComponent(page.documentElement.outerHTML);
    frame.replaceWith(found);
  }}
}}, 20000));
</script></body>"""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Pages by name, as written and after their scripts have run: all in frames of one browser."""
    several = html_report("several", runs())
    pages = {
        "several": several,
        "alone": html_report("alone", runs()[:1]),
        "clicked": several.replace("</body></html>", f"<script>{CLICKS}</script></body></html>"),
    }
    frames = "".join(
        f'<iframe width="1400" height="3000" srcdoc="{escape(page)}"></iframe>' for page in pages.values()
    )
    document, log = browsed(FRAMES.format(frames=frames), tmp_path_factory.mktemp("drawn"))
    assert "CONSOLE" not in log, log
    found = [unquote(each) for each in re.findall(r"<pre>(.*?)</pre>", document)]
    return {name: (page, after) for (name, page), after in zip(pages.items(), found, strict=True)}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("name", ["several", "alone"])
def test_a_browser_draws_every_chart(drawn: dict[str, tuple[str, str]], name: str) -> None:
    page, document = drawn[name]
    charts = embedded(page)
    assert f'data-drawn="{len(charts)}"' in document
    for chart in charts:
        begin = document.index(f'id="chart-{chart["key"]}"')
        assert 'class="main-svg"' in document[begin : begin + 3_000], chart["key"]
    assert len(re.findall(r'class="trace scatter', document)) >= 6
    assert len(re.findall(r'class="hm"', document)) >= 3


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_runs_and_percentiles_are_switched(drawn: dict[str, tuple[str, str]]) -> None:
    page, document = drawn["clicked"]
    assert f'data-drawn="{len(embedded(page)) - 1}"' in document, "all but the heatmaps of that run"
    assert re.search(r'<section [^>]*id="card-gauges-1" hidden', document)
    over_time = document[document.index('id="chart-ttft-over-time"') :]
    over_time = over_time[: over_time.index("</section>")]
    assert len(re.findall(r'class="trace scatter', over_time)) == 2, "p99 of the two runs left"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_broken_page_would_be_noticed(tmp_path: Path) -> None:
    page = html_report("broken", runs()[:1]).replace("Plotly.react(", "Plotly.redact(")
    document, log = browsed(page, tmp_path)
    assert "CONSOLE" in log
    assert "data-drawn" not in document.split("<script")[0]
