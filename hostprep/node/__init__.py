"""What root does on one node: observe, plan, apply; the boot script; the doctor."""
