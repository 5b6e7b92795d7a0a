"""The report as a page."""

import json
from html import escape
from typing import Any


def report_html(report: dict[str, Any]) -> str:
    """Draws the report as one self-contained page."""
    return f"<!doctype html><title>curate</title><pre>{escape(json.dumps(report, indent=2))}</pre>"
