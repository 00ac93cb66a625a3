"""The console in a real browser, in front of a real `conductor serve` with traffic."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from front_door_process import FrontDoor, free_port, front_door

pytest.importorskip("playwright")
from browsing import CHROMIUM, Watched, browser, watched_page
from playwright.sync_api import Browser, Page, Route, expect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),  # some start two servers and a browser
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not installed: make browser (Debian: apt-get install chromium)"
    ),
]
SYSTEM = "You answer questions about caches, in one sentence each. " * 40
KEY = "console-key-9a8b7c"
MANY = Path(__file__).parents[1] / "support" / "many_engines.py"
VIEWS = ("cluster", "placements", "prefixes", "actions", "objectives", "problems")


def converse(door: FrontDoor, requests: int) -> None:
    for number in range(requests):
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Question {number}?"},
        ]
        body = {"model": "emulated-8b", "messages": messages, "max_tokens": 8, "stream": True}
        answer = door.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """Two prefill and two decode engines that have answered some requests with the same beginning."""
    with front_door(
        tmp_path_factory.mktemp("console"), "--emulate", "2p2d", "--emulate-speed", "10"
    ) as opened:
        converse(opened, 12)
        yield opened


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def watched(chromium: Browser, door: FrontDoor) -> Iterator[Watched]:
    """A page that in the end has told of no error and has asked nobody but its server."""
    with watched_page(chromium) as opened:
        yield opened
        assert opened.told == []
        assert opened.origins() == {door.url}


def show(page: Page, url: str, view: str) -> None:
    page.goto(f"{url}/ui/#{view}")
    expect(page.locator("#link")).to_have_text("live")


def test_the_cluster_is_shown_as_it_is(watched: Watched, door: FrontDoor) -> None:
    page = watched.page
    show(page, door.url, "cluster")
    for role, names in (("prefill", ["prefill-0", "prefill-1"]), ("decode", ["decode-0", "decode-1"])):
        expect(page.locator(f"section[data-role={role}] h3")).to_have_text([role.capitalize(), *names])
    fields, rows = door.get("/v1/cluster/load").values()
    for row in (dict(zip(fields, row, strict=True)) for row in rows):
        card = page.locator("article", has=page.get_by_role("heading", name=row["id"], exact=True))
        expect(card.locator(".chip")).to_have_text("up")
        mebibytes = row["device_blocks"] * 16 * row["kv_bytes_per_token"] / 2**20
        shown = card.locator(".meter", has_text="Cached").locator(".amount").inner_text().split()
        scale = {"B": 2**-20, "MiB": 1.0, "GiB": 1024.0}[shown[1]]
        assert float(shown[0]) * scale == pytest.approx(mebibytes, rel=0.06, abs=0.6)
    cluster = door.get("/v1/cluster")
    figures = page.locator("#figures .figure")
    expect(figures.filter(has_text="Refused")).to_contain_text("of 12 placements")
    reuse = figures.filter(has_text="Tokens reused").locator(".value").inner_text()
    assert float(reuse.split()[0].removesuffix("%")) == pytest.approx(
        cluster["window"]["token_reuse_planned"] * 100, abs=1
    )
    expect(page.locator("#facts")).to_have_text("4 instances, 4 ranks · policy slo · emulated-8b")
    page.get_by_role("searchbox").fill("nobody")
    expect(page.locator(".empty")).to_contain_text("No instance fits the filter")
    page.get_by_role("searchbox").fill("decode")
    expect(page.locator("article")).to_have_count(2)


def test_a_placement_is_explained_with_every_candidates_costs(watched: Watched, door: FrontDoor) -> None:
    page = watched.page
    show(page, door.url, "placements")
    listed = door.get("/v1/placements")["placements"]
    expect(page.locator("tbody tr")).to_have_count(12)
    newest = listed[0]
    row = page.locator("tbody tr").first
    expect(row).to_contain_text(newest["placement_id"])
    expect(row).to_contain_text(f"{newest['prompt_tokens']:,}")
    reused = sum(newest["reused_tokens"].values()) / newest["prompt_tokens"]
    expect(row).to_contain_text(f"{reused * 100:.0f} %")
    row.get_by_role("button").focus()
    page.keyboard.press("Enter")
    why = door.get(f"/v1/placements/{newest['placement_id']}")
    dialog = page.locator("#detail")
    expect(dialog.locator(".why")).to_have_text(why["why"])
    rows = dialog.locator("#candidates tbody tr")
    expect(rows).to_have_count(why["candidates_total"])
    for number, candidate in enumerate(why["candidates"]):
        cells = rows.nth(number).locator("td")
        expect(cells.first).to_have_text(f"{candidate['instance']} / {candidate['rank']}")
        told = cells.nth(6).inner_text()
        assert re.fullmatch(r"[\d.]+ ms", told)
        assert float(told.split()[0]) == pytest.approx(candidate["ttft_ms"], rel=0.05, abs=0.51)
    expect(dialog.locator("tr.chosen .chip").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page).to_have_url(f"{door.url}/ui/#placements")
    page.goto(f"{door.url}/ui/#placements/{newest['placement_id']}")
    expect(dialog.locator(".why")).to_have_text(why["why"])


def test_new_placements_come_by_themselves(watched: Watched, door: FrontDoor) -> None:
    page = watched.page
    show(page, door.url, "placements")
    expect(page.locator("tbody tr").first).to_be_visible()
    page.get_by_role("searchbox").fill("finished")
    converse(door, 1)
    newest = door.get("/v1/placements")["placements"][0]["placement_id"]
    expect(page.locator("tbody tr").first).to_contain_text(newest)


def test_hot_prefixes_have_their_holders_and_sizes(watched: Watched, door: FrontDoor) -> None:
    page = watched.page
    show(page, door.url, "prefixes")
    hottest = door.get("/v1/cache/hot")["prefixes"][0]
    row = page.locator("tbody tr", has_text=hottest["hash"])
    blocks = hottest["depth"] + 1
    expect(row.locator("td").nth(2)).to_have_text(str(blocks))
    expect(row.locator("td").nth(3)).to_have_text(f"{blocks * 16:,}")
    expect(row.locator("td").nth(4)).to_have_text(f"{blocks * 2} MiB")
    for place in hottest["held_by"]:
        expect(row).to_contain_text(f"{place['instance']} · {place['tier']}")


def test_objectives_are_drawn(watched: Watched, door: FrontDoor) -> None:
    page = watched.page
    show(page, door.url, "objectives")
    charts = page.locator("figure svg")
    expect(charts).to_have_count(6)
    met = page.get_by_role("img", name=re.compile("^Requests that meet their objectives: "))
    expect(met).to_have_attribute("aria-label", re.compile(r"TTFT 100 %, TBT 100 %, all 100 %"))
    assert met.locator("path").count() >= 3
    page.get_by_label("How far back").select_option("3600")
    expect(page.locator("main .head")).to_contain_text("steps of 1 min")


def test_nothing_is_wrong_and_then_something_is(watched: Watched, chromium: Browser, door: FrontDoor) -> None:
    page = watched.page
    show(page, door.url, "problems")
    expect(page.locator("table tbody tr")).to_have_count(5)
    expect(page.locator(".problem", has_text="is down")).to_have_count(0)
    added = door.http.put("/v1/instances/away-0", json={"url": f"http://127.0.0.1:{free_port()}"})
    assert added.status_code == 201
    try:
        expect(page.locator(".problem", has_text="Away-0 is down")).to_be_visible()
        expect(page.locator("#problem-count")).to_be_visible()
    finally:
        assert door.http.delete("/v1/instances/away-0").status_code == 200
    expect(page.locator(".problem", has_text="Away-0")).to_have_count(0)


@pytest.mark.parametrize("width", [390, 768, 1440])
def test_it_fits_into_any_width(chromium: Browser, door: FrontDoor, width: int) -> None:
    with watched_page(chromium, viewport={"width": width, "height": 844}, color_scheme="dark") as opened:
        page = opened.page
        for view in VIEWS:
            show(page, door.url, view)
            expect(page.locator(f"#view-{view} h2").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
            unnamed = page.evaluate(
                "[...document.querySelectorAll('button, input, select, a')].filter("
                "e => !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).length"
            )
            assert unnamed == 0, view
        assert opened.told == []


def test_light_and_dark_as_wished(chromium: Browser, door: FrontDoor) -> None:
    with watched_page(chromium, color_scheme="dark") as opened:
        page = opened.page
        show(page, door.url, "cluster")

        def background() -> str:
            return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

        dark = background()
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text("Light")
        assert background() != dark
        page.reload()
        expect(page.locator("#theme")).to_have_text("Light")
        page.locator("#theme").click()
        assert background() == dark


def test_a_server_that_is_away_and_comes_back(chromium: Browser, door: FrontDoor) -> None:
    with watched_page(chromium) as opened:
        page = opened.page
        show(page, door.url, "cluster")
        page.context.set_offline(True)
        expect(page.locator("#away")).to_contain_text("The server does not answer")
        expect(page.locator("article")).to_have_count(4)
        page.context.set_offline(False)
        expect(page.locator("#away")).to_be_hidden()
        expect(page.locator("#link")).to_have_text("live")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    """Takes a key for everything but inference; orders for host tiers wait for room that never comes."""
    folder = tmp_path_factory.mktemp("keyed")
    file = folder / "conductor.yaml"
    no_room = [{"instance": f"mixed-{number}", "tier": "host", "bytes": 1} for number in range(3)]
    content = {
        "server": {"admin_token": KEY, "workers": 2},
        "log": {"level": "debug", "format": "json"},
        "emulation": {"cluster": "3", "speed": 10, "host_blocks": 5000},
        "tiers": {"capacities": no_room},
    }
    file.write_text(yaml.safe_dump(content))
    with front_door(folder, "--config", str(file), headers={"authorization": f"Bearer {KEY}"}) as opened:
        yield opened


def sign_in(page: Page, url: str, view: str = "cluster") -> None:
    page.goto(f"{url}/ui#{view}")
    page.get_by_label("Key", exact=True).fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#link")).to_have_text("live")


def test_a_key_is_asked_for_once_and_kept_in_the_tab(chromium: Browser, keyed: FrontDoor) -> None:
    with watched_page(chromium) as opened:
        page = opened.page
        page.goto(f"{keyed.url}/ui")
        expect(page.locator("#key-dialog")).to_be_visible()
        page.keyboard.press("Escape")
        page.get_by_label("Key", exact=True).fill("not-the-key")
        page.keyboard.press("Enter")
        expect(page.locator("#key-fault")).to_have_text("The API key is not known here.")
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("article")).to_have_count(3)
        page.reload()
        expect(page.locator("article")).to_have_count(3)
        expect(page.locator("#key-dialog")).to_be_hidden()
        assert page.evaluate("sessionStorage.getItem('conductor.key')") == KEY
        assert KEY not in str(page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href"))
        page.get_by_role("button", name="Forget key").click()
        expect(page.locator("#key-dialog")).to_be_visible()
        assert all("401" in told for told in opened.told), opened.told
        assert opened.origins() == {keyed.url}
        assert not any(KEY in url or "not-the-key" in url for url in opened.urls)
    assert KEY not in keyed.log.read_text()


def test_a_late_answer_to_a_former_key_is_not_heard(chromium: Browser, keyed: FrontDoor) -> None:
    with watched_page(chromium) as opened:
        page = opened.page
        held: list[Route] = []

        def hold_one(route: Route) -> None:
            if not held and route.request.headers.get("authorization") == "Bearer former":
                held.append(route)
            else:
                route.continue_()

        page.route("**/v1/**", hold_one)
        page.goto(f"{keyed.url}/ui")
        page.get_by_label("Key", exact=True).fill("former")
        page.keyboard.press("Enter")
        expect(page.locator("#key-fault")).to_have_text("The API key is not known here.")
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#key-dialog")).to_be_hidden()
        held[0].fulfill(status=401, json={"error": {"message": "too late"}})
        expect(page.locator("article")).to_have_count(3)
        expect(page.locator("#figures .figure")).to_have_count(8)
        expect(page.locator("#key-dialog")).to_be_hidden()


def test_an_instance_is_drained(chromium: Browser, keyed: FrontDoor) -> None:
    with watched_page(chromium) as opened:
        page = opened.page
        sign_in(page, keyed.url)
        page.get_by_role("button", name="Drain mixed-2").click()
        expect(page.locator("#confirm-title")).to_have_text("Drain mixed-2?")
        page.get_by_role("button", name="Keep it").click()
        assert "mixed-2" in keyed.instances()
        page.get_by_role("button", name="Drain mixed-2").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#said")).to_have_text("mixed-2 drains")
        expect(page.locator("article")).to_have_count(2)
        keyed.wait_until(lambda: "mixed-2" not in keyed.instances(), "the instance left")
        assert all("401" in told for told in opened.told), opened.told


def test_a_tier_action_is_shown_and_cancelled(chromium: Browser, keyed: FrontDoor) -> None:
    with watched_page(chromium) as opened:
        page = opened.page
        sign_in(page, keyed.url, "actions")
        expect(page.locator(".empty")).to_contain_text("No tier actions")
        prompt = {"model": "emulated-8b", "prompt": SYSTEM, "max_tokens": 1}
        holder = keyed.http.post("/v1/completions", json=prompt).headers["x-conductor-prefill-instance"]
        target = "mixed-1" if holder == "mixed-0" else "mixed-0"
        order = {
            "model": "emulated-8b",
            "text": SYSTEM,
            "source": {"instance": holder, "tier": "device"},
            "target": {"instance": target, "tier": "host"},
            "reason": "an order from a test",
        }
        keyed.wait_until(
            lambda: keyed.http.post("/v1/cache/prefetch", json=order).status_code == 202, "it is ordered"
        )
        (action,) = keyed.get("/v1/actions")["actions"]
        row = page.locator(f"tr[data-id='{action['id']}']")
        expect(row).to_contain_text("an order from a test (by hand)")
        expect(row).to_contain_text(f"{holder} device → {target} host")
        expect(row.locator(".chip")).to_have_text("planned")
        row.get_by_role("button", name="Cancel").click()
        expect(row.locator(".chip")).to_have_text("cancelled")
        expect(row.get_by_role("button")).to_be_hidden()
        assert keyed.get(f"/v1/actions/{action['id']}")["state"] == "cancelled"


@pytest.mark.extended
def test_many_instances_are_tiles(chromium: Browser, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "cluster.yaml"
    with file.open("w") as output:
        engines = subprocess.Popen([sys.executable, str(MANY), str(port), "200"], stdout=output)
    try:
        with front_door(tmp_path, "--config", str(file)) as door, watched_page(chromium) as opened:
            page = opened.page
            show(page, door.url, "cluster")
            expect(page.locator(".tile")).to_have_count(200)
            page.get_by_role("button", name=re.compile("^decode-0001: up")).click()
            dialog = page.locator("#detail")
            expect(dialog.locator("h2")).to_have_text("decode-0001")
            expect(dialog).to_contain_text("37 %")  # as that engine reports
            page.keyboard.press("Escape")
            expect(dialog).to_be_hidden()
            assert opened.told == []
    finally:
        engines.terminate()
        engines.wait(timeout=30)


@pytest.mark.extended
def test_it_can_be_switched_off_and_a_server_that_ends_is_noticed(chromium: Browser, tmp_path: Path) -> None:
    env = {"CONDUCTOR_SERVER__CONSOLE": "false"}
    with front_door(tmp_path, "--emulate", "1", env=env) as without:
        for path in ("/ui", "/ui/", "/ui/console.js"):
            assert without.http.get(path).status_code == 404
    with front_door(tmp_path, "--emulate", "1") as door, watched_page(chromium) as opened:
        show(opened.page, door.url, "cluster")
        expect(opened.page.locator("article")).to_have_count(1)
        assert door.stop(signal.SIGTERM) == 0
        expect(opened.page.locator("#away")).to_contain_text("The server does not answer")
        expect(opened.page.locator("#link")).to_have_text("reconnecting")
