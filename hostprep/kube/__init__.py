"""The API server and the process around it, shared by agent and operator.

Configuration, client, typed errors, backoff, logs, and the server of health and metrics. Nothing
here knows pools or nodes beyond their names.
"""
