"""Converts KV pages and layouts to protobuf and back."""

from __future__ import annotations

import zlib
from typing import Any

from tandem.engine.prefill import PageLayout, PageRun
from tandem.rpc.printable import printable
from tandem.v1 import prefill_worker_pb2 as pb

LAYOUT_FIELDS = ("weights_revision", "dtype", "backend", "format", "page_tokens", "page_bytes")


class Corrupt(ValueError):
    """A message fails its checksums or was not requested."""


def layout_to_wire(layout: PageLayout) -> pb.PageLayout:
    return pb.PageLayout(**{name: getattr(layout, name) for name in LAYOUT_FIELDS})


def layout_from_wire(message: pb.PageLayout) -> PageLayout:
    given: dict[str, Any] = {name: getattr(message, name) for name in LAYOUT_FIELDS}
    values: dict[str, Any] = {n: printable(value) if isinstance(value, str) else value for n, value in given.items()}
    return PageLayout(**values)


def run_to_wire(run: PageRun) -> pb.KvPages:
    return pb.KvPages(first_page=run.first, data=b"".join(run.pages), checksums=map(zlib.crc32, run.pages))


def run_from_wire(message: pb.KvPages, first: int, page_bytes: int, most: int) -> PageRun:
    """Returns 1 to `most` pages from `first` on. Raises Corrupt."""
    data, count = message.data, len(message.checksums)
    if message.first_page != first:
        raise Corrupt(f"page {message.first_page} came instead of page {first}")
    if not 1 <= count <= most:
        raise Corrupt(f"{count} pages came, where 1 to {most} are missing")
    if len(data) != count * page_bytes:
        raise Corrupt(f"{count} pages came in {len(data)} bytes, and a page has {page_bytes}")
    pages = tuple(data[at : at + page_bytes] for at in range(0, len(data), page_bytes))
    for number, (page, checksum) in enumerate(zip(pages, message.checksums, strict=True), first):
        if zlib.crc32(page) != checksum:
            raise Corrupt(f"page {number} came with another checksum")
    return PageRun(first, pages)
