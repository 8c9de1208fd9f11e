"""Inference engines: what leads each of them to prepared memory, and the plugins they load.

Part of the engine half: Python >= 3.9 and the standard library only, until the engine itself
imports a plugin. Travels in the zipapp: nothing here opens a file of the package by its path.
"""
