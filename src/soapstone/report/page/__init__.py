"""The report page: one HTML file that shows a plan, its timeline, its traffic, its memory and its search.

Everything on the page is data first: frozen dataclasses that pure functions make of a plan and its
simulation (`picture`, `timeline`, `traffic`, `occupancy`, `finding`), then one JSON document, then the page
(`page.html` with `page.css` and `page.js` inside it). Nothing is fetched when it is opened.
"""

from soapstone.report.page.actual import Actual, read_actual
from soapstone.report.page.page import Rival, page

__all__ = ["Actual", "Rival", "page", "read_actual"]
