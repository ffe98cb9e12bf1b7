"""What is decided, one module per subject; the state handlers choose which of them applies.

Every function here is given the turn that it decides in. One that finds a single answer returns it instead, and the
handler decides it. Only these functions may refuse.
"""
