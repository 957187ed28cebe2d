"""BrowserGym logs in to WebArena's sites on a page of its own, and closes that as soon as it has clicked: before the
site has answered. The login may be lost then, and Chromium sometimes never closes a page whose next one is on its way.
"""
# pyright: reportMissingImports=false

from contextlib import suppress
from typing import Any

from playwright.sync_api import Error

SETTLED = 10_000  # ms; a site that is still busy then has had its chance


class Patient:
    """In place of a page: its context's new pages are closed only when they have come to rest."""

    def __init__(self, page: Any) -> None:
        self.context, self._inner = self, page.context

    def new_page(self) -> Any:
        page = self._inner.new_page()
        close = page.close

        def at_rest() -> None:
            with suppress(Error):
                page.wait_for_load_state("networkidle", timeout=SETTLED)
            close()

        page.close = at_rest
        return page


def install(instance: type) -> None:
    """`instance`: WebArenaInstance."""
    log_in = instance.ui_login  # pyright: ignore[reportAttributeAccessIssue]

    def ui_login(self: Any, site: str, page: Any) -> None:
        log_in(self, site, Patient(page))

    instance.ui_login = ui_login  # pyright: ignore[reportAttributeAccessIssue]
