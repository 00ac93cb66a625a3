"""What a fault costs: two conductors and three routers over emulated engines under load, each killed in turn.

`kill -9` of the leading conductor, a router, Redis and an engine, while clients stream answers through the routers.
A client goes on to the next router when one refuses its connection, as behind a load balancer. Counted are answers
that were *lost* or came *twice* (tokens that were asked for and did not come, or more of them), beyond the streams
that ran through the killed router or on the killed engine; *resumed* is the longest time to the first byte of any
request that was begun within some seconds after the kill, with the decision and all that the fault delayed;
*leader* is how long nobody led. At the end both conductors' indexes are compared, residency by residency.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads.ha_site import MODEL, Site

OUTPUT_TOKENS = 24
WATCHED_S = 3.0  # after a kill, and before it
QUICK_WATCHED_S = 1.5
FAULTS = ("conductor", "redis", "engine", "router")


@dataclass(slots=True)
class Answer:
    """One request as its client saw it."""

    router: str
    began_s: float
    first_byte_s: float | None = None
    ended_s: float | None = None
    instance: str = ""
    tokens: int = 0
    ends: int = 0  # [DONE] lines
    fault: str = ""
    routers_refused: int = 0

    @property
    def whole(self) -> bool:
        return self.tokens == OUTPUT_TOKENS and self.ends == 1 and not self.fault

    @property
    def twice(self) -> bool:
        return self.tokens > OUTPUT_TOKENS or self.ends > 1


@dataclass(slots=True)
class Load:
    """Clients that ask one thing after the other."""

    routers: dict[str, str]
    answers: list[Answer] = field(default_factory=list)
    stopping: bool = False

    async def client(self, number: int, session: aiohttp.ClientSession) -> None:
        draw = random.Random(number)
        names = list(self.routers)
        asked = 0
        while not self.stopping:
            asked += 1
            topic = draw.randrange(8)
            prompt = [100 + (97 * topic + i) % 800 for i in range(160)]
            prompt += [100 + (61 * number + asked % 40) % 800] * 32
            answer = Answer("", time.monotonic())
            self.answers.append(answer)
            for turn in range(2 * len(names)):
                answer.router = names[(number + turn) % len(names)]
                try:
                    await self._ask(session, answer, prompt)
                except aiohttp.ClientConnectorError:
                    answer.routers_refused += 1
                    continue
                except (aiohttp.ClientError, TimeoutError) as error:
                    answer.fault = repr(error)
                break
            else:
                answer.fault = "no router"
            answer.ended_s = time.monotonic()
            await asyncio.sleep(draw.uniform(0.05, 0.25))

    async def _ask(self, session: aiohttp.ClientSession, answer: Answer, prompt: list[int]) -> None:
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        async with session.post(f"{self.routers[answer.router]}/v1/completions", json=body) as response:
            answer.instance = response.headers.get("x-conductor-decode-instance", "")
            if response.status != 200:
                answer.fault = f"{response.status} {(await response.text())[:200]}"
                return
            async for line in response.content:
                if answer.first_byte_s is None:
                    answer.first_byte_s = time.monotonic()
                if line.startswith(b"data: {"):
                    answer.tokens += 1
                    if b'"error"' in line:
                        answer.fault = line.decode()[:200]
                elif line.startswith(b"data: [DONE]"):
                    answer.ends += 1


def judged(
    answers: list[Answer], kind: str, name: str, at_s: float, gone_s: float, watched_s: float
) -> dict[str, Any]:
    """What a kill at ``at_s`` cost; the process was gone by ``gone_s``."""
    spared = [
        each
        for each in answers
        if not each.whole
        and each.began_s <= gone_s
        and (each.ended_s or at_s) >= at_s
        and ((kind == "router" and each.router == name) or (kind == "engine" and each.instance == name))
    ]
    near = [
        each for each in answers if (each.ended_s or at_s) >= at_s and each.began_s < at_s + 2 * watched_s
    ]
    lost = [each for each in near if not each.whole and each not in spared]
    after = [
        each.first_byte_s - each.began_s
        for each in near
        if each.first_byte_s is not None and at_s <= each.began_s < at_s + watched_s
    ]
    before = [
        each.first_byte_s - each.began_s
        for each in answers
        if each.first_byte_s is not None and at_s - watched_s <= each.began_s < at_s - 0.5
    ]
    return {
        "killed": name,
        "answers": len(near),
        "own_streams_cut": len(spared),
        "lost": len(lost),
        "twice": sum(each.twice for each in near),
        "resumed_s": round(max(after), 3) if after else None,
        "first_byte_before_median_s": round(statistics.median(before), 3) if before else None,
        "first_byte_before_max_s": round(max(before), 3) if before else None,
        "faults": sorted({each.fault for each in lost})[:5],
    }


async def run_fault(
    site: Site, load: Load, kind: str, draw: random.Random, watched_s: float
) -> dict[str, Any]:
    await asyncio.sleep(watched_s)
    leader = await asyncio.to_thread(site.leader)
    name = (leader or "conductor-0") if kind == "conductor" else draw.choice(site.names(kind))
    at_s = time.monotonic()
    await asyncio.to_thread(site.kill, name)
    gone_s = time.monotonic()
    leader_s = None
    if kind == "conductor":
        while await asyncio.to_thread(site.leader) is None and time.monotonic() - at_s < 30.0:
            await asyncio.sleep(0.05)
        leader_s = round(time.monotonic() - at_s, 3)
    await asyncio.sleep(max(at_s + watched_s - time.monotonic(), 0.0))
    site.start(name)
    # Answers to what was begun by now are waited for before they are judged.
    await asyncio.sleep(watched_s)
    while any(each.ended_s is None and each.began_s < at_s + 2 * watched_s for each in load.answers):
        await asyncio.sleep(0.05)
    result = judged(load.answers, kind, name, at_s, gone_s, watched_s)
    if leader_s is not None:
        result["leader_s"] = leader_s
    return result


async def run(rounds: int, clients: int, engines: int, watched_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="failover-") as folder:
        site = Site(Path(folder), conductors=2, routers=3, engines=engines)
        try:
            return await _measure(site, rounds, clients, watched_s)
        finally:
            await asyncio.to_thread(site.close)


async def _measure(site: Site, rounds: int, clients: int, watched_s: float) -> dict[str, Any]:
    for kinds in (("redis", "engine"), ("conductor", "router")):
        names = [name for kind in kinds for name in site.names(kind)]
        for name in names:
            site.start(name)
        for name in names:
            await asyncio.to_thread(site.wait_for, lambda name=name: site.ready(name), f"start of {name}")
    await asyncio.to_thread(site.wait_for, site.leader, "a leader")
    load = Load({name: site.urls[name] for name in site.names("router")})
    draw = random.Random(1)
    faults: dict[str, list[dict[str, Any]]] = {kind: [] for kind in FAULTS}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as session:
        tasks = [asyncio.create_task(load.client(number, session)) for number in range(clients)]
        for _ in range(rounds):
            for kind in FAULTS:
                faults[kind].append(await run_fault(site, load, kind, draw, watched_s))
                for name in site.names("conductor") + site.names("router") if rounds > 1 else ():
                    await asyncio.to_thread(site.wait_for, lambda name=name: site.ready(name), name)
        load.stopping = True
        await asyncio.gather(*tasks)
    for name in site.names("conductor"):
        await asyncio.to_thread(site.wait_for, lambda name=name: site.ready(name), f"{name} is back")
    return {"faults": faults, "total": _totals(load), "index": await _divergence(site)}


def _totals(load: Load) -> dict[str, int]:
    return {
        "answers": len(load.answers),
        "whole": sum(each.whole for each in load.answers),
        "twice": sum(each.twice for each in load.answers),
        "rerouted": sum(each.routers_refused > 0 for each in load.answers),
    }


async def _divergence(site: Site) -> dict[str, int]:
    """Of the two indexes, once the last events are there."""
    first, second = site.names("conductor")
    deadline_s = time.monotonic() + 5.0
    while True:
        a = await asyncio.to_thread(site.residencies, first)
        b = await asyncio.to_thread(site.residencies, second)
        if a == b or time.monotonic() > deadline_s:
            return {"residencies": len(a), "divergent": len(a ^ b)}
        await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often each is killed")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="one round, 6 clients, 2 engines")
    options = parser.parse_args()
    engines, watched_s = 3, WATCHED_S
    if options.quick:
        engines = 2
        options.rounds, options.clients, watched_s = 1, min(options.clients, 6), QUICK_WATCHED_S
    figures = asyncio.run(run(options.rounds, options.clients, engines, watched_s))
    if options.json:
        print(json.dumps(figures))
        return
    print(
        f"{'killed':12}{'answers':>9}{'own':>6}{'lost':>6}{'twice':>7}{'resumed':>10}{'before':>9}{'leader':>9}"
    )
    for results in figures["faults"].values():
        for each in results:
            print(
                f"{each['killed']:12}{each['answers']:9}{each['own_streams_cut']:6}{each['lost']:6}"
                f"{each['twice']:7}{each['resumed_s'] or 0:8.2f} s{each['first_byte_before_max_s'] or 0:7.2f} s"
                + (f"{each['leader_s']:7.2f} s" if "leader_s" in each else "")
            )
            for fault in each["faults"]:
                print(f"    {fault}")
    print(f"all answers: {figures['total']}; index: {figures['index']}")


if __name__ == "__main__":
    main()
