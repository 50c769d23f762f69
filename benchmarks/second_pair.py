"""placeholder"""
import sys
from pathlib import Path
from benchmarks.second_pair_files import prepare
prepare(Path(sys.argv[2]), lambda l: print(l, file=sys.stderr, flush=True))
