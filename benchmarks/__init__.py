"""Every number that Hostprep promises, beside its rival, in one run on one machine.

`python -m benchmarks` runs all of them, `python -m benchmarks.NAME` one.
"""
