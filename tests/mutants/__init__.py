"""Mutants: connectors in which one historical mistake is made again, so that the audit can be seen to name it.

`catalogue/` has the mistakes, `scenes.py` the simulations that drive them, `detection.py` the audit of what they wrote,
`run.py` the command behind `make mutants`. A mistake is made in the code under test while a scene is played, and again
while the log is audited: in production one version writes and verifies, so a mistake must not hide itself.
"""
