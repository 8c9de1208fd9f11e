"""The pure core: from observed objects to the writes they need. No clock, no I/O, no logging."""
