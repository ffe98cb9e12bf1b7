"""Functions that make decisions, one module per subject. State handlers choose which of these functions to call.

- `lookups`: how many tokens can be loaded, or whether the scheduler should ask again later.
- `loads`: which slots are loaded into which blocks.
- `saves`: which chunks are saved, from which blocks, and which chunks are evicted to make room.
- `reports`: the decisions that follow from reports of workers, and the progress of a request's prefill.
- `windows`: how sliding windows limit loads and saves.

A function that decides gets the turn, and passes its decisions to `turn.decide`. Only `answer_lookup` returns its
decision instead, and the handler passes it to `turn.decide`. In the core, only these functions and the `Decider` that
calls the handlers may refuse an observation; projections fold all events.
"""
