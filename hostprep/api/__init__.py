"""The custom resources HostMemoryPool and HostMemoryNode: types, defaults, checks, names.

Shared by command line, agent and operator.
"""
