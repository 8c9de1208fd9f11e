"""What agent and operator agree on: names, conditions, and the HostMemoryNode resource."""
