"""Time to first token and time per output token when a fixed number of users ask one engine without pause.

Every user sends a prompt, receives the answer, and sends the next prompt. A cycle, from one prompt of a user to
the next, holds one prefill of every user and the decode steps of one answer; Little's law gives the time per
output token of what the first token leaves of it. This is how most published measurements are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from conductor.catalogue.derivation import kv_capacity_tokens
from conductor.catalogue.engines import Engine
from conductor.catalogue.roofline import Deployment, StepWork, step_work
from conductor.costs import Floats


@dataclass(frozen=True, slots=True)
class Times:
    ttft_s: Floats
    tpot_s: Floats


@dataclass(frozen=True, slots=True)
class ClosedLoops:
    """Closed loops of one engine, one an element; what they take for given coefficients is `times`."""

    users: Floats
    running: Floats  # users whose context fits the KV cache; the others queue
    output_tokens: Floats
    prefill_steps: Floats  # of a cycle
    held_steps: Floats
    decode: StepWork  # a step without prompts
    prefill: StepWork  # a step with prompts, and with the decoding sequences where the engine mixes
    alone: StepWork  # one prompt in an idle engine

    def times(self, engine: Engine) -> Times:
        """What ``engine`` takes; it must mix or not mix as the one that the loops were made for."""
        decode_s, prefill_s, alone_s = (
            work.seconds(engine) for work in (self.decode, self.prefill, self.alone)
        )
        if engine.mixes:
            decode_steps = np.maximum(self.output_tokens - self.prefill_steps, 0.0)
            added_s = prefill_s - decode_s
        else:
            decode_steps, added_s = self.output_tokens, prefill_s
        cycle_s = self.prefill_steps * prefill_s + decode_steps * decode_s
        # The prefills that are met delay the first token; the step under way when a prompt arrives has to end.
        met_s = engine.met_prompts * (self.running - 1) * added_s * self.prefill_steps / self.running
        first_s = alone_s + decode_s * (1.0 if engine.mixes else 0.5) + met_s + self.held_steps * decode_s
        first_s = np.minimum(first_s, 0.95 * cycle_s)
        queued_s = (self.users - self.running) / self.running * cycle_s
        return Times(
            ttft_s=engine.request_s + first_s + queued_s,
            tpot_s=(cycle_s - first_s) / np.maximum(self.output_tokens - 1, 1.0),
        )

    @classmethod
    def gathered(cls, parts: list[ClosedLoops]) -> ClosedLoops:
        """The loops of all parts, one after another."""
        gathered: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            is_work = isinstance(values[0], StepWork)
            gathered[field.name] = StepWork.gathered(values) if is_work else np.concatenate(values)
        return cls(**gathered)


def closed_loops(
    deployment: Deployment,
    users: ArrayLike,
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    *,
    chunk_tokens: int = 8192,
    held_steps: ArrayLike = 0.0,
) -> ClosedLoops:
    """Loops on ``deployment``, arguments broadcast. ``held_steps``: steps for which it holds prompts back.

    Raises ValueError when the weights do not fit.
    """
    given = (users, prompt_tokens, output_tokens, held_steps)
    users, prompts, outputs, held = (
        np.atleast_1d(column)
        for column in np.broadcast_arrays(*(np.asarray(value, np.float64) for value in given))
    )
    context = prompts + outputs / 2
    running = np.clip(kv_capacity_tokens(deployment) / context, 1.0, users)
    fitting = np.maximum(chunk_tokens / prompts, 1.0)  # prompts that one step takes
    # An engine that mixes takes prompts as they come, and they come one a user and answer; another gathers them.
    together = np.clip(running / outputs if deployment.engine.mixes else running, 1.0, fitting)
    riding = running if deployment.engine.mixes else 0.0 * running
    return ClosedLoops(
        users=users,
        running=running,
        output_tokens=outputs,
        prefill_steps=running / together,
        held_steps=held,
        decode=step_work(deployment, sequences=running, context_tokens=running * context),
        prefill=step_work(
            deployment,
            prompts=together,
            prompt_tokens=prompts,
            sequences=riding,
            context_tokens=riding * context,
        ),
        alone=step_work(deployment, prompts=1, prompt_tokens=prompts),
    )
