"""The operator at 100, 1,000 and 5,000 nodes on a real API server: writes, CPU, memory, latency."""
