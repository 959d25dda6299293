"""A log of events, one JSON object a line, that survives being killed in the middle of a line."""

import json
import math
from pathlib import Path
from typing import Any

__all__ = ["append_event", "read_events"]


def append_event(path: Path, event: dict[str, Any]) -> None:
    """Add one line, and the file and its folder if need be.

    Args:
        path: the file.
        event: numbers, strings and lists of them; a number that is not finite becomes the string "nan", "inf", "-inf",
            since JSON has no word for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({key: _in_json(value) for key, value in event.items()})
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # whoever wrote last was killed
                line = "\n" + line
        file.write(f"{line}\n".encode())


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read all events; none where there is no file. Half a line, left by a run that was killed, is passed over.

    Args:
        path: the file.
    """
    if not path.exists():
        return []
    events = []
    for line in path.read_bytes().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return [event for event in events if isinstance(event, dict)]


def _in_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
