"""Regions as devices: kubelet's device plugin API, for pods that may mount no path of the host.

A device is a region, its ID the region's name; `hostprep.dev/<pool>` is the resource. `devices` is
pure; `views` makes the folders that containers see; `plugin` and `manager` serve kubelet.
"""
