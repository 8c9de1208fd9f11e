"""What registering costs, under its documented name: see `hostprep.cuda.cost`."""

from hostprep.cuda.cost import Cost, registration_cost

__all__ = ["Cost", "registration_cost"]
