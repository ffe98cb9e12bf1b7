"""GROUP_AGREEMENT: behind a load every group has what the next token sees, and no save reads behind a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.settled import SettledTokens
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.windows import NO_SLOT


class GroupAgreement:
    """A load ends at one token for all groups and brings each group what that token's successor sees, no more.

    Verifies: for every page of a load that it is copied if and only if its group sees it at the load's end; for every
    page of a save that its group still saw it when the tokens settled that the log had told by then, or left it just
    then and the copy precedes the forward. With full attention alone there is nothing to verify.
    Does not verify: that the windows in the log's header are the model's, nor which blocks vLLM had freed.
    """

    rule: ClassVar[str] = "GROUP_AGREEMENT"

    def __init__(self) -> None:
        self._settled: SettledTokens
        self._leaving: dict[str, tuple[int, int]] = {}
        """Request id -> (settled tokens, sequence) as told since the last step."""
        self._left: dict[str, tuple[int, int]] = {}
        """The same, told right before the last step."""
        self._step_sequence = 0

    def begin(self, projections: Projections) -> None:
        """Take over which windows were being left."""
        for record in projections.tracker:
            leaving, left = (
                projections.blocks.left_at_end(record.request_id),
                projections.blocks.left_since(record.request_id),
            )
            if leaving is not None:
                self._leaving[record.request_id] = (leaving, 0)
            if left is not None:
                self._left[record.request_id] = (left, 0)

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event; none where no group has a window."""
        if not any(model.configuration.windows):
            return []
        self._settled = model.settled
        return [
            (e.WindowLeft, self._window_left),
            (e.StepScheduled, self._step_scheduled),
            (e.LoadIssued, self._check_load),
            (e.SaveIssued, self._save_issued),
            (e.TailSaveIssued, self._tail_save_issued),
        ]

    def _window_left(self, event: e.WindowLeft, step: ReplayedEvent, _projections: Projections) -> None:
        self._leaving[event.request_id] = (event.num_settled_tokens, step.sequence)

    def _step_scheduled(self, _event: e.StepScheduled, step: ReplayedEvent, _projections: Projections) -> None:
        self._left, self._leaving, self._step_sequence = self._leaving, {}, step.sequence

    def _save_issued(self, event: e.SaveIssued, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        return self._check_save(event, projections.geometry.pages_of(event.chunks), step, projections)

    def _tail_save_issued(
        self, event: e.TailSaveIssued, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        pages = projections.geometry.pages_spanning(event.first_token, event.num_tokens)
        return self._check_save(event, pages, step, projections)

    def _intact_since(self, event: e.SaveIssued | e.TailSaveIssued) -> tuple[int, int] | None:
        """What was told about pages that were being left; they must be copied before the forward."""
        if isinstance(event, e.TailSaveIssued) or not event.before_forward:
            return None
        told = self._left if event.cause == self._step_sequence else self._leaving
        return told.get(event.request_id)

    def _check_load(self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        end_token = event.first_token + event.num_tokens
        pages = projections.geometry.pages_spanning(event.first_token, event.num_tokens)
        for page, slot in zip(pages, event.slots, strict=False):
            if (slot != NO_SLOT) != _is_seen(page, end_token, projections):
                what = "leaves out" if slot == NO_SLOT else "brings"
                but = "sees" if slot == NO_SLOT else "does not see"
                detail = (
                    f"load {event.job_id} to token {end_token} {what} {_words(page, projections)}, "
                    f"which the next token {but}"
                )
                yield violation(self.rule, step, projections, detail, event.cause)

    def _check_save(
        self,
        event: e.SaveIssued | e.TailSaveIssued,
        pages: Sequence[int],
        step: ReplayedEvent,
        projections: Projections,
    ) -> Iterator[Violation]:
        num_settled_tokens, sequence = self._intact_since(event) or self._settled.at_least(event.request_id)
        for page, slot in zip(pages, event.slots, strict=False):
            if slot != NO_SLOT and not _is_seen(page, num_settled_tokens, projections):
                detail = (
                    f"save {event.job_id} reads {_words(page, projections)}, "
                    f"which the window had left when {num_settled_tokens} tokens were settled"
                )
                yield violation(self.rule, step, projections, detail, sequence, event.cause)


def _is_seen(page: int, num_tokens: int, projections: Projections) -> bool:
    """Whether the last position of the page, or one behind it, is in the window of the token behind `num_tokens`.

    Counted in positions, apart from `windows.py` on purpose: a mistake there must not hide itself.
    """
    block, group = divmod(page, len(projections.configuration.windows))
    size = projections.configuration.windows[group]
    last_position = (block + 1) * projections.configuration.block_size - 1
    return not size or last_position > num_tokens - size


def _words(page: int, projections: Projections) -> str:
    block, group = divmod(page, len(projections.configuration.windows))
    return f"block {block} of group {group}"
