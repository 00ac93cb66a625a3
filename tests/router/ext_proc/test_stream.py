"""A gateway's stream, message by message, before a real scheduler."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import orjson
import pytest
from cluster_factory import hold, make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.alternatives import alternatives
from conductor.dispatcher import Dispatcher
from conductor.scheduler import Scheduler
from router import KeyRing, RouterServices, RouterSettings
from router.api_keys import ApiKey
from router.ext_proc.messages import (
    BODY_BUFFERED,
    BODY_FULL_DUPLEX_STREAMED,
    BODY_NONE,
    BODY_STREAMED,
    ProcessingRequest,
    ProcessingResponse,
)
from router.ext_proc.stream import BrokenMessageError, GatewayStream, Surroundings
from router.picks import PickEnd

MODES = [BODY_BUFFERED, BODY_FULL_DUPLEX_STREAMED]
DESTINATION = "x-gateway-destination-endpoint"


def completion(**fields: Any) -> bytes:
    return orjson.dumps({"model": "llama", "prompt": list(range(1024)), "max_tokens": 100, **fields})


class Gateway:
    """Plays one gateway before a scheduler; every request is a stream of its own."""

    def __init__(self, roles: str = "mmm", *, keys: KeyRing | None = None, **options: Any) -> None:
        self.scheduler: Scheduler = make_scheduler(roles, **options)
        self.now_s = 0.0
        self.services = RouterServices(
            self.scheduler,
            dispatch=Dispatcher(self.scheduler),
            keys=keys,
            settings=RouterSettings(max_body_bytes=100_000),
            clock=lambda: self.now_s,
        )
        self.around = Surroundings(
            self.services,
            lambda: [instance.ranks[0].target for instance in self.scheduler.cluster],
            lambda placement_id: alternatives(self.scheduler.find(placement_id), 2),
        )

    def stream(self, mode: int = BODY_BUFFERED, response_mode: int = BODY_NONE) -> Stream:
        return Stream(GatewayStream(self.around), mode, response_mode)


class Stream:
    def __init__(self, stream: GatewayStream, mode: int, response_mode: int) -> None:
        self.stream = stream
        self.mode = mode
        self.response_mode = response_mode

    async def tell(self, message: Any) -> list[Any]:
        return [
            ProcessingResponse.FromString(raw)
            for raw in await self.stream.receive(message.SerializeToString())
        ]

    async def headers(
        self,
        *fields: tuple[str, str],
        path: str = "/v1/completions",
        subset: Iterable[str] | str | None = None,
        ends: bool = False,
    ) -> list[Any]:
        message = ProcessingRequest()
        message.protocol_config.request_body_mode = self.mode
        message.protocol_config.response_body_mode = self.response_mode
        message.request_headers.end_of_stream = ends
        for name, value in ((":path", path), *fields):
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        if subset is not None:
            hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({f"{DESTINATION}-subset": subset if isinstance(subset, str) else list(subset)})
        return await self.tell(message)

    async def body(self, body: bytes, *, ends: bool = True) -> list[Any]:
        message = ProcessingRequest()
        message.request_body.body = body
        message.request_body.end_of_stream = ends
        return await self.tell(message)

    async def asked(self, body: bytes = b"", *fields: tuple[str, str], **named: Any) -> list[Any]:
        """A whole request; the answers to all of it."""
        answers = await self.headers(*fields, **named)
        return answers + await self.body(body or completion())

    async def response(self, status: int, served: str | None = None, *, ends: bool = False) -> list[Any]:
        message = ProcessingRequest()
        message.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
        message.response_headers.end_of_stream = ends
        if served is not None:
            message.metadata_context.filter_metadata["envoy.lb"].update({f"{DESTINATION}-served": served})
        return await self.tell(message)

    async def response_body(self, body: bytes, *, ends: bool) -> list[Any]:
        message = ProcessingRequest()
        message.response_body.body = body
        message.response_body.end_of_stream = ends
        return await self.tell(message)


def mutation_of(answers: list[Any]) -> Any:
    for answer in answers:
        for kind in ("request_headers", "request_body"):
            if answer.HasField(kind) and getattr(answer, kind).response.HasField("header_mutation"):
                return getattr(answer, kind).response.header_mutation
    raise AssertionError(f"no endpoint among {answers}")


def headers_set(answers: list[Any]) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in mutation_of(answers).set_headers}


def refusal(answers: list[Any]) -> tuple[int, dict[str, Any]]:
    immediate = answers[-1].immediate_response
    return immediate.status.code, orjson.loads(immediate.body)["error"]


async def test_an_engine_gets_its_own_key_and_no_other_does() -> None:
    gateway = Gateway()
    keys = {"10.0.0.0:8000": "one", "10.0.0.1:8000": "one", "10.0.0.2:8000": "other"}
    for instance in gateway.scheduler.cluster:
        for rank in instance.ranks:
            rank.target = replace(rank.target, api_key=keys[f"{rank.target.host}:{rank.target.port}"])
    told = headers_set(await gateway.stream().asked())
    endpoints = told[DESTINATION].split(",")
    assert told["authorization"] == f"Bearer {keys[endpoints[0]]}"
    assert {keys[endpoint] for endpoint in endpoints} == {keys[endpoints[0]]}


@pytest.mark.parametrize("mode", MODES)
async def test_the_prefix_decides_and_others_are_named_behind(mode: int) -> None:
    gateway = Gateway()
    hold(gateway.scheduler, "m1", np.arange(1024, dtype=np.uint32))
    answers = await gateway.stream(mode).asked()
    endpoints = headers_set(answers)[DESTINATION].split(",")
    assert endpoints[0] == "10.0.0.1:8000"
    assert sorted(endpoints[1:]) == ["10.0.0.0:8000", "10.0.0.2:8000"]
    (metadata,) = [dict(a.dynamic_metadata["envoy.lb"]) for a in answers if a.HasField("dynamic_metadata")]
    assert metadata == {DESTINATION: ",".join(endpoints)}
    assert gateway.scheduler.active_placements == 1


async def test_a_body_in_full_duplex_comes_back_as_it_was() -> None:
    gateway = Gateway()
    stream = gateway.stream(BODY_FULL_DUPLEX_STREAMED)
    body = completion()
    assert await stream.headers() == []
    assert await stream.body(body[:700], ends=False) == []
    answers = await stream.body(body[700:])
    assert [answer.ListFields()[0][0].name for answer in answers] == [
        "request_headers",
        "request_body",
    ]
    streamed = answers[1].request_body.response.body_mutation.streamed_response
    assert streamed.body == body and streamed.end_of_stream


async def test_trailers_end_a_request_in_full_duplex() -> None:
    stream = Gateway().stream(BODY_FULL_DUPLEX_STREAMED)
    await stream.headers()
    await stream.body(completion(), ends=False)
    message = ProcessingRequest()
    message.request_trailers.SetInParent()
    answers = await stream.tell(message)
    assert not answers[1].request_body.response.body_mutation.streamed_response.end_of_stream
    assert answers[2].HasField("request_trailers")


@pytest.mark.parametrize("mode", MODES)
async def test_an_alias_is_rewritten(mode: int) -> None:
    gateway = Gateway(aliases={"chat": "llama"})
    answers = await gateway.stream(mode).asked(completion(model="chat"))
    changed = answers[-1].request_body.response.body_mutation
    body = changed.body if mode == BODY_BUFFERED else changed.streamed_response.body
    assert orjson.loads(body) == orjson.loads(completion())
    if mode == BODY_BUFFERED:
        assert headers_set(answers)["content-length"] == str(len(body))


async def test_a_body_that_cannot_be_rewritten_reserves_nothing() -> None:
    gateway = Gateway(aliases={"chat": "llama"})
    nested: Any = 1
    for _ in range(300):
        nested = [nested]
    body = b'{"model": "chat", "prompt": [1, 2], "x": ' + str(nested).encode() + b"}"
    status, error = refusal(await gateway.stream().asked(body))
    assert (status, error["code"]) == (400, "nested_too_deeply")
    assert gateway.scheduler.active_placements == 0


@pytest.mark.parametrize("listed", [True, False])
async def test_only_endpoints_of_the_subset_are_named(listed: bool) -> None:
    gateway = Gateway("mmmm")
    allowed = ["10.0.0.2:8000", "10.0.0.3:8000"]
    for _ in range(4):
        answers = await gateway.stream().asked(subset=allowed if listed else ", ".join(allowed))
        assert set(headers_set(answers)[DESTINATION].split(",")) <= set(allowed)


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:8000"]])
async def test_without_an_endpoint_it_is_503(subset: list[str]) -> None:
    status, error = refusal(await Gateway().stream().asked(subset=subset))
    assert (status, error["code"]) == (503, "no_instance_available")


async def test_a_subset_that_is_down_is_503() -> None:
    gateway = Gateway()
    gateway.scheduler.instance_down("m1", "gone")
    status, error = refusal(await gateway.stream().asked(subset=["10.0.0.1:8000"]))
    assert status == 503
    assert "the gateway allows" in error["message"]
    assert gateway.scheduler.active_placements == 0


async def test_prefill_and_decode_apart() -> None:
    gateway = Gateway("pddp")
    set_ = headers_set(await gateway.stream().asked(b"", ("x-prefiller-host-port", "10.6.6.6:1")))
    assert set_[DESTINATION].split(",")[0] in ("10.0.0.1:8000", "10.0.0.2:8000")
    assert set_["x-prefiller-host-port"] in ("10.0.0.0:8000", "10.0.0.3:8000")
    embedding = orjson.dumps({"model": "llama", "input": "text"})
    set_ = headers_set(await gateway.stream().asked(embedding, path="/v1/embeddings"))
    assert "x-prefiller-host-port" not in set_


async def test_what_a_client_must_not_choose_is_removed() -> None:
    gateway = Gateway(keys=KeyRing([ApiKey("a", hashlib.sha256(b"secret").digest(), "t")]))
    answers = await gateway.stream().asked(
        b"",
        ("authorization", "Bearer secret"),
        ("x-prefiller-host-port", "10.6.6.6:1"),
        ("x-conductor-priority", "3"),
        ("accept", "*/*"),
    )
    assert sorted(mutation_of(answers).remove_headers) == [
        "authorization",
        "x-conductor-priority",
        "x-prefiller-host-port",
    ]
    status, error = refusal(await gateway.stream().asked())
    assert (status, error["code"]) == (401, "missing_api_key")


async def test_objectives_by_either_name() -> None:
    gateway = Gateway()
    await gateway.stream().asked(
        b"",
        ("x-llm-d-slo-ttft-ms", "750"),
        ("x-llm-d-slo-tpot-ms", "20"),
        ("x-llm-d-inference-fairness-id", "team"),
        ("x-conductor-tbt-objective-ms", "40"),
        ("x-request-id", "abc"),
    )
    (record,) = gateway.scheduler.records.latest(1)
    asked = record.request
    assert (asked.ttft_objective_s, asked.tbt_objective_s, asked.tenant) == (0.75, 0.04, "team")
    assert asked.request_id == "abc"
    status, error = refusal(await gateway.stream().asked(b"", ("x-llm-d-slo-ttft-ms", "soon")))
    assert (status, error["param"]) == (400, "x-llm-d-slo-ttft-ms")


@pytest.mark.parametrize("mode", MODES)
async def test_bodies_over_the_limit(mode: int) -> None:
    stream = Gateway().stream(mode)
    await stream.headers()
    status, error = refusal(await stream.body(b"x" * 100_001, ends=False))
    assert (status, error["code"]) == (413, "request_too_large")
    assert await stream.body(b"x") == [], "the gateway has its answer"


@pytest.mark.parametrize(("mode", "name"), [(BODY_NONE, "NONE"), (BODY_STREAMED, "STREAMED")])
async def test_gateways_that_do_not_show_the_body_in_time(mode: int, name: str) -> None:
    status, error = refusal(await Gateway().stream(mode).headers())
    assert (status, error["code"]) == (500, "configuration_error")
    assert f"request_body_mode {name}" in error["message"]


async def test_malformed_requests_are_told_as_at_the_front_door() -> None:
    status, error = refusal(await Gateway().stream().asked(b"{"))
    assert (status, error["code"]) == (400, "invalid_json")
    status, error = refusal(await Gateway().stream().asked(completion(model="other")))
    assert (status, error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/audio/transcriptions"])
async def test_what_is_no_inference_goes_to_some_engine(path: str) -> None:
    gateway = Gateway()
    answers = await gateway.stream().headers(path=path, ends=True)
    assert headers_set(answers)[DESTINATION].startswith("10.0.0.")
    answers = await gateway.stream(BODY_FULL_DUPLEX_STREAMED).asked(b"no json", path=path)
    assert headers_set(answers)[DESTINATION].startswith("10.0.0.")
    assert gateway.scheduler.active_placements == 0


async def test_a_buffered_stream_ends_with_its_request() -> None:
    gateway = Gateway()
    stream = gateway.stream()
    await stream.asked()
    stream.stream.ended()
    assert gateway.scheduler.active_placements == 0
    assert gateway.services.picks.ended[PickEnd.STREAM] == 1


async def test_a_stream_that_is_given_up_early_leaves_its_request_to_the_prediction() -> None:
    gateway = Gateway()
    for _ in range(3):  # no time passes: no engine could have answered
        stream = gateway.stream(BODY_FULL_DUPLEX_STREAMED)
        await stream.asked()
        stream.stream.ended()
    assert gateway.scheduler.active_placements == 3
    stream = gateway.stream(BODY_FULL_DUPLEX_STREAMED)
    await stream.asked()
    gateway.now_s += 60.0
    stream.stream.ended()
    assert gateway.scheduler.active_placements == 4, "this gateway was seen to end its streams early"
    gateway.services.picks.close()
    assert gateway.scheduler.active_placements == 0


async def test_full_duplex_with_response_trailers_ends_with_its_request() -> None:
    gateway = Gateway()
    stream = gateway.stream(BODY_FULL_DUPLEX_STREAMED)
    await stream.asked()
    gateway.now_s += 60.0
    stream.stream.ended()
    assert gateway.scheduler.active_placements == 0


async def test_a_response_that_is_shown_teaches_what_it_shows() -> None:
    gateway = Gateway()
    await gateway.stream().response(200)  # the first that is seen: from now on first bytes are expected
    stream = gateway.stream(BODY_BUFFERED, BODY_FULL_DUPLEX_STREAMED)
    await stream.asked(completion(stream=True))
    gateway.now_s += 0.5
    (answer,) = await stream.response(200)
    names = [each.header.key for each in answer.response_headers.response.header_mutation.set_headers]
    assert "x-conductor-placement-id" in names
    gateway.now_s += 1.0
    usage = b'data: {"usage":{"prompt_tokens":1024,"completion_tokens":77}}\n\n'
    (answer,) = await stream.response_body(b"data: x\n\n", ends=False)
    assert answer.response_body.response.body_mutation.streamed_response.body == b"data: x\n\n"
    await stream.response_body(usage, ends=True)
    (record,) = gateway.scheduler.records.latest(1)
    assert record.outcome == "finished"
    assert record.usage is not None and record.usage.output_tokens == 77
    assert record.observed_ttft_s() == pytest.approx(0.5)
    stream.stream.ended()
    assert gateway.services.picks.ended[PickEnd.OBSERVED] == 1


@pytest.mark.parametrize(("status", "outcome"), [(400, "cancelled"), (503, "failed")])
async def test_an_engine_that_refuses_or_fails(status: int, outcome: str) -> None:
    gateway = Gateway()
    stream = gateway.stream()
    await stream.asked()
    await stream.response(status)
    (record,) = gateway.scheduler.records.latest(1)
    assert record.outcome == outcome
    gateway.scheduler.check_invariants()


async def test_a_request_that_went_to_a_fallback_is_booked_there() -> None:
    gateway = Gateway()
    stream = gateway.stream()
    endpoints = headers_set(await stream.asked())[DESTINATION].split(",")
    await stream.response(200, served=endpoints[1])
    now, before = gateway.scheduler.records.latest(2)
    assert before.outcome == "failed"
    assert now.placement.decode.url == f"http://{endpoints[1]}"
    assert now.request.retry_of == before.placement.placement_id
    stream.stream.ended()
    assert now.outcome == "finished"
    assert gateway.scheduler.active_placements == 0
    assert gateway.services.picks.elsewhere == 1


async def test_messages_out_of_order() -> None:
    stream = Gateway().stream()
    with pytest.raises(BrokenMessageError, match="before request_headers"):
        await stream.body(b"{}")
    await stream.headers()
    with pytest.raises(BrokenMessageError, match="second time"):
        await stream.headers()
    with pytest.raises(BrokenMessageError, match="holds none of"):
        await stream.tell(ProcessingRequest())


@given(st.lists(st.binary(max_size=60), max_size=4))
@settings(max_examples=200, deadline=None)
async def test_any_bytes_are_answered_or_refused(messages: list[bytes]) -> None:
    gateway = _fuzzed()
    stream = gateway.stream()
    for message in messages:
        try:
            for answer in await stream.stream.receive(message):
                ProcessingResponse.FromString(answer)
        except BrokenMessageError:
            break
    stream.stream.ended()
    assert gateway.scheduler.active_placements == 0


@cache
def _fuzzed() -> Gateway:
    return Gateway()
