"""Writes `predictors/silicon_tables.npz`: kernels measured on GPUs, from the package `aiconfigurator-core`.

    pip install "jaxllm[silicon]"
    python scripts/distil_silicon.py predictors/silicon_tables.npz --overwrite

The package (NVIDIA, Apache-2.0) has Parquet tables of each kernel's milliseconds. Of them these are kept:
vLLM's kernels in 16 bits and FP8, the faster where several were measured, on the devices of
`predictors.silicon_tables.MEASURED`. Products lose the rows whose neighbours say the same.
"""

from __future__ import annotations

import argparse
import collections
import pathlib

from jaxllm.predictors.silicon_package import package_version, read_package
from jaxllm.predictors.silicon_tables import MEASURED, save_tables
from jaxllm.system.output_files import OutputParser, new_file

PRODUCT_ROWS = (
    *(1, 2, 4, 8, 12, 16, 17, 32, 33, 48, 64, 65, 80, 96, 112, 128, 129, 160, 192, 224, 256, 257, 384, 512),
    *(513, 768, 1024, 1025, 1536, 2048, 2049, 3072, 4096, 8192, 16384, 32768),
)
SMALLEST = 128  # inputs or outputs of a product that are fewer are left out


def main() -> None:
    """Read, thin out, write."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=new_file)
    parser.add_argument(
        "--folder", type=pathlib.Path, help="`systems` of the package, if it is not installed"
    )
    args = parser.parse_args()
    tables = [read_package(device, args.folder, rows=PRODUCT_ROWS, smallest=SMALLEST) for device in MEASURED]
    notes = {
        "package": f"aiconfigurator-core {package_version(args.folder)}, github.com/ai-dynamo/aiconfigurator",
        "licence": "Apache-2.0; the figures are NVIDIA's, thinned out and rounded to 0.05 %",
        "written_by": "scripts/distil_silicon.py",
    }
    save_tables(pathlib.Path(args.out), tables, notes)
    for one in tables:
        sizes = collections.Counter({kind: len(table.rows) for kind, table in one.tables.items()})
        print(one.device, dict(sizes), one.source)


if __name__ == "__main__":
    main()
