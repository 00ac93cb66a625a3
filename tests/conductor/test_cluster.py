"""Queues of a rank, and instances as they are configured."""

from math import isnan

import pytest
from rank_work import end_decode, end_prefill, place

from cache_index import Holder
from conductor.catalogue import LLAMA_8B_H100
from conductor.cluster import Cluster, EngineFacts, Health, ServedModel, make_instance
from conductor.placement import Role


def _instance(instance_id: str = "a", url: str = "http://10.0.0.1:8000", ranks: int = 1):
    return make_instance(
        instance_id=instance_id,
        url=url,
        role=Role.MIXED,
        instance_class=LLAMA_8B_H100,
        protocol="vllm-nixl",
        ranks=ranks,
    )


def test_the_queue_is_what_is_pending_less_the_progress_of_the_running_one() -> None:
    rank = _instance().ranks[0]
    place(rank, 1, 10.0, prefill_s=1.0)
    place(rank, 2, 10.0, prefill_s=2.0)
    assert rank.queue_s(10.0) == pytest.approx(3.0)
    assert rank.queue_s(10.4) == pytest.approx(2.6)


def test_an_observed_prefill_that_is_late_holds_up_those_behind_it() -> None:
    rank = _instance().ranks[0]
    place(rank, 1, 0.0, prefill_s=1.0)
    place(rank, 2, 0.0, prefill_s=2.0)
    assert rank.queue_s(5.0) == pytest.approx(2.0)
    assert end_prefill(rank, 1, 5.0) == pytest.approx(5.0)
    assert rank.queue_s(5.5) == pytest.approx(1.5)


def test_an_unobserved_prefill_ends_as_predicted() -> None:
    rank = _instance().ranks[0]
    place(rank, 1, 0.0, prefill_s=1.0, observed=False)
    place(rank, 2, 0.0, prefill_s=2.0)
    assert rank.queue_s(1.5) == pytest.approx(1.5)
    place(rank, 3, 1.5, prefill_s=1.0)
    assert rank.under_way() == {2, 3}, "what ended as predicted is forgotten with the next change"
    assert isnan(end_prefill(rank, 1, 2.0))


def test_a_prefill_that_ends_out_of_order_tells_no_service_time() -> None:
    rank = _instance().ranks[0]
    place(rank, 1, 0.0, prefill_s=1.0)
    place(rank, 2, 0.0, prefill_s=2.0)
    assert isnan(end_prefill(rank, 2, 0.5))
    assert rank.queue_s(0.5) == pytest.approx(0.5)
    assert end_prefill(rank, 1, 0.9) == pytest.approx(0.9)
    assert rank.queue_s(0.9) == 0.0


def test_context_tokens_follow_decodes() -> None:
    rank = _instance().ranks[0]
    place(rank, 1, 0.0, decodes=True, prompt_tokens=100)
    place(rank, 2, 0.0, decodes=True, prompt_tokens=50)
    end_decode(rank, 1, 0.0)
    end_decode(rank, 1, 0.0)
    assert rank.context_tokens == 50


def test_ranks_are_holders_and_targets_of_their_own() -> None:
    instance = _instance(ranks=2)
    assert [r.holder for r in instance.ranks] == [Holder("a", 0), Holder("a", 1)]
    assert [(r.target.rank, r.target.ranks, r.target.port) for r in instance.ranks] == [
        (0, 2, 8000),
        (1, 2, 8000),
    ]


@pytest.mark.parametrize("url", ["10.0.0.1:8000", "https://", "ftp://x", "http://"])
def test_a_url_that_cannot_be_routed_to_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must look like http://host:port"):
        _instance(url=url)


def test_models_are_merged_over_instances_that_are_not_down() -> None:
    cluster = Cluster()
    for name, length in (("a", 4096), ("b", 2048), ("c", 1024)):
        instance = _instance(name)
        adapter = ServedModel("adapter", parent="base")
        instance.facts = EngineFacts((ServedModel("base", max_model_len=length), adapter))
        cluster.add(instance)
    cluster["c"].health = Health.DOWN
    base, adapter_card = cluster.models()
    assert (base.model, base.max_model_len, base.instances) == ("base", 2048, 2)
    assert (adapter_card.model, adapter_card.parent) == ("adapter", "base")


def test_an_id_cannot_be_used_twice() -> None:
    cluster = Cluster()
    cluster.add(_instance())
    with pytest.raises(ValueError, match="used twice"):
        cluster.add(_instance())
