"""The process of each node: acts on its HostMemoryNode, verifies, repairs, reports."""
