"""A real control plane, a real node in a virtual machine and real engines, for whoever needs them.

Used by tests, by benchmarks and by `make cluster`. `python -m testbed --help` is the command.
"""
