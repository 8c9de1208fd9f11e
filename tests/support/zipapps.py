"""Another version of the zipapp: the same modules at other places in the file."""

from __future__ import annotations

import zipfile
from io import BytesIO

from hostprep.node.apply.publish import build_zipapp


def another_version(number: int) -> bytes:
    """Return a zipapp in which every module lies elsewhere than in the one that is built."""
    buffer = BytesIO()
    with (
        zipfile.ZipFile(BytesIO(build_zipapp())) as before,
        zipfile.ZipFile(buffer, "w") as after,
    ):
        main, *others = before.infolist()
        after.writestr(main, before.read(main))
        after.writestr(zipfile.ZipInfo("notes.txt"), f"version {number}\n" * 100 * number)
        for entry in others:
            after.writestr(entry, before.read(entry))
    return b"#!/usr/bin/env python3\n" + buffer.getvalue()
