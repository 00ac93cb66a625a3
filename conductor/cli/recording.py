"""Recording what the scheduler decides, where the configuration asks for it."""

from __future__ import annotations

from conductor.config import SchedulingConfig
from conductor.configuration_faults import ConfigError
from conductor.journal import RecordedPolicy
from conductor.journal_writer import JournalWriter
from conductor.recorded_scheduler import RecordedScheduler, make_header
from conductor.scheduler import Scheduler


def scheduler_kind(config: SchedulingConfig) -> type[Scheduler]:
    """What to build so that `start_recording` can record it."""
    return Scheduler if config.record is None else RecordedScheduler


def start_recording(
    config: SchedulingConfig, scheduler: Scheduler, *, id_prefix: str
) -> JournalWriter | None:
    """To be called before any instance is up; None when nothing is to be recorded. Raises ConfigError."""
    if config.record is None or not isinstance(scheduler, RecordedScheduler):
        return None
    header = make_header(
        scheduler,
        RecordedPolicy(config.policy, config.policy_parameters, config.seed),
        RecordedPolicy(config.admission.rule, dict(config.admission.parameters)),
        id_prefix=id_prefix,
    )
    try:
        writer = JournalWriter(config.record, header, max_bytes=config.record_max_bytes)
    except OSError as error:
        raise ConfigError(
            f"scheduling.record: cannot write {config.record} ({error.strerror}); choose another file"
        ) from None
    scheduler.record_to(writer.put)
    return writer
