"""Keeping the saved entries up to date, on a disk that may be full or read-only."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.agent.desired import Desire, read_saved, save
from hostprep.errors import HostprepError
from hostprep.kube.logs import Logger

__all__ = ["Saver"]


@dataclass
class Saver:
    """Saves each instruction; what could not be saved is tried again, and is no reason to stop."""

    folder: str
    log: Logger
    saved: Desire | None = None
    """What is on the disk, as far as is known."""
    _unsaved: Desire | None = None
    _complaint: str = ""

    def read(self) -> Desire | None:
        """Read what an earlier run saved; None where there is nothing that can be used."""
        try:
            self.saved = read_saved(self.folder)
        except HostprepError as error:
            self.log.warning("saved_state_unreadable", error=error.message, remedy=error.remedy)
        return self.saved

    def keep(self, desire: Desire) -> None:
        """Save it, now or as soon as that works."""
        self._unsaved = desire
        self.try_again()

    def try_again(self) -> None:
        """Save what is not saved yet. Says once why it cannot."""
        if self._unsaved is None:
            return
        try:
            if self.saved is None or not self.saved.says_the_same_as(self._unsaved):
                save(self.folder, self._unsaved)
        except HostprepError as error:
            if error.message != self._complaint:
                self._complaint = error.message
                self.log.warning("not_saved", error=error.message, remedy=error.remedy)
        else:
            self.saved, self._unsaved, self._complaint = self._unsaved, None, ""
