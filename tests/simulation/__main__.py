"""Simulate servers, and find seeds whose promises they break.

python -m tests.simulation --seed 7                # one seed; the history of a fault is printed
python -m tests.simulation --seed 7 --shrink       # with as few actions as the fault needs
python -m tests.simulation --count 100 --jobs 2    # seeds 0 to 99
python -m tests.simulation --hours 10 --jobs 2     # seeds until so much virtual time has passed
python -m tests.simulation --postgres --count 100  # the same with PostgreSQL as the store
python -m tests.simulation --planted               # old faults, put back one after another: each must be found
"""

from __future__ import annotations

import tests.simulation.determinism  # isort: skip # noqa: F401 - before all that reads a clock

import argparse
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import count

from tests.simulation.determinism import real_seconds
from tests.simulation.planted import PLANTED, planted
from tests.simulation.seeds import outcome_of, outcomes
from tests.simulation.shrinking import shrunk
from tests.simulation.simulation import Outcome
from tests.support.stores import running_postgres

COMMAND = "python -m tests.simulation"


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="seeds from the first one on")
    parser.add_argument("--hours", type=float, metavar="H", help="virtual time that the seeds take together")
    parser.add_argument("--postgres", action="store_true", help="have the store in a PostgreSQL, which is started")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--kinds", default="", metavar="NAME,NAME", help="the kinds of actions in the plans")
    parser.add_argument("--only", default="", metavar="N,N", help="the actions of the plan that are carried out")
    parser.add_argument("--shrink", action="store_true", help="reduce the plan of a seed that fails")
    parser.add_argument("--plant", choices=sorted(PLANTED), help="put an old fault back")
    parser.add_argument("--planted", action="store_true", help="put old faults back, and expect that each is found")
    parser.add_argument("--quiet", action="store_true", help="print no line for a seed that passes")
    return parser.parse_args()


def seeds_wanted(given: argparse.Namespace) -> Iterable[int]:
    """Return the seeds, without an end if there is a limit of time."""
    return count(given.seed) if given.hours else range(given.seed, given.seed + given.count)


def simulated(given: argparse.Namespace, postgres: str) -> int:
    """Simulate the seeds, and print each that fails; return the number of these."""
    began, seconds, number, failed = real_seconds(), 0.0, 0, 0
    for outcome in outcomes(seeds_wanted(given), given.jobs, given.kinds, given.only, given.plant, postgres):
        seconds, number = seconds + outcome.seconds, number + 1
        if outcome.fault or not given.quiet:
            print(line_of(outcome), flush=True)
        if outcome.fault:
            failed += 1
            print(report_of(outcome, given), flush=True)
        if given.hours and seconds >= 3600 * given.hours:
            break
    real = real_seconds() - began
    print(f"{number} seeds, {failed} with a fault: {seconds / 3600:.2f} virtual hours in {real:.0f} s")
    return failed


def line_of(outcome: Outcome) -> str:
    """Return a line about a seed."""
    verdict = outcome.complaint or "as promised"
    return (
        f"seed {outcome.plan.seed}: {verdict[:300]} ({outcome.seconds:.0f} s, {outcome.steps} steps, {outcome.trace})"
    )


def report_of(outcome: Outcome, given: argparse.Namespace) -> str:
    """Return what is needed to find the cause of a fault."""
    if given.shrink:
        with planted(given.plant):
            outcome = shrunk(outcome)
    kept = ",".join(str(action.number) for action in outcome.plan.actions)
    only = f" --only {kept}" if given.shrink or given.only else ""
    kinds = f" --kinds '{given.kinds}'" if given.kinds else ""
    plant = f" --plant {given.plant}" if given.plant else ""
    store = " --postgres" if given.postgres else ""
    command = f"Again: {COMMAND} --seed {outcome.plan.seed}{kinds}{only}{plant}{store}"
    detailed = given.count == 1 and not given.hours
    return "\n".join([*outcome.history, outcome.fault, command]) if detailed else command


def found_all(given: argparse.Namespace, postgres: str) -> int:
    """Put each old fault back, and print the first seed that finds it and passes without it; count those not found.

    The seed that is known to find a fault comes first.
    """
    missed = 0
    for name, fault in PLANTED.items():
        if fault.on_postgres != given.postgres:
            continue
        wanted = ",".join(fault.kinds)
        for seed in dict.fromkeys((fault.seed, *range(given.seed, given.seed + given.count))):
            outcome = outcome_of(seed, wanted, plant=name, postgres=postgres)
            if outcome.fault:
                sound = outcome_of(seed, wanted, postgres=postgres)
                print(f"{name}: {line_of(outcome)}; without it: {sound.complaint or 'as promised'}", flush=True)
                missed += bool(sound.fault)
                break
        else:
            missed += 1
            print(f"{name}: not found by {given.count} seeds", flush=True)
    return missed


def main() -> int:
    """Run the command; return its exit status."""
    given = arguments()
    with running_postgres() if given.postgres else nullcontext() as server:
        url = server.url if server else ""
        return min(1, found_all(given, url) if given.planted else simulated(given, url))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what a fault has left is not freed
