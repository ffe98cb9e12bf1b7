"""GROUP_AGREEMENT: behind a load every group has what the next token sees, and no save reads behind a window."""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import EventChecks, on
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.windows import NO_SLOT


class GroupAgreement(Checker):
    """A load ends at one token for all groups and brings each group what that token's successor sees, no more.

    Verifies: for every page of a load that it is copied if and only if its group sees it at the load's end; for every
    page of a save that its group still saw it when the tokens settled that the log had by then, or left it just
    then and the copy precedes the forward. With full attention alone there is nothing to verify.
    Does not verify: that the windows in the log's header are the model's, nor which blocks vLLM had freed.
    """

    rule = "GROUP_AGREEMENT"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._leaving: dict[str, tuple[int, int]] = {}
        """Request id -> (settled tokens, sequence) as recorded since the last step."""
        self._left: dict[str, tuple[int, int]] = {}
        """The same, recorded right before the last step."""
        self._step_sequence = 0

    def checks(self) -> EventChecks:
        """None where no group has a window."""
        return super().checks() if any(self.configuration.windows) else []

    def begin(self, start: Start) -> None:
        """Take over which windows were being left."""
        self._leaving = {request_id: (num_tokens, 0) for request_id, num_tokens in start.leaving.items()}
        self._left = {request_id: (num_tokens, 0) for request_id, num_tokens in start.left.items()}

    @on(e.WindowLeft)
    def _window_left(self, event: e.WindowLeft) -> None:
        if self.moment.is_legal:
            self._leaving[event.request_id] = (event.num_settled_tokens, self.moment.sequence)

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        self._left, self._leaving, self._step_sequence = self._leaving, {}, self.moment.sequence

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        self._check_save(event, self.geometry.pages_of(event.chunks))

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued) -> None:
        self._check_save(event, self.geometry.pages_spanning(event.first_token, event.num_tokens))

    def _intact_since(self, event: e.SaveIssued | e.TailSaveIssued) -> tuple[int, int] | None:
        """What was recorded about pages that were being left; they must be copied before the forward."""
        if isinstance(event, e.TailSaveIssued) or not event.before_forward:
            return None
        known = self._left if event.cause == self._step_sequence else self._leaving
        return known.get(event.request_id)

    @on(e.LoadIssued)
    def _check_load(self, event: e.LoadIssued) -> None:
        end_token = event.first_token + event.num_tokens
        pages = self.geometry.pages_spanning(event.first_token, event.num_tokens)
        for page, slot in zip(pages, event.slots, strict=False):
            if (slot != NO_SLOT) != self._is_seen(page, end_token):
                what = "leaves out" if slot == NO_SLOT else "brings"
                but = "sees" if slot == NO_SLOT else "does not see"
                detail = (
                    f"load {event.job_id} to token {end_token} {what} {self._words(page)}, which the next token {but}"
                )
                self.broken(detail, event.cause)

    def _check_save(self, event: e.SaveIssued | e.TailSaveIssued, pages: Sequence[int]) -> None:
        num_settled_tokens, sequence = self._intact_since(event) or self.settled.at_least(event.request_id)
        for page, slot in zip(pages, event.slots, strict=False):
            if slot != NO_SLOT and not self._is_seen(page, num_settled_tokens):
                detail = (
                    f"save {event.job_id} reads {self._words(page)}, "
                    f"which the window had left when {num_settled_tokens} tokens were settled"
                )
                self.broken(detail, sequence, event.cause)

    def _is_seen(self, page: int, num_tokens: int) -> bool:
        """Whether the last position of the page, or one behind it, is in the window of the token behind `num_tokens`.

        Counted in positions, apart from `windows.py` on purpose: a mistake there must not hide itself.
        """
        windows, block_size = self.configuration.windows, self.configuration.block_size
        block, group = divmod(page, len(windows))
        last_position = (block + 1) * block_size - 1
        return not windows[group] or last_position > num_tokens - windows[group]

    def _words(self, page: int) -> str:
        block, group = divmod(page, len(self.configuration.windows))
        return f"block {block} of group {group}"
