"""Restart to hot: what an engine that was killed serves after its next start."""
