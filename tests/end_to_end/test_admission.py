"""Overload over real sockets: who is asked to come back, and who waits at the router."""

import asyncio
from pathlib import Path

import openai
import pytest
from front_door_process import FrontDoor, front_door

LONG = 12_000  # tokens; about a third of a second of prefill on the emulated engine


def _serve(tmp_path: Path, scheduling: str) -> tuple[str, ...]:
    config = tmp_path / "conductor.yaml"
    config.write_text(
        f"scheduling: {scheduling}\nemulation: {{cluster: '1'}}\n"
        "routing: {connect_timeout_s: 30}\n"  # the engine tokenizes and hashes twelve long prompts at once
    )
    return "--config", str(config)


async def _burst(door: FrontDoor, count: int, **headers: str) -> list[object]:
    """Distinct prompts of token ids at once; answers and errors."""
    client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0, timeout=80)
    model = (await client.models.list()).data[0].id

    async def ask(number: int) -> object:
        prompt = [(7 * i + number) % 500 for i in range(LONG)]
        return await client.completions.create(
            # The client looks at every token of a `prompt`, half a second for each, but not into an extra body.
            model=model,
            prompt="",
            max_tokens=4,
            extra_body={"prompt": prompt},
            extra_headers=headers,
        )

    async with client:
        return await asyncio.gather(*(ask(number) for number in range(count)), return_exceptions=True)


@pytest.mark.extended
async def test_who_would_be_late_is_asked_to_come_back(tmp_path: Path) -> None:
    scheduling = "{objectives: {ttft_s: 1.0}, admission: {rule: early}}"
    with front_door(tmp_path, *_serve(tmp_path, scheduling)) as door:
        answers = await _burst(door, 12)
        rejected = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        served = [answer for answer in answers if not isinstance(answer, Exception)]
        assert rejected
        assert served
        others = [answer for answer in answers if isinstance(answer, Exception) and answer not in rejected]
        assert not others
        assert int(rejected[0].response.headers["retry-after"]) >= 1
        assert rejected[0].code == "overloaded_prefill"
        counted = f'conductor_rejections_total{{stage="prefill"}} {float(len(rejected))}'
        assert counted in door.http.get("/metrics").text


async def test_who_is_held_is_served_when_the_engine_is_nearly_free(tmp_path: Path) -> None:
    scheduling = "{objectives: {ttft_s: 60.0}, admission: {queue: {capacity: 32, deadline_s: 60}}}"
    with front_door(tmp_path, *_serve(tmp_path, scheduling)) as door:
        answers = await _burst(door, 6)
        assert not [answer for answer in answers if isinstance(answer, Exception)]
        latest = door.get("/v1/placements")["placements"]
        held = [door.get(f"/v1/placements/{p['placement_id']}")["held_ms"] for p in latest]
        assert sum(held_ms > 100 for held_ms in held) >= 3, "most of them had to wait for those before"


async def test_a_full_queue_turns_away(tmp_path: Path) -> None:
    scheduling = "{objectives: {ttft_s: 60.0}, admission: {queue: {capacity: 2, deadline_s: 60}}}"
    with front_door(tmp_path, *_serve(tmp_path, scheduling)) as door:
        answers = await _burst(door, 10)
        codes = {answer.code for answer in answers if isinstance(answer, openai.RateLimitError)}
        assert codes == {"overloaded_queue"}
        assert sum(not isinstance(answer, Exception) for answer in answers) >= 3


@pytest.mark.extended
async def test_a_bad_priority_is_refused_by_name(tmp_path: Path) -> None:
    with front_door(tmp_path, "--emulate", "1") as door:
        (answer,) = await _burst(door, 1, **{"x-conductor-priority": "very high"})
        assert isinstance(answer, openai.BadRequestError)
        assert answer.param == "x-conductor-priority"
