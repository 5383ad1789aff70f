"""Many ablation cases: a grid, its work on processes or Slurm, its tables, figures and reports."""
