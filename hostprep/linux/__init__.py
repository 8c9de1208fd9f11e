"""System calls and formats of procfs and sysfs, without any policy."""
