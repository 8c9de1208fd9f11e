"""What benchmarks of registering measure with: processes, memory of each kind, and timed calls.

`python -m benchmarks.gpu_day` is the command that uses it.
"""
