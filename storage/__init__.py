"""Storage: `events` stores logs as frames of bytes, `kv` stores KV pages. Neither knows vLLM's scheduler."""
