"""Orders for the cluster's caches over REST: what they become, who gets them, and what is answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cluster_factory import BLOCK, hold, make_scheduler
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cache_index import CacheIndex, PromptMatcher
from cache_index.lmcache_directory import LMCacheDirectory, server_holder
from cache_index.lmcache_objects import LMCacheServer
from conductor.action_ledger import ActionLedger
from conductor.action_runner import ActionRunner
from conductor.actions import ActionKind, Place, TierAction
from conductor.cache_orders import CacheOrders
from conductor.placement import TokenSource
from conductor.rest import TokenizedPrompt, answers, make_rest_router
from conductor.scheduler import Scheduler

TOKENS = list(range(10 * BLOCK))


class Able:
    """Can do some things at some instances."""

    name = "able"

    def __init__(self) -> None:
        self.kinds: set[ActionKind] = set(ActionKind)
        self.instances: set[str] = {"p0", "p1"}

    def can(self, kind: ActionKind, source: Place | None, target: Place) -> bool:
        return kind in self.kinds and target.holder.instance_id in self.instances

    async def execute(self, action: TierAction) -> int:
        return action.blocks


class Api:
    """The routes over a cluster of two prefill and two decode instances; p0 has an LMCache server."""

    def __init__(self) -> None:
        self.directory = LMCacheDirectory(CacheIndex())
        self.scheduler: Scheduler = make_scheduler()
        self.able = Able()
        self.now_s = 1.0
        prompts = PromptMatcher(self.scheduler.index, self.directory)
        self.directory.register(LMCacheServer("s0", "10.0.0.0", 8080, 0.0), 0.0)
        for instance in self.scheduler.cluster:
            for rank in instance.ranks:
                prompts.attach(rank.holder, rank.target.host)
        self.ledger = ActionLedger()
        runner = ActionRunner(self.ledger, [self.able], self.clock)
        orders = CacheOrders(
            runner,
            self.scheduler.cluster,
            self.scheduler.index,
            prompts,
            self.clock,
            aliases={"gpt": "llama"},
        )
        app = FastAPI()
        app.include_router(make_rest_router(self.scheduler, self.clock, tokenize=words, orders=orders))
        self.http = TestClient(app)

    def clock(self) -> float:
        return self.now_s

    def order(self, verb: str, status: int = 202, **body: Any) -> Any:
        body = {"model": "llama", "target": {"instance": "p1"}, "token_ids": TOKENS} | body
        body = {name: value for name, value in body.items() if value is not None}
        answer = self.http.post(f"/v1/cache/{verb}", json=body)
        assert answer.status_code == status, answer.text
        if status != 202:
            return answer.json()
        [action] = answers.ActionsTaken.model_validate(answer.json()).actions
        return action


async def words(document: dict[str, Any]) -> TokenizedPrompt | None:
    if document["model"] != "llama":
        return None
    text = document.get("prompt") or document["messages"][-1]["content"]
    return TokenizedPrompt(np.array([len(word) for word in text.split()], np.uint32), TokenSource.LOCAL)


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    with made.http:
        yield made


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("pin", "pin"),
        ("unpin", "unpin"),
        ("compress", "compress"),
        ("decompress", "decompress"),
        ("clear", "evict"),
    ],
)
def test_verbs_at_one_place(api: Api, verb: str, kind: str) -> None:
    action = api.order(verb, model="gpt", target={"instance": "p1", "tier": "disk"}, reason="by hand")
    assert (action.kind, action.state, action.reason, action.ordered) == (kind, "planned", "by hand", True)
    assert (action.target.instance, action.target.tier, action.source) == ("p1", "disk", None)
    assert (action.start_block, action.stop_block, action.model) == (0, 10, "llama")
    assert action.kv_bytes == 10 * BLOCK * 131_072


@pytest.mark.parametrize(("copy", "kind"), [(False, "move"), (True, "replicate")])
def test_moving_and_copying(api: Api, copy: bool, kind: str) -> None:
    action = api.order("move", source={"instance": "p0"}, copy=copy, start_block=2, stop_block=6)
    assert (action.kind, action.source.instance, action.source.tier) == (kind, "p0", "host")
    assert (action.start_block, action.stop_block) == (2, 6)


def test_a_prefetch_reads_from_who_has_most(api: Api) -> None:
    hold(api.scheduler, "d2", np.array(TOKENS[: 3 * BLOCK], np.uint32))
    hold(api.scheduler, "p0", np.array(TOKENS[: 7 * BLOCK], np.uint32))
    action = api.order("prefetch")
    assert (action.kind, action.source.instance, action.source.tier) == ("replicate", "p0", "device")
    assert action.stop_block == 7  # what is known to be there
    own = api.order("prefetch", source={"instance": "p1", "tier": "disk"})
    assert (own.kind, own.stop_block) == ("prefetch", 10)


def test_a_prefetch_of_what_nobody_is_known_to_have_is_left_to_the_executor(api: Api) -> None:
    action = api.order("prefetch")
    assert (action.kind, action.source, action.stop_block) == ("prefetch", None, 10)


def test_an_engines_lmcache_server_is_meant_too(api: Api) -> None:
    api.able.instances = {"lmcache:s0"}
    action = api.order("prefetch", target={"instance": "p0"})
    assert action.target.instance == server_holder("s0").instance_id
    api.order("prefetch", 422)  # p1 has none


def test_why_nobody_can(api: Api) -> None:
    api.able.kinds = {ActionKind.PIN}
    refused = api.order("compress", 422)
    assert "no executor can compress at p1/host (able); there they can only do able: pin" in str(refused)


def test_everything_at_a_place_is_cleared(api: Api) -> None:
    action = api.order("clear", token_ids=None)
    assert (action.kind, action.model, action.stop_block) == ("evict", None, 0)
    api.order("pin", 422, token_ids=None)


def test_prompts_as_text_and_messages(api: Api) -> None:
    text = "x " * 3 * BLOCK
    assert api.order("pin", token_ids=None, text=text).stop_block == 3
    messages = [{"role": "user", "content": text}]
    assert api.order("pin", token_ids=None, messages=messages).stop_block == 3


def test_a_model_that_nobody_serves_is_not_found(api: Api) -> None:
    for prompt in ({"text": "x"}, {"messages": [{"role": "user", "content": "x"}]}, {}):
        found = api.order("pin", 404, model="none", **({"token_ids": None} if prompt else {}), **prompt)
        assert "no instance serves 'none'" in str(found)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"text": "both"}, "in one form"),
        ({"tools": [{}]}, "tools belong to messages"),
        ({"target": {"instance": "p1", "tier": "attic"}}, "tier"),
        ({"target": {"instance": "p1", "rank": 3}}, "has ranks 0 to 0"),
        ({"stop_block": 11}, "the prompt has 10 whole blocks"),
        ({"start_block": 10}, "are none"),
        ({"token_ids": [1, 2]}, "['body', 'token_ids'], 'msg': 'the prompt has 2 tokens, which is less than"),
        ({"token_ids": None, "text": "x"}, "['body', 'text'], 'msg': 'the prompt has 1 tokens"),
        ({"token_ids": None, "text": "hello", "model": "adapter"}, "no tokenizer"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"where": 1}, "where"),
    ],
)
def test_orders_that_cannot_be(api: Api, body: dict[str, Any], says: str) -> None:
    assert says in str(api.order("pin", 422, **body))


def test_an_unknown_model(api: Api) -> None:
    assert "no instance serves" in str(api.order("pin", 404, model="other"))


def test_actions_are_listed_found_and_cancelled(api: Api) -> None:
    first, second = api.order("pin"), api.order("unpin")
    api.now_s = 3.0
    assert api.ledger.advance(3.0).start
    api.ledger.assigned(first.id, "able")
    api.ledger.completed(first.id, 4, 5.0)
    listed = answers.Actions.model_validate(api.http.get("/v1/actions").json())
    assert [(each.id, each.state) for each in listed.actions] == [(second.id, "running"), (first.id, "done")]
    assert listed.counts == {"planned": 0, "running": 1}
    done = answers.ActionStatus.model_validate(api.http.get(f"/v1/actions/{first.id}").json())
    assert (done.partial, done.blocks_done, done.executor, done.ran_s) == (True, 4, "able", 2.0)
    only = api.http.get("/v1/actions", params={"state": "done"}).json()["actions"]
    assert [each["id"] for each in only] == [first.id]
    cancelled = api.http.post(f"/v1/actions/{second.id}/cancel").json()
    assert (cancelled["state"], cancelled["detail"]) == ("cancelled", "cancelled on request")
    assert api.http.post(f"/v1/actions/{second.id}/cancel").status_code == 409
    assert api.http.get("/v1/actions/nobody").status_code == 404
    assert api.http.post("/v1/actions/nobody/cancel").status_code == 404
    assert api.http.get("/v1/actions", params={"state": "lost"}).status_code == 422
