"""Admission: who is served now, who waits, and who is asked to come back later.

Pure parts: times, predictions and keys in, judgements out.
"""

from conductor.admission.forecast import DecodeForecast, DecodeLoad
from conductor.admission.gate import Gate
from conductor.admission.output_length import (
    OutputLengths,
    OutputPrediction,
    dump_output_lengths,
    load_output_lengths,
    pieces_of_output_lengths,
)
from conductor.admission.prospect import (
    AdmissionRule,
    DecodeSpeeds,
    Prospect,
    Rejection,
    decode_positions,
)
from conductor.admission.rules import RULES, make_rule
from conductor.admission.waiting_room import WaitingRoom

__all__ = [
    "RULES",
    "AdmissionRule",
    "DecodeForecast",
    "DecodeLoad",
    "DecodeSpeeds",
    "Gate",
    "OutputLengths",
    "OutputPrediction",
    "Prospect",
    "Rejection",
    "WaitingRoom",
    "decode_positions",
    "dump_output_lengths",
    "load_output_lengths",
    "make_rule",
    "pieces_of_output_lengths",
]
