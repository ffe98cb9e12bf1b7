"""The other half of the proof: over many seeds of a connector without mistakes every checker is silent.

Walks cost milliseconds and have every fault a walk knows; worlds have vLLM's scheduler and every fault of `sim`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from mutants.detection import audit_of, unexpected
from mutants.scenes import SequenceOf, Story, Walks

WALKS = Walks(num_steps=50, is_reliable=False)


@attrs.frozen
class Health:
    """What the audit said of one healthy seed."""

    seed: int
    num_logs: int
    num_events: int
    alarm: str
    """Empty where there was none."""


def walk(seed: int) -> Health:
    """A walk of the pure core, lost and doubled reports included."""
    return _health(seed, [WALKS.play(seed, _nobody)])


def world(seed: int) -> Health:
    """A world with vLLM's scheduler and whatever faults the seed switches on; each engine's log is audited."""
    from sim.checks.rules import allowed_rules
    from sim.world import World

    with World(seed) as living:
        living.run()
        # Behind a gap nothing can be folded, so what a full disk has cost ends the log.
        logs = (*living.dead_logs, living.log)
        rules = allowed_rules(living)
        return _health(seed, [Story(log.configuration, log.events, "", rules) for log in logs])


def hybrid_world(seed: int) -> Health:
    """A world around a model with sliding windows."""
    from sim.hybrid_world import HybridWorld

    living = HybridWorld(seed)
    living.run()
    return _health(seed, [Story(living.side.ledger.projections.configuration, list(living.events()), "")])


KINDS: dict[str, Callable[[int], Health]] = {"walks": walk, "worlds": world, "hybrid": hybrid_world}


def alarms(kind: str, seeds: range) -> Iterator[Health]:
    """Play and audit all seeds of a kind."""
    for seed in seeds:
        try:
            yield KINDS[kind](seed)
        except Exception as error:  # noqa: BLE001 -- told with its seed
            yield Health(seed, 0, 0, f"{type(error).__name__}: {error}")


def _health(seed: int, stories: list[Story]) -> Health:
    num_events, alarm = 0, ""
    for story in stories:
        audit = audit_of(story)
        num_events += audit.num_events
        found = unexpected(audit, story)
        if story.ended_by or audit.unfoldable is not None or found:
            alarm = alarm or str(story.ended_by or audit.unfoldable or found[0])
    return Health(seed, len(stories), num_events, alarm)


def _nobody(_next_sequence: SequenceOf) -> None:
    return
