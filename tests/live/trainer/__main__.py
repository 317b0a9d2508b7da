"""``make training``: an agent's rewards teach a tiny Qwen a fact, over vLLM and penstock, by TRL's GRPO.

This runs in an environment without penstock, and imports nothing of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.live.trainer.servers import running_servers
from tests.live.trainer.training import BATCHES, Training, unsure_model

RUNS = {"trained": False, "shuffled": True}
"""The trainings, of which one gets its rewards shuffled: what it learns is luck."""


def main() -> int:
    """Train, and write what each batch was like as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.live.trainer", description=__doc__)
    parser.add_argument("programs", metavar="BIN", type=Path, help="the folder with the programs penstock and vllm")
    parser.add_argument("out", metavar="OUT", type=Path, help="the file that gets the steps of each training")
    parser.add_argument("--batches", type=int, default=BATCHES, help="batches of sessions (default: %(default)s)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-training-") as name:
        folder = Path(name)
        weights = unsure_model(folder / "start")
        with running_servers(chosen.programs.absolute(), weights, folder) as servers:
            found = {
                run: [asdict(step) for step in Training(servers, weights, folder, run, shuffled).run(chosen.batches)]
                for run, shuffled in RUNS.items()
            }
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
