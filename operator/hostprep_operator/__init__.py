"""Hostprep's operator: selects nodes, copies policy, marks nodes, counts."""
