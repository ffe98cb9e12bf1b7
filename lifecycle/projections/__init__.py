"""Projections: each a small fold of the log, one file per question it answers. `belief.py` wires them."""
