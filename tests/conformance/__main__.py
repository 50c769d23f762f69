"""The cases against a server that runs already, or their table.

python -m tests.conformance --target 127.0.0.1:50051 [--service TargetVerifier] [--case NAME ...] [--transport run]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace

from tandem.rpc.channel import DRAFT, FUSED, TARGET
from tests.conformance.bench import TRANSPORTS, Combination, LeftOut, elsewhere
from tests.conformance.cases import CASES, table


async def check(address: str, service: str, transport: str, names: list[str]) -> int:
    """How many cases failed; every one of them is said."""
    failed = 0
    async with elsewhere(address, service) as bench:
        bench.combination = replace(bench.combination, transport=transport)
        as_here = Combination(bench.combination.architecture, transport, "toy")
        for entry in CASES:
            if (names and entry.name not in names) or entry.left_out(as_here):
                continue
            if entry.inside:
                print(f"left out  {entry.name}: reaches into a server of its own process")
                continue
            try:
                await asyncio.wait_for(entry.case(bench), 300)
                print(f"holds     {entry.name}")
            except LeftOut as why:
                print(f"left out  {entry.name}: {why}")
            except Exception as error:
                failed += 1
                print(f"FAILS     {entry.name} ({', '.join(entry.guarantees)}): {type(error).__name__}: {error}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description="Named cases of the contract.")
    parser.add_argument("--target", help="host:port of the server to check")
    parser.add_argument("--service", choices=(TARGET, FUSED, DRAFT), default=TARGET)
    parser.add_argument("--transport", choices=TRANSPORTS, help="of rounds, at a TargetVerifier; all if not given")
    parser.add_argument("--case", action="append", default=[], choices=[entry.name for entry in CASES])
    parser.add_argument("--table", action="store_true", help="print the cases as a table")
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
        return 0
    if not arguments.target:
        parser.error("--target HOST:PORT is missing")
    failed = 0
    for transport in [arguments.transport] if arguments.transport else TRANSPORTS:
        print(f"rounds by {transport}")
        failed += asyncio.run(check(arguments.target, arguments.service, transport, arguments.case))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
