"""Environments with the engines' own code, from locked wheels, for the tests of tier `engines`."""
