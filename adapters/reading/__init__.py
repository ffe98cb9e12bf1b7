"""Reading stored logs: what a path means, the events in it, and the index that spares a reading of everything."""
