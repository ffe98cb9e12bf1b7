"""Where things are kept: `events` keeps frames of bytes, `kv` keeps KV pages. Neither knows vLLM's scheduler."""
