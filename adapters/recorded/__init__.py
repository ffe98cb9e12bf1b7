"""The core for a recorder's log: its events, handlers, descriptions and rules. This package must not import vLLM."""
