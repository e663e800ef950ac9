"""The planner: from a model, a machine and a choice to a ledger of bytes. Standard library only."""
