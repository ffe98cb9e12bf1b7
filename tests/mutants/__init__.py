"""Mutants: connectors in which one historical mistake is made again, so that the audit can be seen to name it.

`catalogue/` has the mistakes, `scenes.py` the simulations that drive them, `detection.py` the audit of what they wrote,
`run.py` the command behind `make mutants`. A mistake is made in the code under test and only while a scene is played;
the audit that follows is the one that everybody runs.
"""
