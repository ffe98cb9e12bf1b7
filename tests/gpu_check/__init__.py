"""What is to be seen on a GPU and nowhere else: `make gpu-check` runs it all, in the order of `parts.py`.

A part is a function of a `Machine`. On CPU tensors the same functions run as tests, with small sizes: what a part asks
for and how it is reported is tested everywhere, what it finds only where there is a GPU.
"""
