"""SGLang: a plugin by its entry-point group `sglang.srt.plugins`, and how it is started.

Nothing here imports SGLang before SGLang itself loads `hostprep.engines.sglang.plugin:load`.
"""
