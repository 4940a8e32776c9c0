"""Cost predictors: what a step, a recompute or a swap will take. Imports no accelerator library.

| module       | holds                                                                      |
|--------------|----------------------------------------------------------------------------|
| `base`       | `ModelShape`, the `CostModel` protocol, published model shapes             |
| `devices`    | `DeviceSpec` and a table of devices from their data sheets                 |
| `roofline`   | `RooflineCostModel`: costs from data sheet figures, no measurement         |
| `silicon`    | `SiliconCostModel`: costs from kernels measured on GPUs by others          |
| `silicon_kernels` | single kernels: between and beyond the sizes that were measured            |
| `silicon_tables`, `silicon_package` | tables of kernels, and the package they are from       |
| `regression` | eight regressors x degrees 1-10 fitted to measurements (scikit-learn)      |
| `derived`    | features of what the engine makes of the work: pieces of copies, products  |
| `fit_report` | `FitReport`: held-out errors of all candidates, as JSON and Markdown       |
| `table`      | `TableCostModel`: any cost model distilled into grids, microseconds a call |
| `store`      | `Profile`: a table on disk, as JSON and npz                                |
| `own`        | a user's own predictor, checked when it is given, or a stored profile       |
| `online`     | `OnlineCalibration`: corrects predictions by what was measured             |
| `lengths`    | how long outputs will be: a value, a range or a rank, learned online       |
| `link`       | `LinkCosts`: latency, pieces and bytes of copies, fitted to measurements   |

Costs are seconds of one engine step or one transfer. Nothing here runs a device.
"""

if __name__ == "predictors":  # found in the repository's folder
    raise ImportError("import jaxllm.predictors: this folder is that package, and not one of its own")
