"""Mooncake masters followed over real sockets, and their keys listed over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mooncake_pool import BLOCK, POOL, TOKENS, Following, Master, as_sent, recorded_events, recorded_frames
from waiting import wait_for

from cache_index import Holder, StreamConfig
from cache_index.mooncake import MooncakeStream


@pytest.fixture
def following() -> Iterator[Following]:
    made = Following()
    yield made
    made.close()


def test_a_master_is_followed(following: Following) -> None:
    following.master.publish(as_sent(1, "stored", 101), as_sent(2, "stored", 55))
    wait_for(lambda: following.pool.pooled() == 1)
    stats = following.stats()
    assert (stats.state, stats.last_seq, stats.events, stats.unresolved_blocks) == ("warm", 1, 2, 1)
    assert following.source.hint_counters(POOL).keyed == 1


def test_recorded_frames_through_a_socket(following: Following) -> None:
    for frames in recorded_frames():
        following.master.send(frames[-1])
    wait_for(lambda: following.stats().batches == 60)
    assert (following.stats().events, following.stats().malformed_events) == (74, 0)


def test_a_gap_voids_the_hints(following: Following) -> None:
    following.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: following.pool.pooled() == 1)
    following.master.sequence += 1
    following.master.publish(as_sent(3, "stored", 102))
    wait_for(lambda: following.stats().last_seq == 3)
    assert following.pool.pooled() == 0
    assert (following.stats().state, following.stats().gaps) == ("cold", 1)


def test_bad_payloads_are_counted_and_the_stream_goes_on(following: Following) -> None:
    following.master.send(b"\xc1")
    following.master.publish(as_sent(1, "stored", 101), {"event_type": "stored"}, as_sent(2, "sung"))
    wait_for(lambda: following.pool.pooled() == 1)
    stats = following.stats()
    assert (stats.malformed_frames, stats.malformed_events, stats.unknown_events) == (1, 1, 1)
    assert stats.state == "cold"  # nobody knows what the first message said


def test_a_restarted_master_leaves_nothing_stale(following: Following) -> None:
    following.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: following.pool.pooled() == 1)
    following.master.close()
    wait_for(lambda: following.stats().state == "connecting")
    following.master = Master(following.master.endpoint)
    following.master.wait_for_subscriber()
    wait_for(lambda: following.pool.pooled() == 0)
    following.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: following.pool.pooled() == 1)
    assert following.stats().state == "warm"


def test_resync_and_removal_forget(following: Following) -> None:
    following.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: following.pool.pooled() == 1)
    following.source.resync(POOL)
    assert following.pool.pooled() == 0
    following.master.publish(as_sent(2, "stored", 101))
    wait_for(lambda: following.pool.pooled() == 1)
    following.source.remove_stream(POOL)
    assert (following.pool.pooled(), following.source.stream_stats()) == (0, [])


# --- listings over HTTP ----------------------------------------------------------------------------------


class Admin:
    """A master's admin port, as far as it is asked: keys as text, one a line."""

    def __init__(self, *keys: str, events_enabled: bool = True) -> None:
        self.keys = list(keys)
        self.asked: list[str] = []
        self.status = 200
        self.held = threading.Event()
        self.held.set()
        admin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                admin.asked.append(self.path)
                content = json.dumps({"enabled": events_enabled, "published_events": 3})
                if self.path == "/get_all_keys":
                    content = "".join(f"{key}\n" for key in admin.keys)
                    admin.held.wait(20)
                self.send_response(admin.status)
                self.end_headers()
                self.wfile.write(content.encode())

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def listings(self) -> int:
        return self.asked.count("/get_all_keys")

    def close(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def admin() -> Iterator[Admin]:
    made = Admin()
    yield made
    made.close()


def follow(following: Following, admin: Admin, reconcile_s: float = 1.0) -> None:
    """Follow the master anew, this time with its admin port."""
    following.source.remove_stream(POOL)
    following.master.wait_until_left()
    following.source.add_stream(MooncakeStream.of(following.stream(), admin.url, reconcile_s))
    following.master.wait_for_subscriber()


def test_what_a_master_had_before_is_learned_from_its_keys(following: Following, admin: Admin) -> None:
    admin.keys = ["101", "0x66", "tenant/7", "session-1"]
    follow(following, admin)
    wait_for(lambda: following.pool.pooled() == 2)
    wait_for(lambda: following.stats().state == "warm")
    following.master.sequence = 40
    following.master.publish(as_sent(41, "stored", 103))
    wait_for(lambda: following.pool.pooled() == 3)
    assert following.stats().state == "warm"


def test_removals_that_nobody_told_of_are_found(following: Following, admin: Admin) -> None:
    admin.keys = ["101", "102"]
    follow(following, admin)
    wait_for(lambda: following.pool.pooled() == 2)
    admin.keys = ["101"]  # batch removals publish nothing
    wait_for(lambda: following.pool.pooled() == 1)
    assert following.source.hint_counters(POOL).unlisted == 1


def test_a_gap_is_closed_by_the_next_listing(following: Following, admin: Admin) -> None:
    admin.keys = ["101", "102"]
    follow(following, admin, reconcile_s=3600.0)
    wait_for(lambda: following.stats().state == "warm" and following.pool.pooled() == 2)
    following.master.publish(as_sent(1, "stored", 9))
    wait_for(lambda: following.stats().last_seq == 1)
    following.master.sequence += 3
    admin.held.clear()
    following.master.publish(as_sent(5, "stored", 9))
    wait_for(lambda: following.stats().state == "cold")
    admin.held.set()
    wait_for(lambda: following.stats().state == "warm" and following.pool.pooled() == 2)
    assert following.stats().gaps == 1


def test_an_admin_port_that_fails_changes_nothing(following: Following, admin: Admin) -> None:
    admin.status = 500
    follow(following, admin)
    following.master.publish(as_sent(1, "stored", 101))
    wait_for(lambda: following.pool.pooled() == 1)
    asked = admin.listings
    wait_for(lambda: admin.listings >= asked + 2)
    assert (following.pool.pooled(), following.stats().state) == (1, "warm")


def test_a_removed_pool_is_not_listed_any_more(following: Following, admin: Admin) -> None:
    admin.keys = ["101"]
    admin.held.clear()
    follow(following, admin)
    wait_for(lambda: admin.listings == 1)
    following.source.remove_stream(POOL)
    admin.held.set()
    wait_for(lambda: "/kv_events/status" in admin.asked)
    other = Admin()  # its listing comes after the removed pool's has been dealt with
    try:
        stream = StreamConfig(Holder("other"), "tiny", following.master.endpoint, None, block_size=BLOCK)
        following.source.add_stream(MooncakeStream.of(stream, other.url, 1.0))
        wait_for(lambda: other.listings >= 2)
    finally:
        other.close()
    assert (following.pool.pooled(), admin.listings) == (0, 1)


def test_recorded_objects_are_listed_as_the_master_names_them(following: Following, admin: Admin) -> None:
    events = [event for payload in recorded_events() for event in payload[1]]
    present = {event["object_key"] for event in events if event["event_type"] == "stored"}
    present -= {event["object_key"] for event in events if event["event_type"] == "removed"}
    admin.keys = sorted(present)
    names = {event["seq_hashes"][0] for event in events if event["object_key"] in present}
    following.pool.explain(sorted(names)[:3], TOKENS)
    follow(following, admin)
    wait_for(lambda: following.pool.pooled() == 3)
    assert following.source.hint_counters(POOL).learned == len(names) == len(present)
