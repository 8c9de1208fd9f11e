"""System calls that Python lacks, and the few procfs files that engines need. Linux only."""
