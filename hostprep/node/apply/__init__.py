"""Carrying plans out: safe to kill at any point and to run again."""
