"""Plants one bug after the other and looks whether the tests of core notice.

    nox -s mutants
    nox -s mutants -- window budget        those with one of these words only

Each bug of `catalogue.py` is planted in a copy of ``packages/core``, and the tests run
against the copy until the first of them fails, the simulation (with fewer seeds) before the
stories. One that survives all of them is a hole in the tests: mend it with a test of what
the bug breaks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "packages" / "core" / "src"
SIMULATIONS = ("test_simulation", "test_scheduler_state_machine", "test_policies_simulation")
STORIES = (
    "test_scheduler",
    "test_block_*",
    "test_engine_core",
    "test_grammar_*",
    "test_host_tier",
    "test_known_failures",
)
POLICIES = ("test_policies*",)
TIMEOUT = 240.0  # a bug that makes a test hang is noticed, too
PYTEST_FAILED = 1


def main() -> int:
    arguments = parse_arguments()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.words
        or any(word in f"{mutant.file} {mutant.breaks}" for word in arguments.words)
    ]
    misfits = [mutant for mutant in MUTANTS if not fits(mutant)]
    for mutant in misfits:
        print(f"NO SUCH TEXT, or not once: {mutant.file}: {mutant.breaks}")
    if misfits:
        return 1
    with tempfile.TemporaryDirectory(prefix="octavo-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(copy_source(Path(folder) / str(number)))
        if not check_unharmed(copies):
            return 1
        with ThreadPoolExecutor(arguments.jobs) as pool:
            survivors = [m for m in pool.map(lambda m: try_one(m, copies), chosen) if m]
    num_caught = len(chosen) - len(survivors)
    print(f"{num_caught} of {len(chosen)} caught")
    for mutant in survivors:
        print(f"SURVIVED: {mutant.file}: {mutant.breaks}")
    return 0 if num_caught >= arguments.at_least * len(chosen) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only mutants whose file or name has one of these")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default: 2)")
    parser.add_argument(
        "--at-least", type=float, default=0.95, help="share that must be caught (default: 0.95)"
    )
    return parser.parse_args()


def fits(mutant: Mutant) -> bool:
    text = (SOURCE / "octavo_core" / mutant.file).read_text()
    return text.count(mutant.old) == 1 and mutant.new != mutant.old


def copy_source(target: Path) -> Path:
    shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def check_unharmed(copies: SimpleQueue[Path]) -> bool:
    """Without a bug the tests pass, and it is the copy that they test."""
    source = copies.get()
    where = run([sys.executable, "-c", "import octavo_core; print(octavo_core.__file__)"], source)
    if not where.stdout.startswith(str(source)):
        print(f"the tests would use {where.stdout.strip()} and not the copy")
        return False
    result = run(pytest_command("scheduler.py"), source)
    copies.put(source)
    if result.returncode != 0:
        print(f"the tests fail without any bug:\n{result.stdout[-3000:]}")
    return result.returncode == 0


def try_one(mutant: Mutant, copies: SimpleQueue[Path]) -> Mutant | None:
    """Return the mutant if no test noticed."""
    source = copies.get()
    path = source / "octavo_core" / mutant.file
    original = path.read_text()
    start = time.monotonic()
    try:
        path.write_text(original.replace(mutant.old, mutant.new))
        result = run(pytest_command(mutant.file), source)
    finally:
        path.write_text(original)
        copies.put(source)
    if result.returncode not in (0, PYTEST_FAILED):
        raise SystemExit(f"{mutant.breaks}: pytest said {result.returncode}\n{result.stdout}")
    caught_by = next(
        (line.split()[1] for line in result.stdout.splitlines() if line.startswith("FAILED")), ""
    )
    verdict = f"caught by {caught_by.rpartition('/')[2]}" if result.returncode else "SURVIVED"
    seconds = time.monotonic() - start
    print(f"{seconds:5.0f} s  {mutant.file}: {mutant.breaks}: {verdict}", flush=True)
    return None if result.returncode else mutant


def pytest_command(file: str) -> list[str]:
    """Tests in the order in which they are likely to notice a bug of `file`."""
    order = (
        (POLICIES, SIMULATIONS[:2], STORIES)
        if file.startswith("policies/")
        else (SIMULATIONS[:1], STORIES, SIMULATIONS[1:], POLICIES)
    )
    names = [name for names in order for name in names]
    found = [path for name in names for path in find_tests(name)]
    options = ["-q", "-x", "-rf", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider"]
    options += ["-k", "not reach"]  # is about the generator of events
    return [sys.executable, "-m", "pytest", *options, *map(str, dict.fromkeys(found))]


def find_tests(name: str) -> list[Path]:
    """A name that matches no file would quietly test less."""
    found = sorted((ROOT / "tests/core").glob(f"{name}.py"))
    if not found:
        raise SystemExit(f"there is no tests/core/{name}.py")
    return found


def run(command: list[str], source: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        # Files that differ in one letter have one size and one second.
        "PYTHONDONTWRITEBYTECODE": "1",
        "OCTAVO_SIMULATION_SEEDS": "100",
    }
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, PYTEST_FAILED, "FAILED (it hangs)")


if __name__ == "__main__":
    sys.exit(main())
