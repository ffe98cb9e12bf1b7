"""What a recorder's log contains: its events, their handlers and descriptions, the rules for it. No vLLM."""
