"""The command line of the node half: click commands over the services, rich for people."""
