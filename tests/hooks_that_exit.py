"""A hook whose file ends the process: it must not end a run with exit code 0."""

raise SystemExit(0)
