"""What replicas learned of engines' speed, for the next one to start with.

Of one class the most observed factors are kept. Forgetting them (`DELETE /v1/calibration/CLASS`) counts in
``resets``, and more resets count more than any observations: a replica that hears of one forgets as well.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from conductor.costs import Calibration, dump_calibrations, load_calibrations


class Learned(msgspec.Struct, frozen=True):
    """Of one class; ``factors`` are as `dump_calibrations` writes them."""

    resets: int
    observations: int
    factors: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Learned).decode


class SharedCalibrations:
    """What this replica has learned, beside what all have told."""

    def __init__(self) -> None:
        self._known: dict[str, Learned] = {}  # as last read
        self._resets: dict[str, int] = {}
        self._seen: dict[str, Calibration] = {}

    def start_with(self, told: Mapping[str, bytes]) -> dict[str, Calibration]:
        """The factors that others learned. Raises ValueError for what cannot be read."""
        self._read(told)
        calibrations: dict[str, Calibration] = {}
        for name, learned in self._known.items():
            self._resets[name] = learned.resets
            if learned.observations:
                calibrations |= load_calibrations(learned.factors.encode())
        return calibrations

    def news(self, calibrations: Mapping[str, Calibration]) -> dict[str, bytes]:
        """What to tell: of every class of which more is known here, or that was reset here."""
        for name, seen in self._seen.items():
            if calibrations.get(name) is not seen:
                self._resets[name] = self._resets.get(name, 0) + 1
        self._seen = dict(calibrations)
        news = {}
        for name in calibrations.keys() | self._resets.keys():
            own = self._learned(name, calibrations.get(name))
            known = self._known.get(name)
            if (own.resets, own.observations) > ((known.resets, known.observations) if known else (0, 0)):
                news[name] = _encode(own)
        return news

    def heard(self, told: Mapping[str, bytes]) -> list[str]:
        """Classes that were reset elsewhere, to be reset here. Raises ValueError for what cannot be read."""
        self._read(told)
        reset = [name for name, each in self._known.items() if each.resets > self._resets.get(name, 0)]
        for name in reset:
            self._resets[name] = self._known[name].resets
            self._seen.pop(name, None)
        return reset

    def _read(self, told: Mapping[str, bytes]) -> None:
        try:
            self._known = {name: _decode(entry) for name, entry in told.items()}
        except msgspec.DecodeError as error:
            raise ValueError(f"not what replicas learned: {error}") from None

    def _learned(self, name: str, calibration: Calibration | None) -> Learned:
        calibration = calibration or Calibration()
        observations = calibration.prefill.observations + calibration.decode.observations
        factors = dump_calibrations({name: calibration}).decode()
        return Learned(self._resets.get(name, 0), observations, factors)
