"""The instance classes by name: measured ones, and ones derived from models and GPUs on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from conductor.catalogue import gpus, models
from conductor.catalogue.attention import KvPrecision
from conductor.catalogue.derivation import derive_instance_class
from conductor.catalogue.measured_classes import LLAMA_8B_H100, LLAMA_70B_8XA800
from conductor.catalogue.models import WeightPrecision
from conductor.catalogue.roofline import Deployment
from conductor.costs import InstanceClass

DEPLOYMENTS: Final[Mapping[str, Deployment]] = {
    "llama-3.1-8b-l40s": Deployment(models.LLAMA_3_1_8B, gpus.L40S),
    "llama-3.1-8b-a100": Deployment(models.LLAMA_3_1_8B, gpus.A100_80GB),
    "llama-3.1-8b-h200": Deployment(models.LLAMA_3_1_8B, gpus.H200),
    "llama-3-70b-8xa100": Deployment(models.LLAMA_3_70B, gpus.A100_80GB, 8),
    "llama-3-70b-4xh100": Deployment(models.LLAMA_3_70B, gpus.H100_80GB, 4),
    "llama-3-70b-8xh100": Deployment(models.LLAMA_3_70B, gpus.H100_80GB, 8),
    "llama-3-70b-4xh200": Deployment(models.LLAMA_3_70B, gpus.H200, 4),
    "llama-3-70b-8xh200": Deployment(models.LLAMA_3_70B, gpus.H200, 8),
    "llama-3-70b-fp8-2xh100": Deployment(
        models.LLAMA_3_70B, gpus.H100_80GB, 2, WeightPrecision.FP8, KvPrecision.FP8
    ),
    "llama-3-70b-2xb200": Deployment(models.LLAMA_3_70B, gpus.B200, 2),
    "qwen3-32b-2xh100": Deployment(models.QWEN3_32B, gpus.H100_80GB, 2),
    "qwen3-30b-a3b-h100": Deployment(models.QWEN3_30B_A3B, gpus.H100_80GB),
    "deepseek-v3-8xh200": Deployment(models.DEEPSEEK_V3, gpus.H200, 8, WeightPrecision.FP8),
    "deepseek-v3-8xb200": Deployment(models.DEEPSEEK_V3, gpus.B200, 8, WeightPrecision.FP8),
    "deepseek-v4-pro-8xb300": Deployment(
        models.DEEPSEEK_V4_PRO, gpus.B300, 8, WeightPrecision.FP4_EXPERTS, KvPrecision.FP8_FP4_INDEXER
    ),
    "glm-5.2-8xb200": Deployment(models.GLM_5_2, gpus.B200, 8, WeightPrecision.FP8),
    "kimi-k2-8xb200": Deployment(models.KIMI_K2, gpus.B200, 8, WeightPrecision.FP8),
}


class InstanceClasses(Mapping[str, InstanceClass]):
    """Instance classes by name; a derived one is computed when it is first asked for, which takes milliseconds."""

    def __init__(self, measured: tuple[InstanceClass, ...], deployments: Mapping[str, Deployment]) -> None:
        self._known = {instance_class.name: instance_class for instance_class in measured}
        self._deployments = deployments
        self._names = (*self._known, *deployments)

    def __getitem__(self, name: str) -> InstanceClass:
        if name not in self._known:
            self._known[name] = derive_instance_class(name, self._deployments[name])
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


INSTANCE_CLASSES: Final = InstanceClasses((LLAMA_8B_H100, LLAMA_70B_8XA800), DEPLOYMENTS)
