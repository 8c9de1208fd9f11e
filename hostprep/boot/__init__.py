"""What must precede kubelet: a script that reserves huge pages, mounts them and says so."""

from hostprep.boot.script import boot_script, systemd_unit

__all__ = ["boot_script", "systemd_unit"]
