"""What a figure needs: simulator, workloads, benchmarks, planning."""
