"""What a recorder's log says: its events, the handlers and the words for them, the rules that judge it. No vLLM."""
