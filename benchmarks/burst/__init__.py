"""Burst to ready: an engine as it starts today beside one over prepared memory, in one run."""
