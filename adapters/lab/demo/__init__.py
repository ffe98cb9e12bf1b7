"""The demo: real vLLM on a tiny model, a preempted request that recovers, and the log that shows how.

`python -m kvledger.adapters.lab.demo` runs it. All but its `__main__` serves the end-to-end tests as well. Nothing here
is part of the connector, and the connector knows nothing of it.
"""
