"""Work put on a rank by hand: what `Books` does for placements, part by part."""

from conductor.costs.rank_books import rank_kernels
from conductor.rank import RankState

TBT_SHARE = 0.1


def place(
    rank: RankState,
    ticket: int,
    now_s: float,
    *,
    prefill_s: float | None = None,
    decodes: bool = False,
    prompt_tokens: int = 16,
    output_tokens: int = 1,
    held_tokens: int = 0,
    plan_tokens: int = 0,
    observed: bool = True,
    tbt_objective_s: float = 0.0,
    long_steps: bool = False,
) -> None:
    """A request that prefills here for ``prefill_s``, or does not, and ``decodes`` here, or does not."""
    if rank_kernels().place(
        rank.address,
        now_s,
        TBT_SHARE,
        ticket,
        prefill_s is not None,
        decodes,
        prompt_tokens,
        output_tokens,
        held_tokens,
        plan_tokens,
        prefill_s or 0.0,
        observed,
        tbt_objective_s,
        long_steps,
    ):
        rank.grow()


def end_prefill(rank: RankState, ticket: int, now_s: float) -> float:
    """Returns the service time; NaN where it is not known."""
    return rank_kernels().advance(rank.address, now_s, TBT_SHARE, ticket, True, False)


def begin_decode(
    rank: RankState, ticket: int, now_s: float, *, prefilled: bool = False, tbt_share: float = TBT_SHARE
) -> float:
    """The same, where it ``prefilled`` here until now."""
    return rank_kernels().advance(rank.address, now_s, tbt_share, ticket, prefilled, True)


def end_decode(rank: RankState, ticket: int, now_s: float, *, prefilled: bool = False) -> float:
    """Returns how many seconds of prefill ran beside it; ``prefilled``: here, until now."""
    kernels = rank_kernels()
    borne_s = kernels.borne_s(rank.address, now_s, ticket)
    kernels.end(rank.address, now_s, TBT_SHARE, ticket, prefilled)
    return borne_s


def move(rank: RankState, *, taken: int = 0, given: int = 0) -> None:
    rank_kernels().move(rank.address, taken, given)
