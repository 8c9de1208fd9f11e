"""What people watch: the list of metrics, alert rules and the dashboard, generated from this code.

`python -m observability --write` writes the files that are checked in; without `--write` they are
compared.
"""
