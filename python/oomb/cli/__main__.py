from oomb.cli import app

app()
