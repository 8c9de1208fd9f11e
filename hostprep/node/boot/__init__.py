"""What must precede kubelet: a script that reserves huge pages, mounts them and says so."""

from hostprep.node.boot.install import BootUnit, sync_boot_unit
from hostprep.node.boot.script import boot_script, systemd_unit

__all__ = ["BootUnit", "boot_script", "sync_boot_unit", "systemd_unit"]
