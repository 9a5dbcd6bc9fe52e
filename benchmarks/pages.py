"""Pages of which a part is written by a program, between the comments `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""

from __future__ import annotations

from pathlib import Path


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def put_between(text: str, name: str, new: str) -> str:
    """`text` with what stands between the markers replaced. Raises ValueError where they are not there."""
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"the page needs one {begin} and one {end}")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{new.rstrip()}\n{end}{rest.split(end)[1]}"


def rewrite(page: Path, name: str, new: str) -> None:
    page.write_text(put_between(page.read_text(), name, new))
