"""Published step times with their sources: files in step_times/, named as the presets."""

from __future__ import annotations

from pathlib import Path

from tandem.host.device_times import DeviceTimes, read_times

FOLDER = Path(__file__).with_name("step_times")


def presets() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in FOLDER.glob("*.json")))


def times_named(given: str) -> DeviceTimes:
    """Step times of a preset or file. Raises ValueError, one line."""
    preset = given in presets()
    if not preset and not Path(given).is_file():
        raise ValueError(f"rehearse: {given!r} is neither a file nor one of {', '.join(presets())}")
    try:
        return read_times(FOLDER / f"{given}.json" if preset else Path(given))
    except ValueError as error:
        raise ValueError(f"rehearse: {error}") from None
