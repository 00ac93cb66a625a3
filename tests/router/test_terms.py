"""What clients say of their requests in header fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from router.terms import DEFAULT_TERMS, RequestTerms, parse_terms


def test_all_fields() -> None:
    terms = parse_terms(
        [
            (b"accept", b"*/*"),
            (b"x-conductor-tenant", b"team-a"),
            (b"x-conductor-priority", b"-3"),
            (b"x-conductor-ttft-objective-ms", b"500"),
            (b"x-conductor-tbt-objective-ms", b"30.5"),
            (b"x-conductor-route", b"agent-step"),
        ]
    )
    assert terms == RequestTerms("team-a", -3, 0.5, 0.0305, "agent-step")


def test_nothing_said_is_the_default() -> None:
    assert parse_terms([(b"host", b"x")]) is DEFAULT_TERMS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"tenant", b""),
        (b"tenant", b"two words"),
        (b"tenant", b"x" * 129),
        (b"tenant", "é".encode()),
        (b"route", b"two words"),
        (b"priority", b"high"),
        (b"priority", b"9"),
        (b"priority", b"1.5"),
        (b"ttft-objective-ms", b"0"),
        (b"ttft-objective-ms", b"-1"),
        (b"ttft-objective-ms", b"nan"),
        (b"tbt-objective-ms", b"inf"),
        (b"tbt-objective-ms", b"soon"),
    ],
)
def test_bad_values_are_refused_by_name(name: bytes, value: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        parse_terms([(b"x-conductor-" + name, value)])
    assert refused.value.status == 400
    assert refused.value.param == "x-conductor-" + name.decode()


@given(
    st.binary(max_size=200),
    st.sampled_from([b"tenant", b"route", b"priority", b"ttft-objective-ms", b"tbt-objective-ms"]),
)
def test_any_bytes_parse_or_are_refused(value: bytes, name: bytes) -> None:
    try:
        parse_terms([(b"x-conductor-" + name, value)])
    except RequestError as refused:
        assert refused.status == 400
