"""Registering prepared memory with CUDA, in the engine's process.

Standard library until a registration is made; then cuda-python (`cuda-bindings>=12.8`). Engines
import `hostprep.register`.
"""
