"""Mooncake's store: segments of its pool in prepared regions.

In Python, `hostprep.engines.mooncake.segments.mount`; by the store service's REST interface,
`hostprep exec --engine mooncake -- mc_store_rest_server ...`.
"""
