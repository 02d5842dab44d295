"""Run rows of the tables as every rank of a job; write what is wrong with each as JSON.

``worker.py GROUP[,GROUP...] EXTENT OUT FOLDER``. The extent says how many of the runs are made:
``few`` or ``all``, of the table of equality also ``once``, and of checks also ``alone``. Not a test
itself.
"""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import deepspeed
import engines


def main():
    groups, extent, out, folder = sys.argv[1].split(","), sys.argv[2], *map(Path, sys.argv[3:])
    modules = {group: importlib.import_module(f"rows_{group}") for group in groups}
    if groups == ["ends"]:
        modules["ends"].main(out)
        return
    engines.prepare(installs=groups != ["parallel"])
    report = {"deepspeed": deepspeed.__version__}
    for group, module in modules.items():
        module.run(report.setdefault(group, {}), extent, folder / group)
    report["lanes left"] = engines.lanes_left()
    out.with_name(f"{out.name}.{engines.RANK}").write_text(json.dumps(report))
    engines.leave()


if __name__ == "__main__":
    main()
