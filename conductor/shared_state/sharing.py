"""One replica's part in the shared state: a task that tells and hears everything in small turns.

Nothing here is awaited by a request. While Redis does not answer, this replica decides by what it knows itself;
what others told counts for the length of a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import msgspec
import structlog

from conductor.admission import pieces_of_output_lengths
from conductor.instance_config import InstanceConfig
from conductor.membership import Membership
from conductor.scheduler import Scheduler
from conductor.shared_state import instances as registry
from conductor.shared_state import replicas, scripts
from conductor.shared_state.instances import Standing
from conductor.shared_state.learned import SharedCalibrations
from conductor.shared_state.lease import Answer, Lease
from conductor.shared_state.link import LinkError, RedisLink
from conductor.shared_state.members import apply_entry
from conductor.shared_state.others import summed_load, told_load
from conductor.shared_state.replicas import Replica
from conductor.shared_state_config import SharedStateConfig

_log = structlog.get_logger(__name__)

LinkState = Literal["connecting", "up", "down"]

RECORD_EVERY_S = 1.0
LEARNED_EVERY_S = 5.0
LENGTHS_EVERY_S = 60.0
PIECES_A_TURN = 4
RETRY_S = 0.2  # after a failure
ACTIONS_KEPT = 1_000


@dataclass(slots=True)
class Counts:
    """Since the start."""

    turns: int = 0
    failures: int = 0  # turns that Redis did not answer
    losses: int = 0  # times that it was there and went
    faults: int = 0  # entries that could not be read or used, and errors of our own
    refused_actions: int = 0


class SharedState:
    """``clock`` gives monotonic seconds, ``wall`` Unix seconds."""

    def __init__(
        self,
        config: SharedStateConfig,
        link: RedisLink,
        replica: str,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        calibrations: SharedCalibrations | None = None,
    ) -> None:
        self.replica = replica
        self.link = link
        self.lease = Lease(config.lease_s)
        self.registry = registry.InstanceRegistry(replica)
        self.counts = Counts()
        self.state: LinkState = "connecting"
        self.reason = "not asked yet"
        self.peers: list[Replica] = []
        self.others_placed = 0  # ranks that others have placed something on
        self._config = config
        self._clock = clock
        self.wall = wall
        self._started_at_s = wall()
        self._since_s = clock()
        self._heard_s = clock()
        self._url = ""
        self._warm_streams: Callable[[], int] = lambda: 0
        self._calibrations = calibrations or SharedCalibrations()
        self._stamp: str | None = None
        self._stamps = 0
        self._configured: list[InstanceConfig] | None = []  # None once they were told
        self._unsent: list[registry.Entry] = []
        self._led = False
        self._due = dict.fromkeys(("record", "learned"), -1.0)
        self._lengths_due_s = clock() + LENGTHS_EVERY_S
        self._lengths_to_tell: Iterator[bytes] | None = None
        self._lengths_told: list[bytes] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._scheduler: Scheduler
        self._membership: Membership

    # ---- life ----

    def start(
        self,
        scheduler: Scheduler,
        membership: Membership,
        url: str,
        configured: Iterable[InstanceConfig],
        warm_streams: Callable[[], int],
    ) -> None:
        """Share from now on; ``configured`` are this replica's own instances, which are in the cluster."""
        self._scheduler, self._membership = scheduler, membership
        self._url, self._configured = url, list(configured)
        self._warm_streams = warm_streams
        self._task = asyncio.create_task(self._share_forever(), name="shared-state")

    async def close(self) -> None:
        """Leave: the others need not wait for the lease to end."""
        if self._task is not None:
            self._closing = True
            self._wake.set()
            await self._task  # a turn has deadlines; cut off, it would leave an answer on the way
            if self.state == "up":
                with contextlib.suppress(LinkError):
                    await self._leave()
        await self.link.close()

    # ---- leadership ----

    @property
    def token(self) -> int:
        """Of the lease, while this replica leads; else 0."""
        return self.lease.token(self._clock())

    async def record_action(self, entry: Mapping[str, Any]) -> str | None:
        """Write down what is about to be done, under the token of the lease; why that is refused, or None.

        Raises LinkError when Redis cannot be asked.
        """
        token = self.token
        if not token:
            self.counts.refused_actions += 1
            return f"this replica does not lead; {self.leader_words()}"
        told = msgspec.json.encode({**entry, "token": token, "replica": self.replica, "at_s": self.wall()})
        holder = f"{token} {self.replica}"
        done = await self.link.run(
            scripts.RECORD_ACTION, ("lease", "token", "actions"), holder, told, ACTIONS_KEPT
        )
        if not done:
            self.counts.refused_actions += 1
            return f"the token {token} of this replica is not the leader's any more"
        return None

    def leader_words(self) -> str:
        """Who leads, in words."""
        leader = next((peer for peer in self.peers if peer.replica == self.lease.leader), None)
        if self.state != "up" or not self.lease.leader:
            return "nobody is known to lead now"
        return f"{self.lease.leader} leads" + (f" ({leader.url})" if leader is not None else "")

    def status(self) -> dict[str, Any]:
        """For people: how it stands, and who takes part."""
        now_s = self._clock()
        return {
            "redis": self.state,
            "address": self.link.host,
            "reason": self.reason,
            "for_s": round(now_s - self._since_s, 3),
            "replica": self.replica,
            "leads": bool(self.token),
            "leader": self.lease.leader if self.state == "up" else "",
            "token": self.lease.highest,
            "replicas": len(self.peers) if self.state == "up" else 1,
            "conflicts": self.registry.conflicts,
        }

    # ---- instances ----

    def tell(self, instance_id: str, standing: Standing, **fields: Any) -> None:
        """Write an entry, unless the present one says the same, and have it told at once."""
        known = self.registry.entries.get(instance_id)
        present = known is not None and known.standing is standing is Standing.PRESENT
        if present and known is not None and known.description == fields["description"]:
            return
        entry = self.registry.write(instance_id, standing, at_s=self.wall(), **fields)
        self._unsent.append(entry)
        self._wake.set()

    # ---- turns ----

    async def _share_forever(self) -> None:
        while not self._closing:
            pause_s = self._config.batch_s
            try:
                await self._turn()
                self._answered()
            except LinkError as error:
                self.counts.failures += 1
                self._silent(str(error))
                pause_s = RETRY_S
            except Exception:
                self.counts.faults += 1
                _log.exception("shared_state.failed")
                pause_s = RETRY_S
            self._watch_leadership()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            if not self._closing:
                self._wake.clear()

    async def _turn(self) -> None:
        now_s = self._clock()
        record = b""
        if self._is_due("record", now_s, RECORD_EVERY_S) or self.state != "up":
            record = replicas.encoded(self._record())
        loads, stamp, records = await self.link.run(
            scripts.EXCHANGE,
            ("presence", "records", "loads", "stamp"),
            self.replica,
            round(self._config.lease_s * 1e3),
            told_load(self._scheduler.cluster, now_s),
            record,
        )
        self._hear_loads(_pairs(loads))
        if record:
            self.peers = replicas.decoded(_pairs(records))
        if stamp.decode() != self._stamp or self._unsent:
            await self._share_instances()
        if self.lease.is_due(now_s):
            await self._ask_for_lease()
        if self._is_due("learned", now_s, LEARNED_EVERY_S):
            await self._share_learned()
        if self._lengths_to_tell is not None:
            await self._go_on_with_lengths(self._lengths_to_tell)
        self.counts.turns += 1

    def _hear_loads(self, loads: dict[str, bytes]) -> None:
        loads.pop(self.replica, None)
        self._heard_s = self._clock()
        told = summed_load(loads.values(), self._heard_s)
        if told or self.others_placed:
            self._scheduler.placed_elsewhere(told)
        self.others_placed = len(told)

    async def _ask_for_lease(self) -> None:
        asked_s = self._clock()
        question = self.lease.question(asked_s)
        try:
            granted, leader, highest = await self.link.run(
                scripts.TAKE_LEASE,
                ("lease", "token", "server"),
                self.replica,
                question.token,
                question.floor,
                round(self._config.lease_s * 1e3),
            )
        except LinkError:
            self.lease.unanswered()
            raise
        self.lease.answered(question, asked_s, Answer(int(granted), leader.decode(), int(highest)))

    async def _share_instances(self) -> None:
        """Read all entries, use what is news, and write what is missing or older there."""
        stamp, stored = await self.link.run(scripts.READ_INSTANCES, ("instances", "stamp"))
        heard: dict[str, registry.Entry] = {}
        for name, value in _pairs(stored).items():
            try:
                heard[name] = registry.decoded(value)
            except msgspec.DecodeError as error:
                self._fault("an entry of the registry cannot be read", name, str(error))
        news = self.registry.merge(heard.values())
        if self._configured is not None:
            told = self.registry.configure(self._configured, self.wall())
            for entry in told:
                if entry.instance_id in heard:
                    earlier = heard[entry.instance_id].replica
                    _log.warning(
                        "an instance is configured differently; this file counts, being the latest",
                        instance=entry.instance_id,
                        other=earlier,
                    )
            for conflict in self.registry.conflicts:
                _log.warning("the configuration is not followed", conflict=conflict)
            self._configured = None
        for entry in news:
            if self.registry.entries.get(entry.instance_id) is entry:
                try:
                    apply_entry(entry, self._membership, self._scheduler, self.wall())
                except ValueError as error:
                    self._fault("an instance of the registry cannot be used", entry.instance_id, str(error))
        old = self.registry.forget(self.wall())
        missing = self.registry.missing_from(heard)
        self._unsent.clear()
        self._stamp = None  # whatever goes wrong from here on, look again
        if old:
            await self.link.run(scripts.FORGET_INSTANCES, ("instances",), *old)
        if not missing:
            self._stamp = stamp.decode()
        else:
            self._stamps += 1
            fields = [part for e in missing for part in (e.instance_id, e.order, registry.encoded(e))]
            await self.link.run(
                scripts.PUBLISH_INSTANCES,
                ("instances", "stamp"),
                f"{self.replica} {self._stamps}",
                *fields,
            )

    async def _share_learned(self) -> None:
        scheduler = self._scheduler
        news = self._calibrations.news(scheduler.calibrations)
        told = await self.link.run(
            scripts.EXCHANGE_LEARNED, ("learned",), *(part for pair in news.items() for part in pair)
        )
        for name in self._calibrations.heard(_pairs(told)):
            if name in scheduler.calibrations:
                scheduler.reset_calibration(name)
        if self.token and self._clock() >= self._lengths_due_s:
            self._lengths_due_s = self._clock() + LENGTHS_EVERY_S
            self._lengths_to_tell = pieces_of_output_lengths(scheduler.gate.lengths)
            self._lengths_told.clear()

    async def _go_on_with_lengths(self, pieces: Iterator[bytes]) -> None:
        """There may be tens of thousands of kinds: some are read in each turn, and written with the last."""
        some = list(islice(pieces, PIECES_A_TURN))
        self._lengths_told += some
        if len(some) == PIECES_A_TURN:
            return
        self._lengths_to_tell = None
        if self.token:
            await self.link.run(scripts.WRITE_LENGTHS, ("lengths",), b"".join(self._lengths_told))
        self._lengths_told.clear()

    async def _leave(self) -> None:
        token = self.token
        await self._share_learned()
        holder = f"{token} {self.replica}" if token else ""
        keys = ("presence", "records", "loads", "lease")
        await self.link.run(scripts.LEAVE, keys, self.replica, holder)
        self.lease.given_up()

    # ---- how it stands ----

    def _answered(self) -> None:
        if self.state != "up":
            _log.info("the state is shared", redis=self.link.host, replicas=len(self.peers))
            self.state, self.reason, self._since_s = "up", "", self._clock()

    def _silent(self, reason: str) -> None:
        now_s = self._clock()
        if self.state != "down":
            _log.warning(
                "the shared state is out of reach; decisions go on without the other replicas",
                redis=self.link.host,
                reason=reason,
            )
            self.counts.losses += self.state == "up"
            self.state, self._since_s = "down", now_s
        self.reason = reason
        if self.others_placed and now_s - self._heard_s > self._config.lease_s:
            self._scheduler.placed_elsewhere({})
            self.others_placed = 0

    def _watch_leadership(self) -> None:
        leads = bool(self.token)
        if leads != self._led:
            self._led = leads
            said = "this replica leads" if leads else "this replica does not lead any more"
            _log.info(said, replica=self.replica, token=self.lease.highest)

    def _fault(self, what: str, name: str, reason: str) -> None:
        self.counts.faults += 1
        _log.error(what, name=name, reason=reason[:200])

    def _is_due(self, what: str, now_s: float, every_s: float) -> bool:
        if now_s < self._due[what]:
            return False
        self._due[what] = now_s + every_s
        return True

    def _record(self) -> Replica:
        return Replica(
            self.replica,
            self._url,
            self._started_at_s,
            warm_streams=self._warm_streams(),
            instances=len(self._scheduler.cluster),
        )


def _pairs(flat: list[bytes]) -> dict[str, bytes]:
    """A hash as scripts answer it."""
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
