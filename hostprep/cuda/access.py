"""Having CUDA in a thread: which driver, which context, and nothing left changed afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hostprep.cuda.driver import Driver, load_driver
from hostprep.errors import HostprepError

__all__ = ["CudaAccess"]


class CudaAccess:
    """The driver and the context that use the memory; by default those of the calling thread.

    Trouble is kept for the one who works: what stands in the way of registering must not keep
    an engine from being built.
    """

    def __init__(self, driver: Driver | None, context: int | None) -> None:
        self._driver = driver
        self._context = context
        self._trouble: HostprepError | None = None
        if context is None:
            try:
                self._driver = driver or load_driver()
                self._context = self._driver.current_context()
            except HostprepError as error:
                self._trouble = error

    @property
    def context(self) -> int:
        """The context's handle; 0 where there is none."""
        return self._context or 0

    @contextlib.contextmanager
    def use(self) -> Iterator[Driver]:
        """Have the context current in this thread, and captures of other threads left alone.

        Raises HostprepError: what stood in the way when this was made, or does now.
        """
        if self._trouble is not None:
            raise self._trouble
        driver = self._driver = self._driver or load_driver()
        with driver.using(self.context), driver.relaxed_capture():
            yield driver
