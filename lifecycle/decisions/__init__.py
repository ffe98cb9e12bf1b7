"""Functions that make decisions, one module per subject. State handlers choose which of them to call.

- `lookups`: how many tokens can be loaded, or that the scheduler should ask again.
- `loads`: which slots are loaded into which blocks.
- `saves`: which chunks are saved, from which blocks, and which chunks are evicted for them.
- `reports`: what follows from reports of workers, and how far a request is.
- `windows`: what sliding windows change about loads and saves.

Every function that decides takes the turn in which it decides. `answer_lookup` returns its only decision instead, and
the handler makes that decision. Only these functions may refuse something.
"""
