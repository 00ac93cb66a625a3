"""Published figures that the catalogue can predict, each with its source, beside what it predicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from conductor.catalogue import (
    GPUS,
    KERNELS,
    LLAMA_70B_8XA800,
    MODELS,
    VLLM,
    Deployment,
    Engine,
    WeightPrecision,
    chunked_prefill_s,
    decode_step_s,
    derive_instance_class,
    prefill_s,
    step_work,
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number; ``predicted`` is in the same unit."""

    source: str
    subject: str
    what: str
    unit: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative; positive where the prediction is larger."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Composite:
    """Sums of NVIDIA AIConfigurator's measured vLLM kernels, BF16: no engine around them."""

    deployment: Deployment
    prefill_tokens_per_s: tuple[float, ...]  # at PREFILL_TOKENS
    decode_step_ms: tuple[float, ...]  # at DECODE_BATCHES


PREFILL_TOKENS: Final = (1024, 4096, 16_384, 65_536)
# Sequences, and tokens of context of each.
DECODE_BATCHES: Final = ((1, 1024), (16, 1024), (64, 1024), (16, 8192), (64, 8192), (128, 2048))


def _composite(
    model: str, gpu: str, gpus: int, kilo_tokens_per_s: tuple[float, ...], step_ms: tuple[float, ...]
) -> Composite:
    deployment = Deployment(MODELS[model], GPUS[gpu], gpus, engine=KERNELS)
    return Composite(deployment, tuple(1e3 * speed for speed in kilo_tokens_per_s), step_ms)


COMPOSITES: Final = (
    _composite("llama-3.1-8b", "a100-80gb", 1, (15.8, 15.8, 12.5, 6.5), (11.9, 13.6, 17.8, 22.3, 58.6, 34.5)),
    _composite("llama-3.1-8b", "h100-80gb", 1, (46, 45, 37, 21), (6.2, 7.5, 10.4, 13.1, 28.6, 18.1)),
    _composite("llama-3-70b", "a100-80gb", 8, (8.1, 9.7, 9.2, 6.5), (17.2, 19.5, 22.2, 22.6, 33.9, 32.4)),
    _composite("llama-3-70b", "h100-80gb", 4, (15.2, 15.5, 14.5, 10.6), (14.9, 16.4, 19.1, 19.8, 30.8, 26.1)),
    _composite("llama-3-70b", "h100-80gb", 8, (22.1, 24.2, 23.7, 18.4), (10.1, 11.1, 12.3, 12.8, 18.9, 16.3)),
)

# Mooncake (FAST'25), LLaMA3-70B on eight A800: Figure 14a, prefill in seconds by prompt tokens; Figure 14b, the
# same with 95 % of the prompt cached; Figure 14a, 128 output tokens of one request; Figure 12, 40 GB over RDMA.
_MOONCAKE: Final = "Mooncake (FAST'25)"
_A800_PREFILL_S: Final = {8192: 0.96, 16_384: 2.00, 32_768: 4.43, 65_536: 10.43, 131_072: 27.41}
_A800_CACHED_PREFILL_S: Final = {8192: 0.14, 16_384: 0.21, 32_768: 0.39, 65_536: 0.88, 131_072: 2.32}
_A800_CACHED_SHARE: Final = 0.95
_A800_DECODE_S: Final = {8192: 3.39, 131_072: 3.88}
_A800_DECODE_TOKENS: Final = 128
_TRANSFER_BYTES: Final = 40e9
_A800_TRANSFER_S: Final = 0.451

# DeepSeek's inference overview: a prefill node of eight H800 takes 73,700 input tokens/s of which 56.3 % are
# cached, a decode node makes 14,800 output tokens/s at 20 to 22 tokens/s a request, contexts average 4,989 tokens.
# Experts are spread over 4 and 18 nodes there, attention is data-parallel; the roofline knows one node in tensor
# parallel.
_DEEPSEEK: Final = "DeepSeek inference overview"
_H800: Final = replace(GPUS["h100-80gb"], name="h800", nvlink_bytes_per_s=200e9)
_H800_INPUT_TOKENS_PER_S: Final = 73_700.0
_H800_CACHED_SHARE: Final = 0.563
_H800_OUTPUT_TOKENS_PER_S: Final = 14_800.0
_H800_REQUEST_TOKENS_PER_S: Final = 21.0
_H800_CONTEXT_TOKENS: Final = 4989


def composite_figures() -> Iterator[Figure]:
    """Prefill and decode steps of `COMPOSITES`."""
    source = "kernels of AIConfigurator 0.12"
    for composite in COMPOSITES:
        deployment = composite.deployment
        subject = f"{deployment.model.name}, {deployment.tensor_parallel} x {deployment.gpu.name}"
        for tokens, speed in zip(PREFILL_TOKENS, composite.prefill_tokens_per_s, strict=True):
            predicted_s = prefill_s(deployment, tokens)
            yield Figure(source, subject, f"prefill of {tokens}", "s", tokens / speed, predicted_s)
        for (batch, context), step_ms in zip(DECODE_BATCHES, composite.decode_step_ms, strict=True):
            predicted_ms = 1e3 * decode_step_s(deployment, batch, batch * context)
            yield Figure(source, subject, f"step of {batch} x {context}", "ms", step_ms, predicted_ms)


def mooncake_figures(engine: Engine = VLLM) -> Iterator[Figure]:
    """LLaMA3-70B on eight A800, derived from shapes and datasheets, and as the class that was fitted to it."""
    deployment = Deployment(MODELS["llama-3-70b"], GPUS["a800-80gb"], 8, engine=engine)
    measured = LLAMA_70B_8XA800
    derived_name, measured_name = f"roofline, {engine.name}", f"class {measured.name}"
    for tokens, seconds in _A800_PREFILL_S.items():
        what = f"prefill of {tokens}"
        yield Figure(_MOONCAKE, derived_name, what, "s", seconds, chunked_prefill_s(deployment, tokens))
        predicted_s = float(measured.prefill_s(tokens, np.array([0]))[0])
        yield Figure(_MOONCAKE, measured_name, what, "s", seconds, predicted_s)
    for tokens, seconds in _A800_CACHED_PREFILL_S.items():
        what, cached = f"prefill of {tokens}, 95 % cached", int(_A800_CACHED_SHARE * tokens)
        yield Figure(
            _MOONCAKE, derived_name, what, "s", seconds, chunked_prefill_s(deployment, tokens, cached)
        )
        predicted_s = float(measured.prefill_s(tokens, np.array([cached]))[0])
        yield Figure(_MOONCAKE, measured_name, what, "s", seconds, predicted_s)
    for tokens, seconds in _A800_DECODE_S.items():
        what, step_ms = f"decode step of 1 x {tokens}", 1e3 * seconds / _A800_DECODE_TOKENS
        yield Figure(_MOONCAKE, derived_name, what, "ms", step_ms, 1e3 * decode_step_s(deployment, 1, tokens))
        predicted_ms = 1e3 * float(measured.decode_step_s(np.array([1]), np.array([tokens]))[0])
        yield Figure(_MOONCAKE, measured_name, what, "ms", step_ms, predicted_ms)
    derived = derive_instance_class("derived", deployment)
    for name, instance_class in ((derived_name, derived), (measured_name, measured)):
        tokens = round(_TRANSFER_BYTES / instance_class.kv_bytes_per_token)
        predicted_s = float(instance_class.hand_off_s(np.array([tokens]))[0])
        yield Figure(_MOONCAKE, name, "transfer of 40 GB", "s", _A800_TRANSFER_S, predicted_s)


def deepseek_figures(engine: Engine = VLLM) -> Iterator[Figure]:
    """What one node in tensor parallel would do of what DeepSeek's nodes with spread experts do."""
    deployment = Deployment(MODELS["deepseek-v3"], _H800, 8, WeightPrecision.FP8, engine=engine)
    subject = f"DeepSeek-V3, tensor parallel, {engine.name}"
    cached = round(_H800_CACHED_SHARE * _H800_CONTEXT_TOKENS)
    work = step_work(deployment, prompts=4, prompt_tokens=_H800_CONTEXT_TOKENS - cached, cached_tokens=cached)
    speed = 4 * _H800_CONTEXT_TOKENS / float(work.seconds(engine)[0])
    yield Figure(_DEEPSEEK, subject, "input of a node", "tokens/s", _H800_INPUT_TOKENS_PER_S, speed)
    batch = round(_H800_OUTPUT_TOKENS_PER_S / _H800_REQUEST_TOKENS_PER_S)
    speed = batch / decode_step_s(deployment, batch, batch * _H800_CONTEXT_TOKENS)
    yield Figure(_DEEPSEEK, subject, "output of a node", "tokens/s", _H800_OUTPUT_TOKENS_PER_S, speed)
