"""The fuzzer over every file below the root: hostile moves, and what must hold all the time."""
