"""Runs from one YAML file: ``oomb train``."""
