"""What registering host memory with CUDA costs on a real GPU: this process, its neighbours, memory.

`python -m benchmarks.register` measures everything in under ten minutes. The measuring part needs
cuda-python and nothing else; charts need matplotlib, and can be drawn elsewhere from the JSON.
"""
