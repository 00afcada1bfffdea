"""Several ranks and hosts: one report, clocks brought onto one, which ranks were run."""
