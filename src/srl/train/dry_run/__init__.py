"""What `srl train --dry-run` says before anything starts: the plan of a run, its memory, its time."""
