"""Bars on the HTML page that show where tokens came from: after preemptions, and at all admissions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from kvledger.adapters.figures import Figures
from kvledger.adapters.tools.reasons import BY_DESIGN, LoadFate, Reason, Sums

_OWN_SHARES = [reason for reason in Reason if reason in BY_DESIGN or reason is Reason.RECORDED]
"""Reasons with a share of their own: their tokens are not misses, or the log does not show whether they are."""


@attrs.frozen
class Share:
    """Tokens of one source. `style` names a colour of the HTML page."""

    name: str
    style: str
    num_tokens: int


@attrs.frozen
class Bar:
    """All tokens, by source."""

    title: str
    shares: Sequence[Share]

    @property
    def num_tokens(self) -> int:
        """Tokens of all shares."""
        return sum(share.num_tokens for share in self.shares)

    def placed(self) -> Iterator[tuple[Share, float, float]]:
        """Yield each share with its beginning and its width, in percent of the bar."""
        begin = 0.0
        for share in self.shares:
            width = 100 * share.num_tokens / max(1, self.num_tokens)
            yield share, begin, width
            begin += width


def after_preemptions(figures: Sequence[Figures]) -> Bar:
    """Return the bar for tokens that were computed before preemptions: where requests got them from afterwards."""
    recovered = Share("recovered: copied back", "recovered", sum(each.num_tokens_recovered for each in figures))
    retained = Share("retained in vLLM's cache", "retained", sum(each.num_tokens_retained for each in figures))
    recomputed = Share("recomputed", "recomputed", sum(each.num_tokens_recomputed for each in figures))
    num_preemptions = sum(each.num_preemptions for each in figures)
    title = (
        f"After {num_preemptions:,} preemption{'s' if num_preemptions != 1 else ''}"
        if num_preemptions
        else "No request was preempted"
    )
    bar = Bar(title, (recovered, retained, recomputed))
    return bar if bar.num_tokens or not num_preemptions else Bar(f"{title} no tokens had to be recovered", bar.shares)


def at_admissions(sums: Sums) -> Bar:
    """Return the bar of the tokens that requests needed at their first and at all later admissions."""
    missed = sums.misses()
    own = [Share(f"computed: {reason}", "computed", missed[reason]) for reason in _OWN_SHARES]
    num_others = missed.total() - sum(share.num_tokens for share in own)
    shares = (
        Share("loaded", "recovered", sums.to_load[LoadFate.LOADED]),
        Share("still to be loaded", "coming", sums.to_load[LoadFate.UNDER_WAY]),
        Share("from vLLM's prefix cache", "retained", sums.num_retained),
        Share("from elsewhere", "elsewhere", sums.num_elsewhere),
        *own,
        Share("computed: other reasons, see below", "recomputed", num_others),
    )
    title = "At the only admission" if sums.num_admissions == 1 else f"At all {sums.num_admissions:,} admissions"
    return Bar(title, [share for share in shares if share.num_tokens])
