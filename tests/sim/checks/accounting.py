"""Tokens add up: what a preemption took is won back, computed again, or not wanted any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.lifecycle import events as e

if TYPE_CHECKING:
    from sim.world import World


def check_accounting(world: World) -> None:
    """Our log's figures for lost tokens are those of a meter at vLLM's scheduler, and nothing is missing from them.

    Verifies: every token that a preempted request had computed is recovered (host pool), retained (vLLM's prefix
    cache), recomputed or never reached again; the log's share of each is the meter's. Where neither room nor a fault
    is an excuse, no token is computed again at all.
    Does not verify: worlds with a restart, where each log has figures of its own, and the sum where loads failed,
    because a token may be won back and computed again then.
    """
    meter, figures = world.meter, world.side.journal.totals.figures
    if world.dead_logs:
        return
    # With two steps in flight a preempted request has computed one token that nobody knew yet; the log leaves it out.
    tolerance = world.meter.num_preemptions if world.settings.async_scheduling else 0
    recomputed = figures.num_tokens_recomputed
    assert 0 <= meter.num_tokens_recomputed - recomputed <= tolerance, (
        f"{meter.num_tokens_recomputed} tokens were computed again, our log says {recomputed}"
    )
    if world.engine.num_steps_with_failed_loads or figures.num_loads_failed:
        return
    won_back = figures.num_tokens_recovered + figures.num_tokens_retained
    if world.settings.neighbour is not None:
        won_back = max(won_back, meter.num_tokens_won_back)  # what the neighbour loads is no figure of ours
    assert abs(meter.num_tokens_won_back - won_back) <= tolerance, (
        f"{meter.num_tokens_won_back} tokens were won back, our log says {won_back}"
    )
    accounted = meter.num_tokens_won_back + meter.num_tokens_recomputed + meter.num_tokens_never_reached
    assert accounted == meter.num_tokens_to_win_back, (
        f"{meter.num_tokens_to_win_back} tokens were to be won back, {accounted} are accounted for"
    )
    if _has_no_excuse(world):
        needless = meter.num_tokens_recomputed - tolerance
        assert needless <= 0, f"{meter.num_tokens_recomputed} tokens computed again without need"


def _has_no_excuse(world: World) -> bool:
    figures = world.side.journal.totals.figures
    connector = world.settings.connector
    is_calm = not world.faults or set(world.fault_names) <= {"aborts", "storms", "reused ids"}
    has_room = not figures.num_chunks_evicted and not figures.num_chunks_declined
    never_slower = all(
        event.miss_reason != e.MissReason.SLOWER for _, event in world.log.events if isinstance(event, e.LookupAnswered)
    )
    saves_all = connector["save_tails"]
    # MultiConnector takes the first child that has anything, also where another one has more.
    is_asked_first = world.settings.neighbour is None or not world.settings.neighbour.is_first
    # With asynchronous copies, late reports, or two steps in flight, a request may be back before its own save is known
    # to be done.
    is_late = world.settings.async_scheduling or world.settings.late_reports
    waits = not is_late and connector.get("save_mode") == "sync"
    max_deferred = connector.get("max_deferred_lookups")
    # A copy may take longer than vLLM is asked to ask again (world 701042).
    has_waited_in_vain = any(
        event.num_deferred == max_deferred for _, event in world.log.events if isinstance(event, e.LookupDeferred)
    )
    return bool(
        is_calm
        and has_room
        and saves_all
        and never_slower
        and is_asked_first
        and (waits or (max_deferred and not has_waited_in_vain))
        and not _lost_blocks_while_loading(world)
    )


def _lost_blocks_while_loading(world: World) -> bool:
    """Whether a request was preempted before its load was reported.

    What it had computed behind the loaded tokens is not saved, because the load may still fail (world 780352).
    """
    loading: dict[int, str] = {}
    for _, event in world.log.events:
        if isinstance(event, e.LoadIssued):
            loading[event.job_id] = event.request_id
        elif isinstance(event, e.LoadCompleted | e.LoadFailed):
            loading.pop(event.job_id, None)
        elif isinstance(event, e.RequestPreempted) and event.request_id in loading.values():
            return True
    return False
