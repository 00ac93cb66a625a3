"""The next turn of a conversation goes straight to the decode instance that holds it."""

from front_door_process import FrontDoor

MODEL = "emulated-8b"


def test_a_decode_instance_that_holds_the_prefix_gets_the_next_turn_alone(cluster: FrontDoor) -> None:
    skipped = "conductor_prefills_skipped_total"
    before = cluster.samples().get(skipped, 0.0)
    prompt = [3 + number * 7 % 900 for number in range(3000)]
    first = cluster.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 2})
    holder = first.headers["x-conductor-decode-instance"]
    assert first.headers["x-conductor-prefill-instance"].startswith("prefill-")

    def cached() -> int:
        asked = {"model": MODEL, "token_ids": prompt}
        found = cluster.http.post("/v1/cache/lookup", json=asked).json()["default"]
        return int(found.get(holder, {}).get("longest_matched", 0))

    cluster.wait_until(lambda: cached() >= 2900, "the events of the first turn")
    turn = {"model": MODEL, "prompt": [*prompt, *range(50, 150)], "max_tokens": 2}
    second = cluster.http.post("/v1/completions", json=turn)
    assert second.status_code == 200
    assert second.headers["x-conductor-prefill-instance"] == holder
    assert second.headers["x-conductor-decode-instance"] == holder
    why = cluster.get(f"/v1/placements/{second.headers['x-conductor-placement-id']}")["why"]
    assert "computes the other" in why
    assert cluster.samples()[skipped] == before + 1
