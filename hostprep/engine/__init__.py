"""The engine half's commands, standard library only: exec, wait and attach."""
