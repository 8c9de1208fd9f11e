"""TensorRT-LLM: configuration for its KV cache connectors. Its own pools cannot be prepared."""
