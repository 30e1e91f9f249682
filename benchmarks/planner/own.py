"""Time the rows of own.csv again, on this machine's GPU: `python -m benchmarks.planner.own [ID …] [--steps 8]`, from the root of the repository.

Prints own.csv with new step times and memory. A row that does not fit, or whose preset is not known, ends the command.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
from pathlib import Path

import torch
from benchmarks.micro_batch import step_ms

from argosy.config.resolve import resolve
from argosy.config.schema import RunSpec
from argosy.train.device import prepare_device

OWN = Path(__file__).parent / "own.csv"
LAUNCHED, OWN_KERNELS = "kernels started one by one", "with Argosy's own kernels"


def spec_of(cells: dict[str, str]) -> RunSpec:
    """Return the run that a row was measured with."""
    keys = {
        "model.preset": cells["model"], "model.vocab_size": cells["vocab"], "model.layers": cells["layers"], "data.seq_len": cells["seq_len"],
        "train.global_batch": cells["global_batch"], "parallel.micro_batch": cells["micro_batch"],
        "parallel.recompute": cells["recompute"], "train.precision": cells["precision"],
        "parallel.graph": "off" if LAUNCHED in cells["notes"] else "auto",
        "data.train": "synthetic", "optim.lr": "1e-4", "eval": "off", "train.steps": "100",
    }  # fmt: skip
    return resolve(None, [f"{key}={value}" for key, value in keys.items()]).spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help="rows; without one, all")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with OWN.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if unknown := set(options.ids) - {cells["id"] for cells in rows}:
        parser.error(f"own.csv has no row {', '.join(sorted(unknown))}")
    chosen = [cells for cells in rows if cells["id"] in options.ids or not options.ids]
    device = prepare_device(spec_of(chosen[0]).train)
    if device.type != "cuda":
        parser.error("the rows are of a GPU, and torch finds none on this machine")
    table = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    table.writeheader()
    for cells in chosen:
        torch.cuda.reset_peak_memory_stats(device)
        ms = step_ms(spec_of(cells), device, options.steps)
        if ms is None:
            sys.exit(f"{cells['id']} does not fit")
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        notes = cells["notes"].removesuffix(f"; {OWN_KERNELS}") + f"; {OWN_KERNELS}"
        table.writerow(
            cells | {"measured_step_s": f"{ms / 1000:.4f}", "measured_mem_gb": f"{peak:.1f}", "notes": notes}
        )
        sys.stdout.flush()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
