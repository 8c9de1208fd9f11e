"""LMCache: its first memory tier (L1) in prepared regions.

The server opens them itself, as memory-mapped files: `launch` completes its command line, `lend`
adds regions to one that runs and takes them back, `server` is the client for its HTTP interface.
Inside of vLLM's processes, `vllm_connector` provides them: `launch_inprocess` has vLLM load it.
"""
