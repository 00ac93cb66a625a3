"""The REST API over the real scheduler and index: placements, progress, reservations, the cluster."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cluster_factory import BLOCK, facts, hold, make_scheduler, request
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cache_index import VllmEventSource, sequence_hashes
from conductor.cache_rest import make_cache_router
from conductor.metrics import ClusterCollector
from conductor.placement import TokenSource
from conductor.placement_metrics import PlacementCollector
from conductor.rank import ReportedLoad
from conductor.rest import Reservations, TokenizedPrompt, answers, make_rest_router
from conductor.scheduler import Scheduler


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


async def words_as_tokens(document: dict[str, Any]) -> TokenizedPrompt | None:
    """A tokenizer of `llama` whose tokens are the lengths of words."""
    if document["model"] != "llama":
        return None
    text = document.get("prompt") or document["messages"][-1]["content"]
    return TokenizedPrompt(np.array([len(word) for word in text.split()], np.uint32), TokenSource.LOCAL)


@pytest.fixture
def scheduler() -> Scheduler:
    return make_scheduler()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reservations(scheduler: Scheduler, clock: Clock) -> Reservations:
    return Reservations(scheduler, clock, ttl_s=60.0)


@pytest.fixture
def api(scheduler: Scheduler, clock: Clock, reservations: Reservations) -> Iterator[TestClient]:
    events = VllmEventSource(scheduler.index)
    app = FastAPI()
    app.include_router(
        make_rest_router(scheduler, clock, reservations=reservations, tokenize=words_as_tokens)
    )
    app.include_router(make_cache_router(scheduler.index, events))
    with TestClient(app) as client:
        yield client
    events.close()


def placed(api: TestClient, **fields: Any) -> dict[str, Any]:
    fields.setdefault("token_ids", request(1024).tokens.tolist())
    answer = api.post("/v1/placements", json={"model": "llama", **fields})
    assert answer.status_code == 200, answer.text
    answers.Decision.model_validate(answer.json())
    return answer.json()


def progress(api: TestClient, placement_id: str, event: str, **fields: Any) -> Any:
    return api.post(f"/v1/placements/{placement_id}/progress", json={"event": event, **fields})


def test_a_placement_can_be_asked_for_reported_on_and_explained(
    api: TestClient, scheduler: Scheduler, clock: Clock
) -> None:
    hold(scheduler, "p1", request(1024).tokens[:512])
    placement = placed(api, request_id="mine", session="s-1", route="chat")
    assert placement["prefill_instance"] == "p1"
    assert placement["prefill_url"] == "http://10.0.0.1:8000"
    assert placement["decode_url"] == f"http://10.0.0.{placement['decode_instance'][1]}:8000"
    assert placement["overlap_tokens"] == 512
    assert placement["plan"]["segments"] == [
        {"start_token": 0, "stop_token": 512, "holder": "p1", "rank": 0, "tier": "device"}
    ]
    assert "explanation" not in placement
    assert scheduler.active_placements == 1
    clock.now_s = 1.02
    for event in ("prefill_finished", "first_token"):
        assert progress(api, placement["placement_id"], event).json()["outcome"] == "running"
    clock.now_s = 2.02
    done = progress(
        api, placement["placement_id"], "finished", usage={"cached_tokens": 512, "output_tokens": 101}
    )
    assert done.json() == {
        "placement_id": placement["placement_id"],
        "outcome": "finished",
        "repeated": False,
    }
    assert scheduler.active_placements == 0
    explained = api.get(f"/v1/placements/{placement['placement_id']}").json()
    answers.Explanation.model_validate(explained)
    assert explained["outcome"] == "finished"
    assert explained["observed"]["cached_tokens"] == 512
    assert explained["observed"]["ttft_ms"] == pytest.approx(20.0)
    assert (explained["session"], explained["route"], explained["request_id"]) == ("s-1", "chat", "mine")
    assert explained["candidates_total"] == len(explained["candidates"]) == 4
    listed = api.get("/v1/placements").json()
    answers.Placements.model_validate(listed)
    assert listed["placements"][0]["placement_id"] == placement["placement_id"]
    scheduler.check_invariants()


def test_the_explanation_has_terms_constraints_and_a_counterfactual(
    api: TestClient, scheduler: Scheduler
) -> None:
    hold(scheduler, "p1", request(1024).tokens[:512])
    answer = api.post(
        "/v1/placements?explain=true", json={"model": "llama", "token_ids": request(1024).tokens.tolist()}
    ).json()
    answers.Decision.model_validate(answer)
    explained = answer["explanation"]
    candidates = {c["instance"]: c for c in explained["candidates"]}
    assert candidates["p1"]["chosen_for"] == ["prefill"]
    assert candidates["p1"]["prefill_ms"] < candidates["p0"]["prefill_ms"]
    assert explained["counterfactual"]["slo"]["prefill_instance"] == "p1"
    assert explained["counterfactual"]["without_this_prefill"]["prefill_instance"] != "p1"
    best = api.get(f"/v1/placements/{answer['placement_id']}", params={"limit": 1}).json()
    assert [c["instance"] for c in best["candidates"]] == ["p1"]
    assert best["candidates_total"] == 4


def test_a_dry_run_reserves_nothing(api: TestClient, scheduler: Scheduler) -> None:
    answer = api.post("/v1/placements?dry_run=true", json={"model": "llama", "token_ids": [1] * 64}).json()
    assert (answer["placement_id"], answer["expires_in_s"]) == (None, None)
    assert scheduler.active_placements == 0
    assert api.get("/v1/placements").json() == {"placements": []}


def test_prompts_come_as_text_messages_tokens_or_hashes(api: TestClient, scheduler: Scheduler) -> None:
    text = " ".join("x" * (i % 7 + 1) for i in range(64))
    tokens = [i % 7 + 1 for i in range(64)]
    hold(scheduler, "p1", np.array(tokens[:48], np.uint32))
    hashes = sequence_hashes(np.array(tokens, np.uint32), BLOCK).tolist()
    signed = [h - 2**64 if h >= 2**63 else h for h in hashes]
    for prompt in (
        {"token_ids": tokens},
        {"text": text},
        {"messages": [{"role": "user", "content": text}]},
        {"hashes": hashes, "block_size": BLOCK, "prompt_tokens": 64},
        {"seq_hashes": signed, "block_size": BLOCK, "prompt_tokens": 64},
        {"hashes": [f"{h:016x}" for h in hashes], "block_size": BLOCK, "prompt_tokens": 64},
        {"hashes": [hex(h) for h in hashes], "block_size": BLOCK, "prompt_tokens": 64},
    ):
        answer = api.post("/v1/placements?dry_run=true&explain=true", json={"model": "llama", **prompt})
        assert answer.status_code == 200, answer.text
        overlaps = {c["instance"]: c["overlap_tokens"] for c in answer.json()["explanation"]["candidates"]}
        assert overlaps == {"p0": 0, "p1": 48, "d2": 0, "d3": 0}, prompt


BAD_QUESTIONS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "gpt-5", "token_ids": [1]}, 404, "served: llama"),
    ({"model": "gpt-5", "text": "hello"}, 404, "served: llama"),
    ({"model": "llama", "token_ids": []}, 422, "token_ids"),
    ({"model": "llama", "token_ids": [-1]}, 422, "greater than or equal to 0"),
    ({"model": "llama"}, 422, "text, messages, token_ids or hashes (given: none)"),
    ({"model": "llama", "token_ids": [1], "text": "a"}, 422, "given: text and token_ids"),
    ({"model": "llama", "token_ids": [1], "tenannt": "x"}, 422, "is unknown; did you mean 'tenant'?"),
    ({"model": "llama", "token_ids": [1], "zzz": "x"}, 422, "is unknown; known keys here: model, text"),
    ({"model": "llama", "token_ids": [1], "objectives": {"ttft": 1}}, 422, "did you mean 'ttft_s'?"),
    ({"model": "llama", "token_ids": [1], "objectives": {"ttft_s": 0}}, 422, "greater than 0"),
    ({"model": "llama", "hashes": [1]}, 422, '["body","block_size"],"msg":"is required with hashes'),
    ({"model": "llama", "hashes": [1], "block_size": 16}, 422, '["body","prompt_tokens"],"msg":"is required'),
    (
        {"model": "llama", "hashes": [1, 2], "block_size": 16, "prompt_tokens": 20},
        422,
        "2 blocks of 16 tokens are more than 20 tokens",
    ),
    (
        {"model": "llama", "hashes": [1], "block_size": 64, "prompt_tokens": 64},
        422,
        "caches blocks of 64 tokens; give hashes of blocks of 16 tokens",
    ),
    ({"model": "llama", "hashes": [1, 2.5], "block_size": 16, "prompt_tokens": 64}, 422, "entry 1 must be"),
    ({"model": "llama", "hashes": ["xyz"], "block_size": 16, "prompt_tokens": 64}, 422, "entry 0 must be"),
    ({"model": "llama", "hashes": [2**64], "block_size": 16, "prompt_tokens": 64}, 422, "entry 0 must be"),
    ({"model": "llama", "hashes": [1], "block_size": 16, "prompt_tokens": 10**30}, 422, '"prompt_tokens"]'),
    ({"model": "llama", "token_ids": [1], "max_output_tokens": 2**32}, 422, "less than 4294967296"),
    ({"model": "llama", "token_ids": [1], "priority": 10**30}, 422, "less than or equal to 8"),
    ({"model": "llama", "token_ids": [1], "block_size": 16}, 422, "belong to hashes"),
    ({"model": "llama", "token_ids": [1], "tools": []}, 422, "belong to messages"),
    ({"model": "adapter", "text": "hello"}, 422, "give token_ids, or hashes with block_size"),
    (
        {"model": "llama", "token_ids": [1], "exclude": ["p0", "p1", "d2", "d3"]},
        503,
        "failed this request before",
    ),
]


@pytest.mark.parametrize(("body", "status", "said"), BAD_QUESTIONS)
def test_bad_questions_are_answered_precisely(
    api: TestClient, scheduler: Scheduler, body: dict[str, Any], status: int, said: str
) -> None:
    answer = api.post("/v1/placements", json=body)
    assert answer.status_code == status, answer.text
    assert said in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)
    assert scheduler.active_placements == 0


def test_a_prompt_that_fits_nowhere_is_no_matter_of_waiting(api: TestClient, scheduler: Scheduler) -> None:
    blocks = {"p0": 100, "p1": 200, "d2": 50, "d3": 150}
    for instance_id, capacity in blocks.items():
        scheduler.instance_up(instance_id, replace(facts(), kv_capacity_blocks=capacity))
    question: dict[str, Any] = {"model": "llama", "hashes": [1], "block_size": BLOCK, "prompt_tokens": 2_400}
    answer = api.post("/v1/placements", json=question)
    assert answer.status_code == 422 and '["body","prompt_tokens"]' in answer.text
    assert (
        "2400 tokens does not fit into the KV memory of any instance of 'llama'; 2399 tokens do"
        in answer.text
    )
    assert api.post("/v1/placements", json={**question, "prompt_tokens": 2_399}).status_code == 200
    answer = api.post("/v1/placements", json={**question, "exclude": ["p1"]})
    assert answer.status_code == 503
    assert "p1 (failed this request before); the prompt of 2400 tokens does not fit" in answer.text


def test_answers_with_objectives_without_end_are_refused(api: TestClient) -> None:
    body = b'{"model":"llama","token_ids":[1],"objectives":{"ttft_s":1e400}}'
    answer = api.post("/v1/placements", content=body)
    assert answer.status_code == 422 and "finite" in answer.text


def test_a_body_that_is_no_json_is_422(api: TestClient) -> None:
    assert api.post("/v1/placements", content=b"{").status_code == 422


def test_progress_is_idempotent_and_ends_once(api: TestClient, scheduler: Scheduler) -> None:
    placement_id = placed(api)["placement_id"]
    assert not progress(api, placement_id, "first_token").json()["repeated"]
    assert progress(api, placement_id, "first_token").json()["repeated"]
    assert progress(api, placement_id, "cancelled").json()["outcome"] == "cancelled"
    assert progress(api, placement_id, "cancelled").json() == {
        "placement_id": placement_id,
        "outcome": "cancelled",
        "repeated": True,
    }
    late = progress(api, placement_id, "finished")
    assert (late.status_code, "has ended (cancelled)" in late.text) == (409, True)
    scheduler.check_invariants()


def test_a_failure_takes_its_instance_out(api: TestClient, scheduler: Scheduler) -> None:
    placement = placed(api)
    failure = {"instance": placement["prefill_instance"], "kind": "unreachable", "detail": "refused"}
    assert progress(api, placement["placement_id"], "failed", failure=failure).json()["outcome"] == "failed"
    assert api.get(f"/v1/instances/{placement['prefill_instance']}").json()["health"] == "down"
    again = placed(api, exclude=[placement["prefill_instance"]], retry_of=placement["placement_id"])
    assert again["prefill_instance"] != placement["prefill_instance"]


@pytest.mark.parametrize(
    ("report", "status", "said"),
    [
        ({"event": "done"}, 422, "prefill_finished"),
        ({"event": "failed"}, 422, "failure must be given"),
        ({"event": "first_token", "usage": {}}, 422, "usage belongs to the event finished"),
        ({"event": "finished", "usage": {"output_tokens": -1}}, 422, "greater than or equal to 0"),
        ({"event": "finished", "sage": {}}, 422, "sage"),
        ({"event": "finished", "usage": {"output_tokens": 10**30}}, 422, "less than 4294967296"),
    ],
)
def test_bad_reports_are_refused(api: TestClient, report: dict[str, Any], status: int, said: str) -> None:
    path = f"/v1/placements/{placed(api)['placement_id']}/progress"
    answer = api.post(path, json=report)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


def test_an_unknown_placement_is_404(api: TestClient) -> None:
    assert api.get("/v1/placements/none").status_code == 404
    assert progress(api, "none", "finished").status_code == 404


def test_reservations_of_silent_clients_expire(
    api: TestClient, scheduler: Scheduler, clock: Clock, reservations: Reservations
) -> None:
    talking, silent = placed(api)["placement_id"], placed(api)["placement_id"]
    of_the_router = scheduler.place(request(64), clock()).placement_id
    clock.now_s = 50.0
    progress(api, talking, "first_token")
    clock.now_s = 61.5
    reservations.expire()
    assert api.get(f"/v1/placements/{silent}").json()["outcome"] == "expired"
    assert progress(api, silent, "finished").status_code == 409
    assert api.get(f"/v1/placements/{talking}").json()["outcome"] == "running"
    clock.now_s = 1_000.0
    reservations.expire()
    assert (reservations.expired, len(reservations), scheduler.active_placements) == (2, 0, 1)
    scheduler.cancelled(of_the_router, 1_000.0)
    scheduler.check_invariants()


def test_a_placement_that_has_left_the_log_can_still_be_reported_on(clock: Clock) -> None:
    scheduler = make_scheduler()
    scheduler.records._capacity = 1
    app = FastAPI()
    app.include_router(make_rest_router(scheduler, clock))
    with TestClient(app) as api:
        first, _ = placed(api), placed(api)
        explained = api.get(f"/v1/placements/{first['placement_id']}").json()
        answers.Explanation.model_validate(explained)
        assert (explained["candidates"], explained["predicted"]["ttft_ms"] > 0) == (None, True)
        assert progress(api, first["placement_id"], "finished").status_code == 200


def test_the_cluster_in_figures(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    wanted = request(1024)
    hold(scheduler, "p0", wanted.tokens[:512])
    for i in range(4):
        clock.now_s = 10.0 + i
        placement_id = placed(api)["placement_id"]
        clock.now_s += 0.1 if i < 3 else 3.0
        progress(api, placement_id, "first_token")
        clock.now_s += 0.3
        progress(api, placement_id, "finished", usage={"output_tokens": 11, "cached_tokens": 512 if i else 0})
    placed(api)
    found = api.get("/v1/cluster").json()
    answers.Cluster.model_validate(found)
    assert found["instances"]["by_role"] == {"prefill": 2, "decode": 2}
    assert found["instances"]["by_health"] == {"up": 4}
    assert [m["model"] for m in found["models"]] == ["llama", "adapter"]
    window = found["window"]
    assert (window["placed"], window["ended"]) == (5, {"finished": 4})
    assert (window["ttft_attainment"], window["tbt_attainment"], window["goodput_share"]) == (0.75, 1.0, 0.75)
    assert window["token_reuse_planned"] == 0.5
    assert window["token_reuse_reported"] == pytest.approx(3 * 512 / 4096)
    assert window["token_reuse_reported_of"] == 1.0
    assert found["now"]["active_placements"] == 1
    assert api.get("/v1/cluster", params={"window_s": 1}).status_code == 422


def test_of_how_many_prompts_engines_tell_what_was_cached(api: TestClient) -> None:
    for usage in ({"output_tokens": 1, "cached_tokens": 512}, {"output_tokens": 1}):
        progress(api, placed(api)["placement_id"], "finished", usage=usage)
    window = api.get("/v1/cluster").json()["window"]
    assert (window["token_reuse_reported"], window["token_reuse_reported_of"]) == (0.5, 0.5)


def test_the_diagnosis_rests_on_what_was_seen(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    empty = api.get("/v1/diagnosis").json()
    answers.Diagnosis.model_validate(empty)
    assert (empty["limit"], empty["summary"].startswith("too little was seen")) == (None, True)
    # Engines that preempt: 30 requests finish, and one rank counts 20 preemptions meanwhile.
    for i in range(30):
        clock.now_s = 10.0 + i
        placement_id = placed(api)["placement_id"]
        progress(api, placement_id, "finished")
        scheduler.report_load(
            "d2", 0, ReportedLoad(8, 2, 0.99, clock.now_s, preemptions=0 if i < 10 else i - 10)
        )
    found = api.get("/v1/diagnosis").json()
    answers.Diagnosis.model_validate(found)
    assert found["limit"] == "memory capacity"
    assert "preempted 19 requests while 30 finished" in found["summary"]


def test_calibration_is_shown_and_reset(api: TestClient, scheduler: Scheduler, clock: Clock) -> None:
    for i in range(20):
        clock.now_s = 10.0 * i
        placement = placed(api, token_ids=request(4096, seed=i).tokens.tolist())
        clock.now_s += 2 * placement["predicted"]["prefill_ms"] / 1e3
        progress(api, placement["placement_id"], "prefill_finished")
        progress(api, placement["placement_id"], "first_token")
        progress(api, placement["placement_id"], "finished")
    shown = api.get("/v1/calibration").json()
    answers.Calibrations.model_validate(shown)
    [(name, learned)] = shown["classes"].items()
    assert learned["prefill"]["observations"] == 20
    assert learned["prefill"]["factor"] > 1.2
    assert (learned["ttft"]["count"], learned["instances"]) == (20, 4)
    before = placed(api)["predicted"]["prefill_ms"]
    reset = api.delete(f"/v1/calibration/{name}").json()
    assert reset["classes"][name]["prefill"] == {"factor": 1.0, "observations": 0}
    assert placed(api, token_ids=[7] * 1024)["predicted"]["prefill_ms"] < before
    assert api.delete("/v1/calibration/none").status_code == 404


def test_the_tree_shows_prefixes_with_their_holders(api: TestClient, scheduler: Scheduler) -> None:
    hold(scheduler, "p0", request(64).tokens)
    hold(scheduler, "d2", request(64).tokens[:32])
    tree = api.get("/v1/cache/tree").json()
    assert (tree["blocks"], tree["residencies"]) == (4, 6)
    nodes = {node["depth"]: node for node in tree["nodes"]}
    assert sorted(h["instance"] for h in nodes[min(nodes)]["holders"]) == ["d2", "p0"]
    assert api.get("/v1/cache/tree", params={"limit": 1}).json()["nodes"].__len__() == 1
    assert api.get("/v1/cache/streams").json() == {"streams": []}


def test_every_route_is_documented(api: TestClient) -> None:
    schema = api.get("/openapi.json").json()
    ours = {p: m for p, m in schema["paths"].items() if not p.startswith("/v1/cache")}
    assert len(ours) == 14
    for path, methods in ours.items():
        for method, route in methods.items():
            assert route["summary"] and route["description"], (method, path)
            good = [code for code in route["responses"] if code.startswith("2")]
            assert good, (method, path)
            for code in good:
                content = route["responses"][code]["content"]["application/json"]["schema"]
                assert "$ref" in content, (method, path)
            if "{" in path:
                assert {"404", "422"} & route["responses"].keys(), (method, path)
    body = schema["paths"]["/v1/placements"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["examples"] and all("description" in p for p in body["properties"].values())
    assert "$ref" not in json.dumps(body)
    for path, method in (
        ("/v1/placements/{placement_id}/progress", "post"),
        ("/v1/instances/{instance_id}", "put"),
    ):
        schema_of = ours[path][method]["requestBody"]["content"]["application/json"]["schema"]
        assert schema_of["examples"] and "$ref" not in json.dumps(schema_of)


def test_metrics_are_scraped_from_live_state(scheduler: Scheduler, clock: Clock) -> None:
    reservations = Reservations(scheduler, clock)
    placement = scheduler.place(request(1024), 1.0)
    reservations.made(placement.placement_id)
    scheduler.first_token(placement.placement_id, 1.1)
    other = scheduler.place(request(1024, seed=2), 1.2)
    scheduler.cancelled(other.placement_id, 1.3)
    scheduler.instance_down("d2", "gone")
    samples = {
        (s.name, *s.labels.values()): s.value
        for collector in (
            ClusterCollector(scheduler, clock),
            PlacementCollector(scheduler, clock, reservations),
        )
        for family in collector.collect()
        for s in family.samples
    }
    assert samples["conductor_instance_up", "p0", "prefill"] == 1.0
    assert samples["conductor_instance_up", "d2", "decode"] == 0.0
    assert samples["conductor_active_placements",] == 1
    assert samples["conductor_rest_reservations",] == 1
    assert samples["conductor_placements_ended_total", "cancelled"] == 1
    assert samples["conductor_placed_prompt_tokens_total",] == 2048
    assert samples["conductor_limited_by", "compute"] == 0.0
