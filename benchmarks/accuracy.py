"""How far the performance model is from measured engines: errors of TPOT and TTFT, and of published figures.

The measured runs are those of ``systems/silicon_sample.csv`` in NVIDIA's package aiconfigurator-core 0.12.0
(Apache-2.0): ``--silicon`` names the table or the wheel; without it the wheel is downloaded into a cache folder by
pip. Dense models only. Ten coefficients for each engine are fitted, on all runs to print them, and on a part to
predict the rest: two random halves that predict each other, all models but one, all GPUs but one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])  # `simulator` is the package, not the script here

from conductor.catalogue import DEPLOYMENTS, ENGINES, INSTANCE_CLASSES
from simulator.accuracy import (
    COEFFICIENTS,
    FRAMEWORKS,
    SPLITS,
    Client,
    Figure,
    Fitted,
    Prediction,
    Silicon,
    affine_errors,
    composite_figures,
    deepseek_figures,
    errors_of,
    faster_than_peak,
    fit_all,
    held_out,
    in_sample,
    mooncake_figures,
    read_silicon,
    split_decode_errors,
)

PACKAGE = "aiconfigurator-core==0.12.0"
# Of AIConfigurator itself on 120 of these runs, as docs/accuracy.md cites them.
AICONFIGURATOR = {"tpot_median": 0.103, "ttft_median": 0.41}


def download(cache: Path) -> Path:
    """The wheel in ``cache``, fetched by pip when it is not there. Exits when that is impossible."""
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), PACKAGE]
    wheels = sorted(cache.glob("aiconfigurator_core-0.12.0-*.whl"))
    if not wheels:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(cache.glob("aiconfigurator_core-0.12.0-*.whl"))
        if not wheels:
            sys.exit(
                f"could not download {PACKAGE} into {cache}: {done.stderr.strip() or 'pip gave no reason'}\n"
                "Where there is no network, pass the wheel or its silicon_sample.csv: --silicon FILE"
            )
    return wheels[0]


def by_group(
    predictions: Iterable[Prediction], key: Callable[[Prediction], tuple[str, ...]]
) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(", ".join(key(prediction)), []).append(prediction)
    return {name: asdict(errors_of(group)) for name, group in sorted(groups.items())}


def coefficients_of(fitted: Fitted) -> dict[str, float]:
    """As the fields of an `Engine`, and the seconds a request spends outside it under each client."""
    clients = {client.value for client in Client}
    return {
        **{c.name: getattr(fitted.engine, c.name) for c in COEFFICIENTS if c.name not in clients},
        **{f"request_s, {client.value}": seconds for client, seconds in fitted.request_s.items()},
    }


def from_silicon(silicon: Silicon, *, quick: bool) -> dict[str, Any]:
    fitted = fit_all(silicon.runs)
    # What the catalogue ships, rounded, in place of what was fitted just now.
    shipped = {name: Fitted(ENGINES[name], fitted[name].request_s) for name in fitted}
    splits = {}
    for split in ("random", "model") if quick else SPLITS:
        predictions = held_out(silicon.runs, split)
        splits[split] = {
            "all": asdict(errors_of(predictions)),
            **by_group(predictions, lambda p: (p.run.framework,)),
            **by_group(
                predictions,
                lambda p: (p.run.framework, p.run.model.name, p.run.gpu.name, p.run.weights.value),
            ),
        }
    return {
        "rows": silicon.rows,
        "dense_runs": len(silicon.runs),
        "left_out": dict(silicon.left_out),
        "faster_than_peak": len(faster_than_peak(silicon.runs)),
        "coefficients": {name: coefficients_of(fitted[name]) for name in fitted},
        "fitted_to_all": asdict(errors_of(in_sample(silicon.runs, fitted))),
        "shipped": asdict(errors_of(in_sample(silicon.runs, shipped))),
        "held_out": splits,
        "disaggregated": [
            {
                "framework": run.framework,
                "gpu": run.gpu.name,
                "gpus": run.tensor_parallel,
                "users": run.users,
                "tpot_ms": 1e3 * run.tpot_s,
                "step_error": error,
            }
            for run, error in split_decode_errors(silicon.runs, fitted)
        ],
    }


def from_classes() -> dict[str, Any]:
    """Derived instance classes beside the roofline they were derived from."""
    found = {}
    for name, deployment in DEPLOYMENTS.items():
        errors = affine_errors(INSTANCE_CLASSES[name], deployment)
        found[name] = {
            f"{part}_{statistic}": float(value)
            for part, absolute in (("prefill", np.abs(errors.prefill)), ("decode", np.abs(errors.decode)))
            for statistic, value in (("mean", absolute.mean()), ("worst", absolute.max()))
        }
    return found


def measure(silicon: Silicon, *, quick: bool) -> dict[str, Any]:
    began_s = time.perf_counter()

    def told(figures: Iterable[Figure]) -> list[dict[str, Any]]:
        return [{**asdict(figure), "error": figure.error} for figure in figures]

    return {
        "benchmark": "accuracy",
        "aiconfigurator": AICONFIGURATOR,
        "silicon": from_silicon(silicon, quick=quick),
        "instance_classes": from_classes(),
        "composites": told(composite_figures()),
        "mooncake": told(mooncake_figures()),
        "deepseek": told(deepseek_figures()),
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def show(result: dict[str, Any]) -> None:
    silicon = result["silicon"]
    print(f"{silicon['rows']} rows, {silicon['dense_runs']} of dense models; left out: {silicon['left_out']}")
    print(f"{silicon['faster_than_peak']} of them ended sooner than the datasheet's peaks allow\n")
    names = list(next(iter(silicon["coefficients"].values())))
    print(f"{'coefficient':<26}" + "".join(f"{name:>12}" for name in FRAMEWORKS))
    for name in names:
        values = (silicon["coefficients"].get(framework, {}).get(name) for framework in FRAMEWORKS)
        print(f"{name:<26}" + "".join(f"{'-' if v is None else format(v, '.3g'):>12}" for v in values))

    def line(name: str, errors: dict[str, Any]) -> None:
        print(
            f"{name:<42} {errors['runs']:>5}  {errors['tpot_median']:6.1%} {errors['tpot_mean']:6.1%} "
            f"{errors['tpot_bias']:+7.1%}   {errors['ttft_median']:6.1%} {errors['ttft_bias']:+7.1%}"
        )

    print(f"\n{'':<42} {'runs':>5}    TPOT median, mean, bias   TTFT median, bias")
    line("fitted to all runs", silicon["fitted_to_all"])
    line("the catalogue's engines", silicon["shipped"])
    for split, groups in silicon["held_out"].items():
        print(f"held out: {split}")
        for name, errors in groups.items():
            line(f"  {name}", errors)
    theirs = result["aiconfigurator"]
    print(
        f"AIConfigurator: TPOT median {theirs['tpot_median']:.1%}, TTFT median {theirs['ttft_median']:.0%}\n"
    )
    for run in silicon["disaggregated"]:
        print(
            f"decode instance of {run['gpus']} x {run['gpu']}, {run['framework']}, {run['users']} requests: "
            f"TPOT {run['tpot_ms']:.1f} ms, step {run['step_error']:+.0%}"
        )
    print(f"\n{'instance class':<26} prefill mean, worst    decode mean, worst")
    for name, errors in result["instance_classes"].items():
        print(
            f"{name:<26} {errors['prefill_mean']:8.1%} {errors['prefill_worst']:8.1%}      "
            f"{errors['decode_mean']:8.1%} {errors['decode_worst']:8.1%}"
        )
    for part in ("composites", "mooncake", "deepseek"):
        print()
        for figure in result[part]:
            name = f"{figure['subject']}: {figure['what']}"
            print(
                f"{name:<66} {figure['measured']:10.4g} {figure['predicted']:10.4g} {figure['unit']:<9} "
                f"{figure['error']:+.1%}"
            )
    print(f"\n{result['seconds']} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--quick", action="store_true", help="without the split by GPU; ends within 50 s once downloaded"
    )
    parser.add_argument("--silicon", type=Path, help="silicon_sample.csv, or the wheel that has it")
    options = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "conductor" / "silicon"
    try:
        silicon = read_silicon(options.silicon or download(cache))
    except ValueError as error:
        sys.exit(str(error))
    result = measure(silicon, quick=options.quick)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
