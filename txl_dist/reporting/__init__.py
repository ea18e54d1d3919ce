"""Reports: attention by distance, the files and plots of an evaluation, the page of a run."""
