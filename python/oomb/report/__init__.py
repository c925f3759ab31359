"""A run as one page: pictures of loss, memory, time and pages read."""

from oomb.report.page import write_report

__all__ = ["write_report"]
