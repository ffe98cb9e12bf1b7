"""Reading stored logs: what a path means, the events in it, where it can begin, and the index of a large one.

For the command line and the exports. It must not know commands, pages, vLLM or torch.
"""
