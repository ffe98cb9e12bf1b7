"""The demo: real vLLM on a tiny model preempts requests, kvledger recovers them, and the log shows how.

Run it with `python -m kvledger.adapters.lab.demo`. The end-to-end tests use all modules except `__main__`. The
connector imports nothing from here.
"""
