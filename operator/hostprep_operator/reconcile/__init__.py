"""The pure core: from what is there to what is to be written. No clock, no I/O, no logging."""
