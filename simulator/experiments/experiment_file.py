"""Experiment files: a question, what is simulated to answer it, and the figures of its source beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from conductor.catalogue import MODELS, KvPrecision
from conductor.config import Positive
from conductor.configuration_faults import ConfigError, did_you_mean, explain, read_yaml
from conductor.policies import POLICIES
from simulator.experiments.clusters import Setting
from simulator.experiments.figures import FIGURES, OF_BOUNDS, USUAL
from simulator.experiments.grid import PolicyChoice
from simulator.experiments.workload import Load
from simulator.workloads import WORKLOAD_KINDS, TraceFormat

SHIPPED_EXPERIMENTS: Final = Path(__file__).parent

_Tokens = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoadSection(_Section):
    """As recorded, ``speed`` times as fast, or at ``rate`` requests a second."""

    speed: Positive | None = None
    rate: Positive | None = None

    def load(self, seed: int) -> Load:
        return Load(self.speed, self.rate, seed)

    @model_validator(mode="after")
    def _one_scale(self) -> LoadSection:
        self.load(0)
        return self


class WorkloadSection(_Section):
    """A ``trace`` file, which ``download`` says where to get, or a kind to ``generate``."""

    trace: str | None = None
    download: str | None = None
    format: TraceFormat | None = None
    generate: str | None = None
    requests: _Count = 1000  # of a generated one
    rate: Positive = 1.0
    seed: int = 0
    limit: _Count | None = None
    from_s: Annotated[float, Field(ge=0)] = 0.0
    to_s: Positive | None = None
    min_input_tokens: _Tokens = 0
    max_input_tokens: _Tokens | None = None
    min_output_tokens: _Tokens = 0
    max_output_tokens: _Tokens | None = None
    output_tokens: _Count | None = None  # of every answer, instead of its own
    loads: list[LoadSection] | None = None  # instead of the experiment's

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSection:
        if (self.trace is None) == (self.generate is None):
            raise ValueError("give trace (a file) or generate (a kind of workload), one of them")
        if self.generate is not None and self.generate not in WORKLOAD_KINDS:
            hint = did_you_mean(self.generate, WORKLOAD_KINDS)
            raise ValueError(f"unknown kind of workload {self.generate!r}; {hint}")
        given = self.model_fields_set
        if self.trace is not None and (wrong := sorted({"requests", "rate"} & given)):
            raise ValueError(f"{wrong[0]} is for generated workloads; traces have limit and loads")
        if self.generate is not None and (wrong := sorted({"download", "format"} & given)):
            raise ValueError(f"{wrong[0]} is for traces")
        return self


class ClusterChoice(_Section):
    """A short form, a shipped cluster or a cluster file beside the experiment, with other values for its keys."""

    cluster: str
    instance_class: str | None = None
    set: dict[str, Any] = {}

    def settings(self) -> list[Setting]:
        return list(self.set.items())


class PolicySection(_Section):
    policy: str
    parameters: dict[str, Any] = {}

    def choice(self) -> PolicyChoice:
        return PolicyChoice(self.policy, self.parameters)

    @model_validator(mode="after")
    def _known_policy(self) -> PolicySection:
        self.choice()
        return self


class ExpectedSection(_Section):
    """Figures of the source, for the points whose labels are ``where``."""

    where: dict[str, str]
    figures: dict[str, float]

    @field_validator("figures")
    @classmethod
    def _known(cls, figures: dict[str, float]) -> dict[str, float]:
        _check_figures(figures)
        return figures


class OrderSection(_Section):
    """The order in which the source has a figure, of points that differ in one label only: least first."""

    figure: str
    label: str
    ascending: Annotated[list[str], Field(min_length=2)]
    where: dict[str, str] = {}  # only among points with these labels

    @field_validator("figure")
    @classmethod
    def _known(cls, figure: str) -> str:
        _check_figures([figure])
        return figure


class QuickSection(_Section):
    """What ``--quick`` leaves: so many requests of each workload, and points with these labels.

    ``workloads`` take the place of the experiment's, so that no trace is needed.
    """

    limit: _Count | None = None
    workloads: dict[str, WorkloadSection] = {}
    only: dict[str, list[str]] = {}


class SizeSection(_Section):
    """KV cache of one request, and what the source says it is."""

    model: str
    context_tokens: _Count
    kv: KvPrecision = KvPrecision.BF16
    expected_gib: Positive | None = None

    @field_validator("model")
    @classmethod
    def _catalogued(cls, name: str) -> str:
        if name not in MODELS:
            raise ValueError(f"unknown model {name!r}; {did_you_mean(name, MODELS)}")
        return name


class CacheSection(_Section):
    """Hit rate of one cache for a whole workload, and what the source says it is."""

    workload: str
    capacity_tokens: _Count
    expected_percent: Annotated[float, Field(ge=0, le=100)] | None = None


class Experiment(_Section):
    """A whole experiment file: simulations (``workloads`` and ``clusters``), ``caches`` or ``sizes``."""

    title: str
    question: str
    source: str
    notes: str = ""
    workloads: dict[str, WorkloadSection] = {}
    clusters: dict[str, ClusterChoice] = {}
    variants: dict[str, dict[str, Any]] = {}  # each cluster with each of these settings
    policies: Literal["all"] | list[str] | dict[str, PolicySection] | None = None  # None: the clusters' own
    loads: list[LoadSection] = [LoadSection()]
    find_rate: Annotated[float, Field(gt=0, le=1)] | None = None  # share of requests to be good
    bounds: bool = False  # what no scheduler can exceed, too
    report: list[str] = list(USUAL)
    expected: list[ExpectedSection] = []
    orders: list[OrderSection] = []
    quick: QuickSection = QuickSection()
    caches: list[CacheSection] = []
    sizes: list[SizeSection] = []

    @model_validator(mode="after")
    def _complete(self) -> Experiment:
        if bool(self.sizes) == bool(self.workloads):
            raise ValueError("give workloads and clusters to simulate, or sizes, one of them")
        if self.workloads and bool(self.clusters) == bool(self.caches):
            raise ValueError(
                "clusters is required: say what the workloads are simulated on; or give caches, one of them"
            )
        for cache in self.caches:
            if cache.workload not in self.workloads:
                raise ValueError(
                    f"unknown workload {cache.workload!r} in caches; {did_you_mean(cache.workload, self.workloads)}"
                )
        _check_figures(self.report)
        if not self.bounds and (of_bounds := [name for name in self.report if name in OF_BOUNDS]):
            raise ValueError(f"{of_bounds[0]} is a figure of bounds: set bounds: true")
        if isinstance(self.policies, list):
            for name in self.policies:
                PolicyChoice(name)
        return self

    def policy_choices(self) -> dict[str, PolicyChoice] | None:
        """By label; None for the clusters' own."""
        if self.policies == "all":
            return {name: PolicyChoice(name) for name in POLICIES}
        if isinstance(self.policies, list):
            return {name: PolicyChoice(name) for name in self.policies}
        if isinstance(self.policies, dict):
            return {label: section.choice() for label, section in self.policies.items()}
        return None

    def expected_of(self, labels: Mapping[str, str]) -> dict[str, float]:
        """The source's figures for a point with these labels."""
        found: dict[str, float] = {}
        for each in self.expected:
            if each.where.items() <= labels.items():
                found |= each.figures
        return found


def read_experiment(path: Path) -> Experiment:
    """Raises ConfigError naming file, key and remedy."""
    try:
        content = read_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"cannot read the experiment {path}: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping such as 'title: ...' (docs/simulation.md)")
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in explain(error, Experiment))) from None


def find_experiment(text: str) -> Path:
    """A file, or the name of a shipped experiment. Raises ConfigError naming those."""
    path = Path(text)
    if path.is_file():
        return path
    shipped = SHIPPED_EXPERIMENTS / f"{text}.yaml"
    if "/" in text or not shipped.is_file():
        known = ", ".join(each.stem for each in shipped_experiments())
        raise ConfigError(f"there is no experiment {text!r}: give a file, or one of {known}")
    return shipped


def shipped_experiments() -> list[Path]:
    return sorted(SHIPPED_EXPERIMENTS.glob("*.yaml"))


def _check_figures(names: Mapping[str, float] | list[str]) -> None:
    for name in names:
        if name not in FIGURES:
            raise ValueError(f"unknown figure {name!r}; {did_you_mean(name, FIGURES)}")
