"""The library in an engine's process: handoff, claim, lease, scrub, attach, join, wait.

Standard library only, Python >= 3.9. `hostprep` itself exports what engines call.
"""
