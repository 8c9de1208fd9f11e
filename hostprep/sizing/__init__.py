"""Sizing: from a model's config.json and serving limits to groups, slots and bytes.

Pure: what is read is handed in. Of the node half; what an engine needs of it, the layout, is
`hostprep.layout`.
"""
