"""The boot script and its systemd unit, under their documented name: see `hostprep.node.boot`."""

from hostprep.node.boot import boot_script, systemd_unit

__all__ = ["boot_script", "systemd_unit"]
