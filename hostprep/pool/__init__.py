"""What an administrator asks for: the custom resource, and the plain values it becomes."""
