"""Whether a job would run on these machines, and if not, what to do: `ds-bert doctor`."""
