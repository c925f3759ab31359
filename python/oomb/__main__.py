"""``python -m oomb``: the command line where the package is on the path but not installed."""

from oomb.cli import app

app(prog_name="oomb")
